"""Process reward models: families of published checkpoints, and incremental scoring of steps.

Contract. A family defines which token ids a step appends to its parent's, at which positions to read, which of the ids
are probe tokens (fed only to read the score, and not kept), and how the values read become a score in [0, 1]. The
tokens of a step are computed once, on a fork of its parent's sequence; the caller stores the score. A family that
tokenizes a path's text as a whole returns all ids of the path: if the parent's ids are not a prefix of them, the path
is computed again. The caller holds the parent's computed sequence while a step is scored; the verification releases the
sequences that it opened itself.
"""
