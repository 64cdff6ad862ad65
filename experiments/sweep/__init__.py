"""Sweeps: grids of searches, each cell a run folder, with tables of all cells."""
