"""What the engine does a second, and with how much memory: decoding, shared prefixes, one pool, continuations."""
