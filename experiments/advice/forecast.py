"""Accuracy and cost of searches on recorded problems: those whose paths were recorded, and those that are modelled."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from espalier.engine.roles import GENERATOR
from espalier.experiments.advice.modelled_search import SearchModel, UnpredictableSearchError
from espalier.experiments.advice.recorded import OwnTokens, RecordedStep, RecordedTree, fit_step_states
from espalier.experiments.prm_evaluation.metrics import auc_within
from espalier.experiments.runs.grid import settings_of
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.statistics import pass_at_k
from espalier.search.algorithms import (
    algorithm_of,
    answers_suffice,
    has_independent_paths,
    needs_verifier,
    vote_of,
)
from espalier.search.common_fields import Aggregation, Vote
from espalier.search.request import SearchRequest
from espalier.search.result import Candidate
from espalier.search.tree import aggregate
from espalier.search.voting.vote import select

_DRAWS = 40
"""Draws of recorded paths for each N."""
_MODELS = 10
"""Models, each with states and rates of its own, for each modelled search."""
_RESAMPLES = 2000
_MODEL_ERROR = 0.055
"""Root mean square error of modelled step-by-step searches beside runs of the bundled pair, rounded up."""
_RIGHT = "right"


class Basis(StrEnum):
    """The origin of an accuracy."""

    RUN = "run"  # it was run
    RECORDED = "recorded"  # votes over draws of the recorded paths
    PREDICTED = "predicted"  # searches on modelled trees


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of computing on this machine, measured while the paths were recorded.

    Attributes:
        generator_seconds: of one computed token.
        verifier_seconds: of one token that the verifier reads.
        sampled: tokens that the generator computes for each of a tree's steps, see `OwnTokens`.
        read: tokens that the verifier reads for each of the steps' tokens.
        read_of_prompt: the same for each of the generator's prompt.
    """

    generator_seconds: float
    verifier_seconds: float
    sampled: float = 1.0
    read: float = 1.0
    read_of_prompt: float = 1.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """A search, and what it would give and cost on problems like the recorded ones.

    Attributes:
        settings: the fields that it uses.
        candidates: children that it samples in a round at most.
        basis: what the accuracy follows from.
        accuracy: share of problems solved.
        low: of its 95% interval, as of a run over as many problems.
        high: of the same.
        generator_tokens: that the generator computes a problem, prompts included.
        verifier_tokens: that the verifier reads a problem.
        seconds: of a problem, where as many searches run at once as were sampled.
        outcomes: share of repetitions that solve each problem, moved like the accuracy.
    """

    settings: Mapping[str, Any]
    candidates: int
    basis: Basis
    accuracy: float
    low: float
    high: float
    generator_tokens: float
    verifier_tokens: float
    seconds: float
    outcomes: np.ndarray = field(repr=False, compare=False)

    @property
    def tokens(self) -> float:
        """Tokens of both models."""
        return self.generator_tokens + self.verifier_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-serializable values; tokens rounded, shares and seconds to four digits."""
        return {
            "search": {name: value for name, value in self.settings.items() if value is not None},
            "candidates": self.candidates,
            "basis": str(self.basis), "accuracy": round(self.accuracy, 4), "low": round(self.low, 4),
            "high": round(self.high, 4), "generator_tokens": round(self.generator_tokens),
            "verifier_tokens": round(self.verifier_tokens), "seconds": round(self.seconds, 4),
        }  # fmt: skip


def _outcomes(of_problems: Iterable[Sequence[tuple[float, float, float]]]) -> np.ndarray:
    """Outcomes of each problem's repetitions, `[3, P, R]`: whether they solve it, and the tokens of their steps.

    Of the latter, those that siblings begin with alike count once in the last of the three.
    """
    return np.ascontiguousarray(np.moveaxis(np.array(list(of_problems), float), -1, 0))


class Forecaster:
    """Forecasts searches from the recorded trees of some problems."""

    def __init__(self, trees: Sequence[RecordedTree], costs: Costs, seed: int = 0) -> None:
        """Fit the states of the trees' steps; there is at least one tree with a path."""
        fit_step_states(trees)
        self.trees = trees
        self.paths = min(tree.paths for tree in trees)
        self.costs = costs
        self._seed = seed
        self._prompt_tokens = float(np.mean([tree.prompt_tokens for tree in trees]))
        self._own_tokens = OwnTokens(trees)
        self._models = [SearchModel(trees, seed + i, self._own_tokens) for i in range(_MODELS)]
        self._recorded, self._modelled = cache(self._vote_over_paths), cache(self._search_models)
        self._error = 0.0  # of the model's accuracy of step-by-step searches, where one was run
        self._more_tokens = 1.0  # than the model has, likewise

    def step_by_step(self, requests: Sequence[SearchRequest]) -> SearchRequest | None:
        """The search to run and to give to `correct`: a step-by-step one of about as many candidates as recorded paths.

        Of most candidates, at most as many as the paths, else of fewest; None if the model has none of the requests.
        """

        def size(request: SearchRequest) -> int:
            candidates = algorithm_of(request).candidates(request)
            return candidates if candidates <= self.paths else -candidates

        for request in sorted(requests, key=size, reverse=True):
            if not algorithm_of(request).whole_paths:
                with suppress(UnpredictableSearchError):
                    self.forecast(request)
                    return request
        return None

    def correct(self, request: SearchRequest, samples: Mapping[str, Sample]) -> None:
        """Move the forecasts of all step-by-step searches by what the model errs by where one was run on the problems.

        Recorded paths do not tell how a verifier's errors add up over the steps of a search. A run of few problems
        tells less, and moves them less: by what is expected of a normal error of `_MODEL_ERROR`.
        """
        run = self.of_run(request, samples)
        found = self._with_costs(request, Basis.PREDICTED, self._modelled(request))
        error = run.outcomes - found.outcomes
        noise = float(error.var()) / len(error)
        self._error = float(error.mean()) * _MODEL_ERROR**2 / (_MODEL_ERROR**2 + noise)
        self._more_tokens = run.generator_tokens / found.generator_tokens

    def forecast(self, request: SearchRequest) -> Forecast:
        """Forecast a search with every default filled in.

        Raises:
            UnpredictableSearchError: it asks for what samples do not tell, or for scores that they lack.
        """
        inner = (step for tree in self.trees for step in tree.steps if step.end is None)
        if not answers_suffice(request) and all(step.score is None for step in inner):
            raise UnpredictableSearchError("the verifier scores whole answers only")
        independent = has_independent_paths(request)
        if independent and request.beam_width <= self.paths:
            return self._with_costs(request, Basis.RECORDED, self._recorded(request))
        found = self._modelled(request)
        if not algorithm_of(request).whole_paths:
            return self._with_costs(request, Basis.PREDICTED, found, self._error, self._more_tokens)
        shift = 0.0
        if independent:  # how far the model is off where more is known
            known = replace(request, beam_width=self.paths)
            shift = float(self._recorded(known)[0].mean() - self._modelled(known)[0].mean())
        return self._with_costs(request, Basis.PREDICTED, found, shift)

    def _with_costs(
        self, request: SearchRequest, basis: Basis, found: np.ndarray, shift: float = 0.0, more_tokens: float = 1.0
    ) -> Forecast:
        """A search that was not run, with what its tokens cost; `shift` moves its accuracy."""
        costs, prompt, (right, steps, own) = self.costs, self._prompt_tokens, found
        generator = more_tokens * (prompt + costs.sampled * float(own.mean()))
        verifier = costs.read_of_prompt * prompt + costs.read * float(steps.mean()) if needs_verifier(request) else 0.0
        return self._made(request, basis, right, (generator, verifier * more_tokens), shift)

    def _made(
        self, request: SearchRequest, basis: Basis, right: np.ndarray, tokens: tuple[float, float], shift: float = 0.0
    ) -> Forecast:
        low, high = _interval(right, self._seed)
        of_problems = right.mean(1)
        accuracy = float(of_problems.mean())
        if basis is Basis.PREDICTED:  # as squares: what the model errs by does not depend on the problems drawn
            low = accuracy - math.hypot(accuracy - low, _MODEL_ERROR)
            high = accuracy + math.hypot(high - accuracy, _MODEL_ERROR)
        accuracy, low, high = (float(np.clip(each + shift, 0, 1)) for each in (accuracy, low, high))
        seconds = tokens[0] * self.costs.generator_seconds + tokens[1] * self.costs.verifier_seconds
        settings, candidates = settings_of(request), algorithm_of(request).candidates(request)
        return Forecast(settings, candidates, basis, accuracy, low, high, *tokens, seconds, of_problems + shift)

    def of_run(self, request: SearchRequest, samples: Mapping[str, Sample]) -> Forecast:
        """A search that was run on the recorded problems, by their ids; a problem without a sample is not solved."""
        right = np.array([[float(s.correct) if (s := samples.get(t.problem_id)) else 0.0] for t in self.trees])
        usages = [(each.usage["generator_tokens"], each.usage["verifier_tokens"]) for each in samples.values()]
        generator, verifier = np.mean(usages, axis=0).tolist()
        return self._made(request, Basis.RUN, right, (generator, verifier))

    def _search_models(self, request: SearchRequest) -> np.ndarray:
        return _outcomes([model.search(i, request) for model in self._models] for i in range(len(self.trees)))

    def _vote_over_paths(self, request: SearchRequest) -> np.ndarray:
        how = request.aggregation if needs_verifier(request) else None

        def outcome(paths: Sequence[RecordedStep]) -> tuple[float, float, float]:
            steps = dict.fromkeys(step for end in paths for step in end.lineage())  # the distinct ones
            tokens, own_tokens = sum(step.tokens for step in steps), self._own_tokens.of_all(steps)
            return _solved(paths, vote_of(request), how), tokens, own_tokens

        draws = (_draws_of(tree, request.beam_width, f"{self._seed} {i}") for i, tree in enumerate(self.trees))
        return _outcomes(list(map(outcome, row)) for row in draws)

    def pass_at(self) -> dict[int, float]:
        """The probability that any of k paths is right, for k of 1, 2, 4 and so on, and of all."""
        ks = sorted({*(2**i for i in range(self.paths.bit_length())), self.paths})
        return {k: float(np.mean([pass_at_k(tree.paths, tree.right, k) for tree in self.trees])) for k in ks}

    def path_rank(self, how: Aggregation) -> float | None:
        """The share of pairs of a right and a wrong path of a problem in which the right one has the higher score."""
        groups: list[tuple[list[float], list[float]]] = []
        for tree in self.trees:
            right, wrong = list[float](), list[float]()
            for end in tree.ends():
                if end.complete:
                    (right if end.right else wrong).extend([aggregate(end.scores(), how) or 0.0] * end.count)
            groups.append((right, wrong))
        return auc_within(groups)

    def sibling_rank(self, how: Aggregation) -> tuple[float | None, int]:
        """The same of siblings of which one's paths end right more often; and the number of pairs."""
        pairs = (pair for tree in self.trees for pair in _sibling_pairs(tree, how))
        ahead = [(one > other) + 0.5 * (one == other) for one, other in pairs]
        return (float(np.mean(ahead)) if ahead else None), len(ahead)

    def useful_width(self, request: SearchRequest) -> int:
        """The most paths of which the best-scored one is right more often than of half as many.

        A score that errs gains less from each doubling, and loses where the best of many is one that it overrates. A
        doubling counts if it gains more than its standard error over the problems.
        """
        widths = [2**i for i in range(self.paths.bit_length())]
        asked = (replace(request, beam_width=width, vote=Vote.NAIVE) for width in widths)
        for width, (before, now) in zip(
            widths, pairwise(self._recorded(each)[0].mean(1) for each in asked), strict=False
        ):
            gain = now - before
            if gain.mean() <= gain.std() / len(gain) ** 0.5:
                return width
        return widths[-1]


