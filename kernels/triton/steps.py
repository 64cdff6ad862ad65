"""Inputs of a step's kernels, in one copy to the device, and their results, in one back."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from espalier.kernels.layout import AttentionBatch, LayerKV
from espalier.kernels.triton.attention import DevicePlan
from espalier.kernels.triton.plan import FIELDS, AttentionPlan, Costs
from espalier.kernels.triton.pointwise import take_drawn

_PROGRAMS_PER_PROCESSOR = 4


class Room(NamedTuple):
    """Capacities of a packed step."""

    tokens: int
    narrow: int
    wide: int
    rows: int
    partials: int
    table_entries: int
    state_rows: int = 0
    read_again: int = 0

    def holds(self, other: "Room") -> bool:
        """True if there is room for all of another."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


class StepTokens(NamedTuple):
    """A step on the host.

    Attributes:
        token_ids: int `[T]`; -1 - i where `DeviceStep.load` fills in the i-th of `drawn`.
        positions: int `[T]`.
        places: int64 `[T]`, where each token's first head lies in its layer's keys, in elements; -1 if it is not
            written. One for each window that layers have, as layers with one are a KV group.
        tables: int32 `[S, blocks]`, one for each window.
        plans: of attention, one for each window.
        states: int64, where recurrent states are; see `StateBatch.places`; empty without.
        drawn: on the device; see `StepBatch`.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    places: Sequence[np.ndarray]
    tables: Sequence[np.ndarray]
    plans: Sequence[AttentionPlan]
    states: Sequence[np.ndarray] = ()
    drawn: torch.Tensor | None = None

    @property
    def room(self) -> Room:
        """The room it needs."""
        entries = max((table.size for table in self.tables), default=0)
        needs = [Room(0, len(p.narrow), len(p.wide), len(p.rows), p.partials, 0) for p in self.plans]
        least = Room(len(self.token_ids), 0, 0, 0, 0, entries, *(len(places) for places in self.states[2:]))
        return Room(*(max(each) for each in zip(least, *needs, strict=True)))


class StepMemory:
    """Memory that steps are copied to the device in, one after the other.

    Attributes:
        device: int32, on the device.
        counters: int32, zeros; see `DevicePlan`.
        loaded: the plans that are there, and the size of their block tables. Steps of other sizes have other plans.
    """

    def __init__(self, size: int, counters: int, device: torch.device) -> None:
        """Make room for so many int32 numbers, and for so many counters."""
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)
        self.loaded: tuple[Sequence[AttentionPlan], int] = (), 0
        # Two, for the copy of the step before may still wait for its turn on the device.
        self._hosts = [_PinnedBuffer(size, device) for _ in range(2)]

    def next_host(self) -> "_PinnedBuffer":
        """Memory of the host that no copy reads any more."""
        self._hosts.reverse()
        self._hosts[0].wait()
        return self._hosts[0]


class DeviceStep:
    """A step on the device, in room that it may leave partly unused: tokens beyond its own are not written anywhere.

    Attributes:
        token_ids: int32 `[tokens]`.
        positions: int32 `[tokens]`.
        places: int64 `[tokens]`, one for each window; see `StepTokens`.
        states: int64; see `StepTokens`; rows beyond the step's own have no tokens.
        tables: int32, block tables, one after the other; one for each window.
        plans: one for each window.
        memory: what all of these lie in.
    """

    def __init__(
        self,
        room: Room,
        windows: int,
        kv_heads: Collection[int],
        costs: Costs,
        device: torch.device,
        memory: StepMemory | None = None,
        beside: torch.cuda.Stream | None = None,
    ) -> None:
        """Make room on `device` for steps with plans for `windows`, of layers with so many `kv_heads`.

        With `memory`, take that of a step with more room: only one of them can be computed at a time. For `beside`, see
        `DevicePlan`.
        """
        self.room = room
        of_step = [(2 * room.tokens,)] * windows + [(room.tokens,)] * 2
        of_step += [(2 * size,) for size in (room.state_rows + 1, room.state_rows, room.state_rows, room.read_again)]
        of_step += [(room.table_entries,)] * windows
        of_plan = [(4,), (room.narrow, FIELDS), (room.wide, FIELDS), (room.rows,), (room.tokens + 1,), (room.partials,)]
        shapes: list[tuple[int, ...]] = of_step + of_plan * windows
        self._starts = np.cumsum([0, *(-(-int(np.prod(shape)) // 4) * 4 for shape in shapes)]).tolist()
        self.memory = memory or StepMemory(self._starts[-1], room.tokens * max(kv_heads, default=1), device)
        counters, programs = self.memory.counters, programs_of(costs, min(kv_heads, default=1))
        self.memory.device.zero_()  # what another step has left there would be no tokens of this one
        views = [
            self.memory.device[start : start + int(np.prod(shape))].view(shape)
            for start, shape in zip(self._starts, shapes, strict=False)
        ]
        self.places = [view.view(torch.int64).fill_(-1) for view in views[:windows]]
        self.token_ids, self.positions = views[windows : windows + 2]
        self._first_table, self._of_step = windows + 6, len(of_step)
        self.states = [view.view(torch.int64) for view in views[windows + 2 : self._first_table]]
        self.tables = views[self._first_table : self._of_step]
        self.plans = [
            DevicePlan(narrow, wide, sizes, rows, merge_starts, merges, counters, room.partials, programs, beside)
            for sizes, narrow, wide, rows, merge_starts, merges in (
                views[first : first + len(of_plan)] for first in range(len(of_step), len(views), len(of_plan))
            )
        ]

    def load(self, step: StepTokens) -> None:
        """Copy a step to the device; it must fit in the room."""
        host = self.memory.next_host()
        places = np.full((len(self.places), self.room.tokens), -1, np.int64)
        for row, given in zip(places, step.places, strict=True):
            row[: len(given)] = given
        # The whole room is computed: an id left by a step before, or what another one has there, must not stay.
        token_ids, positions = np.zeros((2, self.room.tokens), np.int32)
        token_ids[: len(step.token_ids)], positions[: len(step.positions)] = step.token_ids, step.positions
        states = [np.zeros(len(view), np.int64) for view in self.states]
        for all_rows, given in zip(states, step.states, strict=False):
            all_rows[: len(given)] = given
            all_rows[len(given) :] = given[-1] if len(given) else 0  # so that spans of rows beyond hold no tokens
        sections = *places, token_ids, positions, *states
        self._copy(host, 0, [*(section.view(np.int32) for section in sections), *step.tables[:1]])
        for index, table in enumerate(step.tables[1:], self._first_table + 1):
            self._copy(host, index, [table])
        if step.drawn is not None:
            take_drawn(self.token_ids[: len(step.token_ids)], step.drawn)
        table_size = step.tables[0].shape[1] if step.tables else 0
        plans, size = self.memory.loaded
        if plans is not step.plans or size != table_size:
            self._load_plans(host, step, table_size)
        host.is_read_from_now_on()

    def _load_plans(self, host: "_PinnedBuffer", step: StepTokens, table_size: int) -> None:
        self.memory.loaded = step.plans, table_size
        sections = []
        for plan in step.plans:
            sizes = np.array([len(plan.narrow), table_size, len(plan.wide), table_size], np.int32)
            ends = np.full(self.room.tokens + 1, plan.merge_starts[-1], np.int32)  # tokens beyond merge nothing
            ends[: len(step.token_ids) + 1] = plan.merge_starts[: len(step.token_ids) + 1]
            sections += [sizes, plan.narrow, plan.wide, plan.rows, ends, plan.merges]
        if sections:
            self._copy(host, self._of_step, sections)

    def _copy(self, buffer: "_PinnedBuffer", first: int, sections: list[np.ndarray]) -> None:
        """Copy arrays to the sections from `first` on, at once."""
        host, end = buffer.memory, 0
        array = host.numpy()
        for start, section in zip(self._starts[first:], sections, strict=False):
            end = start + section.size
            array[start:end] = section.reshape(-1)
        begin = self._starts[first]
        self.memory.device[begin:end].copy_(host[begin:end], non_blocking=True)


class _PinnedBuffer:
    """Memory of the host that is copied to the device without waiting, and must stay as it is until that is done."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Make room for so many int32 numbers."""
        pinned = device.type == "cuda"
        self.memory = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None

    def is_read_from_now_on(self) -> None:
        """Remember that the copies queued so far read it."""
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Wait until it may be written to again."""
        if self._copied is not None:
            self._copied.synchronize()


def second_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream beside the present one; None on a CPU that interprets kernels."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def programs_of(costs: Costs, kv_heads: int) -> int:
    """Programs of each of `kv_heads` that keep the device busy."""
    return max(1, _PROGRAMS_PER_PROCESSOR * costs.processors // kv_heads)


def places_of(batch: AttentionBatch, layer_kv: LayerKV, tokens: int) -> np.ndarray:
    """Int64 `[T]`: where each token's first head lies in its layer's keys, in elements; -1 if it is not written."""
    slab_stride, slot_stride, token_stride = layer_kv.keys.stride()[:3]
    written = (
        batch.write_slabs.numpy() * slab_stride
        + batch.write_slots.numpy() * slot_stride
        + batch.write_offsets.numpy() * token_stride
    )
    if batch.write_rows is None:
        return written
    places = np.full(tokens, -1, np.int64)
    places[batch.write_rows.numpy()] = written
    return places


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """See `kernels.backend.Backend.to_device`: through pinned memory, as a copy from elsewhere waits for the device."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def fetch(results: list[torch.Tensor]) -> Callable[[], list[np.ndarray]]:
    """See `kernels.backend.Backend.fetch`: all results in one copy, which is queued behind the step."""
    device = next((tensor.device for tensor in results if tensor.numel()), results[0].device)
    packed = pack([tensor.to(device) for tensor in results])
    if device.type == "cpu":
        return lambda: [tensor.numpy() for tensor in unpack(packed, results)]
    host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(device))

    def wait() -> list[np.ndarray]:
        copied.synchronize()
        return [tensor.numpy() for tensor in unpack(host, results)]

    return wait


def pack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of one device as bytes, one after the other; those of wider elements must come first."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def unpack(packed: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of what `pack` made, with the shapes and dtypes of `like`."""
    parts = packed.split([tensor.nbytes for tensor in like])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
