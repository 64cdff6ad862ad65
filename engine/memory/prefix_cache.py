"""The prefix cache: blocks by the hash of their tokens, so that a prompt seen before is not computed again.

A block is known by the sha256 of its tokens and of all before them, so equal hashes mean equal prefixes. Most blocks
are full. Tails, which are not, go on being written to: only what is about to be freed is entered as one. What is
entered as a sequence is released is transient until it is found again: its room is given up first.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


def chain_start(seed: bytes) -> bytes:
    """Stands for the hash of a block before the first; see `chain_hashes`."""
    return hashlib.sha256(seed).digest()


def chain_hashes(seed: bytes, token_ids: Sequence[int] | np.ndarray, block_size: int) -> list[bytes]:
    """The hash of each full block of `token_ids`, from `seed` on.

    Args:
        seed: hashed first, so that only sequences of one model and one cache salt have equal hashes.
        token_ids: a sequence's tokens, from its start.
        block_size: tokens per block.
    """
    data = np.asarray(token_ids, dtype=np.int32).tobytes()
    width = 4 * block_size
    hashes, last = [], chain_start(seed)
    for end in range(width, len(data) + 1, width):
        last = hashlib.sha256(last + data[end - width : end]).digest()
        hashes.append(last)
    return hashes


class PrefixCache:
    """Finds blocks of one model by the hash of their tokens; it knows computed blocks, live or cached."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._tails: dict[bytes, dict[bytes, bytes]] = {}  # by the hash of the block before: their hashes by tokens
        self._tail_of: dict[int, tuple[bytes, bytes]] = {}  # by block: the hash of the one before, and its tokens
        self._transient: set[int] = set()  # blocks

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

    def knows(self, hashes: Sequence[bytes]) -> bool:
        """True if it knows a block with each of these hashes."""
        return all(digest in self._block_of for digest in hashes)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks with these hashes, all of which it knows; they are transient no longer."""
        found = [self._block_of[digest] for digest in hashes]
        self._transient.difference_update(found)
        return found

    def register(self, block: int, digest: bytes, transient: bool = False) -> None:
        """Enter a full, computed block; of two with the same tokens the first stays in the cache."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
            if transient:
                self._transient.add(block)
        elif not transient:
            self._transient.discard(self._block_of[digest])

    @property
    def has_tails(self) -> bool:
        """True if it knows a tail."""
        return bool(self._tail_of)

    def is_tail(self, block: int) -> bool:
        """True if it knows `block` as a tail."""
        return block in self._tail_of

    def is_transient(self, block: int) -> bool:
        """True if it knows `block` from a released sequence alone."""
        return block in self._transient

    def register_tail(self, block: int, before: bytes, token_ids: bytes, transient: bool = False) -> None:
        """Enter a block that is not full.

        Args:
            block: a computed block that is not written to while it is known.
            before: the hash of the block before it.
            token_ids: int32, what it has of its own.
            transient: whether its room is given up first.
        """
        digest = hashlib.sha256(before + token_ids).digest()
        if digest not in self._block_of:
            self.register(block, digest, transient)
            self._tails.setdefault(before, {})[token_ids] = digest
            self._tail_of[block] = before, token_ids

    def longest_tail(self, before: bytes, token_ids: bytes) -> tuple[int, bytes]:
        """Length and hash of the longest tail behind a block that `token_ids`, int32, begin with; 0 without any."""
        known = [tail for tail in self._tails.get(before, ()) if token_ids.startswith(tail)]
        longest = max(known, key=len, default=b"")
        return len(longest) // 4, self._tails[before][longest] if longest else b""

    def forget(self, block: int) -> None:
        """Take a block out, before other tokens are written to it."""
        del self._block_of[self._hash_of.pop(block)]
        self._transient.discard(block)
        if tail := self._tail_of.pop(block, None):
            before, token_ids = tail
            del self._tails[before][token_ids]
            if not self._tails[before]:
                del self._tails[before]

    def check_integrity(self, held: set[int]) -> None:
        """Raise AssertionError unless both maps agree and every block of the cache is in `held`, live or cached."""
        assert {block: digest for digest, block in self._block_of.items()} == self._hash_of, "the two maps differ"
        assert set(self._hash_of) <= held, "a block of the prefix cache is neither live nor evictable"
        assert self._transient <= set(self._hash_of), "a block that is not known is transient"
        tails = {self._block_of[digest] for known in self._tails.values() for digest in known.values()}
        assert tails == set(self._tail_of), "tails differ from the blocks that are known as such"
