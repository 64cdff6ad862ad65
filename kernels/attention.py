"""Causal attention over paged keys and values, in torch: the reference; and its calls by decoders of other code.

Decoders whose layers are not the engine's ask for attention call after call, each over KV of its own shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from espalier.kernels.layout import AttentionBatch, LayerKV, StateBatch, StepBatch

_MAX_GATHERED = 2**26
"""Elements of keys, of values and of logits that `GatheredAttention` holds at a time."""


def write_kv(layer_kv: LayerKV, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> None:
    """Store a step's keys and values of one layer in their blocks.

    Args:
        layer_kv: from `KVLayout.layer_view`; written in place.
        key: `[T, kv_head, head_dim]`.
        value: `[T, kv_head, value_dim]`.
        batch: the block and position that each token is written to.
    """
    if batch.write_rows is not None:
        key, value = key[batch.write_rows], value[batch.write_rows]
    places = (batch.write_slabs, batch.write_slots, batch.write_offsets)
    layer_kv.keys[places] = key
    layer_kv.values[places] = value


class Terms(NamedTuple):
    """The arguments of attention, beside the tensors.

    Attributes:
        scale: factor on the logits, usually `head_dim ** -0.5`.
        window: how many positions a token sees, its own the last; None for all before it.
        softcap: each logit x becomes `softcap * tanh(x / softcap)`; None leaves it.
        sinks: `[heads]`, one more logit of each head, of no position: it takes part in the softmax; None without.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """n sequences with equally many new tokens, padded to the `longest` context among them.

    Attributes:
        rows: int64 `[n, tokens]`, the rows of their tokens in the batch.
        contexts: int32 `[n, 1]`, the length of each context.
        places: int32 `[longest]`, the positions of a context.
        slabs: int64 `[n, blocks]`, the slab of each block; of any block beyond a context and behind all windows.
        slots: int64 `[n, blocks]`, the slot of each block in its slab.
        unwritten: bool `[n, longest, 1, 1]`, positions beyond a context or behind all windows, where memory may hold
            anything, even NaN.
        masks: by window, the positions that tokens see, bool `[n, 1, some of the tokens, longest]`; made on demand.
    """

    rows: torch.Tensor
    contexts: torch.Tensor
    places: torch.Tensor
    slabs: torch.Tensor
    slots: torch.Tensor
    unwritten: torch.Tensor
    masks: dict[int | None, list[torch.Tensor]] = field(default_factory=dict)


