"""What a search needs, before a card is rented: KV bytes, searches that fit, rounds per second, on paper."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from espalier.engine.memory.device_memory import plan_memory
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.experiments.planning.closed_form import HeldBlocks, PathLengths, TreeShape, blocks_by_round
from espalier.experiments.planning.devices import PlannedModel
from espalier.experiments.planning.roofline import Card, decode_seconds, scoring_seconds
from espalier.prm.limits import PathLimits, verifier_limits
from espalier.search.algorithms import memory_estimate
from espalier.search.run.memory import worst_case_blocks


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
