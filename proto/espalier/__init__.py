"""Espalier: test-time-compute search with a generator and a process reward model in one engine.

The sub-packages are layers, and imports only point down:
`kernels` <- `engine` <- `prm` <- `search` <- `experiments`; `v1` is the wire contract.
"""
