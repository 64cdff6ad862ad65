"""Benchmarks as commands: `python -m espalier.experiments.bench NAME`."""
