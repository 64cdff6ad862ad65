"""The layers of a decoder of transformers, over the engine's KV pool."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle

from espalier.engine.errors import CheckpointError
from espalier.engine.models.zoo.attention import running
from espalier.engine.models.zoo.experts import ROWS
from espalier.engine.models.zoo.recurrent import filled_rows, running_recurrent
from espalier.kernels.attention import Terms
from espalier.kernels.batch import StateBatch, StepBatch
from espalier.kernels.calls import Call, PrepareStep, StepCalls
from espalier.kernels.layers import EmbeddingAndNorm, Layers, LayerWeights, UnsupportedShapeError
from espalier.kernels.layout import LayerKV, StateLayout, StateShape
from espalier.kernels.recurrent import StateRows

_RAW = -1
"""Stands for the layer of `raw_tap` among numbers of layers."""


class PagedStep:
    """One step's attention over blocks; see `attention.Step`."""

    def __init__(self, calls: Sequence[Call], layer_kvs: Sequence[LayerKV], step: StepCalls, added: int) -> None:
        """Serve `calls` of a step; queries have `added` tokens more than it has, to fill it up."""
        self.config_windows = False  # each call has its window already
        self._calls = calls
        self._layer_kvs = layer_kvs
        self._step = step
        self._added = added
        self._done = 0

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """See `attention.Step`."""
        call = self._calls[self._done]
        query, key, value = (states[: len(states) - self._added] for states in (query, key, value))
        self._done += 1
        layer_kv = self._layer_kvs[call.slot]
        if call.writes:
            self._step.write(layer_kv, key, value)
        output = self._step.attend(call, query, layer_kv, terms._replace(window=call.window))
        return F.pad(output, (0, 0, 0, 0, 0, self._added))

    def finish(self) -> None:
        """Check that the step made every call that was expected."""
        assert self._done == len(self._calls), f"a step made {self._done} of {len(self._calls)} calls of attention"


class RecurrentStates:
    """One step's recurrent states, call by call; see `recurrent.RecurrentStep`. The last part is the hidden state."""

    def __init__(self, shapes: Sequence[StateShape], states: StateBatch, device: torch.device) -> None:
        """Serve calls with states of `shapes`, without that of the hidden state."""
        self._shapes = shapes
        self._offsets = StateLayout((*shapes, ()), 1, 2**62).offsets
        self._rows = states.rows.to(device)
        self._read_again = states.read_again.to(device)
        self._done = 0

    def rows(self, *shape: int) -> StateRows:
        """See `RecurrentStep`."""
        assert shape == self._shapes[self._done], f"a recurrent layer has a state of {shape}"
        self._done += 1
        return self._rows.part(self._offsets[self._done - 1])

    def finish(self, hidden: torch.Tensor) -> None:
        """Check that the step made every call; put away the rows' last hidden states, and fill in those asked again.

        Args:
            hidden: `[T, hidden]`, written in place.
        """
        assert self._done == len(self._shapes), f"a step made {self._done} of {len(self._shapes)} calls of states"
        last = self._offsets[self._done]
        self._rows.part(last).write(hidden[self._rows.spans[1:] - 1].float())
        if again := len(self._read_again):
            kept = replace(self._rows, sources=self._read_again + last)
            hidden[-again:] = kept.read(hidden.shape[1]).to(hidden.dtype)


class TransformersLayers(Layers):
    """`Layers` that run a decoder of transformers.

    Attributes:
        model: the module of transformers that gives the hidden states after the last norm.
        head: the module that gives logits of them, if the checkpoint is a language model's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        head: Callable[[torch.Tensor], torch.Tensor] | None,
        calls: Sequence[Call],
        prepare_step: PrepareStep,
        states: Sequence[StateShape] = (),
    ) -> None:
        """Run `model`, whose steps make `calls` of attention, and calls of recurrent layers with `states` of a row."""
        self.model = model
        self.head = head
        self._calls = calls
        self._states = states
        self._fill = math.lcm(ROWS, filled_rows(states))
        self._prepare_step = prepare_step
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        weight = embedding.weight.detach()
        self._tapped: dict[int, torch.Tensor] = {}  # of the step that runs
        self._raw_hook: RemovableHandle | None = None
        self.outer = EmbeddingAndNorm(weight, weight[:0])  # norm and rotation are the model's own

    def require_head(self, folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head over the vocabulary.

        Raises:
            CheckpointError: the checkpoint in `folder` has none.
        """
        if self.head is None:
            raise CheckpointError(f"{folder} has no head over the vocabulary")
        return self.head

    def tap(self, layers: Sequence[int]) -> None:
        """See `Layers`; for models whose layers are the list `layers`, and that end with `norm`."""
        modules, norm = getattr(self.model, "layers", None), getattr(self.model, "norm", None)
        if not isinstance(modules, torch.nn.ModuleList) or norm is None or max(layers) >= len(modules):
            raise UnsupportedShapeError(f"states between the layers of {type(self.model).__name__} are not given")
        norm: Any = self.model.norm
        for layer in set(layers).difference(self.taps):
            modules[layer].register_forward_pre_hook(partial(self._keep, layer, norm), with_kwargs=True)
        self.taps = tuple(sorted({*self.taps, *layers}))

    def tap_raw(self, layer: int) -> None:
        """See `Layers`; for models whose layers are the list `layers`."""
        modules = getattr(self.model, "layers", None)
        if not isinstance(modules, torch.nn.ModuleList) or not 0 <= layer < len(modules):
            raise UnsupportedShapeError(f"states between the layers of {type(self.model).__name__} are not given")
        if self._raw_hook:
            self._raw_hook.remove()
        keep = partial(self._keep, _RAW, lambda states: states)
        self._raw_hook = modules[layer].register_forward_pre_hook(keep, with_kwargs=True)
        self.raw_tap = layer

    def _keep(
        self,
        name: int,
        given: Callable[[torch.Tensor], torch.Tensor],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Keep the states that enter a layer, `[1, T, hidden]`, as they are to be given."""
        self._tapped[name] = given(args[0] if args else kwargs["hidden_states"])[0]

    def __len__(self) -> int:
        return sum(call.writes for call in self._calls)

    def weights(self, index: int) -> LayerWeights:
        """None are known one by one."""
        raise NotImplementedError("the weights of a decoder of transformers are its modules'")

    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """See `Layers`."""
        added = -len(step.token_ids) % self._fill
        of_step = self._prepare_step(step, layer_kvs)
        paged = PagedStep(self._calls, layer_kvs, of_step, added)
        token_ids, positions = (F.pad(each, (0, added)) for each in (of_step.token_ids, of_step.positions))
        if step.states is None:
            with torch.inference_mode(), running(paged):
                hidden = hidden_states(self.model, token_ids, positions)[: len(step.token_ids)]
        else:
            recurrent = RecurrentStates(self._states, step.states, token_ids.device)
            with torch.inference_mode(), running(paged), running_recurrent(recurrent):
                hidden = hidden_states(self.model, token_ids, positions)[: len(step.token_ids)]
                recurrent.finish(hidden)
        paged.finish()
        names = self.taps if self.raw_tap is None else (*self.taps, _RAW)
        if not names:
            return hidden
        return torch.cat([hidden, *(self._tapped.pop(name)[: len(hidden)] for name in names)], dim=1)


def hidden_states(model: Callable[..., Any], token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hidden states `[T, hidden]` of a flat batch: `token_ids` and `positions` are `[T]`."""
    return model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)[0][0]
