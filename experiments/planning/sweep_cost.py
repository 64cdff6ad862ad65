"""Estimates what the cells of a sweep cost, before anything runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from espalier.engine.roles import GENERATOR
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.fewer_paths import holds_the_paths_of
from espalier.experiments.runs.folder import read_samples
from espalier.experiments.runs.grid import cell_name, distinct, key_of, varied_fields
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.sweep import held_requests
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


@dataclass(frozen=True, slots=True)
class _Measured:
    name: str
    request: SearchRequest
    samples: list[Sample]

    @property
    def searched(self) -> list[Sample]:
        """Samples with a search of their own, which tell what it costs."""
        return [sample for sample in self.samples if not sample.derived_from]


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
    searches = distinct(requests, with_defaults)
    by_id = {problem.unique_id: problem for problem in problems}
    held: list[_Measured] = []
    for path, request in held_requests(folder):
        samples = [s for s in read_samples(path) if not s.refused]
        held.append(_Measured(path.name, request, [s for s in samples if s.unique_id in by_id]))
    full = [_filled(request, held) for request in searches]
    varied = varied_fields([*(with_defaults(each.request) for each in held), *full])
    wanted = {(problem.unique_id, epoch) for problem in asked for epoch in range(epochs)}
    owned = [next((each for each in held if _same(request, each.request)), None) for request in searches]
    missing = [wanted - {sample.key for sample in own.samples} if own else wanted for own in owned]
    found: list[Estimate] = []
    for request, filled, own, lacking in zip(searches, full, owned, missing, strict=True):
        left = set(lacking)
        for other, its in zip(full, missing, strict=True):
            if share_work and holds_the_paths_of(other, filled):
                left -= its
        name = own.name if own else cell_name(filled, varied)
        done, count = len(wanted) - len(lacking), len(left)
        derived = Estimate("", 0, 1, 0, 0, 0, 0, DERIVED)
        one = derived if lacking and not left else _one(request, own, held, kv_bytes_per_token)
        tokens = {"generated_tokens": count * one.generated_tokens, "verifier_tokens": count * one.verifier_tokens}
        minutes = None if one.minutes is None else count * one.minutes
        found.append(replace(one, name=name, done=done, searches=count, minutes=minutes, **tokens))
    return found


def _one(
    request: SearchRequest, own: _Measured | None, held: Sequence[_Measured], kv_bytes_per_token: Mapping[str, int]
) -> Estimate:
    """Expected cost of one search."""
    wanted = _steps_in_parallel(request)
    alike = [each for each in held if each.searched and each.request.algorithm == request.algorithm]
    nearest = min(alike, key=lambda each: abs(math.log(_steps_in_parallel(each.request) / wanted)), default=None)
    source = own if own and own.searched else nearest
    if source is None:
        return _longest(request, kv_bytes_per_token)
    scale = 1.0 if source is own else wanted / _steps_in_parallel(source.request)
    usages = [sample.usage for sample in source.searched]
    generated, verified = (scale * fmean(u[name] for u in usages) for name in ("generated_tokens", "verifier_tokens"))
    minutes = scale * fmean(sample.wall_seconds for sample in source.searched) / 60 or None
    peak = max(1.0, scale) * max(usage["peak_kv_bytes"] for usage in usages)
    basis = MEASURED if source is own else f"{SCALED} {source.name}"
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


def _filled(request: SearchRequest, held: Sequence[_Measured]) -> SearchRequest:
    """The request with its defaults; those of the checkpoint as the first run folder has them, if there is one."""
    full = with_defaults(request)
    if not held:
        return full
    opened = {name: getattr(held[0].request, name) for name in _OF_CHECKPOINT if getattr(full, name) is None}
    return replace(full, **opened)


def _same(asked: SearchRequest, held: SearchRequest) -> bool:
    """Return true if the held search, which has no open fields, is the asked one as far as that says."""
    full = with_defaults(asked)
    known = {name: value for name, value in full.to_dict().items() if value is not None}
    filled = replace(with_defaults(held), **known)
    return key_of(filled) == key_of(with_defaults(held))
