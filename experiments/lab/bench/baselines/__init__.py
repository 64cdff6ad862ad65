"""Baselines of the benchmarks: minimal implementations of common alternatives."""
