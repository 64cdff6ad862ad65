"""One step's tokens, described once for the operations of every layer."""

from dataclasses import dataclass, fields, replace

import torch

from espalier.kernels.recurrent import StateRows


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The tokens of a step and the places of their context; in the host's memory until layers move it.

    S sequences contribute T new tokens in all, those of one sequence side by side. The tokens of sequence `s` have the
    last `query_starts[s + 1] - query_starts[s]` positions of its context, and each attends to itself and to the
    positions before it.

    Attributes:
        query_starts: int32 `[S + 1]`, offsets of each sequence's tokens in the batch.
        row_sequences: int32 `[T]`, the sequence of each token.
        context_lengths: int32 `[S]`, tokens of each sequence once this step's are written.
        block_tables: int32 `[S, max_blocks]`, block ids in order; -1 for blocks behind the windows of all
            layers and tokens. Entries past the context are not read.
        write_slabs: int64 `[W]`, the slab of the block that each of W written tokens goes to.
        write_slots: int64 `[W]`, the slot of that block in its slab.
        write_offsets: int64 `[W]`, the token's position inside that block.
        write_rows: int64 `[W]`, the batch row of each written token, or None when all T rows are written in order.
        others: the same step in the model's other KV groups; they differ in block tables, slabs and slots.
    """

    query_starts: torch.Tensor
    row_sequences: torch.Tensor
    context_lengths: torch.Tensor
    block_tables: torch.Tensor
    write_slabs: torch.Tensor
    write_slots: torch.Tensor
    write_offsets: torch.Tensor
    write_rows: torch.Tensor | None
    others: tuple["AttentionBatch", ...] = ()

    def of(self, group: int) -> "AttentionBatch":
        """The step in one of the model's KV groups."""
        return self.others[group - 1] if group else self

    def in_other_group(
        self, block_tables: torch.Tensor, write_slabs: torch.Tensor, write_slots: torch.Tensor
    ) -> "AttentionBatch":
        """The step in a KV group whose blocks lie elsewhere."""
        return replace(self, block_tables=block_tables, write_slabs=write_slabs, write_slots=write_slots, others=())

    def to(self, device: torch.device) -> "AttentionBatch":
        """The same on a device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "others"}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items() if tensor is not None}
        own = replace(self, **moved)
        places = ((it.block_tables, it.write_slabs, it.write_slots) for it in self.others)
        others = tuple(own.in_other_group(*(x.to(device, non_blocking=True) for x in each)) for each in places)
        return replace(own, others=others)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The recurrent states of a step's sequences; where they lie is in the host's memory until layers move it.

    Attributes:
        rows: the sequences that go on; their tokens come first. Addresses are those of whole states.
        read_again: int64, the states of the sequences behind them, of which the last token, computed before, is asked
            for once more: its hidden state is the last part of each.
    """

    rows: StateRows
    read_again: torch.Tensor

    @property
    def places(self) -> tuple[torch.Tensor, ...]:
        """All that says where they lie: spans, sources and targets of the rows, states that are read again."""
        return self.rows.spans, self.rows.sources, self.rows.targets, self.read_again

    def placed(
        self, spans: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, again: torch.Tensor
    ) -> "StateBatch":
        """The same states with their places on a device."""
        return StateBatch(StateRows(self.rows.memory, spans, sources, targets), again)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step: T tokens and where they lie; in the host's memory, but for `drawn`.

    Attributes:
        token_ids: int64 `[T]`; -1 - i stands for the i-th of `drawn`.
        positions: int64 `[T]`.
        attention: where the tokens and their context lie.
        drawn: int64, on the device: tokens that the step before drew and that the host has not seen yet; None if no
            token stands for one.
        states: None for a decoder that has none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    drawn: torch.Tensor | None = None
    states: StateBatch | None = None

    def known_token_ids(self, device: torch.device) -> torch.Tensor:
        """The token ids on a device, with those just drawn filled in."""
        ids = self.token_ids.to(device)
        return ids if self.drawn is None else torch.where(ids < 0, self.drawn[(-1 - ids).clamp_min(0)], ids)
