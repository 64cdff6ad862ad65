"""The prefix cache: full blocks by the hash of their tokens, so that a prompt seen before is not computed again.

A block is known by the sha256 of its tokens and of all before them, so equal hashes mean equal prefixes.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


def chain_hashes(seed: bytes, token_ids: Sequence[int] | np.ndarray, block_size: int) -> list[bytes]:
    """The hash of each full block of `token_ids`, from `seed` on.

    Args:
        seed: hashed first, so that only sequences of one model and one cache salt have equal hashes.
        token_ids: a sequence's tokens, from its start.
        block_size: tokens per block.
    """
    data = np.asarray(token_ids, dtype=np.int32).tobytes()
    width = 4 * block_size
    hashes, last = [], hashlib.sha256(seed).digest()
    for end in range(width, len(data) + 1, width):
        last = hashlib.sha256(last + data[end - width : end]).digest()
        hashes.append(last)
    return hashes


class PrefixCache:
    """Finds blocks of one model by the hash of their tokens; it knows full, computed blocks, live or cached."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        """True if the cache knows the tokens of `block`."""
        return block in self._hash_of

    def longest(self, hashes: Sequence[bytes], passed: Sequence[int]) -> int:
        """The most blocks that a sequence with this chain of hashes can go on after.

        Args:
            hashes: of its full blocks.
            passed: for each number of blocks, how many of the first are not seen by what comes after them.
        """
        longest = known = 0  # known: blocks side by side up to the present one
        for count, digest in enumerate(hashes, start=1):
            known = known + 1 if digest in self._block_of else 0
            if known >= count - passed[count]:
                longest = count
        return longest

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks with these hashes, all of which it knows."""
        return [self._block_of[digest] for digest in hashes]

    def register(self, block: int, digest: bytes) -> None:
        """Enter a full, computed block; of two with the same tokens the first stays in the cache."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def forget(self, block: int) -> None:
        """Take a block out, before other tokens are written to it."""
        del self._block_of[self._hash_of.pop(block)]

    def check_integrity(self, held: set[int]) -> None:
        """Raise AssertionError unless both maps agree and every block of the cache is in `held`, live or cached."""
        assert {block: digest for digest, block in self._block_of.items()} == self._hash_of, "the two maps differ"
        assert set(self._hash_of) <= held, "a block of the prefix cache is neither live nor evictable"
