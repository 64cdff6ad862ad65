"""Memory and time of searches: on paper, and measured."""
