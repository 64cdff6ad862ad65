"""The arrays of one forward pass, made from rows of a sequence table by vector operations alone."""

from dataclasses import replace

import numpy as np
import torch

from espalier.engine.memory.sequences import SequenceTable
from espalier.kernels.batch import AttentionBatch, StepBatch


def build_batch(
    table: SequenceTable, rows: np.ndarray, first: np.ndarray, counts: np.ndarray, drawn: torch.Tensor
) -> StepBatch:
    """Describe the computation of `counts` tokens of each row, from position `first` on.

    A token below the row's `computed` count is computed again for its hidden state and not written: its block may be
    shared by now.

    Args:
        table: the model's sequences; blocks for the tokens are in place.
        rows: int64 `[S]`, distinct.
        first: int64 `[S]`, position of each row's first token.
        counts: int64 `[S]`, at least 1 each.
        drawn: int64, on the device: what the step before drew. A negative token id, -1 - i, stands for its i-th.
    """
    ends = counts.cumsum()
    starts = ends - counts
    sequence_of, row_of, positions = np.arange(len(rows)), rows, first
    if ends[-1] > len(rows):  # otherwise the batch is one token of each sequence
        sequence_of = sequence_of.repeat(counts)
        row_of = rows[sequence_of]
        positions = np.arange(ends[-1]) + (first - starts)[sequence_of]
    contexts = (first + counts).astype(np.int32)
    size = table.block_size
    written = positions >= table.computed[row_of]
    whole = bool(written.all())
    write_rows = None if whole else np.flatnonzero(written)
    write_row_of, write_positions = (row_of, positions) if whole else (row_of[written], positions[written])
    columns, offsets = np.divmod(write_positions, size)
    tensor, width = torch.from_numpy, -(-int(contexts.max()) // size)

    def places(group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Block tables of a KV group, and slabs and slots that are written to."""
        blocks, slots = table.blocks[group], table.pools[group].layout.blocks_per_slab
        slabs, block_slots = np.divmod(blocks[write_row_of, columns].astype(np.int64), slots)
        return tensor(blocks[rows, :width]), tensor(slabs), tensor(block_slots)

    block_tables, write_slabs, write_slots = places(0)
    attention = AttentionBatch(
        query_starts=tensor(np.concatenate(([0], ends)).astype(np.int32)),
        row_sequences=tensor(sequence_of.astype(np.int32)),
        context_lengths=tensor(contexts),
        block_tables=block_tables,
        write_slabs=write_slabs,
        write_slots=write_slots,
        write_offsets=tensor(offsets),
        write_rows=None if write_rows is None else tensor(write_rows),
    )
    if len(table.pools) > 1:
        others = tuple(attention.in_other_group(*places(group)) for group in range(1, len(table.pools)))
        attention = replace(attention, others=others)
    token_ids = table.tokens[row_of, positions].astype(np.int64)
    return StepBatch(tensor(token_ids), tensor(positions), attention, drawn if token_ids.min() < 0 else None)
