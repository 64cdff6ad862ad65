"""Estimates what the cells of a sweep cost, before anything runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from espalier.engine.roles import GENERATOR
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.fewer_paths import holds_the_paths_of
from espalier.experiments.runs.folder import read_samples
from espalier.experiments.runs.grid import distinct
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.sweep import Place, held_requests, places_of
from espalier.search.algorithms import algorithm_of, memory_estimate, named, needs_verifier, with_defaults
from espalier.search.common_fields import DEFAULT_MAX_STEPS
from espalier.search.request import SearchRequest
from espalier.search.run.load import resolve_dtype
from espalier.search.run.settings import RuntimeSettings

_OF_CHECKPOINT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
"""Fields whose default is the checkpoint's."""
MEASURED, SCALED, LONGEST, DERIVED = "its own samples", "samples of", "longest paths", "derived from a larger N"
"""The basis of an estimate."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected cost of the searches of one cell that are not done.

    Attributes:
        name: name of the run folder.
        done: searches that have samples already.
        searches: searches still to run.
        generated_tokens: tokens sampled, in total.
        verifier_tokens: tokens computed by the verifier, in total.
        minutes: wall time; None without samples to tell the speed.
        peak_kv_bytes: KV of one search at its peak, of both models.
        basis: what the figures follow from: samples of this cell, those of another cell scaled by the number of
            candidates, or N and M with every path as long as
            allowed, nothing shared and prompts not counted, which is usually far too much; or nothing is to be searched
            as all samples are derived.
    """

    name: str
    done: int
    searches: int
    generated_tokens: float
    verifier_tokens: float
    minutes: float | None
    peak_kv_bytes: float
    basis: str


def estimates(
    requests: Sequence[SearchRequest],
    problems: Sequence[Problem],
    asked: Sequence[Problem],
    folder: Path,
    runtime: RuntimeSettings,
    *,
    epochs: int = 1,
    share_work: bool = False,
) -> list[Estimate]:
    """Estimate every distinct search; reads the samples in `folder` and the models' configurations, and no weights.

    Args:
        requests: the searches.
        problems: the problems of the benchmark.
        asked: the problems to search.
        folder: folder of the sweep; need not exist.
        runtime: the models.
        epochs: how often each is searched.
        share_work: whether samples are derived from larger searches; see `fewer_paths`.

    Raises:
        CheckpointError: a model is missing or unsupported.
    """
    from espalier.experiments.planning.plan import planned_models  # slow to import: torch

    requests = [named(request, "steps") for request in requests]
    models = planned_models(runtime, any(map(needs_verifier, requests)), resolve_dtype(runtime.dtype, runtime.device))
    kv_bytes_per_token = {role: model.kv_bytes_per_token for role, model in models.items()}
    found = held_requests(folder)
    fill = partial(_filled, opened=found[0][1] if found else None)
    held = [Place(path, request, fill(request)) for path, request in found]
    places = places_of(folder, distinct(requests, with_defaults), held, fill)
    ids = {problem.unique_id for problem in problems}
    samples = {each.path: [s for s in read_samples(each.path) if not s.refused and s.unique_id in ids] for each in held}
    # Samples with a search of their own tell what it costs.
    usages = {path: [sample for sample in its if not sample.derived_from] for path, its in samples.items()}
    wanted = {(problem.unique_id, epoch) for problem in asked for epoch in range(epochs)}
    missing = {each.path: wanted - {sample.key for sample in samples.get(each.path, ())} for each in places}
    costs: list[Estimate] = []
    for place in places:
        lacking = missing[place.path]
        larger = [each for each in places if share_work and holds_the_paths_of(each.effective, place.effective)]
        count = len(lacking.difference(*(missing[each.path] for each in larger)))
        derived = Estimate("", 0, 1, 0, 0, 0, 0, DERIVED)
        one = derived if lacking and not count else _one(place, held, usages, kv_bytes_per_token)
        tokens = {"generated_tokens": count * one.generated_tokens, "verifier_tokens": count * one.verifier_tokens}
        minutes = None if one.minutes is None else count * one.minutes
        done = len(wanted) - len(lacking)
        costs.append(replace(one, name=place.path.name, done=done, searches=count, minutes=minutes, **tokens))
    return costs


def _one(
    place: Place, held: Sequence[Place], samples: Mapping[Path, Sequence[Sample]], kv_bytes_per_token: Mapping[str, int]
) -> Estimate:
    """Expected cost of one search, from the samples of its cell or of the most similar one."""
    wanted = _steps_in_parallel(place.request)
    alike = [each for each in held if samples[each.path] and each.request.algorithm == place.request.algorithm]
    scales = {each.path: wanted / _steps_in_parallel(each.request) for each in alike}
    source = min(scales, key=lambda path: (path != place.path, abs(math.log(scales[path]))), default=None)
    if source is None:
        return _longest(place.request, kv_bytes_per_token)
    scale, usages = scales[source], [sample.usage for sample in samples[source]]
    generated, verified = (scale * fmean(u[name] for u in usages) for name in ("generated_tokens", "verifier_tokens"))
    minutes = scale * fmean(sample.wall_seconds for sample in samples[source]) / 60 or None
    peak = max(1.0, scale) * max(usage["peak_kv_bytes"] for usage in usages)
    basis = MEASURED if source == place.path else f"{SCALED} {source.name}"
    return Estimate("", 0, 1, generated, verified, minutes, peak, basis)


def _longest(request: SearchRequest, kv_bytes_per_token: Mapping[str, int]) -> Estimate:
    """Cost if every path and step is as long as allowed and nothing is shared, without prompts."""
    full = with_defaults(request)
    path = full.path_limit
    step = min(full.max_step_tokens or path, path)
    paths, steps = algorithm_of(full).sampled(full)
    tokens = paths * path + steps * step
    if full.generator_budget:
        tokens = min(tokens, full.generator_budget + full.candidates * step)
    roles = kv_bytes_per_token if needs_verifier(full) else (GENERATOR,)
    at_peak = max(each.paths * path + each.steps * step for each in memory_estimate(full))
    peak = at_peak * sum(kv_bytes_per_token[role] for role in roles)
    return Estimate("", 0, 1, tokens, tokens if needs_verifier(full) else 0, None, peak, LONGEST)


def _steps_in_parallel(request: SearchRequest) -> float:
    """Paths of the greatest length whose tokens a search samples at most, to scale costs by."""
    paths, steps = algorithm_of(request).sampled(request)
    return steps / (request.max_steps or DEFAULT_MAX_STEPS) or paths  # a path besides many steps hardly counts


def _filled(request: SearchRequest, opened: SearchRequest | None) -> SearchRequest:
    """The request with its defaults; those of the checkpoint as in `opened`, the search of a run folder, if any."""
    full = with_defaults(request)
    left = [name for name in _OF_CHECKPOINT if getattr(full, name) is None]
    return replace(full, **{name: getattr(opened, name) for name in left}) if opened else full
