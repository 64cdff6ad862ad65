"""The layers of a decoder of transformers over the engine's KV pool, and its class's head."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from espalier.engine.models.zoo.calls import filled_rows, running
from espalier.engine.models.zoo.products import ROWS
from espalier.kernels.attention import Call, CallSteps, StepCalls, Terms
from espalier.kernels.layers import RECORDED_WITHOUT, EmbeddingAndNorm, Layers, UnsupportedShapeError
from espalier.kernels.layout import LayerKV, StateLayout, StateShape, StepBatch
from espalier.kernels.recurrent import StateRows

_RAW = -1
"""Stands for the layer of `raw_tap` among numbers of layers."""


@dataclass(slots=True)
class PagedStep:
    """One step over the KV pool: its attention over blocks, and its recurrent states; see `calls.Step`.

    Attributes:
        calls: of attention, those to come.
        layer_kvs: the KV of all layers.
        step: computes attention, and says where states are.
        added: tokens that queries have more than the step, to fill it up.
        places: shape and offset of the state of each recurrent call to come.
        last: offset of the hidden state.
        config_windows: each call has its window already.
    """

    calls: Iterator[Call]
    layer_kvs: Sequence[LayerKV]
    step: StepCalls
    added: int
    places: Iterator[tuple[StateShape, int]]
    last: int
    config_windows: bool = False

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """See `calls.Step`."""
        call = next(self.calls)
        if self.added:
            query, key, value = (states[: -self.added] for states in (query, key, value))
        layer_kv = self.layer_kvs[call.slot]
        if call.writes:
            self.step.write(layer_kv, key, value)
        output = self.step.attend(call, query, layer_kv, terms._replace(window=call.window))
        return F.pad(output, (0, 0, 0, 0, 0, self.added)) if self.added else output  # else torch copies it

    def rows(self, *shape: int) -> StateRows:
        """See `calls.Step`."""
        expected, offset = next(self.places)
        assert shape == expected, f"a recurrent layer has a state of {shape}"
        assert self.step.states is not None, "a decoder without states makes no recurrent calls"
        return self.step.states.rows.part(offset)

    def finish(self, hidden: torch.Tensor) -> None:
        """Check that the step made every call; put away the rows' last hidden states, and fill in those asked again.

        Args:
            hidden: `[T, hidden]`, written in place where there are states.
        """
        left = len([*self.calls, *self.places])
        assert not left, f"a step lacks {left} of its calls"
        if (states := self.step.states) is None:
            return
        self.step.keep_last(hidden, self.last)
        if again := len(states.read_again):
            sources = states.read_again + self.last
            hidden[-again:] = replace(states.rows, sources=sources).read(hidden.shape[1]).to(hidden.dtype)


class TransformersLayers(Layers):
    """`Layers` that run a decoder of transformers.

    Attributes:
        model: the module of transformers that gives the hidden states after the last norm.
        head: the module that gives logits of them, if the checkpoint is a language model's.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Callable[[torch.Tensor], torch.Tensor] | None,
        calls: Sequence[Call],
        steps: CallSteps,
        states: Sequence[StateShape] = (),
    ) -> None:
        """Run `model` by `steps`, which make `calls` of attention, and of recurrent layers with `states` of a row."""
        self.model = model
        self.head = head
        self._calls = calls
        self._places = list(zip((*states, ()), StateLayout((*states, ()), 1, 2**62).offsets, strict=False))
        self._fill = math.lcm(ROWS, filled_rows(states))
        self._steps = steps
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        weight = embedding.weight.detach()
        self._tapped: dict[int, torch.Tensor] = {}  # of the step that runs
        self._raw_hook: RemovableHandle | None = None
        self.outer = EmbeddingAndNorm(weight, weight[:0])  # norm and rotation are the model's own

    def tap(self, layers: Sequence[int]) -> None:
        """See `Layers`; for models whose layers are the list `layers`, and that end with `norm`."""
        new = set(layers).difference(self.taps)
        self._require_unrecorded(bool(new))
        norm: Any = getattr(self.model, "norm", None)
        for layer in sorted(new, reverse=True):  # one that is not there comes first
            self._keep(layer, layer, norm)
        self.taps = tuple(sorted({*self.taps, *layers}))

    def tap_raw(self, layer: int) -> None:
        """See `Layers`; for models whose layers are the list `layers`."""
        self._require_unrecorded(layer != self.raw_tap)
        before, self._raw_hook = self._raw_hook, self._keep(layer, _RAW, lambda states: states)
        if before:
            before.remove()
        self.raw_tap = layer

    def _require_unrecorded(self, changes: bool) -> None:
        if changes and self._steps.recorded:
            raise RuntimeError(RECORDED_WITHOUT)

    def _keep(self, layer: int, name: int, given: Callable[[torch.Tensor], torch.Tensor] | None) -> RemovableHandle:
        """Have the states that enter a layer kept in each step, `[1, T, hidden]`, as they are to be given."""
        modules = getattr(self.model, "layers", None)
        if not isinstance(modules, nn.ModuleList) or given is None or not 0 <= layer < len(modules):
            raise UnsupportedShapeError(f"states between the layers of {type(self.model).__name__} are not given")

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._tapped[name] = given(args[0] if args else kwargs["hidden_states"])[0]

        return modules[layer].register_forward_pre_hook(keep, with_kwargs=True)

    def __len__(self) -> int:
        return sum(call.writes for call in self._calls)

    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """See `Layers`."""
        return self._steps.run(step, layer_kvs, self._compute)

    def warm_up(self, layer_kvs: Sequence[LayerKV], decodes: bool, states: torch.Tensor | None = None) -> None:
        """See `Layers`."""
        if decodes:
            _, last = self._places[-1]
            self._steps.warm_up(layer_kvs, states, last + self.outer.embedding.shape[1], self._compute)

    def release(self, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None = None) -> None:
        """See `Layers`."""
        self._steps.release(layer_kvs, states)

    def _compute(self, of_step: StepCalls, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        added = -len(of_step.token_ids) % self._fill
        *places, (_, last) = self._places
        paged = PagedStep(iter(self._calls), layer_kvs, of_step, added, iter(places), last)
        token_ids, positions = of_step.token_ids, of_step.positions
        if added:
            token_ids, positions = (F.pad(each, (0, added)) for each in (token_ids, positions))
        with torch.inference_mode(), running(paged):
            hidden = hidden_states(self.model, token_ids, positions)[: len(of_step.token_ids)]
            paged.finish(hidden)
        names = self.taps if self.raw_tap is None else (*self.taps, _RAW)
        if not names:
            return hidden
        return torch.cat([hidden, *(self._tapped.pop(name)[: len(hidden)] for name in names)], dim=1)


def hidden_states(model: Callable[..., Any], token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hidden states `[T, hidden]` of a flat batch: `token_ids` and `positions` are `[T]`."""
    return model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)[0][0]


class _Outputs(tuple[torch.Tensor, ...]):
    """A decoder's output with hidden states alone; other attributes are None."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _GivenStates(nn.Module):
    """Stands where a class has its decoder, with the decoder's numbers, and gives back the states that it is given."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        for name, value in vars(decoder).items():
            if isinstance(value, int | float) and name not in vars(self):
                setattr(self, name, value)

    @property
    def decoder(self) -> "_GivenStates":
        """Itself: some classes call a part of their decoder."""
        return self

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _Outputs:
        """`inputs_embeds`, as hidden states."""
        return _Outputs((inputs_embeds,))


class LogitsHead:
    """Hidden states `[R, hidden]` to logits `[R, vocabulary]`, with a class's caps, factors and biases."""

    def __init__(self, model: Any) -> None:
        """Keep `model`, a language model of transformers whose decoder was taken out."""
        self.model = model

    @classmethod
    def split(cls, model: Any) -> tuple[Any, "LogitsHead"]:
        """The decoder of a language model, and its head without the decoder."""
        name = decoder_name(model)
        decoder = getattr(model, name)
        setattr(model, name, _GivenStates(decoder))
        return decoder, cls(model)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        with torch.inference_mode():
            return self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]


def decoder_name(model: Any) -> str:
    """The attribute of a language model of transformers that holds its decoder."""
    return model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
