"""The decoder: one implementation for the Llama and Qwen2 families, reading and writing KV in blocks."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from espalier.engine.checkpoint import Checkpoint
from espalier.engine.config import DecoderConfig
from espalier.engine.errors import CheckpointError
from espalier.kernels.attention import paged_attention
from espalier.kernels.batch import AttentionBatch
from espalier.kernels.cache import write_kv
from espalier.kernels.linear import pad_rows
from espalier.kernels.rotary import apply_rotary, inverse_frequencies, rotary_table


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; q, k, v and gate, up are fused so that each is one product.

    Shapes: `qkv [(heads + 2 * kv_heads) * head_dim, hidden]`, `out [hidden, heads * head_dim]`,
    `gate_up [2 * intermediate, hidden]`, `down [hidden, intermediate]`, norms `[hidden]`.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """Token ids to final hidden states, over a paged KV cache."""

    def __init__(
        self, config: DecoderConfig, embedding: torch.Tensor, layers: list[LayerWeights], norm: torch.Tensor
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        inverse = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._inverse_frequencies = inverse.to(embedding.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights and of the KV cache."""
        return self.embedding.dtype

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, layer_kvs: list[torch.Tensor], batch: AttentionBatch
    ) -> torch.Tensor:
        """Compute a step's tokens, writing their keys and values.

        Args:
            token_ids: int64 `[T]`.
            positions: int64 `[T]`.
            layer_kvs: one `KVLayout.layer_view` per layer.
            batch: where the tokens and their context lie.

        Returns:
            Hidden states after the final norm, `[T, hidden]`.
        """
        tokens = token_ids.shape[0]
        cos, sin = rotary_table(self._inverse_frequencies, positions)
        hidden = pad_rows(F.embedding(token_ids, self.embedding))
        for layer, layer_kv in zip(self.layers, layer_kvs, strict=True):
            normed = F.rms_norm(hidden, (hidden.shape[-1],), layer.attention_norm, self.config.norm_eps)
            hidden = hidden + self._attention(layer, normed, tokens, cos, sin, layer_kv, batch)
            normed = F.rms_norm(hidden, (hidden.shape[-1],), layer.mlp_norm, self.config.norm_eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(hidden[:tokens], (hidden.shape[-1],), self.norm, self.config.norm_eps)

    def _attention(
        self,
        layer: LayerWeights,
        normed: torch.Tensor,
        tokens: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_kv: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        c = self.config
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)[:tokens].view(tokens, -1, c.head_dim)
        rotated = apply_rotary(qkv[:, : c.num_heads + c.num_kv_heads], cos, sin)
        query, key = rotated[:, : c.num_heads], rotated[:, c.num_heads :]
        write_kv(layer_kv, key, qkv[:, c.num_heads + c.num_kv_heads :], batch)
        mixed = paged_attention(query, layer_kv, batch, c.head_dim**-0.5)
        return F.linear(pad_rows(mixed.flatten(1)), layer.out)


def load_decoder(
    checkpoint: Checkpoint, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str
) -> Decoder:
    """Build the decoder trunk from a checkpoint, taking its tensors; heads are left for their owners to take.

    Raises:
        CheckpointError: when a tensor is missing or has another shape than `config` says.
    """
    prefix = "model." if "model.embed_tokens.weight" in checkpoint else ""

    def take(name: str) -> torch.Tensor:
        return checkpoint.take(prefix + name, dtype, device)

    def fused(layer: int, block: str, names: tuple[str, ...], kind: str) -> torch.Tensor:
        return torch.cat([take(f"layers.{layer}.{block}.{name}.{kind}") for name in names])

    layers = []
    qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    for i in range(config.num_layers):
        layers.append(
            LayerWeights(
                attention_norm=take(f"layers.{i}.input_layernorm.weight"),
                qkv=fused(i, "self_attn", qkv, "weight"),
                qkv_bias=fused(i, "self_attn", qkv, "bias") if config.attention_bias else None,
                out=take(f"layers.{i}.self_attn.o_proj.weight"),
                mlp_norm=take(f"layers.{i}.post_attention_layernorm.weight"),
                gate_up=fused(i, "mlp", gate_up, "weight"),
                down=take(f"layers.{i}.mlp.down_proj.weight"),
            )
        )
    embedding = take("embed_tokens.weight")
    if embedding.shape != (config.vocab_size, config.hidden_size):
        raise _shape_error(checkpoint, "embed_tokens.weight", embedding, (config.vocab_size, config.hidden_size))
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    if layers[0].qkv.shape[0] != qkv_rows:
        raise _shape_error(checkpoint, "q, k and v", layers[0].qkv, (qkv_rows, config.hidden_size))
    return Decoder(config, embedding, layers, take("norm.weight"))


def _shape_error(checkpoint: Checkpoint, name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{checkpoint.folder}: {name} has shape {tuple(tensor.shape)}, config.json means {expected}")
