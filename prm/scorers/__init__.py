"""Scorers without a model of their own: what a step's generation says of it."""

SELF = "self"
"""Value of `--verifier` that asks the generator itself, as a verifier of the family `yes-no` on the same weights."""
WITHOUT_WEIGHTS = (SELF, "confidence", "lowest-confidence")
"""Values of `--verifier` that name no checkpoint."""
