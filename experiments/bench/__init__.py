"""Benchmark commands: `python -m espalier.experiments.bench NAME`."""
