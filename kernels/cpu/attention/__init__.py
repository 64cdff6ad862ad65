"""Paged attention on CPU."""
