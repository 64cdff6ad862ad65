"""Speed and memory of the engine: decoding, shared prefixes, one pool, continuations."""
