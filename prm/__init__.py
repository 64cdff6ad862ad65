"""What a step is worth: process-reward-model families and incremental scoring.

Contract. A family says which token ids follow those that a step's parent keeps, where to read, which of them are fed
for the reading only, and how what is read becomes one score in [0, 1]. A step's tokens are computed once, on a fork
of its parent's sequence; its score is stored by whoever asked for it, and never computed again. A family whose text
is tokenised as a whole gives all ids of a path: they are compared with the parent's, and where those are no beginning
of them the path is read anew. Who scores a step holds its parent's sequence, computed; what is opened for a reading
only, the verification holds and gives up.
"""
