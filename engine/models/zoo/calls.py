"""A decoder's calls of attention and of recurrent layers, in the order in which each step makes them."""

from collections.abc import Callable

import torch

from espalier.engine.models.zoo.attention import NotRunnableError, running
from espalier.engine.models.zoo.recurrent import RecurrentTracer, running_recurrent
from espalier.kernels.attention import Terms
from espalier.kernels.calls import Call
from espalier.kernels.layout import KVShape, StateShape


class Tracer:
    """The step that finds out which calls a decoder makes; its attention gives zeros.

    Attributes:
        calls: those made so far.
        config_windows: see `attention.Step`.
    """

    def __init__(self, config_windows: bool) -> None:
        self.config_windows = config_windows
        self.calls: list[Call] = []
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []  # kept, so that no memory is used twice

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """See `attention.Step`."""
        tokens, heads, key_dim = query.shape
        if len(key) != tokens or len(value) != tokens:
            raise NotRunnableError("its attention reads keys of other tokens than its queries are of")
        if heads % key.shape[1] or key.shape[1] != value.shape[1]:
            raise NotRunnableError(
                f"{heads} query heads cannot share {key.shape[1]} key and {value.shape[1]} value heads"
            )
        slot = next((i for i, kv in enumerate(self._written) if _same(kv[0], key) and _same(kv[1], value)), None)
        writes = slot is None
        if slot is None:
            slot = len(self._written)
            self._written.append((key, value))
        call = Call(heads, key.shape[1], key_dim, value.shape[-1], terms.window, slot, writes)
        self.calls.append(call)
        return query.new_zeros(tokens, heads, value.shape[-1])


def trace(run: Callable[[], object], config_windows: bool) -> tuple[tuple[Call, ...], tuple[StateShape, ...]]:
    """The calls of attention that one step makes, and the shapes of the states of its calls of recurrent layers.

    Args:
        run: computes a step of a few tokens.
        config_windows: see `attention.Step`.

    Raises:
        NotRunnableError: there are none, and no states, or one asks for attention of another kind.
    """
    tracer, recurrent = Tracer(config_windows), RecurrentTracer()
    with torch.inference_mode(), running(tracer), running_recurrent(recurrent):
        run()
    if not tracer.calls and not recurrent.shapes:
        raise NotRunnableError("its layers do not call transformers' attention interface")
    return tuple(tracer.calls), tuple(recurrent.shapes)


def kv_layers(calls: tuple[Call, ...]) -> tuple[KVShape, ...]:
    """Shape of each KV layer's keys and values, with the window of the calls that read it."""
    windows: dict[int, list[int | None]] = {}
    for call in calls:
        windows.setdefault(call.slot, []).append(call.window)
    widest = {slot: None if None in its else max(window for window in its if window) for slot, its in windows.items()}
    return tuple(
        KVShape(call.kv_heads, call.key_dim, call.value_dim, widest[call.slot]) for call in calls if call.writes
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if both are the same memory read in the same way; tensors without memory have a storage, too."""
    storages = (each.untyped_storage()._cdata for each in (one, other))  # pyright: ignore[reportPrivateUsage]
    places = ((each.storage_offset(), each.shape, each.stride()) for each in (one, other))
    return len(set(storages)) == 1 and len(set(places)) == 1
