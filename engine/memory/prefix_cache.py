"""The prefix cache: blocks by the hash of their tokens, so that a prompt seen before is not computed again.

Those without references stay until their room is needed, see `EvictableBlocks`.

A block is known by the sha256 of its tokens and of all before them, so equal hashes mean equal prefixes. Most blocks
are full. Tails, which are not, go on being written to: only what is about to be freed is entered as one. What is
entered as a sequence is released is transient until it is found again: its room is given up first.
"""

import hashlib
from collections import OrderedDict
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


class EvictableBlocks:
    """Cached blocks without references, by slab; slabs, and blocks of a slab, in order of least recent use.

    A live slab also holds blocks that are in use; an idle one holds nothing but cached blocks and free slots. Transient
    blocks are evicted before others, and idle slabs with transient blocks alone before other slabs.
    """

    def __init__(self) -> None:
        # Each pair: of blocks that last, and of transient ones.
        self._of: tuple[dict[int, OrderedDict[int, None]], ...] = ({}, {})
        self._live: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        self._idle: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, slab: int) -> list[int]:
        """Cached blocks of a slab, those to evict first at the front."""
        return [block for blocks in reversed(self._of) for block in blocks.get(slab, ())]

    def keep(self, block: int, slab: int, transient: bool = False) -> None:
        """Add `block` of the live `slab` as the most recently used one."""
        self._of[transient].setdefault(slab, OrderedDict())[block] = None
        self._live[transient][slab] = None
        self._live[transient].move_to_end(slab)
        self._count += 1

    def remove(self, block: int, slab: int) -> None:
        """Take `block` out: it is used again, or its room is needed."""
        transient = block not in self._of[False].get(slab, ())
        kept = self._of[transient][slab]
        del kept[block]
        self._count -= 1
        if not kept:
            del self._of[transient][slab]
            self._live[transient].pop(slab, None)
            if slab not in self._of[not transient]:
                self._leave_idle(slab)

    def set_idle(self, slab: int) -> None:
        """Note that the last block in use of `slab` was freed."""
        holds = [slab in blocks for blocks in self._of]
        if any(holds):
            for live in self._live:
                live.pop(slab, None)
            self._idle[not holds[False]][slab] = None

    def set_live(self, slab: int) -> None:
        """Note that a block of `slab` is in use again."""
        if self._leave_idle(slab):
            for live, blocks in zip(self._live, self._of, strict=True):
                if slab in blocks:
                    live[slab] = None

    def next_is_transient(self) -> tuple[bool, bool]:
        """True if the block to evict first among live slabs is transient; the same for that among all slabs.

        Blocks of idle slabs come after all those of live ones.
        """
        in_live_slab = bool(self._live[True])
        return in_live_slab, in_live_slab or (not self._live[False] and bool(self._idle[True]))

    def oldest_in_live_slab(self) -> tuple[int, int] | None:
        """The block to evict first among live slabs, and its slab; None without any."""
        for slabs, blocks in zip(reversed(self._live), reversed(self._of), strict=True):
            if slabs:
                slab = next(iter(slabs))
                return next(iter(blocks[slab])), slab
        return None

    def oldest_idle_slab(self, lasting: bool = True) -> int | None:
        """The idle slab to give back first; None without any. With `lasting` it may hold more than transient blocks."""
        lasts, transient = self._idle
        return next(iter(transient or (lasts if lasting else ())), None)

    def check_integrity(self, live_slabs: set[int]) -> None:
        """Raise AssertionError unless every slab with cached blocks is listed as live or as idle."""
        assert self._count == sum(len(blocks) for of in self._of for blocks in of.values()), (
            "cached blocks are miscounted"
        )
        for live, of in zip(self._live, self._of, strict=True):
            assert set(live) == set(of) & live_slabs, "live slabs with cached blocks differ"
        lasts, transient = (set(of) - live_slabs for of in self._of)
        assert set(self._idle[False]) == lasts, "idle slabs differ"
        assert set(self._idle[True]) == transient - lasts, "idle slabs with transient blocks alone differ"

    def _leave_idle(self, slab: int) -> bool:
        """Take a slab out of those that are idle; False if it was not."""
        return any(idle.pop(slab, 0) is None for idle in self._idle)  # it is in one at most
