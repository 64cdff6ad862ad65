"""Weights that a library stored quantised: their layouts, expanded tensor by tensor as a checkpoint loads."""
