"""Benchmarks, runs of searches over them, and the record that is kept."""
