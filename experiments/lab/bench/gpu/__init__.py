"""Figures of kernels and steps for GPUs: compiled, on paper, and measured."""
