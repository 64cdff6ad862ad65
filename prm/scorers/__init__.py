"""Scorers without a model of their own: a step's generation, or a function of the user's."""

import re

SELF = "self"
"""Value of `--verifier` that asks the generator itself, as a verifier of the family `yes-no` on the same weights."""
PROBE = "probe"
"""Value of `--verifier` that scores steps by the answers that their paths would give."""
SCORERS = (SELF, PROBE, "confidence", "lowest-confidence")
"""Values of `--verifier` that name no checkpoint."""
_FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def names_function(verifier: str) -> bool:
    """Return whether a value of `--verifier` is a function or a `Scorer` of the user's, `MODULE:NAME`."""
    return _FUNCTION.fullmatch(verifier) is not None


def names_checkpoint(verifier: str) -> bool:
    """Return whether a value of `--verifier` names a checkpoint."""
    return bool(verifier) and verifier not in SCORERS and not names_function(verifier)
