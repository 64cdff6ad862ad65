"""Causal attention over paged keys and values: the torch reference and the choice of path."""

import torch

from espalier.kernels.batch import AttentionBatch
from espalier.kernels.layout import LayerKV


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


def paged_attention(
    query: torch.Tensor, layer_kv: LayerKV, batch: AttentionBatch, scale: float, window: int | None = None
) -> torch.Tensor:
    """`paged_attention_reference` by the fastest path for the device and dtype; same arguments and result."""
    if query.device.type == "cpu" and query.dtype == torch.float32:
        from espalier.kernels.cpu.attention import paged_attention_cpu  # numba takes half a second to import

        return paged_attention_cpu(query, layer_kv, batch, scale, window)
    return paged_attention_reference(query, layer_kv, batch, scale, window)
