"""Decoders that run through transformers' own modelling code, over the engine's KV pool."""
