"""A bare torch decoding loop on dense KV, without scheduler, paging or stop conditions: the minimum overhead."""

import torch
import torch.nn.functional as F

from espalier.engine.models.config import NativeConfig
from espalier.engine.models.decoder import Decoder
from espalier.kernels.cpu.decoder import CpuLayers
from espalier.kernels.cpu.products.linear import unpack
from espalier.kernels.layers import LayerWeights
from espalier.kernels.linear import Linear
from espalier.kernels.rotary import apply_rotary, attention_factor, inverse_frequencies, rotary_table


def layers_as_given(layers: CpuLayers, config: NativeConfig) -> list[LayerWeights]:
    """The weights of plain layers, out of the panels that compiled products read."""
    packed, qkv_rows = layers.stacked.packed, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return [
        LayerWeights(
            attention_norm=packed.norms[index][0],
            qkv=unpack(packed.qkv[index], qkv_rows),
            qkv_bias=packed.qkv_bias[index][:qkv_rows] if config.attention_bias else None,
            out=unpack(packed.out[index], config.hidden_size),
            mlp_norm=packed.norms[index][1],
            gate_up=torch.cat([unpack(half, config.intermediate_size) for half in packed.gate_up[index].chunk(2)]),
            down=unpack(packed.down[index], config.hidden_size)[:, : config.intermediate_size],
        )
        for index in range(config.num_layers)
    ]


class DenseLoop:
    """Decodes a fixed batch of sequences of equal length, sampling at temperature 1."""

    def __init__(self, decoder: Decoder, head: Linear) -> None:
        self._decoder = decoder
        self._unembedding = head.weight
        c = decoder.config
        # Plain matrices, multiplied by torch's own library.
        if not isinstance(c, NativeConfig) or c.head_norms or c.out_bias or c.post_norms or any(c.windows):
            raise ValueError("the dense loop supports plain Llama and Qwen2 layers only")
        self._eps = c.norm_eps
        assert isinstance(decoder.layers, CpuLayers)
        self._layers = layers_as_given(decoder.layers, c)
        self._inverse = inverse_frequencies(c.head_dim, c.rope_theta, c.rotaries[0].scaling)

    @torch.inference_mode()
    def prefill(self, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """Fill the cache with `prompts`, int64 `[B, P]`, and return the first sampled tokens, int64 `[B]`."""
        batch, length = prompts.shape
        c = self._decoder.config
        shape = (c.num_layers, 2, batch, c.num_kv_heads, length + new_tokens, c.head_dim)
        self._cache = torch.empty(shape, dtype=self._decoder.dtype)
        self._length = 0
        return self._sample(self._forward(prompts)[:, -1])

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Decode one more token per sequence: int64 `[B]` to int64 `[B]`."""
        return self._sample(self._forward(tokens[:, None])[:, -1])

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._unembedding)

    def _sample(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(torch.softmax(self._head(hidden), dim=-1), 1)[:, 0]

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        c = self._decoder.config
        start, end = self._length, self._length + tokens.shape[1]
        cos, sin = rotary_table(self._inverse, torch.arange(start, end), attention_factor(c.rotaries[0].scaling))
        hidden = F.embedding(tokens, self._decoder.embedding)
        for layer, cache in zip(self._layers, self._cache, strict=True):
            normed = F.rms_norm(hidden, (c.hidden_size,), layer.attention_norm, self._eps)
            hidden = hidden + self._attention(layer, normed, cache, start, end, cos, sin)
            normed = F.rms_norm(hidden, (c.hidden_size,), layer.mlp_norm, self._eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        self._length = end
        return F.rms_norm(hidden, (c.hidden_size,), self._decoder.layers.outer.norm, self._eps)

    def _attention(
        self,
        layer: LayerWeights,
        normed: torch.Tensor,
        cache: torch.Tensor,
        start: int,
        end: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        c = self._decoder.config
        batch, tokens, _ = normed.shape
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(batch, tokens, -1, c.head_dim)
        rotated = apply_rotary(qkv[:, :, : c.num_heads + c.num_kv_heads], cos, sin).transpose(1, 2)
        cache[0, :, :, start:end] = rotated[:, c.num_heads :]
        cache[1, :, :, start:end] = qkv[:, :, c.num_heads + c.num_kv_heads :].transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotated[:, : c.num_heads], cache[0, :, :, :end], cache[1, :, :, :end], is_causal=tokens > 1, enable_gqa=True
        )
        return F.linear(mixed.transpose(1, 2).flatten(2), layer.out)
