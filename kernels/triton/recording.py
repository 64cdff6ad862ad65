"""Decode steps recorded once as CUDA graphs, and replayed with what changed: one launch instead of hundreds."""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

import torch

from espalier.kernels.triton.steps import DeviceStep, Room, StepTokens

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


class GraphRecorder:
    """A `Recorder` of CUDA graphs of one model, on one stream, as cuBLAS keeps a workspace for each stream.

    All share the memory of what they compute in between, as they run one at a time.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See `Recorder`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # compiles kernels, and lets libraries make what they need
            compute()
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
