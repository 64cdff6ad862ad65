"""The decoder that all model families share: token ids to hidden states, over KV in blocks."""

import logging

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.options import Quantization
from espalier.engine.models.quantization import make_quantizer, stored_bytes
from espalier.kernels.backend import Backend, choose_backend
from espalier.kernels.batch import StepBatch
from espalier.kernels.layers import EmbeddingAndNorm, Layers, LayerShape, LayerWeights, UnsupportedShapeError
from espalier.kernels.layout import LayerKV
from espalier.kernels.rotary import attention_factor, inverse_frequencies

log = logging.getLogger("espalier.engine")


class Decoder:
    """Token ids to final hidden states, over a paged KV cache.

    Attributes:
        backend: the operations of its device, from which heads, copies and draws come too.
        layers: its layers, ready to run, with most of its weights.
        embedding: `[vocabulary, hidden]`, which a head may be tied to.
        weight_bytes: bytes of all of its weights.
    """

    def __init__(self, config: DecoderConfig, backend: Backend, layers: Layers, weight_bytes: int) -> None:
        self.config = config
        self.backend = backend
        self.layers = layers
        self.embedding = layers.outer.embedding
        self.weight_bytes = weight_bytes

    @property
    def device(self) -> torch.device:
        """The device that holds the weights."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights and of the KV cache."""
        return self.embedding.dtype

    @torch.inference_mode()
    def forward(self, step: StepBatch, layer_kvs: list[LayerKV]) -> torch.Tensor:
        """Compute a step's tokens, writing their keys and values.

        Args:
            step: the tokens.
            layer_kvs: one `KVLayout.layer_view` per layer.

        Returns:
            Hidden states after the final norm, `[T, hidden]`.
        """
        return self.layers.forward(step, layer_kvs)

    @torch.inference_mode()
    def warm_up(self, layer_kvs: list[LayerKV], decodes: bool) -> None:
        """Prepare what steps on these blocks reuse, so that no request waits for it; see `Layers.warm_up`."""
        self.layers.warm_up(layer_kvs, decodes)

    def release(self, layer_kvs: list[LayerKV]) -> None:
        """Let go of what `warm_up` prepared for these blocks."""
        self.layers.release(layer_kvs)


def choose_backend_for(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Backend:
    """The backend that runs a checkpoint, made ready on this thread.

    Raises:
        CheckpointError: no backend has what the checkpoint's options ask for.
    """
    try:
        backend = choose_backend(device, dtype, checkpoint.batch_invariant)
    except ValueError as error:
        raise CheckpointError(f"--batch-invariant: {error}") from error
    quantised = checkpoint.quantization is not Quantization.NONE
    if checkpoint.batch_invariant and quantised and not backend.quantized_packer():
        raise CheckpointError(
            f"--batch-invariant: products of {checkpoint.quantization} weights on {device} are torchao's, whose rows "
            "depend on their batch; leave out --batch-invariant, or --generator-quantization and "
            "--verifier-quantization"
        )
    backend.use_device(torch.device(device))
    return backend


def load_decoder(
    checkpoint: Checkpoint, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str
) -> Decoder:
    """Build the decoder of a checkpoint from its tensors, except those of heads.

    Raises:
        CheckpointError: when a tensor is missing or has another shape than `config` says, it cannot be quantised, or
            the device has no operations for it.
    """
    backend = choose_backend_for(checkpoint, dtype, device)
    log.info("%s runs by native code", checkpoint.folder)
    quantize = make_quantizer(checkpoint.quantization, backend, dtype, device)
    weight_bytes = 0
    prefix = "model." if "model.embed_tokens.weight" in checkpoint else ""

    def take(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.take(prefix + name, dtype, device, shape)

    def fuse(rows: dict[str, int], *columns: int) -> torch.Tensor:
        """Tensors one below the other, of as many rows each as `rows` says; each is read into its place."""
        whole = torch.empty(sum(rows.values()), *columns, dtype=dtype, device=device)
        for name, part in zip(rows, whole.split(list(rows.values())), strict=True):
            checkpoint.take_into(prefix + name, part)
        return whole

    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def layer(index: int) -> LayerWeights:
        """One layer, quantised before the next is read, so that the unquantised model is never held as a whole."""
        nonlocal weight_bytes
        name = f"layers.{index}"
        projections = {
            f"{name}.self_attn.{p}_proj": rows for p, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        }
        biases = {f"{p}.bias": rows for p, rows in projections.items()}
        weights = LayerWeights(
            attention_norm=take(f"{name}.input_layernorm.weight", hidden),
            qkv=quantize(fuse({f"{p}.weight": rows for p, rows in projections.items()}, hidden)),
            qkv_bias=fuse(biases) if config.attention_bias else None,
            out=quantize(take(f"{name}.self_attn.o_proj.weight", hidden, heads)),
            mlp_norm=take(f"{name}.post_attention_layernorm.weight", hidden),
            gate_up=quantize(fuse({f"{name}.mlp.{p}_proj.weight": inner for p in ("gate", "up")}, hidden)),
            down=quantize(take(f"{name}.mlp.down_proj.weight", hidden, inner)),
            out_bias=take(f"{name}.self_attn.o_proj.bias", hidden) if config.out_bias else None,
            query_norm=take(f"{name}.self_attn.q_norm.weight", config.head_dim) if config.head_norms else None,
            key_norm=take(f"{name}.self_attn.k_norm.weight", config.head_dim) if config.head_norms else None,
        )
        weight_bytes += sum(stored_bytes(getattr(weights, field)) for field in weights.__slots__)
        return weights

    shape = LayerShape(config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps, config.windows)
    embedding = take("embed_tokens.weight", config.vocab_size, hidden)  # first, as in most files
    norm = take("norm.weight", hidden)
    inverse = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling).to(device)
    outer = EmbeddingAndNorm(embedding, norm, inverse, attention_factor(config.rope_scaling))
    try:
        layers = backend.prepare_layers(config.num_layers, layer, shape, outer)
    except UnsupportedShapeError as error:
        raise CheckpointError(f"{checkpoint.folder} cannot be run on {device}: {error}; --device cpu can") from error
    return Decoder(config, backend, layers, weight_bytes + embedding.nbytes + norm.nbytes)
