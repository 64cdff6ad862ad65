"""Scores of steps: the contract of scorers, families of process reward models, and incremental scoring.

A `Scorer` begins a `ScoreSession` for each search, which owns what it computes scores with; see `scorer`. A family of
process reward models defines which token ids a step appends to its parent's, at which positions to read, which of the
ids are probe tokens (fed only to read the score, and not kept), and how the values read become a score in [0, 1]. The
tokens of a step are computed once, on a fork of its parent's sequence. A family that tokenizes a path's text as a whole
returns all ids of the path: if the parent's ids are not a prefix of them, the path is computed again.
"""
