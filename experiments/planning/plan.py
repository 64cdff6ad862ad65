"""The plan of a search on paper, before a card is rented: KV bytes, searches that fit, rounds per second."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from espalier.engine.errors import EspalierError
from espalier.engine.memory.device_memory import plan_memory
from espalier.engine.models.hub import HubSettings
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.experiments.planning.closed_form import HeldBlocks, PathLengths, TreeShape, blocks_by_round
from espalier.experiments.planning.devices import CARD_MEMORY, CPU, PlannedModel, card_of, cpu_kv_memory, planned_model
from espalier.experiments.planning.inspection import verifier_checkpoint
from espalier.experiments.planning.known_models import MODELS
from espalier.experiments.planning.options import DeviceOptions, LengthOptions
from espalier.experiments.planning.roofline import Card, decode_seconds, scoring_seconds
from espalier.prm.limits import PathLimits, verifier_limits
from espalier.prm.scorers import SELF
from espalier.search.algorithms import memory_estimate, needs_verifier
from espalier.search.request import SearchRequest, validate
from espalier.search.run.load import DTYPES, RuntimeSettings
from espalier.search.run.resolve import worst_case_blocks

_MANY = (1, 8, 32)
"""Searches at once for which the speed is planned, besides as many as fit."""


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """KV bytes of one search.

    Attributes:
        rounds: expected bytes at the end of each round, by role.
        logical_peak_bytes: bytes of the fullest round if no two sequences shared a block.
        worst_case_bytes: the most that the search can hold, which admission counts.
    """

    rounds: tuple[Mapping[str, float], ...]
    logical_peak_bytes: float
    worst_case_bytes: int

    @property
    def peak_bytes(self) -> float:
        """Expected bytes of both models in the fullest round."""
        return sum(self.fullest.values())

    @property
    def fullest(self) -> Mapping[str, float]:
        """Expected bytes by role in the fullest round."""
        return max(self.rounds, key=lambda held: sum(held.values()))

    @property
    def mean_bytes(self) -> float:
        """Expected bytes of both models, averaged over the rounds."""
        return sum(sum(held.values()) for held in self.rounds) / len(self.rounds)


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """The least time on a card; what software adds comes on top.

    Attributes:
        searches: searches at once.
        seconds: seconds of each of them.
        rounds_per_second: rounds of all of them together.
        generator_share: share of the time that the generator takes.
    """

    searches: int
    seconds: float
    rounds_per_second: float
    generator_share: float


def search_plan(
    tree: TreeShape,
    models: Mapping[str, PlannedModel],
    lengths: Mapping[str, PathLengths],
    block_size: int,
) -> SearchPlan:
    """Plan one search of a tree, with the lengths of each model's paths.

    Raises:
        InvalidRequestError: the algorithm has no closed form.
    """
    held = {role: blocks_by_round(tree, lengths[role], block_size) for role in models}
    block_bytes = {role: model.shape.kv_bytes_per_token * block_size for role, model in models.items()}
    rounds = tuple(
        {role: row.physical * block_bytes[role] for role, row in zip(held, rows, strict=True)}
        for rows in zip(*held.values(), strict=True)
    )
    fullest = max(range(len(rounds)), key=lambda i: sum(rounds[i].values()))
    logical = sum(rows[fullest].logical * block_bytes[role] for role, rows in held.items())
    blocks = _worst_case(tree, models, lengths, block_size)
    return SearchPlan(rounds, logical, sum(blocks[role] * size for role, size in block_bytes.items()))


def _worst_case(
    tree: TreeShape, models: Mapping[str, PlannedModel], lengths: Mapping[str, PathLengths], block_size: int
) -> dict[str, int]:
    """Blocks that admission counts for a search whose limits are the planned lengths."""
    estimates = memory_estimate(tree.request)
    its = lengths[GENERATOR]
    step = math.ceil(its.step_tokens)
    limits = PathLimits(math.ceil(its.prompt_tokens), step * tree.rounds, step)
    blocks = {GENERATOR: worst_case_blocks(estimates, limits, block_size)}
    if VERIFIER in models:
        prompt, context = math.ceil(lengths[VERIFIER].prompt_tokens), models[VERIFIER].config.max_positions
        limits = verifier_limits(limits, prompt, max(context, prompt + 1), tree.rounds, same_vocabulary=True)
        blocks[VERIFIER] = worst_case_blocks(estimates, limits, block_size)
    return blocks


def kv_pool_bytes(
    models: Mapping[str, PlannedModel], memory: int, utilization: float, max_batch_tokens: int
) -> tuple[int, int]:
    """Bytes of weights, and what they and a step's workspace leave of a device for the KV pool.

    Raises:
        CheckpointError: nothing is left.
    """
    weights = sum(model.memory_bytes for model in models.values())
    item = next(iter(models.values())).shape.item_bytes
    configs = [model.config for model in models.values()]
    plan = plan_memory(memory, memory - weights, utilization, configs, max_batch_tokens, item)
    return weights, plan.kv_pool


def speed_plan(
    tree: TreeShape,
    models: Mapping[str, PlannedModel],
    lengths: Mapping[str, PathLengths],
    card: Card,
    searches: int,
    block_size: int,
) -> SpeedPlan:
    """The floor of `searches` searches in step with each other: weights, KV, products and launches, nothing else."""
    generating = scoring = 0.0
    rows = searches * tree.children
    step = lengths[GENERATOR].step_tokens
    for number in range(1, tree.rounds + 1):
        held = {role: _last(tree, lengths[role], block_size, number).physical * block_size for role in models}
        # Within a round a child's own step grows from nothing.
        read = held[GENERATOR] - tree.children * step / 2
        context = max(1, round(searches * read / rows))
        generating += step * decode_seconds(models[GENERATOR].shape, card, math.ceil(rows), context, 0)
        if VERIFIER in models:
            new = tree.children * lengths[VERIFIER].step_tokens
            old = max(0.0, held[VERIFIER] - new)
            scoring += scoring_seconds(models[VERIFIER].shape, card, round(searches * new), round(searches * old))
    seconds = generating + scoring
    return SpeedPlan(searches, seconds, searches * tree.rounds / seconds, generating / seconds)


def _last(tree: TreeShape, lengths: PathLengths, block_size: int, rounds: int) -> HeldBlocks:
    """Blocks at the end of round `rounds`."""
    return blocks_by_round(replace(tree, rounds=rounds), lengths, block_size)[-1]


def make_plan(
    request: SearchRequest, runtime: RuntimeSettings, device: DeviceOptions, lengths: LengthOptions
) -> dict[str, Any]:
    """Plan a search on a device, from the sizes of known models and of checkpoints, whose weights are not read.

    Returns:
        Values for JSON: the models, the search's KV bytes, the device's memory, searches that fit, and their speed.

    Raises:
        InvalidRequestError: the search is invalid, or its algorithm has no closed form.
        EspalierError: a checkpoint or the card is unknown, or the weights leave nothing for the KV pool.
    """
    request = replace(request, max_steps=lengths.steps)
    validate(request)
    if device.dtype not in DTYPES:
        raise EspalierError(f"--dtype takes one of {', '.join(DTYPES)}, is {device.dtype!r}")
    if device.card is None and device.memory is None:
        raise EspalierError("--card or --memory is needed: a100, h100, h200 or cpu; or the device's memory, like 24G")
    card = card_of(device)
    dtype = ("float32" if device.card == CPU else "bfloat16") if device.dtype == "auto" else device.dtype
    models = _models(request, runtime, getattr(torch, dtype))
    tree = TreeShape(request, lengths.steps, lengths.merged_share)
    paths = {
        GENERATOR: PathLengths(lengths.prompt_tokens, lengths.step_tokens, pending_tokens=1),
        VERIFIER: PathLengths(
            lengths.verifier_prompt_tokens or lengths.prompt_tokens, lengths.verifier_step_tokens or lengths.step_tokens
        ),
    }
    search = search_plan(tree, models, paths, runtime.block_size)
    if device.card == CPU and device.memory is None:
        weights, pool = sum(model.memory_bytes for model in models.values()), cpu_kv_memory()
    else:
        total = device.memory if device.memory is not None else CARD_MEMORY[device.card or ""]
        weights, pool = kv_pool_bytes(models, total, runtime.gpu_memory_utilization, runtime.max_batch_tokens)
    fit = {
        "at_their_peaks": int(pool // search.peak_bytes),
        "on_average": int(pool // search.mean_bytes),
        "admitted": int(pool // max(1.0, runtime.reserved_share * search.worst_case_bytes)),
    }
    counts = sorted({*(count for count in _MANY if count <= fit["on_average"]), max(1, fit["on_average"])})
    speeds = [speed_plan(tree, models, paths, card, count, runtime.block_size) for count in counts] if card else []
    return {
        "models": {
            role: {
                "name": model.shape.name,
                "weight_bytes": model.memory_bytes,
                "quantization": str(model.shape.quantization),
                "kv_bytes_per_token": model.shape.kv_bytes_per_token,
            }
            for role, model in models.items()
        },
        "dtype": dtype,
        "search": {
            "rounds": [dict(held) for held in search.rounds],
            "peak_bytes": search.peak_bytes,
            "peak_bytes_by_role": dict(search.fullest),
            "mean_bytes": search.mean_bytes,
            "logical_peak_bytes": search.logical_peak_bytes,
            "worst_case_bytes": search.worst_case_bytes,
        },
        "device": {"weight_bytes": weights, "kv_pool_bytes": pool},
        "searches_that_fit": fit,
        "speed": [asdict(row) for row in speeds],
    }


def _models(request: SearchRequest, runtime: RuntimeSettings, dtype: torch.dtype) -> dict[str, PlannedModel]:
    """The models that the search computes with, by role."""
    hub, verifier = HubSettings(runtime.offline, runtime.cache_dir), runtime.verifier
    found = {GENERATOR: planned_model(runtime.generator, GENERATOR, dtype, hub, runtime.generator_quantization)}
    if not needs_verifier(request) or not verifier:
        return found
    if verifier == SELF:  # the generator's weights, with a KV of its own
        its = found[GENERATOR]
        return found | {VERIFIER: replace(its, memory_bytes=0, shape=replace(its.shape, outputs=2))}
    if verifier in MODELS or (verifier := verifier_checkpoint(verifier, runtime.generator, hub)):
        how = runtime.verifier_quantization, runtime.verifier_family, runtime.verifier_reference
        found[VERIFIER] = planned_model(verifier, VERIFIER, dtype, hub, *how)
    return found
