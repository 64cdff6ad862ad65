"""CPU paths of the operations, compiled by numba; imported only where they run."""
