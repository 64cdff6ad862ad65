"""Models and devices of a plan: sizes of checkpoints without their weights, memory and speed of cards."""

import os
import time
from dataclasses import dataclass, replace

import torch

from espalier.engine.errors import EspalierError
from espalier.engine.models.config import DecoderConfig, parse_decoder_config
from espalier.engine.models.hub import HubSettings
from espalier.engine.models.options import Quantization
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.experiments.planning.known_models import MODELS, ModelShape
from espalier.experiments.planning.options import DeviceOptions
from espalier.experiments.planning.roofline import CARDS, Card

CARD_MEMORY = {"a100": 80 * 10**9, "h100": 80 * 10**9, "h200": 141 * 10**9}
"""Bytes by the data sheet."""
CPU = "cpu"
_COPIED, _MULTIPLIED, _REPEATS = 2**26, 1024, 3


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model's sizes.

    Attributes:
        shape: what the floor of its steps follows from.
        config: what its workspace follows from.
        memory_bytes: bytes of all weights on the device; `shape.weight_bytes` lacks the embedding unless it is tied.
    """

    shape: ModelShape
    config: DecoderConfig
    memory_bytes: int


def planned_model(
    name: str,
    role: str,
    dtype: torch.dtype,
    hub: HubSettings | None = None,
    quantization: Quantization = Quantization.NONE,
    family: str | None = None,
    reference: str = "",
) -> PlannedModel:
    """Sizes of a model: of a known shape by its name, else of a checkpoint, whose weights are not read.

    Args:
        name: the shape, or the checkpoint.
        role: what it is loaded as.
        dtype: dtype of KV, and of the weights that are not quantised.
        hub: see `inspect_checkpoint`, as for the next three.
        quantization: quantization of the layers' weights.
        family: a verifier's; None detects it.
        reference: the reference model of a verifier that has one.

    Raises:
        CheckpointError: the checkpoint is missing or unsupported, or no family fits a verifier.
    """
    if name in MODELS:
        shape = replace(MODELS[name], item_bytes=dtype.itemsize, quantization=quantization)
        embedding = 0 if shape.outputs == shape.vocabulary else shape.vocabulary * shape.hidden * shape.item_bytes
        return PlannedModel(shape, _config_of(shape), shape.weight_bytes + embedding)
    from espalier.experiments.planning.inspection import inspect_checkpoint

    found = inspect_checkpoint(name, dtype, quantization, family, reference, hub, as_verifier=role == VERIFIER)
    c = found.config
    outputs = c.vocab_size if role == GENERATOR else 2
    shape = ModelShape(
        name, c.num_layers, c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size,
        outputs, dtype.itemsize, quantization,
    )  # fmt: skip
    return PlannedModel(shape, c, found.weight_bytes)


def _config_of(shape: ModelShape) -> DecoderConfig:
    sizes = {
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rope_theta": 1e6,
        "max_position_embeddings": 131_072,
    }
    return parse_decoder_config(sizes)


def card_of(device: DeviceOptions) -> Card | None:
    """The bandwidth and the rate of a device; None if nothing is known of them.

    `cpu` is this machine, measured in about a second.

    Raises:
        EspalierError: the card is unknown, or one of the two is.
    """
    given = {"bandwidth": 1e9 * (device.bandwidth or 0), "matrix_rate": 1e12 * (device.matrix_rate or 0)}
    given = {name: value for name, value in given.items() if value}
    if device.card is None:
        if len(given) == 1:
            raise EspalierError("--bandwidth and --matrix-rate go together, or with --card")
        return Card(**given) if given else None
    if device.card != CPU and device.card not in CARDS:
        raise EspalierError(
            f"--card {device.card!r} is unknown; it takes {', '.join(CARDS)} or {CPU}. For another device leave it "
            "out, and give --memory, --bandwidth and --matrix-rate"
        )
    return replace(_measured_cpu() if device.card == CPU else CARDS[device.card], **given)


def cpu_kv_memory() -> int:
    """Bytes of the KV pool on a CPU by default, as in `search.run.load`."""
    return min(4 * 2**30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)


def _measured_cpu() -> Card:
    source, target = torch.ones(_COPIED, dtype=torch.uint8), torch.empty(_COPIED, dtype=torch.uint8)
    square = torch.ones(_MULTIPLIED, _MULTIPLIED)
    copying = min(_seconds(lambda: target.copy_(source)) for _ in range(_REPEATS))
    multiplying = min(_seconds(lambda: square @ square) for _ in range(_REPEATS))
    return Card(2 * _COPIED / copying, 2 * _MULTIPLIED**3 / multiplying, kernel_seconds=0.0)


def _seconds(action: object) -> float:
    assert callable(action)
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
