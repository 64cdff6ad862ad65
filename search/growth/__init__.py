"""One search from submission to result: its algorithm's rounds, the tree that they grow, and what shapes its paths."""