class GatheredAttention:
    """Attention of a step's tokens over their sequences' blocks, several sequences at a time, on any device.

    Sequences with equally many new tokens are computed together, as many as fit: usually all that decode. Their keys
    and values are copied out of their blocks, padded to the longest context. A long prompt's new tokens are computed
    part by part, so that their logits fit too. Places of blocks and masks are the same in every layer, and are found
    once in a step.
    """

    def __init__(self, layer_kv: LayerKV, batch: AttentionBatch, num_heads: int) -> None:
        """Prepare a step's attention; `layer_kv` is that of any layer."""
        _, slots, size, kv_heads, head_dim = layer_kv.keys.shape
        self._num_heads = num_heads
        self._groups: list[_Group] = []
        counts = batch.query_starts.diff()
        for count in counts.unique().tolist():
            alike = (counts == count).nonzero()[:, 0]
            longest = int(batch.context_lengths[alike].max())
            most = max(1, _MAX_GATHERED // (longest * kv_heads * head_dim))
            for some in alike.split(most) if count else ():
                contexts = batch.context_lengths[some, None].int()
                places = torch.arange(int(contexts.max()), device=contexts.device, dtype=torch.int32)
                # Entries of a block table beyond the context mean nothing; those behind all windows are negative.
                tables = batch.block_tables[some, : -(-len(places) // size)]
                held = (places[::size] < contexts) & (tables >= 0)
                blocks = torch.where(held, tables, 0).long()
                unwritten = (places >= contexts) | ~held.repeat_interleave(size, dim=1)[:, : len(places)]
                self._groups.append(
                    _Group(
                        rows=batch.query_starts[some, None].long() + torch.arange(count, device=contexts.device),
                        contexts=contexts,
                        places=places,
                        slabs=blocks // slots,
                        slots=blocks % slots,
                        unwritten=unwritten[:, :, None, None],
                    )
                )

    def __call__(self, query: torch.Tensor, layer_kv: LayerKV, terms: Terms) -> torch.Tensor:
        """Attention in one layer.

        Args:
            query: `[T, heads, head_dim]`.
            layer_kv: the layer's keys and values; those of this step are written already.
            terms: how its logits are made.

        Returns:
            `[T, heads, value_dim]` in the query's dtype.
        """
        output = query.new_empty((*query.shape[:2], layer_kv.values.shape[-1]))
        for group in self._groups:
            # [n, kv_heads, longest, head_dim and value_dim]
            key, value = (
                x[group.slabs, group.slots]
                .flatten(1, 2)[:, : len(group.places)]
                .masked_fill_(group.unwritten, 0)
                .transpose(1, 2)
                for x in (layer_kv.keys, layer_kv.values)
            )
            first = 0
            for mask in self._masks(group, terms.window):
                rows = group.rows[:, first : first + mask.shape[2]]
                # [n, heads, some of the tokens, head_dim]
                some = query[rows].transpose(1, 2)
                if terms.softcap is None and terms.sinks is None:
                    mixed = F.scaled_dot_product_attention(
                        some, key, value, attn_mask=mask, scale=terms.scale, enable_gqa=True
                    )
                else:
                    mixed = _attend_plainly(some, key, value, mask, terms)
                output[rows] = mixed.transpose(1, 2)
                first += mask.shape[2]
        return output

    def _masks(self, group: _Group, window: int | None) -> list[torch.Tensor]:
        if (known := group.masks.get(window)) is not None:
            return known
        n, count = group.rows.shape
        most = max(1, _MAX_GATHERED // (n * len(group.places) * self._num_heads))  # tokens whose logits fit
        masks = group.masks[window] = []
        for tokens in torch.arange(count, device=group.places.device, dtype=torch.int32).split(most):
            behind = (group.contexts - count + tokens)[:, None, :, None] - group.places
            masks.append((behind >= 0) & (behind < (window or len(group.places))))
        return masks


def _attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, terms: Terms
) -> torch.Tensor:
    """Attention with a cap or sinks, which torch's own has not: `[n, heads, tokens, head_dim]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    logits = (query @ key.transpose(2, 3)).float() * terms.scale  # [n, heads, tokens, longest]
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if terms.sinks is not None:
        sink = terms.sinks.float()[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sink), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


Attend = Callable[[torch.Tensor, LayerKV, Terms], torch.Tensor]
"""Attention of a step's tokens in one layer, `[T, heads, head_dim]` to `[T, heads, value_dim]`; see
`GatheredAttention.__call__`."""
PrepareAttention = Callable[[LayerKV, AttentionBatch, int], Attend]
"""Prepares one step's attention for all layers: keys and values of any of them, the step's tokens, query heads."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention, which every step makes.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        key_dim: elements of a head of queries and keys.
        value_dim: elements of a head of values.
        window: how many positions a token sees, its own the last, or None for all before it.
        slot: which of the KV layers it reads.
        writes: whether its keys and values are new; else an earlier call of the step has written them.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    slot: int
    writes: bool


class StepCalls(Protocol):
    """The calls of one step, on the device.

    Attributes:
        token_ids: `[T]`, those just drawn filled in.
        positions: `[T]`.
        states: those of recurrent layers; None for a decoder that has none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    states: StateBatch | None

    def write(self, layer_kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the step's keys `[T, kv_heads, key_dim]` and values `[T, kv_heads, value_dim]` to their blocks."""

    def attend(self, call: Call, query: torch.Tensor, layer_kv: LayerKV, terms: Terms) -> torch.Tensor:
        """Attention of a call, `[T, heads, value_dim]`, with terms of its window; see `Attend`."""
        ...

    def keep_last(self, hidden: torch.Tensor, offset: int) -> None:
        """Write the last of each row's hidden states, `[T, hidden]`, `offset` elements into its recurrent state."""


ComputeStep = Callable[[StepCalls, Sequence[LayerKV]], torch.Tensor]
"""Computes a step by its calls, over the KV of all layers; `[T, ...]`."""


class CallSteps:
    """Runs the steps of a decoder whose layers are not the engine's."""

    def __init__(self, prepare: Callable[[StepBatch, Sequence[LayerKV]], StepCalls]) -> None:
        """Have `prepare` bring each step to the device."""
        self._prepare = prepare

    @property
    def recorded(self) -> bool:
        """True if steps are recorded, which would not follow a change of what computes them."""
        return False

    def run(self, step: StepBatch, layer_kvs: Sequence[LayerKV], compute: ComputeStep) -> torch.Tensor:
        """Give what `compute` gives for a step; it may hold until the next step only."""
        return compute(self._prepare(step, layer_kvs), layer_kvs)

    def warm_up(
        self, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None, state_size: int, compute: ComputeStep
    ) -> None:
        """Prepare steps of one token to a sequence: nothing, usually; see `layers.Layers.warm_up`.

        Args:
            layer_kvs: KV of all layers.
            states: float32, the KV pool, if there are recurrent states in it.
            state_size: elements of a sequence's state.
            compute: computes steps to come.
        """

    def release(self, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None) -> None:
        """Let go of what `warm_up` made for this KV pool."""


class TorchStepCalls:
    """`StepCalls` by a backend's attention, which reads each batch on the device."""

    def __init__(
        self,
        prepare_attention: PrepareAttention,
        write_kv: Callable[[LayerKV, torch.Tensor, torch.Tensor, AttentionBatch], None],
        device: torch.device,
        step: StepBatch,
        _: Sequence[LayerKV],
    ) -> None:
        self.token_ids, self.positions = step.known_token_ids(device), step.positions.to(device)
        self.states = step.states and step.states.placed(*(each.to(device) for each in step.states.places))
        self._batch = step.attention.to(device)
        self._prepare_attention = prepare_attention
        self._write_kv = write_kv
        self._attend: dict[tuple[int, int], Attend] = {}  # by KV group and query heads

    def write(self, layer_kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `StepCalls`."""
        self._write_kv(layer_kv, key, value, self._batch.of(layer_kv.group))

    def attend(self, call: Call, query: torch.Tensor, layer_kv: LayerKV, terms: Terms) -> torch.Tensor:
        """See `StepCalls`."""
        alike = (layer_kv.group, call.heads)
        if (attend := self._attend.get(alike)) is None:
            batch = self._batch.of(layer_kv.group)
            attend = self._attend[alike] = self._prepare_attention(layer_kv, batch, call.heads)
        return attend(query, layer_kv, terms)

    def keep_last(self, hidden: torch.Tensor, offset: int) -> None:
        """See `StepCalls`."""
        assert self.states is not None
        rows = self.states.rows.part(offset)
        rows.write(hidden[rows.spans[1:] - 1].float())
