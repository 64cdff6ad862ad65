"""Benchmark commands: `python -m espalier.experiments.lab bench NAME`."""
