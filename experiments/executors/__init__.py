"""Executors: where the searches of an evaluation, a sweep or a service run."""
