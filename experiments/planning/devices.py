"""Models and devices of a plan: sizes of checkpoints without their weights, memory and speed of cards."""

import timeit
from dataclasses import replace

import torch

from espalier.engine.errors import EspalierError, nearest
from espalier.engine.models.decoder import chosen_quantization
from espalier.engine.models.hub import HubSettings
from espalier.engine.models.options import Quantization
from espalier.engine.roles import DRAFT, GENERATOR, VERIFIER
from espalier.experiments.planning.inspection import inspect_checkpoint, question_tokens, verifier_checkpoint
from espalier.experiments.planning.known_models import MODELS, ModelShape
from espalier.experiments.planning.options import DeviceOptions
from espalier.experiments.planning.roofline import CARDS, Card
from espalier.kernels.cpu import HAS_VNNI
from espalier.prm.scorers import SELF
from espalier.search.run.settings import TREE, RuntimeSettings

CARD_MEMORY = {"a100": 80 * 10**9, "h100": 80 * 10**9, "h200": 141 * 10**9}
"""Bytes by the data sheet."""
CPU = "cpu"
QUESTION_TOKENS = 32
"""Tokens of asking a model of which only sizes are known about a step: those of `yes-no` for Qwen2.5."""
_COPIED, _MULTIPLIED, _REPEATS = 2**26, 1024, 3


def planned_models(
    runtime: RuntimeSettings, scored: bool, dtype: torch.dtype, on_cpu: bool = False
) -> dict[str, ModelShape]:
    """Sizes of the models that a search computes with, by role; the verifier's if one with a KV of its own scores.

    Each is a known shape by its name, else a checkpoint, whose weights are not read.

    Args:
        runtime: names of the models, their quantization and family, and how to use the hub.
        scored: whether searches use scores.
        dtype: dtype of KV, and of the weights that are not quantised.
        on_cpu: whether they are to run on this machine's processor.

    Raises:
        CheckpointError: a checkpoint is missing or unsupported, or no family fits a verifier.
    """
    generator = planned_model(runtime, GENERATOR, runtime.generator, dtype, on_cpu)
    verifier = runtime.verifier if scored else ""
    if verifier == SELF and not planned_question(runtime):  # the generator's weights, with a KV of their own
        return {GENERATOR: generator, VERIFIER: replace(generator, memory_bytes=0, outputs=2)}
    if verifier and verifier not in MODELS:
        verifier = verifier_checkpoint(verifier, _hub(runtime))
    if not verifier:
        return {GENERATOR: generator}
    return {GENERATOR: generator, VERIFIER: planned_model(runtime, VERIFIER, verifier, dtype, on_cpu)}


def planned_question(runtime: RuntimeSettings) -> int:
    """Tokens that a step costs where a generator is asked about it on its own path; 0 where paths are read apart.

    Raises:
        CheckpointError: the generator is not found, or cannot be asked.
    """
    return QUESTION_TOKENS if runtime.generator in MODELS else question_tokens(runtime)


def planned_draft(
    runtime: RuntimeSettings, generator: ModelShape, dtype: torch.dtype, on_cpu: bool = False
) -> ModelShape | None:
    """Sizes of the model that drafts; None where none does.

    Raises:
        CheckpointError: its checkpoint is missing or unsupported.
        EspalierError: it or the generator has recurrent layers.
    """
    if not runtime.draft:
        return None
    draft = None if runtime.draft == TREE else planned_model(runtime, DRAFT, runtime.draft, dtype, on_cpu)
    for model in (generator, draft):
        if model and model.config.state_shapes:
            raise EspalierError(f"--draft: {model.name} has recurrent layers, whose states cannot go back")
    return draft


def planned_model(
    runtime: RuntimeSettings, role: str, name: str, dtype: torch.dtype, on_cpu: bool = False
) -> ModelShape:
    """Sizes of the model called `name` that is loaded as `role`; see `planned_models`."""
    quantization = {
        GENERATOR: runtime.generator_quantization,
        VERIFIER: runtime.verifier_quantization,
        DRAFT: runtime.draft_quantization,
    }[role]
    device = CPU if on_cpu else "cuda"
    if name in MODELS:
        if quantization is Quantization.AUTO:
            quantization = chosen_quantization(MODELS[name].config, dtype, on_cpu)
        shape = replace(MODELS[name], item_bytes=dtype.itemsize, quantization=quantization)
        vocabulary = shape.config.vocab_size
        embedding = 0 if shape.outputs == vocabulary else vocabulary * shape.config.hidden_size * shape.item_bytes
        return replace(shape, memory_bytes=shape.weight_bytes + embedding)
    of_role = (runtime.verifier_family, runtime.verifier_reference) if role == VERIFIER else (None, "")
    how = _hub(runtime), role == VERIFIER, runtime.model_impl, device
    found = inspect_checkpoint(name, dtype, quantization, *of_role, *how)
    outputs = 2 if role == VERIFIER else found.config.vocab_size
    return ModelShape(name, found.config, outputs, dtype.itemsize, found.quantization, found.weight_bytes)


def _hub(runtime: RuntimeSettings) -> HubSettings:
    return HubSettings(runtime.offline, runtime.cache_dir)


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
            "out, and give --memory, --bandwidth and --matrix-rate" + nearest(device.card, (*CARDS, CPU))
        )
    return replace(_measured_cpu() if device.card == CPU else CARDS[device.card], **given)


def _measured_cpu() -> Card:
    source, target = torch.ones(_COPIED, dtype=torch.uint8), torch.empty(_COPIED, dtype=torch.uint8)
    square = torch.ones(_MULTIPLIED, _MULTIPLIED)
    copying = min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=_REPEATS))
    multiplying = min(timeit.repeat(lambda: square @ square, number=1, repeat=_REPEATS))
    operations, int8_rate = 2 * _MULTIPLIED**3, 0.0
    if HAS_VNNI:
        its, product = square.to(torch.int8), torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
        int8_rate = operations / min(timeit.repeat(lambda: product(its, its), number=1, repeat=_REPEATS))
    return Card(2 * _COPIED / copying, operations / multiplying, kernel_seconds=0.0, int8_rate=int8_rate)
