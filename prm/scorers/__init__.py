"""Scorers without a model of their own: what a step's generation says of it."""

WITHOUT_WEIGHTS = ("confidence", "lowest-confidence")
"""Values of `--verifier` that name a scorer of the generator's own probabilities."""
