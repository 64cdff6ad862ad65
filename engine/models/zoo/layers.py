"""The layers of a decoder of transformers, over the engine's KV pool."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from espalier.engine.errors import CheckpointError
from espalier.engine.models.zoo.attention import Terms, running
from espalier.engine.models.zoo.calls import Call
from espalier.engine.models.zoo.experts import ROWS
from espalier.kernels.attention import Attend
from espalier.kernels.backend import Backend
from espalier.kernels.batch import AttentionBatch, StepBatch
from espalier.kernels.layers import EmbeddingAndNorm, Layers, LayerWeights
from espalier.kernels.layout import LayerKV


class PagedStep:
    """One step's attention over blocks; see `attention.Step`."""

    def __init__(
        self,
        calls: Sequence[Call],
        layer_kvs: Sequence[LayerKV],
        batch: AttentionBatch,
        backend: Backend,
    ) -> None:
        self.config_windows = False  # each call has its window already
        self._calls = calls
        self._layer_kvs = layer_kvs
        self._batch = batch
        self._backend = backend
        self._attend: dict[tuple[int, int], Attend] = {}  # by KV group and query heads
        self._done = 0

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """See `attention.Step`."""
        call, added = self._calls[self._done], len(query) - len(self._batch.row_sequences)
        query, key, value = (states[: len(states) - added] for states in (query, key, value))
        self._done += 1
        layer_kv = self._layer_kvs[call.slot]
        batch, alike = self._batch.of(layer_kv.group), (layer_kv.group, call.heads)
        if call.writes:
            self._backend.write_kv(layer_kv, key, value, batch)
        if (attend := self._attend.get(alike)) is None:
            attend = self._attend[alike] = self._backend.prepare_attention(layer_kv, batch, call.heads)
        output = attend(query, layer_kv, terms.scale, call.window, terms.softcap, terms.sinks)
        return F.pad(output, (0, 0, 0, 0, 0, added))

    def finish(self) -> None:
        """Check that the step made every call that was expected."""
        assert self._done == len(self._calls), f"a step made {self._done} of {len(self._calls)} calls of attention"


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
        backend: Backend,
    ) -> None:
        self.model = model
        self.head = head
        self._calls = calls
        self._backend = backend
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        weight = embedding.weight.detach()
        self.outer = EmbeddingAndNorm(weight, weight[:0])  # norm and rotation are the model's own

    def require_head(self, folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head over the vocabulary.

        Raises:
            CheckpointError: the checkpoint in `folder` has none.
        """
        if self.head is None:
            raise CheckpointError(f"{folder} has no head over the vocabulary")
        return self.head

    def __len__(self) -> int:
        return sum(call.writes for call in self._calls)

    def weights(self, index: int) -> LayerWeights:
        """None are known one by one."""
        raise NotImplementedError("the weights of a decoder of transformers are its modules'")

    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """See `Layers`."""
        device = self.outer.embedding.device
        token_ids, positions = step.known_token_ids(device), step.positions.to(device)
        added = -len(token_ids) % ROWS
        paged = PagedStep(self._calls, layer_kvs, step.attention.to(device), self._backend)
        with torch.inference_mode(), running(paged):
            hidden = hidden_states(self.model, F.pad(token_ids, (0, added)), F.pad(positions, (0, added)))
        paged.finish()
        return hidden[: len(token_ids)]


def hidden_states(model: Callable[..., Any], token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hidden states `[T, hidden]` of a flat batch: `token_ids` and `positions` are `[T]`."""
    return model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)[0][0]
