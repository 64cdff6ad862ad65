"""The KV pool: the one byte tensor that both models' KV lives in, cut into slabs."""

import logging
from typing import Protocol

import torch

from espalier.engine.errors import PoolExhaustedError

log = logging.getLogger("espalier.engine.memory")


class SlabHolder(Protocol):
    """A holder of slabs, such as `BlockPool`. It may hold idle slabs, which it gives back when asked."""

    @property
    def idle_slabs(self) -> int:
        """Slabs it holds that have no block in use."""
        ...

    @property
    def unclaimed_slabs(self) -> int:
        """Slabs reserved for it that it does not need yet."""
        ...

    def reclaim_idle_slab(self, lasting: bool = True) -> bool:
        """Give one idle slab back, with more than transient blocks only if `lasting`; False when there is none."""
        ...


class KVPool:
    """One uint8 tensor cut into equal slabs, each owned by one model or by none.

    The KV pool knows bytes and roles, not blocks: a `BlockPool` takes slabs, lays its model's blocks out in them, and
    gives a slab back when its last block is freed, or when a model needs it more than the prefix cache does.
    """

    def __init__(self, num_bytes: int, slab_bytes: int, device: torch.device | str = "cpu") -> None:
        """Allocate `num_bytes // slab_bytes` slabs on `device`.

        Raises:
            ValueError: when not even one slab fits.
            PoolExhaustedError: when the device has less memory than that.
        """
        if num_bytes < slab_bytes:
            raise ValueError(f"a KV pool of {num_bytes} bytes cannot hold one slab of {slab_bytes} bytes")
        self.slab_bytes = slab_bytes
        self.num_slabs = num_bytes // slab_bytes
        # Not zeroed: memory is only touched once a block is written, and nothing reads bytes that were not.
        try:
            self.bytes = torch.empty(self.num_slabs * slab_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch's out-of-memory, on either kind of device
            raise PoolExhaustedError(
                f"cannot allocate {num_bytes / 2**20:.0f} MiB for the KV pool on {device}; lower --kv-memory"
            ) from error
        self._role_of: list[str | None] = [None] * self.num_slabs
        self._holders: dict[str, SlabHolder] = {}
        self._free = list(range(self.num_slabs - 1, -1, -1))  # a stack: the lowest slab is on top at first

    @property
    def free_slabs(self) -> int:
        """Slabs that no model owns."""
        return len(self._free)

    @property
    def available_slabs(self) -> int:
        """Slabs that `take` could give: free ones and idle ones."""
        return len(self._free) + sum(holder.idle_slabs for holder in self._holders.values())

    @property
    def unreserved_slabs(self) -> int:
        """Available slabs that no role has reserved."""
        return self.available_slabs - sum(holder.unclaimed_slabs for holder in self._holders.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the KV pool, whole slabs."""
        return self.num_slabs * self.slab_bytes

    def register(self, role: str, holder: SlabHolder) -> None:
        """Name the holder of `role`'s slabs."""
        self._holders[role] = holder

    def take(self, role: str) -> int | None:
        """Give a free or idle slab to `role`; None when there is none."""
        holders = self._holders.values()
        if not self._free and not any(one.reclaim_idle_slab(lasting) for lasting in (False, True) for one in holders):
            return None
        slab = self._free.pop()
        self._role_of[slab] = role
        log.debug("slab %d goes to the %s; %d slabs are free", slab, role, len(self._free))
        return slab

    def give_back(self, slab: int, role: str) -> None:
        """Take `slab` back from `role`, which has no block in it any more."""
        assert self._role_of[slab] == role, f"slab {slab} belongs to {self._role_of[slab]}, not {role}"
        self._role_of[slab] = None
        self._free.append(slab)
        log.debug("slab %d comes back from the %s; %d slabs are free", slab, role, len(self._free))

    def owned_by(self, role: str) -> set[int]:
        """Slabs that `role` holds."""
        return {slab for slab, held_by in enumerate(self._role_of) if held_by == role}

    def close(self) -> None:
        """Give the memory back to the device once no view of it is left; no block can be read or written then."""
        self.bytes = self.bytes.new_empty(0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slab is either free once or owned once."""
        assert len(set(self._free)) == len(self._free), "a slab is free twice"
        assert {s for s, role in enumerate(self._role_of) if role is None} == set(self._free), (
            "free list and roles differ"
        )
