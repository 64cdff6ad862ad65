"""Evaluation of process reward models on solutions whose wrong steps are known."""
