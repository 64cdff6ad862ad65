"""The fake device itself: installed for a test, it takes every operation of torch and every launch of Triton."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda import graphs, launches
from fake_cuda.queue import Event, Queue, Stream
from fake_cuda.tensors import CudaTensor, DeviceAssertError, HiddenSynchronisationError

_READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount", "item"}
"""Operations that give the host a value, or a tensor whose shape depends on values."""
_INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_"}
_CONVERSIONS = {"_to_copy", "to"}
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_LARGE = 2**16
"""Elements of a tensor that no test reads: left as zeros, which take no memory until they are written."""


class FakeCuda(TorchDispatchMode):
    """A machine with GPUs, as torch and Triton show one.

    Attributes:
        memory: bytes of each GPU, of which nothing is free but what no test asks for.
        shared_memory: bytes that a program may have of a multiprocessor's.
        counts: operations so far: `to_device` and `to_host` (copies), `blocking` (copies that the host waits for),
            `launches`, `replays`, `streams`, `pinned` (allocations of pinned memory), `launches beside` (recorded on
            another stream than the graph's).
        launched: launches of kernels so far, in order, those of replays apart.
        recorded: launches in each graph so far, those of torch's operations and of kernels.
        draw: gives so many drawn tokens.
    """

    def __init__(self, draw: Callable[[int], torch.Tensor], devices: int = 2) -> None:
        super().__init__()
        self.draw = draw
        self.devices = devices
        self.memory = 80 * 2**30
        self.shared_memory = 227 * 1024
        self.counts: Counter[str] = Counter()
        self.launched: list[launches.Launch] = []
        self.recorded: list[int] = []
        self.queue = Queue()
        self.may_wait = True
        self._here = threading.local()
        self._streams: list[Stream] = []
        self._capturing: graphs.Graph | None = None
        self._random = torch.Generator()
        self._debug_mode: str | int = 0

    # ---- installing

    @contextmanager
    def installed(self) -> Iterator["FakeCuda"]:
        """Be the machine's GPUs."""
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        with pytest.MonkeyPatch.context() as patch:
            replaced = {
                "_lazy_init": lambda: None,
                "is_available": lambda: True,
                "device_count": lambda: self.devices,
                "current_device": lambda: self.current,
                "set_device": self._set_device,
                "get_device_properties": lambda _=None: SimpleNamespace(
                    multi_processor_count=132,
                    shared_memory_per_block_optin=self.shared_memory,
                    total_memory=self.memory,
                    name="Fake",
                    major=9,
                ),
                "get_device_name": lambda _=None: "Fake",
                "mem_get_info": lambda _=None: (self.memory, self.memory),
                "memory_reserved": lambda _=None: 0,
                "synchronize": lambda _=None: self.queue.wait(),
                "empty_cache": lambda: None,
                "get_sync_debug_mode": lambda: self._debug_mode,
                "set_sync_debug_mode": lambda mode: setattr(self, "_debug_mode", mode),
                "current_stream": self._stream,
                "Stream": self._new_stream,
                "stream": self._use_stream,
                "Event": lambda **_: Event(self.queue),
                "graph_pool_handle": graphs.Pool,
                "CUDAGraph": lambda: graphs.Graph(lambda: self.counts.update(["replays"])),
                "graph": self._capture,
            }
            for name, value in replaced.items():
                patch.setattr(torch.cuda, name, value)
            patch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))
            patch.setattr(torch.Tensor, "to", self._with_index(torch.Tensor.to))
            patch.setattr(torch.Tensor, "is_pinned", lambda tensor: self.queue.is_pinned(tensor))
            patch.setattr(torch, "Generator", _HostGenerator)
            for kind in (InterpretedFunction, JITFunction):
                patch.setattr(kind, "run", self._launcher())
            with self:
                yield self

    @contextmanager
    def running(self) -> Iterator[Counter[str]]:
        """Steps, not loading: a copy that the host waits for raises. Gives what is counted meanwhile."""
        before, counted = self.counts.copy(), Counter[str]()
        self.may_wait = False
        try:
            yield counted
        finally:
            self.may_wait = True
            counted.update(self.counts - before)

    # ---- devices, streams, graphs

    @property
    def current(self) -> int:
        """The device of this thread."""
        return getattr(self._here, "index", 0)

    def _set_device(self, device: torch.device | str | int) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is None or not 0 <= index < self.devices:
            raise RuntimeError(f"invalid device ordinal: {device}")
        self._here.index = index

    def _stream(self, device: torch.device | None = None) -> Stream:
        if self._streams:
            return self._streams[-1]
        index = self.current if device is None or device.index is None else device.index
        return Stream(self.queue, index, lambda: self._capturing is not None)

    def _new_stream(self, device: torch.device | None = None) -> Stream:
        self.counts["streams"] += 1
        index = self.current if device is None or device.index is None else device.index
        return Stream(self.queue, index, lambda: self._capturing is not None)

    @contextmanager
    def _use_stream(self, stream: Stream) -> Iterator[None]:
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    @contextmanager
    def _capture(
        self,
        graph: graphs.Graph,
        pool: graphs.Pool | None = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        self.counts["streams"] += stream is None  # torch makes one
        self.counts[f"captures, {capture_error_mode}"] += 1
        graph.begin(pool)
        self._capturing = graph
        self._beside = set[Stream]()
        try:
            with self._use_stream(stream or self._stream()):
                yield
        finally:
            self._capturing = None
        assert all(each.awaited for each in self._beside), "a stream has not come back into the graph"
        self.counts["graphs"] += 1
        self.recorded.append(len(graph.work))

    # ---- launches

    def _launcher(self) -> Callable[..., None]:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            launch, arguments = launches.describe(kernel, grid, args, kwargs)
            launches.require_on_device(launch, arguments, self.current)
            self.launched.append(launch)
            if self._capturing is not None and len(self._streams) > 1:
                here = self._streams[-1]
                assert self._streams[-2] in here.behind, f"{launch.kernel}: on a stream outside of the graph"
                here.awaited = False
                self._beside.add(here)
                self.counts["launches beside"] += 1
            self._run(lambda: self._effect(launch.kernel, arguments), "launches")

        return run

    def _effect(self, kernel: str, arguments: dict[str, Any]) -> None:
        if kernel == "replace_by_drawn":
            launches.put_drawn(arguments)
        elif kernel == "draw_rows":
            ids = arguments["token_ids"].held
            ids.copy_(self.draw(len(ids)))
            arguments["log_probabilities"].held.fill_(-1.0)

    def _run(self, work: Callable[[], None], counted: str) -> None:
        """Do something now, or with each replay of the graph that is being recorded."""
        if self._capturing is not None:
            self._capturing.work.append(work)
        else:
            self.counts[counted] += 1
        work()

    # ---- operations of torch

    def _wait(self, what: str) -> None:
        """Have the host wait for the device."""
        if self._debug_mode == "error" or self._capturing is not None:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        if not self.may_wait:
            raise HiddenSynchronisationError(what)

    def _with_index(self, to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`Tensor.to`, for which torch would ask a driver for the current device."""

        def numbered(value: Any) -> Any:
            is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
            return torch.device("cuda", self.current) if is_device and str(value) == "cuda" else value

        def convert(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            given = {name: numbered(value) for name, value in kwargs.items()}
            return to(tensor, *map(numbered, args), **given)

        return convert

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        assert not isinstance(tensor, CudaTensor), "only the host's memory can be pinned"
        self.counts["pinned"] += 1
        return self.queue.pin(tensor.clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        leaves = pytree.tree_leaves((args, kwargs))
        on_device = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
        if name in _CONVERSIONS:
            return self._convert(func, args, kwargs)
        if name == "copy_" and (on_device and not all(isinstance(x, CudaTensor) for x in args[:2])):
            return self._copy(args[0], args[1], kwargs.get("non_blocking") or args[2:3] == (True,))
        asked = kwargs.get("device")
        if not on_device and (asked is None or torch.device(asked).type != "cuda"):
            return self._on_host(func, args, kwargs)
        return self._on_device(func, name, on_device, leaves, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not kwargs.pop("pin_memory", None):
            return func(*args, **kwargs)
        self.counts["pinned"] += 1
        return self.queue.pin(func(*args, **kwargs))

    def _on_device(
        self, func: Any, name: str, on_device: list[CudaTensor], leaves: list[Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if name in _READS:
            self._wait(f"{name} of a tensor on the device")
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, CudaTensor) and (leaf.dim() or name in _INDEXED):
                raise AssertionError(f"{name} mixes a tensor of the host with tensors of the device")
        if name in _INDEXED and any(
            x.dtype in (torch.bool, torch.uint8) for x in pytree.tree_leaves(args[1]) if isinstance(x, torch.Tensor)
        ):
            raise HiddenSynchronisationError(f"{name} by a mask")
        indices = {tensor.index for tensor in on_device}
        assert len(indices) <= 1, f"{name} mixes tensors of several devices"
        asked = kwargs.get("device")
        index = torch.device(asked).index if asked is not None else None
        index = next(iter(indices), self.current if index is None else index)
        if asked is not None:
            assert torch.device(asked).type == "cuda", f"{name} from the device to {asked}"
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        wrappers = {id(tensor.held): tensor for tensor in on_device}
        held_args, held_kwargs = pytree.tree_map(lambda x: x.held if isinstance(x, CudaTensor) else x, (args, kwargs))
        found = self._compute(func, name, held_args, held_kwargs)

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            known = wrappers.get(id(value))
            return CudaTensor(value, index) if known is None else known

        return pytree.tree_map(wrapped, found)

    def _compute(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        def computed() -> Any:
            try:
                return func(*args, **kwargs)
            except IndexError as error:
                raise DeviceAssertError(f"{name}: {error}") from error

        found = computed()
        if name in _UNWRITTEN:
            self._fill(found)
        elif self._capturing is not None:
            given = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)}
            outputs = [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]
            if any(x.untyped_storage().data_ptr() not in given for x in outputs):
                self._capturing.work.append(lambda: _overwrite(outputs, computed()))
            elif func._schema.is_mutable:
                self._capturing.work.append(computed)
        return found

    def _fill(self, tensor: torch.Tensor) -> None:
        """Memory that nobody has written: any numbers, of which indices are absurd ones."""
        if tensor.numel() > _LARGE or tensor.dtype == torch.uint8:
            tensor.zero_()
        elif tensor.dtype.is_floating_point:  # always the same, so that a step gives what its replay gives
            tensor.normal_(std=0.1, generator=self._random.manual_seed(0))
        else:
            tensor.fill_(-(2**30))

    # ---- copies

    def _convert(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`to`, in all its forms."""
        tensor, rest = args[0], list(args[1:])
        dtype = kwargs.get("dtype") or next((x for x in rest if isinstance(x, torch.dtype)), None)
        device = kwargs.get("device") or next((x for x in rest if isinstance(x, torch.device)), None)
        if other := next((x for x in rest if isinstance(x, torch.Tensor)), None):
            dtype, device = other.dtype, other.device
        there = isinstance(tensor, CudaTensor)
        goes_there = there if device is None else torch.device(device).type == "cuda"
        if not there and not goes_there:
            return func(*args, **kwargs)
        if there and not goes_there:
            made = torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
            return self._copy(made, tensor, non_blocking=False)
        if there:
            return self._changed(tensor, dtype, copies=func._schema.name == "aten::_to_copy")
        index = torch.device(device).index if device is not None else None
        cast = tensor if dtype is None else tensor.to(dtype)
        made = CudaTensor(torch.empty_like(cast), self.current if index is None else index)
        rest_true = kwargs.get("non_blocking") or (rest and isinstance(rest[-1], bool) and rest[0] is True)
        self._copy(made, cast, bool(rest_true) or True in rest[1:2])
        return made

    def _changed(self, tensor: CudaTensor, dtype: torch.dtype | None, *, copies: bool) -> CudaTensor:
        if dtype in (None, tensor.dtype) and not copies:
            return tensor
        found = self._compute(torch.ops.aten._to_copy.default, "_to_copy", (tensor.held,), {"dtype": dtype})
        return CudaTensor(found, tensor.index)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        assert self._capturing is None, "a copy between host and device while a graph is recorded"
        if not source.numel():
            return target
        to_host = isinstance(source, CudaTensor)
        host = target if to_host else source
        asynchronous = non_blocking and self.queue.is_pinned(host)
        self.counts["to_host" if to_host else "to_device"] += 1
        if not asynchronous:
            self.counts["blocking"] += 1
            self._wait(f"a copy of {list(host.shape)} {host.dtype} that the host waits for")
        if isinstance(source, CudaTensor) and asynchronous:
            self.queue.to_host(target, source.held)
        elif isinstance(source, CudaTensor):
            target.copy_(source.held)
        else:
            assert isinstance(target, CudaTensor)
            if asynchronous:
                self.queue.to_device(target.held, source)
            else:
                target.held.copy_(source)
        return target


def _overwrite(outputs: list[torch.Tensor], values: Any) -> None:
    found = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    for output, value in zip(outputs, found, strict=True):
        output.copy_(value)


class _HostGenerator(torch.Generator):
    """A generator of random numbers for any device: they are made on the host."""

    def __new__(cls, _: torch.device | str = "cpu") -> "_HostGenerator":
        return super().__new__(cls)
