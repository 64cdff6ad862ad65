"""Tools that a generator may call: what a request offers, how a checkpoint writes calls, and how they are read."""
