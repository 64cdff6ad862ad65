"""Contestants for the benchmarks: what people use today, as plainly as it can be written."""
