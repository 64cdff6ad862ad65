"""One pool of KV memory for all models: slabs, reference-counted blocks, the prefix cache, sequences."""
