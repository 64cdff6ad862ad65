"""Checkpoints, from the hub to a model that is ready to run."""