def difference(one: Forecast, other: Forecast, seed: int = 0) -> tuple[float, float, float]:
    """By how much `one` solves more, and the 95% bootstrap interval over problems of that."""
    ahead = one.outcomes - other.outcomes
    draws = np.random.default_rng(seed).integers(0, len(ahead), (_RESAMPLES, len(ahead)))
    low, high = np.quantile(ahead[draws].mean(1), (0.025, 0.975))
    return float(ahead.mean()), float(low), float(high)


def _interval(right: np.ndarray, seed: int) -> tuple[float, float]:
    """95% bootstrap interval of a run: problems are drawn with replacement, and of each any repetition."""
    rng = np.random.default_rng(seed)
    problems = rng.integers(0, right.shape[0], (_RESAMPLES, right.shape[0]))
    repetitions = rng.integers(0, right.shape[1], problems.shape)
    low, high = np.quantile(right[problems, repetitions].mean(1), (0.025, 0.975))
    return float(low), float(high)


def _draws_of(tree: RecordedTree, paths: int, seed: str) -> list[list[RecordedStep]]:
    every = [end for end in tree.ends() for _ in range(end.count)]
    draw = random.Random(seed)
    return [every] if paths == len(every) else [draw.sample(every, paths) for _ in range(_DRAWS)]


