"""Memory and time of searches, measured."""
