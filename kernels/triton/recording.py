"""Decode steps recorded once as CUDA graphs, and replayed with what changed: one launch instead of hundreds."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

import torch

from espalier.kernels.layout import LayerKV
from espalier.kernels.triton.steps import DeviceStep, Room, StepMemory, StepTokens

LADDER = (1, 2, 4, *range(8, 257, 8), *range(288, 513, 32), *range(576, 1025, 64))
"""Numbers of tokens that steps are recorded for; a step takes the next one, with tokens that are written nowhere."""
_MAX_ITEMS = 1024
_TABLE_ENTRIES = 2**20
"""Of all sequences: 4 MiB, which all recorded steps share."""

Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Records what a function does on the device; returns what does it again, and what the function returned, which that
overwrites."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step: where its input lies, what replays it, and its output `[tokens, hidden]`."""

    on_device: DeviceStep
    replay: Callable[[], None]
    output: torch.Tensor

    def run(self, step: StepTokens) -> torch.Tensor:
        """Replay with the tokens of `step`; returns their hidden states, which the next replay overwrites."""
        self.on_device.load(step)
        self.replay()
        return self.output[: len(step.token_ids)]


def room_of(tokens: int) -> Room:
    """Room for steps of so many tokens of any usual context; a step that needs more is not replayed."""
    items = tokens + _MAX_ITEMS
    return Room(tokens, items, items, 4 * items, 4 * items, _TABLE_ENTRIES)


def fitted(room: Room, tiles: Iterable[tuple[int, int]]) -> Room:
    """The room without items that no plan for its tokens has; `tiles` are rows of narrow and wide items."""
    narrow_rows = [narrow for narrow, _ in tiles]
    if not any(narrow_rows):
        return room._replace(narrow=0)
    if room.tokens <= min(narrow_rows):  # whatever they share, one narrow item holds them all
        return room._replace(wide=0)
    return room


def pool_of(layer_kvs: Sequence[LayerKV], states: torch.Tensor | None = None) -> int:
    """An address that tells the KV pool that layers write to from others."""
    if states is not None:
        return states.data_ptr()
    return layer_kvs[0].keys.data_ptr() if layer_kvs else 0


class RecordedSteps:
    """Steps of one token to a sequence of one model, recorded for every number of tokens in the ladder."""

    def __init__(self, recorder: Recorder | None) -> None:
        """Record by `recorder`; nothing without."""
        self.recorder = recorder
        self._of_pool: dict[int, dict[int, RecordedStep]] = {}  # by number of tokens

    def __len__(self) -> int:
        return len(self._of_pool)

    def record(
        self,
        pool: int,
        make_step: Callable[[Room, StepMemory | None], DeviceStep],
        compute: Callable[[DeviceStep, torch.Tensor], torch.Tensor],
        output: torch.Tensor,
        ladder: Sequence[int] = (),
    ) -> None:
        """Record steps over a KV pool, the largest first: all share its memory.

        Args:
            pool: see `pool_of`.
            make_step: makes a step of so much room, in memory that may be given.
            compute: computes a step, and writes its states to a part of `output`, which it returns.
            output: `[tokens of the largest, ...]`.
            ladder: ascending numbers of tokens; `LADDER` if empty.
        """
        assert self.recorder is not None
        recorded: dict[int, RecordedStep] = {}
        memory = None
        for tokens in reversed(ladder or LADDER):
            on_device = make_step(room_of(tokens), memory)
            memory = on_device.memory
            recorded[tokens] = RecordedStep(on_device, *self.recorder(partial(compute, on_device, output[:tokens])))
        self._of_pool[pool] = recorded

    def release(self, pool: int) -> None:
        """Let go of the steps over a KV pool; another may come to lie where it was."""
        self._of_pool.pop(pool, None)

    def find(self, step: StepTokens, pool: int) -> RecordedStep | None:
        """The smallest recorded step that has room for `step`; None where there is none."""
        recorded = self._of_pool.get(pool, {})
        ladder = [*reversed(recorded)]
        place = bisect_left(ladder, len(step.token_ids))
        if place == len(ladder) or not (found := recorded[ladder[place]]).on_device.room.holds(step.room):
            return None
        return found


class GraphRecorder:
    """A `Recorder` of CUDA graphs of one model, on one stream, as cuBLAS keeps a workspace for each stream.

    All share the memory of what they compute in between, as they run one at a time.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See `Recorder`.

        Raises:
            RuntimeError: what is computed waits for the device.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")  # a recording that fails half-way may leave a device unusable
        try:
            with torch.cuda.stream(self._stream):  # compiles kernels, and lets libraries make what they need
                compute()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(self._stream)
        # A pool ends with its last graph, and torch's allocator lets no other graph join it then.
        shared = next(iter(self._graphs), None)
        pool = torch.cuda.graph_pool_handle() if shared is None else shared.pool()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate on the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            output = compute()
        self._graphs.add(graph)
        return graph.replay, output