def _solved(paths: Sequence[RecordedStep], vote: Vote, how: Aggregation | None) -> bool:
    """Return whether a vote solves it; without `how`, no score is known, and none breaks ties."""
    candidates = [
        Candidate(i, _RIGHT if end.right else end.answer, aggregate(end.scores(), how) if how else None, 1, ())
        for i, end in enumerate(paths)
        if end.complete
    ]
    best = select(candidates, vote).best
    return best is not None and best.answer == _RIGHT


def _sibling_pairs(tree: RecordedTree, how: Aggregation) -> Iterator[tuple[float, float]]:
    """Scores of siblings, first that of the one whose paths end right more often."""
    right: dict[RecordedStep, int] = {}
    for step in reversed(tree.steps):
        right[step] = step.count * step.right + sum(right[child] for child in step.children)
        values = [
            (right[child] / child.count, score)
            for child in step.children
            if (score := aggregate(child.scores(), how)) is not None
        ]
        yield from ((one, other) for value, one in values for worse, other in values if value > worse)


def costs_of(
    trees: Sequence[RecordedTree], usages: Sequence[Mapping[str, Any]], seconds: Mapping[str, float], wall: float
) -> Costs:
    """The costs of recorded searches.

    Args:
        trees: theirs.
        usages: theirs, as in `samples.jsonl`.
        seconds: of the engine's steps by role, where they are known: they share out the seconds that passed.
        wall: seconds that passed.
    """
    prompts = np.array([tree.prompt_tokens for tree in trees], float)
    steps = np.array([sum(step.tokens for step in tree.steps) for tree in trees], float)
    own_tokens = sum(map(OwnTokens(trees).of_all, (tree.steps for tree in trees)))
    counted = [(usage["generator_tokens"], usage["verifier_tokens"]) for usage in usages]
    generator, verifier = np.array(counted, float).T
    stepped = sum(seconds.values())
    share = seconds.get(GENERATOR, 0.0) / stepped if stepped else generator.sum() / (generator + verifier).sum()
    of_prompt, of_steps = np.linalg.lstsq(np.stack([prompts, steps], 1), verifier, rcond=None)[0]
    if min(of_prompt, of_steps) < 0:  # too few problems to tell both
        of_prompt = of_steps = verifier.sum() / (prompts + steps).sum()
    return Costs(
        generator_seconds=float(wall * share / generator.sum()),
        verifier_seconds=float(wall * (1 - share) / max(1.0, verifier.sum())),
        sampled=float((generator - prompts).sum() / max(1.0, own_tokens)),
        read=float(of_steps),
        read_of_prompt=float(of_prompt),
    )
