"""Memory and time of searches on paper, before anything runs."""
