"""Compilation of Python functions by numba, and where the result is kept."""
