"""Benchmarks, evaluation runs, and their results on disk."""
