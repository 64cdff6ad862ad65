"""The plan of a search on paper, before a card is rented: KV bytes, searches that fit, rounds per second."""

import math
import timeit
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from espalier.engine.errors import EspalierError, nearest
from espalier.engine.memory.model_memory import plan_memory
from espalier.engine.models.decoder import chosen_quantization
from espalier.engine.models.options import Quantization
from espalier.engine.roles import DRAFT, GENERATOR, VERIFIER
from espalier.experiments.planning import roofline
from espalier.experiments.planning.closed_form import PathLengths, TreeShape, blocks_by_round, states_by_round
from espalier.experiments.planning.inspection import inspect_checkpoint, question_tokens, verifier_checkpoint
from espalier.experiments.planning.options import DeviceOptions, LengthOptions
from espalier.experiments.planning.roofline import Card, ModelShape
from espalier.kernels.cpu import HAS_VNNI
from espalier.kernels.layout import kv_groups
from espalier.prm.limits import PathLimits, verifier_limits
from espalier.prm.scorers import SELF
from espalier.search.algorithms import last_score_suffices, memory_estimate, needs_verifier
from espalier.search.request import SearchRequest
from espalier.search.run.resolve import worst_case_blocks, worst_case_states
from espalier.search.run.settings import DTYPES, TREE, RuntimeSettings, default_cpu_kv_memory

