"""A plain batched sampler over dense KV buffers: no scheduler, no paging, for making and judging training data."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb


class _Rows:
    """Decoding state of one batch: KV buffers [layer][k|v] of [rows, kv_heads, capacity, head_dim], left-padded."""

    def __init__(self, model: Qwen2ForCausalLM, prompts: Sequence[Sequence[int]], room: int) -> None:
        """Prefills the distinct prompts and copies their KV to every row that shares them."""
        distinct = sorted({tuple(prompt) for prompt in prompts})
        index = {prompt: row for row, prompt in enumerate(distinct)}
        source = torch.tensor([index[tuple(prompt)] for prompt in prompts])
        self.length = max(map(len, distinct))
        lengths = torch.tensor([len(prompt) for prompt in distinct])
        ids = torch.zeros((len(distinct), self.length), dtype=torch.long)
        for row, prompt in enumerate(distinct):
            ids[row, self.length - len(prompt) :] = torch.tensor(prompt)
        valid = torch.arange(self.length) >= self.length - lengths[:, None]
        positions = (torch.arange(self.length) - (self.length - lengths)[:, None]).clamp_min(0)
        output: Any = model.model(
            input_ids=ids.to(model.device),
            attention_mask=valid.long().to(model.device),
            position_ids=positions.to(model.device),
            use_cache=True,
        )
        source = source.to(model.device)
        self.hidden = output.last_hidden_state[:, -1][source]
        self.positions = lengths.to(model.device)[source]
        self.visible = F.pad(valid.to(model.device)[source], (0, room), value=True)
        self.cache = [
            [F.pad(half[source], (0, 0, 0, room)) for half in (layer.keys, layer.values)]
            for layer in output.past_key_values.layers
        ]

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these."""
        self.hidden, self.positions, self.visible = self.hidden[rows], self.positions[rows], self.visible[rows]
        self.cache = [[half[rows] for half in layer] for layer in self.cache]

    def feed(self, model: Qwen2ForCausalLM, tokens: Tensor) -> None:
        """Appends one token [rows] to every row and updates the last hidden state."""
        config: Any = model.config
        layers: Any = model.model.layers
        rows, end = tokens.shape[0], self.length + 1
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        x = model.model.embed_tokens(tokens)[:, None]  # [rows, 1, hidden]
        cos, sin = model.model.rotary_emb(x, self.positions[:, None])
        mask = self.visible[:, None, None, :end]
        for layer, (keys, values) in zip(layers, self.cache, strict=True):
            attention: Any = layer.self_attn
            normed = layer.input_layernorm(x)
            q = attention.q_proj(normed).view(rows, 1, heads, -1).transpose(1, 2)
            k = attention.k_proj(normed).view(rows, 1, kv_heads, -1).transpose(1, 2)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            keys[:, :, self.length] = k[:, :, 0]
            values[:, :, self.length] = attention.v_proj(normed).view(rows, kv_heads, -1)
            # The query heads of one KV head are its query positions: grouped-query attention without copies.
            grouped = q.reshape(rows, kv_heads, heads // kv_heads, -1)
            mixed = F.scaled_dot_product_attention(grouped, keys[:, :, :end], values[:, :, :end], attn_mask=mask)
            x = x + attention.o_proj(mixed.reshape(rows, 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.hidden = model.model.norm(x)[:, 0]
        self.positions = self.positions + 1
        self.length = end


@torch.inference_mode()
def _sample_batch(
    model: Qwen2ForCausalLM,
    prompts: Sequence[Sequence[int]],
    stops: frozenset[int],
    temperature: float,
    max_new_tokens: int,
    random: torch.Generator,
) -> list[list[int]]:
    rows = _Rows(model, prompts, max_new_tokens)
    results: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    for _ in range(max_new_tokens):
        logits = model.lm_head(rows.hidden).float()
        if temperature == 0:
            tokens = logits.argmax(-1)
        else:
            tokens = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=random)[:, 0]
        going = []
        for row, token in enumerate(tokens.tolist()):
            if not (results[alive[row]] and results[alive[row]][-1] in stops):
                results[alive[row]].append(token)
                if token not in stops:
                    going.append(row)
        if not going:
            break
        if len(going) <= 0.75 * len(alive):
            kept = torch.tensor(going, device=tokens.device)
            rows.keep(kept)
            tokens, alive = tokens[kept], [alive[row] for row in going]
        rows.feed(model, tokens)
    return results


def sample(
    model: Qwen2ForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    stops: frozenset[int],
    temperature: float = 1.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    batch_rows: int = 192,
) -> list[list[int]]:
    """Continues every prompt until one of `stops`, which is kept, or until `max_new_tokens`.

    Args:
        model: The generator.
        prompts: Token ids; equal prompts are prefilled once a batch.
        stops: Token ids that end a row.
        temperature: 0 is greedy.
        max_new_tokens: Longest continuation.
        seed: Of the random draws.
        batch_rows: Rows decoded together; prompts are sorted by length first.
    """
    random = torch.Generator(device=model.device).manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), tuple(prompts[i])))
    results: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), batch_rows):
        chosen = order[first : first + batch_rows]
        batch = _sample_batch(model, [prompts[i] for i in chosen], stops, temperature, max_new_tokens, random)
        for index, ids in zip(chosen, batch, strict=True):
            results[index] = ids
    return results
