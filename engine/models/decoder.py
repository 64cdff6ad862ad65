"""The decoder that all model families share: token ids to hidden states, over KV in blocks.

Parts of a model are kept in its checkpoint's `LoadCache` as they are once they are loaded: int8 weights of files, for
backends that can begin with them; nothing else would be loaded faster.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.config import DecoderConfig, NativeConfig
from espalier.engine.models.load_cache import LoadCache, code_state
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.engine.models.quantization import make_quantizer, refined_outputs, stored_bytes
from espalier.kernels.backend import Backend, choose_backend
from espalier.kernels.layers import EmbeddingAndNorm, Layers, LayerWeights, UnsupportedShapeError
from espalier.kernels.linear import Kept

log = logging.getLogger("espalier.engine")
MIN_INT8_WEIGHTS = 200_000_000
"""Weights of a model's layers from which `auto` is int8.

Measured (experiments/lab/bench/README.md, int8 or not): models of 0.1 billion decode 1.1 to 1.7 times as fast in int8
at a batch of 16, and lose most by rounding; one of 0.36 billion more than twice as fast, with the same text. The limit
is halfway between, by ratio, and no figure of a machine, so that results depend on none.
"""
_EMBEDDING, _NORM, _BYTES = "embedding", "norm", "weight bytes"
"""Names of what is kept beside the layers."""
_USED, _WARNINGS = "taken", "warnings"
"""Facts of what is kept: the tensors it was made of, and what was odd about them."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Token ids to final hidden states, over a paged KV cache.

    Attributes:
        config: its shape.
        backend: the operations of its device, from which heads, copies and draws come too.
        layers: its layers, ready to run, with most of its weights.
        weight_bytes: bytes of all of its weights.
    """

    config: DecoderConfig
    backend: Backend
    layers: Layers
    weight_bytes: int

    @property
    def embedding(self) -> torch.Tensor:
        """`[vocabulary, hidden]`, which a head may be tied to."""
        return self.layers.outer.embedding

    @property
    def device(self) -> torch.device:
        """The device that holds the weights."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights and of the KV cache."""
        return self.embedding.dtype


def chosen_quantization(config: DecoderConfig, dtype: torch.dtype, on_cpu: bool) -> Quantization:
    """The format that `Quantization.AUTO` stands for: int8 where that pays, else none.

    It pays for layers of `MIN_INT8_WEIGHTS` or more, in float32 on a CPU that multiplies bytes (AVX-512 VNNI).

    Args:
        config: the decoder.
        dtype: dtype that it would run in.
        on_cpu: whether it would run on this machine's processor.
    """
    if not on_cpu or config.layer_weights < MIN_INT8_WEIGHTS:
        return Quantization.NONE
    return Quantization.INT8 if choose_backend("cpu", dtype).keeps_int8 else Quantization.NONE


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
        kind = f"{checkpoint.quantization} weights on {device}"
        flags = "--generator-quantization and --verifier-quantization"
        raise CheckpointError(f"--batch-invariant: products of {kind} depend on their batch; leave it out, or {flags}")
    backend.use_device(torch.device(device))
    return backend


