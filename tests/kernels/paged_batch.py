"""Building paged batches of any shape by hand, without the engine's own code."""

from dataclasses import dataclass

import torch

from espalier.kernels.layout import AttentionBatch, KVLayout, LayerKV


@dataclass
class PagedProblem:
    """One layer's attention: the batch, its queries, and the dense keys and values it was filled from."""

    layout: KVLayout
    layer_kv: LayerKV
    query: torch.Tensor
    batch: AttentionBatch
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def paged_problem(
    sequences: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    value_dim: int = 0,
    block_size: int = 16,
    blocks_per_slab: int = 3,
    seed: int = 0,
    kind: type[KVLayout] = KVLayout,
    dtype: torch.dtype = torch.float32,
) -> PagedProblem:
    """A batch of `(context, new tokens)` sequences in blocks scattered over a KV pool of NaNs."""
    generator = torch.Generator().manual_seed(seed)
    layers, layer = 2, 1
    block_bytes = layers * kv_heads * (head_dim + (value_dim or head_dim)) * dtype.itemsize * block_size
    layout = kind(layers, kv_heads, head_dim, block_size, dtype, blocks_per_slab * block_bytes + 64, value_dim)
    counts = [-(-context // block_size) for context, _ in sequences]
    slabs = -(-2 * sum(counts) // blocks_per_slab) + 1
    kv_pool = torch.full((slabs * layout.slab_bytes // dtype.itemsize,), float("nan"), dtype=dtype).view(torch.uint8)
    layer_kv = layout.layer_view(kv_pool, layer)
    blocks = torch.randperm(slabs * blocks_per_slab, generator=generator)
    tables = torch.full((len(sequences), max(counts)), 2**31 - 1, dtype=torch.int32)  # unread entries point nowhere
    keys, values, taken = [], [], 0
    for s, (context, _) in enumerate(sequences):
        table = blocks[taken : taken + counts[s]]
        taken += counts[s]
        tables[s, : counts[s]] = table.int()
        for dense, paged in ((keys, layer_kv.keys), (values, layer_kv.values)):
            dense.append(torch.randn(context, kv_heads, paged.shape[-1], generator=generator).to(dtype))
            for t in range(context):
                block = int(table[t // block_size])
                slot = block % blocks_per_slab
                paged[block // blocks_per_slab, slot, t % block_size] = dense[-1][t]
    new = [n for _, n in sequences]
    starts = torch.tensor([0, *new]).cumsum(0)
    batch = AttentionBatch(
        query_starts=starts.int(),
        row_sequences=torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new)).int(),
        context_lengths=torch.tensor([c for c, _ in sequences], dtype=torch.int32),
        block_tables=tables,
        write_slabs=torch.zeros(0, dtype=torch.int64),
        write_slots=torch.zeros(0, dtype=torch.int64),
        write_offsets=torch.zeros(0, dtype=torch.int64),
        write_rows=None,
    )
    query = torch.randn(int(starts[-1]), heads, head_dim, generator=generator).to(dtype)
    return PagedProblem(layout, layer_kv, query, batch, keys, values)


def dense_attention(
    problem: PagedProblem,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention by the textbook, in float64, over the dense keys and values, the last `window` of each."""
    rows = []
    starts = problem.batch.query_starts.tolist()
    for s, (key, value) in enumerate(zip(problem.keys, problem.values, strict=True)):
        new = starts[s + 1] - starts[s]
        for i in range(new):
            end = len(key) - new + i + 1
            visible = slice(max(0, end - window) if window else 0, end)
            query = problem.query[starts[s] + i].double()
            groups = query.shape[0] // key.shape[1]
            heads = []
            for h in range(query.shape[0]):
                logits = key[visible, h // groups].double() @ query[h] * scale
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                sink = logits.new_empty(0) if sinks is None else sinks[h : h + 1].double()
                weights = torch.softmax(torch.cat((logits, sink)), dim=0)[: len(logits)]
                heads.append(weights @ value[visible, h // groups].double())
            rows.append(torch.stack(heads))
    return torch.stack(rows).float()


def share_leading_blocks(problem: PagedProblem, sequence: int, other: int, blocks: int) -> None:
    """Let a sequence begin with the first blocks of another one, instead of its own."""
    tokens = blocks * problem.layout.block_size
    problem.batch.block_tables[sequence, :blocks] = problem.batch.block_tables[other, :blocks]
    for dense in (problem.keys, problem.values):
        dense[sequence][:tokens] = dense[other][:tokens]


def give_up_passed_blocks(problem: PagedProblem, window: int) -> None:
    """Take the blocks behind the windows of all of a sequence's new tokens out of its block table, as engines do."""
    batch, size = problem.batch, problem.layout.block_size
    for table, context, new in zip(batch.block_tables, batch.context_lengths, batch.query_starts.diff(), strict=True):
        table[: max(0, int(context - new) - window) // size] = -1


def paged_attention_reference(
    query: torch.Tensor, layer_kv: LayerKV, batch: AttentionBatch, scale: float, window: int | None = None
) -> torch.Tensor:
    """Attention of a step's tokens over their sequences' blocks, one sequence at a time.

    Args:
        query: `[T, head, head_dim]`.
        layer_kv: this step's keys and values already written.
        batch: the step's tokens and block tables.
        scale: factor on the logits, usually `head_dim ** -0.5`.
        window: positions that a token sees, its own the last; None for all before it.

    Returns:
        `[T, head, head_dim]`, computed in float32 and returned in the query's dtype.
    """
    _, slots, block_size, kv_heads, _ = layer_kv.keys.shape
    groups = query.shape[1] // kv_heads
    output = torch.empty_like(query)
    starts = batch.query_starts.tolist()
    for s, context in enumerate(batch.context_lengths.tolist()):
        blocks = batch.block_tables[s, : -(-context // block_size)].long()
        kv = (x[blocks // slots, blocks % slots].flatten(0, 1) for x in (layer_kv.keys, layer_kv.values))
        key, value = (x[:context].float().repeat_interleave(groups, dim=1) for x in kv)  # [context, head, head_dim]
        rows = slice(starts[s], starts[s + 1])
        positions = torch.arange(context - (starts[s + 1] - starts[s]), context, device=query.device)
        logits = torch.einsum("qhd,khd->hqk", query[rows].float(), key) * scale
        behind = positions[:, None] - torch.arange(context, device=query.device)
        visible = (behind >= 0) & (behind < (window or context))
        weights = torch.softmax(logits.masked_fill(~visible, float("-inf")), dim=-1)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
    return output
