"""Causal attention over paged keys and values: the torch reference, the path of any device, and the choice of path."""

import torch
import torch.nn.functional as F

from espalier.kernels.batch import AttentionBatch
from espalier.kernels.layout import LayerKV

_MOST_GATHERED = 2**26
"""Elements of keys, of values and of logits that `paged_attention_gathered` holds at a time."""


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


def paged_attention_gathered(
    query: torch.Tensor, layer_kv: LayerKV, batch: AttentionBatch, scale: float, window: int | None = None
) -> torch.Tensor:
    """`paged_attention_reference` of several sequences at a time; same arguments, and result up to rounding.

    Keys and values are copied out of their blocks, padded to the longest context among those that go together, which
    are all that compute as many new tokens and fit: all decoding sequences, as a rule. A long prompt's new tokens go
    part by part, so that their logits fit too.
    """
    counts = batch.query_starts.diff()
    output = torch.empty_like(query)
    for count in counts.unique().tolist():
        alike = (counts == count).nonzero()[:, 0]
        longest = int(batch.context_lengths[alike].max())
        most = max(1, _MOST_GATHERED // (longest * layer_kv.keys.shape[3] * layer_kv.keys.shape[4]))
        for some in alike.split(most) if count else ():
            rows = batch.query_starts[some, None].long() + torch.arange(count, device=query.device)
            output[rows] = _attend_padded(query[rows], layer_kv, batch, some, scale, window)
    return output


def _attend_padded(
    query: torch.Tensor, layer_kv: LayerKV, batch: AttentionBatch, some: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Attention of `query`, `[sequence, token, head, head_dim]`, the newest tokens of the sequences `some`."""
    contexts = batch.context_lengths[some, None].int()
    places = torch.arange(int(contexts.max()), device=query.device, dtype=torch.int32)
    key, value = _gather(layer_kv, batch.block_tables[some], contexts, places)
    count, heads = query.shape[1:3]
    output = torch.empty_like(query)
    most = max(1, _MOST_GATHERED // (len(some) * len(places) * heads))  # logits at a time
    for tokens in torch.arange(count, device=query.device, dtype=torch.int32).split(most):
        behind = (contexts - count + tokens)[:, :, None] - places
        visible = (behind >= 0) & (behind < (window or len(places)))
        part = slice(int(tokens[0]), int(tokens[0]) + len(tokens))
        mixed = F.scaled_dot_product_attention(
            query[:, part].transpose(1, 2), key, value, attn_mask=visible[:, None], scale=scale, enable_gqa=True
        )
        output[:, part] = mixed.transpose(1, 2)
    return output


def _gather(
    layer_kv: LayerKV, tables: torch.Tensor, contexts: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[sequence, kv_head, position, head_dim]` out of their blocks, zeros beyond a context."""
    _, slots, size, _, _ = layer_kv.keys.shape
    # What a table says beyond the context means nothing.
    blocks = torch.where(places[::size] < contexts, tables[:, : -(-len(places) // size)], 0).long()
    unwritten = (places >= contexts)[:, :, None, None]  # holds anything, NaN too
    gathered = (x[blocks // slots, blocks % slots].flatten(1, 2) for x in (layer_kv.keys, layer_kv.values))
    key, value = (x[:, : len(places)].masked_fill_(unwritten, 0).transpose(1, 2) for x in gathered)
    return key, value


def paged_attention(
    query: torch.Tensor, layer_kv: LayerKV, batch: AttentionBatch, scale: float, window: int | None = None
) -> torch.Tensor:
    """`paged_attention_reference` by the fastest path for the device and dtype; same arguments and result."""
    if query.device.type == "cpu" and query.dtype == torch.float32:
        from espalier.kernels.cpu.attention import paged_attention_cpu  # numba takes half a second to import

        return paged_attention_cpu(query, layer_kv, batch, scale, window)
    return paged_attention_gathered(query, layer_kv, batch, scale, window)