def load_decoder(
    checkpoint: Checkpoint, config: NativeConfig, dtype: torch.dtype, device: torch.device | str
) -> Decoder:
    """Build the decoder of a checkpoint from its tensors, except those of heads.

    Raises:
        CheckpointError: when a tensor is missing or has another shape than `config` says, it cannot be quantised, or
            the device has no operations for it.
    """
    backend = choose_backend_for(checkpoint, dtype, device)
    log.info("%s runs by native code", checkpoint.folder)
    quantize = make_quantizer(checkpoint.quantization, backend, dtype, device)
    if kept := read_kept(checkpoint, "decoder", backend, dtype):
        outer = EmbeddingAndNorm(kept.tensors[_EMBEDDING], kept.tensors[_NORM])
        layers = backend.layers_of_kept(kept, config.num_layers, config.spec, outer)
        return Decoder(config, backend, layers, kept.facts[_BYTES])
    used = checkpoint.used
    weight_bytes, rooms = 0, dict[torch.Size, torch.Tensor]()
    prefix = checkpoint.decoder_prefix
    if "language_model." in prefix:
        names = checkpoint.tensors
        checkpoint.ignore([each for each in names if "language_model." not in each and not each.startswith("lm_head.")])

    def take(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.take(prefix + name, dtype, device, shape)

    def norm(name: str, size: int) -> torch.Tensor:
        """Factors of a norm; those with an offset in float32, in which it is added."""
        if not config.norm_offset:
            return take(f"{name}.weight", size)
        return checkpoint.take(f"{prefix}{name}.weight", torch.float32, device, (size,)).add_(config.norm_offset)

    def fuse(names: Sequence[str], rows: Sequence[int], *columns: int) -> torch.Tensor:
        """Tensors one below the other, of `rows` rows each, or one that holds them all; each is read into its place."""
        quantised = columns and checkpoint.quantization is not Quantization.NONE
        if len(names) == 1 and not quantised:
            return take(names[0], sum(rows), *columns)
        whole = torch.empty(sum(rows), *columns, dtype=dtype, device=device)
        if quantised:
            whole = rooms.setdefault(whole.shape, whole)  # quantised before the next one is read
        parts = whole.split(list(rows)) if len(names) > 1 else [whole]
        for name, part in zip(names, parts, strict=True):
            checkpoint.take_into(prefix + name, part)
        return whole

    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    qkv_rows = [count * size for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]

    def layer(index: int) -> LayerWeights:
        """One layer, quantised before the next is read, so that the unquantised model is never held as a whole."""
        nonlocal weight_bytes
        of = {field: [f"layers.{index}.{name}" for name in names] for field, names in config.names.items()}

        def weight(field: str, rows: Sequence[int], columns: int) -> torch.Tensor:
            return quantize(fuse([f"{name}.weight" for name in of[field]], rows, columns), refined_outputs(rows))

        def bias(field: str, rows: Sequence[int], there: bool) -> torch.Tensor | None:
            return fuse([f"{name}.bias" for name in of[field]], rows) if there else None

        def own_norm(field: str, size: int, there: bool) -> torch.Tensor | None:
            return norm(of[field][0], size) if there else None

        weights = LayerWeights(
            attention_norm=norm(of["attention_norm"][0], hidden),
            qkv=weight("qkv", qkv_rows, hidden),
            qkv_bias=bias("qkv", qkv_rows, config.attention_bias),
            out=weight("out", [hidden], qkv_rows[0]),
            mlp_norm=norm(of["mlp_norm"][0], hidden),
            gate_up=weight("gate_up", [inner, inner], hidden),
            down=weight("down", [hidden], inner),
            out_bias=bias("out", [hidden], config.out_bias),
            query_norm=own_norm("query_norm", size, config.head_norms),
            key_norm=own_norm("key_norm", size, config.head_norms),
            attention_post_norm=own_norm("attention_post_norm", hidden, config.post_norms),
            mlp_post_norm=own_norm("mlp_post_norm", hidden, config.post_norms),
        )
        weight_bytes += sum(stored_bytes(getattr(weights, field)) for field in weights.__slots__)
        return weights

    embedding = take("embed_tokens.weight", config.vocab_size, hidden)  # first, as in most files
    outer = EmbeddingAndNorm(embedding, norm("norm", hidden))
    try:
        layers = backend.prepare_layers(config.num_layers, layer, config.spec, outer)
    except UnsupportedShapeError as error:
        raise CheckpointError(f"{checkpoint.folder} cannot be run on {device}: {error}; --device cpu can") from error
    weight_bytes += embedding.nbytes + outer.norm.nbytes
    if kept := layers.kept():
        tensors = {**kept.tensors, _EMBEDDING: embedding, _NORM: outer.norm}
        keep(checkpoint, "decoder", backend, dtype, Kept(tensors, {**kept.facts, _BYTES: weight_bytes}), used)
    return Decoder(config, backend, layers, weight_bytes)


def read_kept(checkpoint: Checkpoint, part: str, backend: Backend, dtype: torch.dtype) -> Kept | None:
    """The weights that `keep` was given in this process or an earlier one; their tensors then count as used.

    Args:
        checkpoint: whose part it is.
        part: of the model.
        backend: the one that runs it.
        dtype: of the weights that are not quantised.
    """
    cache = _cache_for(checkpoint, backend)
    if cache is None or (kept := cache.read(_entry(checkpoint, part, dtype))) is None:
        return None
    for name in kept.facts[_USED]:
        checkpoint.mark_used(name)
    for text in kept.facts[_WARNINGS]:
        checkpoint.warn(text)
    return kept


def keep(
    checkpoint: Checkpoint, part: str, backend: Backend, dtype: torch.dtype, kept: Kept, used_before: frozenset[str]
) -> None:
    """Keep a part of the model for later processes, if there is a cache.

    Args:
        checkpoint: see `read_kept`.
        part: see `read_kept`.
        backend: see `read_kept`.
        dtype: see `read_kept`.
        kept: what it is made of.
        used_before: the tensors that counted as used before it was made.
    """
    if cache := _cache_for(checkpoint, backend):
        used = {_USED: sorted(checkpoint.used - used_before), _WARNINGS: list(checkpoint.warnings)}
        cache.write(_entry(checkpoint, part, dtype), kept._replace(facts={**kept.facts, **used}))


def _cache_for(checkpoint: Checkpoint, backend: Backend) -> LoadCache | None:
    of_files = checkpoint.quantization is Quantization.INT8 and checkpoint.load_format is not LoadFormat.DUMMY
    return checkpoint.load_cache if of_files and backend.keeps_int8 else None


def _entry(checkpoint: Checkpoint, part: str, dtype: torch.dtype) -> str:
    """The name of an entry: a hash of the checkpoint's files, of what becomes of them, and of the code for that."""
    of = f"{checkpoint.digest()} {part} {dtype} {checkpoint.decoder_config.impl} {code_state()}"
    return hashlib.sha256(of.encode()).hexdigest()[:32]
