"""Guided decoding: what may be written at each place of a path.

The engine knows a `Matcher` alone: it gives the allowed tokens, advances by the token drawn, and can be copied. A
branch has one of its own, which forks with it; it is kept with the branch's tokens when its KV is given up, so a branch
that is preempted goes on as it would have. What makes matchers, of grammars that callers write, stands beside it.
"""
