"""The plan of a search on paper, before a card is rented: KV bytes, searches that fit, rounds per second."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from espalier.engine.errors import EspalierError, nearest
from espalier.engine.memory.model_memory import plan_memory
from espalier.engine.roles import DRAFT, GENERATOR, VERIFIER
from espalier.experiments.planning.closed_form import (
    HeldBlocks,
    PathLengths,
    TreeShape,
    blocks_by_round,
    states_by_round,
)
from espalier.experiments.planning.devices import (
    CARD_MEMORY,
    CPU,
    card_of,
    planned_draft,
    planned_models,
    planned_question,
)
from espalier.experiments.planning.drafts import MODEL_ACCEPTANCE, TREE_ACCEPTANCE, draft_rows
from espalier.experiments.planning.known_models import ModelShape
from espalier.experiments.planning.options import DeviceOptions, LengthOptions
from espalier.experiments.planning.roofline import Card, decode_seconds, scoring_seconds
from espalier.kernels.layout import kv_groups
from espalier.prm.limits import PathLimits, verifier_limits
from espalier.prm.scorers import SELF
from espalier.search.algorithms import last_score_suffices, memory_estimate, needs_verifier
from espalier.search.request import SearchRequest, validate
from espalier.search.run.settings import DTYPES, RuntimeSettings, default_cpu_kv_memory
from espalier.search.run.worst_case import worst_case_blocks, worst_case_states

_MANY = (1, 8, 32)
"""Searches at once for which the speed is planned, besides as many as fit."""
_Models = Mapping[str, ModelShape]
_Lengths = Mapping[str, PathLengths]


def make_plan(
    request: SearchRequest, runtime: RuntimeSettings, device: DeviceOptions, lengths: LengthOptions
) -> dict[str, Any]:
    """Plan a search on a device, from the sizes of known models and of checkpoints, whose weights are not read.

    Returns:
        Values for JSON: the models, the search's KV bytes, the device's memory, searches that fit, their speed, and
        what drafts gain.

    Raises:
        InvalidRequestError: the search is invalid, or its algorithm has no closed form.
        EspalierError: a checkpoint or the card is unknown, the weights leave nothing for the KV pool, or a model of
            drafts has recurrent layers.
    """
    request = replace(request, max_steps=lengths.steps)
    validate(request)
    if device.dtype not in DTYPES:
        hint = nearest(device.dtype, DTYPES)
        raise EspalierError(f"--dtype takes one of {', '.join(DTYPES)}, is {device.dtype!r}{hint}")
    if device.card is None and device.memory is None:
        raise EspalierError("--card or --memory is needed: a100, h100, h200 or cpu; or the device's memory, like 24G")
    card = card_of(device)
    dtype = ("float32" if device.card == CPU else "bfloat16") if device.dtype == "auto" else device.dtype
    on_cpu = device.card == CPU
    models = planned_models(runtime, needs_verifier(request), getattr(torch, dtype), on_cpu)
    draft = planned_draft(runtime, models[GENERATOR], getattr(torch, dtype), on_cpu)
    loaded = models | ({DRAFT: draft} if draft else {})
    tree = TreeShape(request, lengths.steps, lengths.merged_share)
    paths = {
        GENERATOR: PathLengths(lengths.prompt_tokens, lengths.step_tokens, pending_tokens=1),
        VERIFIER: PathLengths(
            lengths.verifier_prompt_tokens or lengths.prompt_tokens, lengths.verifier_step_tokens or lengths.step_tokens
        ),
    }
    asked = needs_verifier(request) and runtime.verifier == SELF and VERIFIER not in models
    question = planned_question(runtime) if asked else 0
    search = _search_bytes(tree, models, paths, runtime.block_size, runtime.max_batch_tokens)
    weights = sum(model.memory_bytes for model in loaded.values())
    if device.card == CPU and device.memory is None:
        pool = default_cpu_kv_memory()
    else:
        total = device.memory if device.memory is not None else CARD_MEMORY[device.card or ""]
        configs, item = [model.config for model in loaded.values()], models[GENERATOR].item_bytes
        utilization, tokens = runtime.gpu_memory_utilization, runtime.max_batch_tokens
        pool = plan_memory(total, total - weights, utilization, configs, tokens, item).kv_pool
    fit = {
        "at_their_peaks": int(pool // search["peak_bytes"]),
        "on_average": int(pool // search["mean_bytes"]),
        "admitted": int(pool // max(1.0, runtime.reserved_share * search["worst_case_bytes"])),
    }
    counts = sorted({*(count for count in _MANY if count <= fit["on_average"]), max(1, fit["on_average"])})
    return {
        "models": {
            role: {
                "name": model.name,
                "weight_bytes": model.memory_bytes,
                "quantization": str(model.quantization),
                "kv_bytes_per_token": model.kv_bytes_per_token,
                "state_bytes": model.config.state_bytes,
            }
            for role, model in loaded.items()
        },
        "dtype": dtype,
        "search": search,
        "device": {"weight_bytes": weights, "kv_pool_bytes": pool},
        "searches_that_fit": fit,
        "speed": [_speed(tree, models, paths, question, card, n, runtime.block_size) for n in counts] if card else [],
        "drafts": _drafts(runtime, lengths, models[GENERATOR], draft, card) if card and runtime.draft else None,
    }


def _drafts(
    runtime: RuntimeSettings, lengths: LengthOptions, target: ModelShape, draft: ModelShape | None, card: Card
) -> dict[str, Any]:
    """Gains of drafts for paths of half their length."""
    acceptance = lengths.draft_acceptance
    if acceptance is None:
        acceptance = MODEL_ACCEPTANCE if draft else TREE_ACCEPTANCE
    context = round(lengths.prompt_tokens + lengths.steps * lengths.step_tokens / 2)
    return draft_rows(target, draft, card, context, acceptance, runtime.draft_tokens)


def _search_bytes(
    tree: TreeShape, models: _Models, lengths: _Lengths, block_size: int, batch_tokens: int
) -> dict[str, Any]:
    """KV bytes of one search: expected in each round and in the fullest one, and the most that admission counts.

    Raises:
        InvalidRequestError: the algorithm has no closed form.
    """
    held = {role: _held(tree, model, lengths[role], block_size) for role, model in models.items()}
    states, state_bytes = states_by_round(tree), {role: model.config.state_bytes for role, model in models.items()}
    block_bytes = {role: model.kv_bytes_per_token * block_size for role, model in models.items()}
    rounds = [
        {
            role: row.physical * block_bytes[role] + count * state_bytes[role]
            for role, row in zip(held, rows, strict=True)
        }
        for count, *rows in zip(states, *held.values(), strict=True)
    ]
    totals = [sum(by_role.values()) for by_role in rounds]
    fullest = totals.index(max(totals))
    return {
        "rounds": rounds,
        "peak_bytes": totals[fullest],
        "peak_bytes_by_role": rounds[fullest],
        "mean_bytes": sum(totals) / len(totals),
        "logical_peak_bytes": sum(
            rows[fullest].logical * block_bytes[role] + states[fullest] * state_bytes[role]
            for role, rows in held.items()
        ),
        "worst_case_bytes": _worst_case(tree, models, lengths, block_size, batch_tokens),
    }


def _held(tree: TreeShape, model: ModelShape, lengths: PathLengths, block_size: int) -> list[HeldBlocks]:
    return blocks_by_round(tree, lengths, block_size, model.config.window_shares)


def _worst_case(tree: TreeShape, models: _Models, lengths: _Lengths, block_size: int, batch_tokens: int) -> int:
    """Bytes that admission counts for a search whose limits are the planned lengths."""
    its = lengths[GENERATOR]
    step = math.ceil(its.step_tokens)
    limits = {GENERATOR: PathLimits(math.ceil(its.prompt_tokens), step * tree.rounds, step)}
    if VERIFIER in models:
        prompt, context = math.ceil(lengths[VERIFIER].prompt_tokens), models[VERIFIER].config.max_positions
        limits[VERIFIER] = verifier_limits(
            limits[GENERATOR], prompt, max(context, prompt + 1), tree.rounds, same_vocabulary=True
        )
    estimates, total = memory_estimate(tree.request), 0
    for role, model in models.items():
        for shape, layers in kv_groups(model.config.kv_layers).items():
            blocks = worst_case_blocks(estimates, limits[role], block_size, shape.window, batch_tokens)
            total += blocks * block_size * len(layers) * shape.elements * model.item_bytes
        total += worst_case_states(estimates, limits[role]) * model.config.state_bytes
    return total


def _speed(
    tree: TreeShape,
    models: _Models,
    lengths: _Lengths,
    question: int,
    card: Card,
    searches: int,
    block_size: int,
) -> dict[str, float]:
    """The floor of `searches` searches in step with each other: weights, KV, products and launches, nothing else.

    `question` is the number of tokens that asking the generator about a step of its own path takes, 0 if it is not.
    Where only the last score of a path counts, it is asked once a path.
    """
    generating = scoring = 0.0
    rows = searches * tree.children
    step = lengths[GENERATOR].step_tokens
    for number in range(1, tree.rounds + 1):
        so_far = replace(tree, rounds=number)
        held = {
            role: _held(so_far, model, lengths[role], block_size)[-1].physical * block_size
            for role, model in models.items()
        }
        # Within a round a child's own step grows from nothing.
        read = held[GENERATOR] - tree.children * step / 2
        context = max(1, round(searches * read / rows))
        generating += step * decode_seconds(models[GENERATOR], card, math.ceil(rows), context, 0)
        if VERIFIER in models:
            new = tree.children * lengths[VERIFIER].step_tokens
            old = max(0.0, held[VERIFIER] - new)
            scoring += scoring_seconds(models[VERIFIER], card, round(searches * new), round(searches * old))
        elif question and (number == tree.rounds or not last_score_suffices(tree.request)):
            asker, held_tokens = replace(models[GENERATOR], outputs=2), round(searches * held[GENERATOR])
            scoring += scoring_seconds(asker, card, round(rows * question), held_tokens)
    seconds = generating + scoring
    return {
        "searches": searches,
        "seconds": seconds,
        "rounds_per_second": searches * tree.rounds / seconds,
        "generator_share": generating / seconds,
    }
