"""The arena: the one byte tensor that both models' KV lives in, cut into sectors."""

from typing import Protocol

import torch

from espalier.engine.errors import PoolExhaustedError


class SectorHolder(Protocol):
    """What takes sectors: it may hold idle ones, which it surrenders when asked."""

    @property
    def idle_sectors(self) -> int:
        """Sectors it holds without need."""
        ...

    @property
    def owed_sectors(self) -> int:
        """Sectors it was promised and does not need yet."""
        ...

    def surrender_idle_sector(self) -> bool:
        """Give one of them back; False when there is none."""
        ...


class Arena:
    """One uint8 tensor cut into equal sectors, each owned by one model or by none.

    The arena knows bytes and owners, not blocks: a `BlockPool` takes sectors, lays its model's blocks out in them, and
    gives a sector back when its last block is freed, or when another model needs it more.
    """

    def __init__(self, num_bytes: int, sector_bytes: int, device: torch.device | str = "cpu") -> None:
        """Allocate `num_bytes // sector_bytes` sectors on `device`.

        Raises:
            ValueError: when not even one sector fits.
            PoolExhaustedError: when the device has not so much memory.
        """
        if num_bytes < sector_bytes:
            raise ValueError(f"an arena of {num_bytes} bytes cannot hold one sector of {sector_bytes} bytes")
        self.sector_bytes = sector_bytes
        self.num_sectors = num_bytes // sector_bytes
        # Not zeroed: memory is only touched once a block is written. Stale bytes are finite-or-not, and never read.
        try:
            self.bytes = torch.empty(self.num_sectors * sector_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch's out-of-memory, on either kind of device
            raise PoolExhaustedError(
                f"{num_bytes / 2**20:.0f} MiB of KV memory could not be had on {device}; lower --kv-memory"
            ) from error
        self._owner: list[str | None] = [None] * self.num_sectors
        self._holders: dict[str, SectorHolder] = {}
        self._quotas: dict[str, int] = {}
        self._free = list(range(self.num_sectors - 1, -1, -1))  # a stack: the lowest sector is on top at first

    @property
    def free_sectors(self) -> int:
        """Sectors that no model owns."""
        return len(self._free)

    @property
    def available_sectors(self) -> int:
        """Sectors that `take` could give: free ones, and those that are held without need."""
        return len(self._free) + sum(holder.idle_sectors for holder in self._holders.values())

    @property
    def spare_sectors(self) -> int:
        """Available sectors that nobody was promised."""
        return self.available_sectors - sum(holder.owed_sectors for holder in self._holders.values())

    def set_quota(self, owner: str, sectors: int) -> None:
        """Let `owner` hold `sectors` at most, as if the arena were split in advance; without a quota all are shared."""
        self._quotas[owner] = sectors

    def quota(self, owner: str) -> int:
        """Sectors that `owner` may hold at most."""
        return self._quotas.get(owner, self.num_sectors)

    def available_to(self, owner: str, live: int) -> int:
        """Sectors that `owner`, who has use for `live` already, could get beside these."""
        return min(self.available_sectors, self.quota(owner) - live)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena, whole sectors."""
        return self.num_sectors * self.sector_bytes

    def register(self, owner: str, holder: SectorHolder) -> None:
        """Make known who holds the sectors of `owner`."""
        self._holders[owner] = holder

    def take(self, owner: str) -> int | None:
        """Give a sector to `owner`, one that is free or that is held without need; None when there is none."""
        held = sum(held_by == owner for held_by in self._owner) if owner in self._quotas else 0
        if held >= self.quota(owner) and not self._holders[owner].surrender_idle_sector():
            return None
        if not self._free and not any(holder.surrender_idle_sector() for holder in self._holders.values()):
            return None
        sector = self._free.pop()
        self._owner[sector] = owner
        return sector

    def give_back(self, sector: int, owner: str) -> None:
        """Return `sector`, which `owner` holds and no longer uses."""
        assert self._owner[sector] == owner, f"sector {sector} belongs to {self._owner[sector]}, not {owner}"
        self._owner[sector] = None
        self._free.append(sector)

    def owned_by(self, owner: str) -> set[int]:
        """Sectors that `owner` holds."""
        return {sector for sector, held_by in enumerate(self._owner) if held_by == owner}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every sector is either free once or owned once."""
        assert len(set(self._free)) == len(self._free), "a sector is free twice"
        assert {s for s, owner in enumerate(self._owner) if owner is None} == set(self._free), (
            "free list and owners differ"
        )
