"""Benchmarks, runs on them, and what is kept of a run."""
