"""Which full blocks hold which tokens, so that a prompt seen before is not computed again.

A block is known by the sha256 of its tokens and of all before them, so equal hashes mean equal prefixes. Blocks that no
sequence refers to any more stay until their room is needed, the least recently used first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np


def chain_hashes(seed: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hash of each full block of `token_ids`, from `seed` on.

    Args:
        seed: what else must be equal: the model, and whom the cache may be shared with.
        token_ids: of a sequence, from its start.
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
    """Hashes of the blocks of one model, and the order in which those without references were last used."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self.hits = 0
        self.evictions = 0

    def __len__(self) -> int:
        """Blocks kept though no sequence refers to them."""
        return len(self._unused)

    def __iter__(self) -> Iterator[int]:
        """Those blocks, least recently used first."""
        return iter(self._unused)

    def __contains__(self, block: int) -> bool:
        """Whether `block` is kept though no sequence refers to it."""
        return block in self._unused

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known beginning of a chain."""
        blocks = []
        for digest in hashes:
            if (block := self._block_of.get(digest)) is None:
                break
            blocks.append(block)
        return blocks

    def register(self, block: int, digest: bytes) -> None:
        """Make a full, computed block known; of two with the same tokens the first stays the known one."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def keep(self, block: int) -> bool:
        """Keep `block`, to which the last reference was dropped, if it is known; returns whether it was kept."""
        if block not in self._hash_of:
            return False
        self._unused[block] = None
        return True

    def use(self, block: int) -> None:
        """A sequence refers to the kept `block` again."""
        del self._unused[block]

    def forget(self, block: int) -> None:
        """Give up the kept `block`; its room is needed."""
        del self._unused[block]
        del self._block_of[self._hash_of.pop(block)]
        self.evictions += 1

    def check_integrity(self, live: set[int]) -> None:
        """Raise AssertionError unless both directions agree and every known block is either live or kept."""
        assert {block: digest for digest, block in self._block_of.items()} == self._hash_of, "the two maps differ"
        assert set(self._unused) <= set(self._hash_of), "a kept block is not known"
        assert not set(self._unused) & live, "a live block is kept as unused"
        assert set(self._hash_of) <= live | set(self._unused), "a known block is neither live nor kept"