CPU = "cpu"
QUESTION_TOKENS = 32
"""Tokens of asking a model of which only sizes are known about a step: those of `yes-no` for Qwen2.5."""
_MANY = (1, 8, 32)
"""Searches at once for which the speed is planned, besides as many as fit."""
_COPIED, _MULTIPLIED, _REPEATS = 2**26, 1024, 3


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
    request.validate()
    if device.dtype not in DTYPES:
        hint = nearest(device.dtype, DTYPES)
        raise EspalierError(f"--dtype takes one of {', '.join(DTYPES)}, is {device.dtype!r}{hint}")
    if device.card is None and device.memory is None:
        raise EspalierError("--card or --memory is needed: a100, h100, h200 or cpu; or the device's memory, like 24G")
    card, on_cpu, scored = card_of(device), device.card == CPU, needs_verifier(request)
    name = ("float32" if on_cpu else "bfloat16") if device.dtype == "auto" else device.dtype
    dtype: torch.dtype = getattr(torch, name)
    models = planned_models(runtime, scored, dtype, on_cpu)
    draft = _draft(runtime, models[GENERATOR], dtype, on_cpu) if runtime.draft else None
    loaded = models | ({DRAFT: draft} if draft else {})
    question = planned_question(runtime) if scored and runtime.verifier == SELF and VERIFIER not in models else 0
    prompt, step = lengths.prompt_tokens, lengths.step_tokens
    of_verifier = PathLengths(lengths.verifier_prompt_tokens or prompt, lengths.verifier_step_tokens or step)
    by_role = {GENERATOR: PathLengths(prompt, step, pending_tokens=1), VERIFIER: of_verifier}
    tree = TreeShape(request, lengths.steps, lengths.merged_share)
    planned = _PlannedSearch(tree, models, by_role, runtime.block_size)
    search = planned.bytes(runtime.max_batch_tokens)
    weights = sum(model.memory_bytes for model in loaded.values())
    if on_cpu and device.memory is None:
        pool = default_cpu_kv_memory()
    else:
        total = device.memory if device.memory is not None else card.memory if card else 0
        configs, item = [model.config for model in loaded.values()], models[GENERATOR].item_bytes
        utilization, tokens = runtime.gpu_memory_utilization, runtime.max_batch_tokens
        pool = plan_memory(total, total - weights, utilization, configs, tokens, item).kv_pool
    fit = {
        "at_their_peaks": int(pool // search["peak_bytes"]),
        "on_average": int(pool // search["mean_bytes"]),
        "admitted": int(pool // max(1.0, runtime.reserved_share * search["worst_case_bytes"])),
    }
    counts = sorted({*(count for count in _MANY if count <= fit["on_average"]), max(1, fit["on_average"])})
    drafts = None
    if card and runtime.draft:  # for paths of half their length
        usual = roofline.MODEL_ACCEPTANCE if draft else roofline.TREE_ACCEPTANCE
        acceptance = usual if lengths.draft_acceptance is None else lengths.draft_acceptance
        context = round(prompt + lengths.steps * step / 2)
        drafts = roofline.draft_rows(models[GENERATOR], draft, card, context, acceptance, runtime.draft_tokens)
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
        "dtype": name,
        "search": search,
        "device": {"weight_bytes": weights, "kv_pool_bytes": pool},
        "searches_that_fit": fit,
        "speed": [planned.speed(card, count, question) for count in counts] if card else [],
        "drafts": drafts,
    }


@dataclass(frozen=True, slots=True)
class _PlannedSearch:
    """A search on paper: its tree, the models that compute it and the lengths of their paths, by role."""

    tree: TreeShape
    models: Mapping[str, ModelShape]
    lengths: Mapping[str, PathLengths]
    block_size: int

    def tokens(self, role: str, rounds: int) -> tuple[list[float], list[float]]:
        """Tokens of a model in KV by round, in a search of so many: in each block once, and if none were shared."""
        tree, shares = replace(self.tree, rounds=rounds), self.models[role].config.window_shares
        held = blocks_by_round(tree, self.lengths[role], self.block_size, shares)
        return [row.physical * self.block_size for row in held], [row.logical * self.block_size for row in held]

    def bytes(self, batch_tokens: int) -> dict[str, Any]:
        """KV bytes of one search: expected in each round and in the fullest one, and the most that admission counts.

        Raises:
            InvalidRequestError: the algorithm has no closed form.
        """
        physical: dict[str, list[float]] = {}
        logical: dict[str, list[float]] = {}
        for role, model in self.models.items():
            states = [count * model.config.state_bytes for count in states_by_round(self.tree)]
            for found, tokens in zip((physical, logical), self.tokens(role, self.tree.rounds), strict=True):
                kv = (count * model.kv_bytes_per_token for count in tokens)
                found[role] = [size + state for size, state in zip(kv, states, strict=True)]
        rounds = [dict(zip(physical, by_role, strict=True)) for by_role in zip(*physical.values(), strict=True)]
        totals = [sum(by_role.values()) for by_role in rounds]
        fullest = totals.index(max(totals))
        return {
            "rounds": rounds,
            "peak_bytes": totals[fullest],
            "peak_bytes_by_role": rounds[fullest],
            "mean_bytes": sum(totals) / len(totals),
            "logical_peak_bytes": sum(by_round[fullest] for by_round in logical.values()),
            "worst_case_bytes": self._worst_case(batch_tokens),
        }

    def _worst_case(self, batch_tokens: int) -> int:
        """Bytes that admission counts for a search whose limits are the planned lengths."""
        its, rounds = self.lengths[GENERATOR], self.tree.rounds
        step = math.ceil(its.step_tokens)
        limits = {GENERATOR: PathLimits(math.ceil(its.prompt_tokens), step * rounds, step)}
        if VERIFIER in self.models:
            prompt = math.ceil(self.lengths[VERIFIER].prompt_tokens)
            context = max(self.models[VERIFIER].config.max_positions, prompt + 1)
            limits[VERIFIER] = verifier_limits(limits[GENERATOR], prompt, context, rounds, same_vocabulary=True)
        estimates, total = memory_estimate(self.tree.request), 0
        for role, model in self.models.items():
            for shape, layers in kv_groups(model.config.kv_layers).items():
                blocks = worst_case_blocks(estimates, limits[role], self.block_size, shape.window, batch_tokens)
                total += blocks * self.block_size * len(layers) * shape.elements * model.item_bytes
            total += worst_case_states(estimates, limits[role]) * model.config.state_bytes
        return total

    def speed(self, card: Card, searches: int, question: int) -> dict[str, float]:
        """The floor of `searches` searches in step with each other: weights, KV, products and launches, nothing else.

        `question` is the number of tokens that asking the generator about a step of its own path takes, 0 if it is not.
        Where only the last score of a path counts, it is asked once a path.
        """
        generating = scoring = 0.0
        tree, models = self.tree, self.models
        rows, step = searches * tree.children, self.lengths[GENERATOR].step_tokens
        for number in range(1, tree.rounds + 1):
            held = {role: self.tokens(role, number)[0][-1] for role in models}
            # Within a round a child's own step grows from nothing.
            read = held[GENERATOR] - tree.children * step / 2
            context = max(1, round(searches * read / rows))
            generating += step * roofline.decode_seconds(models[GENERATOR], card, math.ceil(rows), context, 0)
            if VERIFIER in models:
                new = tree.children * self.lengths[VERIFIER].step_tokens
                tokens, old = round(searches * new), round(searches * max(0.0, held[VERIFIER] - new))
                scoring += roofline.scoring_seconds(models[VERIFIER], card, tokens, old)
            elif question and (number == tree.rounds or not last_score_suffices(tree.request)):
                asker, held_tokens = replace(models[GENERATOR], outputs=2), round(searches * held[GENERATOR])
                scoring += roofline.scoring_seconds(asker, card, round(rows * question), held_tokens)
        seconds = generating + scoring
        return {
            "searches": searches,
            "seconds": seconds,
            "rounds_per_second": searches * tree.rounds / seconds,
            "generator_share": generating / seconds,
        }


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
    generator = _planned(runtime, GENERATOR, runtime.generator, dtype, on_cpu)
    verifier = runtime.verifier if scored else ""
    if verifier == SELF and not planned_question(runtime):  # the generator's weights, with a KV of their own
        return {GENERATOR: generator, VERIFIER: replace(generator, memory_bytes=0, outputs=2)}
    if verifier and verifier not in roofline.MODELS:
        verifier = verifier_checkpoint(runtime)
    if not verifier:
        return {GENERATOR: generator}
    return {GENERATOR: generator, VERIFIER: _planned(runtime, VERIFIER, verifier, dtype, on_cpu)}


def planned_question(runtime: RuntimeSettings) -> int:
    """Tokens that a step costs where a generator is asked about it on its own path; 0 where paths are read apart.

    Raises:
        CheckpointError: the generator is not found, or cannot be asked.
    """
    return QUESTION_TOKENS if runtime.generator in roofline.MODELS else question_tokens(runtime)


def _draft(runtime: RuntimeSettings, generator: ModelShape, dtype: torch.dtype, on_cpu: bool) -> ModelShape | None:
    """Sizes of the model that drafts; None where the tree does."""
    draft = None if runtime.draft == TREE else _planned(runtime, DRAFT, runtime.draft, dtype, on_cpu)
    for model in filter(None, (generator, draft)):
        if model.config.state_shapes:
            raise EspalierError(f"--draft: {model.name} has recurrent layers, whose states cannot go back")
    return draft


def _planned(runtime: RuntimeSettings, role: str, name: str, dtype: torch.dtype, on_cpu: bool) -> ModelShape:
    """Sizes of the model called `name` that is loaded as `role`; see `planned_models`."""
    quantization: Quantization = getattr(runtime, f"{role}_quantization")
    if name in roofline.MODELS:
        if quantization is Quantization.AUTO:
            quantization = chosen_quantization(roofline.MODELS[name].config, dtype, on_cpu)
        shape = replace(roofline.MODELS[name], item_bytes=dtype.itemsize, quantization=quantization)
        vocabulary = shape.config.vocab_size
        embedding = 0 if shape.outputs == vocabulary else vocabulary * shape.config.hidden_size * shape.item_bytes
        return replace(shape, memory_bytes=shape.weight_bytes + embedding)
    scores = role == VERIFIER
    how = runtime if scores else replace(runtime, verifier_family=None, verifier_reference="")
    found = inspect_checkpoint(name, dtype, quantization, how, scores, CPU if on_cpu else "cuda")
    outputs = 2 if scores else found.config.vocab_size
    return ModelShape(name, found.config, outputs, dtype.itemsize, found.quantization, found.weight_bytes)


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
        return replace(Card(0, 0), **given) if given else None
    cards = roofline.CARDS
    if device.card != CPU and device.card not in cards:
        known = f"it takes {', '.join(cards)} or {CPU}{nearest(device.card, (*cards, CPU))}"
        how = "for another device leave it out, and give --memory, --bandwidth and --matrix-rate"
        raise EspalierError(f"--card {device.card!r} is unknown; {known}; {how}")
    return replace(_measured_cpu() if device.card == CPU else cards[device.card], **given)


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
