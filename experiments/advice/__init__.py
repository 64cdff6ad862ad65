"""Accuracy and cost of searches that were not run, from paths that are sampled once; and which to run."""
