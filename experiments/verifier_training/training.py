"""Teaches linear heads to predict the values of steps from hidden states, and chooses among them by cross-fitting.

A head is chosen by the pairs of steps of one problem of which one should have the higher score.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from espalier.engine.errors import EspalierError
from espalier.experiments.prm_evaluation.metrics import auc, auc_of_problems
from espalier.experiments.runs.statistics import calibration
from espalier.experiments.verifier_training.features import LAST, Readings

_MEASURED = 0.1
"""Share of the problems that teach nothing and measure what was learned."""
_FOLDS = 5
_PENALTIES = (1e-2, 1e-1, 1e-3)
"""Weights of the squared length of a head's direction beside the loss, for states made standard."""
_WORTH_A_TAP = 0.01
"""By how much a head on a middle layer's states must rank better than one after the last: it may be chance."""
_MAX_COUNTED = 32
"""A step that more solutions have counts no more than so often in a measure."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of rows of which the first should have the higher score, and what each weighs."""

    better: np.ndarray
    worse: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, problems: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Self:
        """Join those of problems, each with its better and worse rows and weights; a problem's weigh 1 together."""
        nothing = np.zeros(0, int), np.zeros(0, int), np.zeros(0)
        better, worse, weights = zip(nothing, *problems, strict=True)
        return cls(*map(np.concatenate, (better, worse, [each / each.sum() for each in weights])))

    def share_ahead(self, column: np.ndarray) -> float | None:
        """The weighed share of pairs whose better row has the higher value; equal values count half."""
        if not len(self.weights):
            return None
        ahead = column[self.better] - column[self.worse]
        return float(((ahead > 0) + 0.5 * (ahead == 0)) @ self.weights / self.weights.sum())


def solution_pairs(readings: Readings, problems: Iterable[int]) -> Pairs:
    """Right and wrong solutions of one problem, weighed by how often they were drawn."""

    def of(problem: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ends = np.flatnonzero((readings.problems == problem) & (readings.right >= 0))
        right, wrong = ends[readings.right[ends] == 1], ends[readings.right[ends] == 0]
        weights = np.outer(readings.samples[right], readings.samples[wrong]).astype(float).ravel()
        return np.repeat(right, len(wrong)), np.tile(wrong, len(right)), weights

    return Pairs.of(map(of, problems))


def sibling_pairs(readings: Readings, problems: Iterable[int]) -> Pairs:
    """Steps behind one step of which one ends right more often, weighed by how much."""

    def of(problem: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = np.flatnonzero(readings.problems == problem)
        alike = readings.parents[rows][:, None] == readings.parents[rows][None]
        ahead = readings.values[rows][:, None] - readings.values[rows][None]
        one, other = np.nonzero(alike & (ahead > 0))
        return rows[one], rows[other], ahead[one, other].astype(float)

    return Pairs.of(map(of, problems))


class TaughtHead(NamedTuple):
    """A linear head, and what it tells of steps that it was not taught.

    Attributes:
        head: maps states to the calibrated logit of a step's value.
        scores: of the readings' steps, `[S]`, by heads that were not taught them; NaN where all were.
        problems: numbers of those whose steps have such scores.
        summary: what `training.json` is to say of it.
    """

    head: nn.Linear
    scores: np.ndarray
    problems: np.ndarray
    summary: dict[str, Any]


def best_head(readings: Readings, teach: np.ndarray, seed: int) -> TaughtHead:
    """Teach linear heads on the states of each layer, and take the one that ranks best on problems it was not taught.

    Each is taught five times, on four fifths of the problems, and scores the others. Layer and penalty are those with
    which the mean of a solution's scores ranks best within a problem, and the last layer unless another is better by a
    hundredth. That head is then taught on all of them. Its logit is calibrated by a slope and an offset (Platt,
    1999), fitted on the scores of the fifths.

    Args:
        readings: steps of all problems.
        teach: numbers of those that teach.
        seed: of the fifths.

    Returns:
        The head; its summary has `auc_by_layer`, the `penalty`, and the `layer` whose states are read as they enter it,
        if not the last ones.

    Raises:
        EspalierError: all steps have one label.
    """
    taught = np.isin(readings.problems, teach)
    if len(np.unique(readings.values[taught])) == 1:
        raise EspalierError("all steps have the same value, so there is nothing to learn; sample more problems")
    pairs = solution_pairs(readings, teach)
    found: list[tuple[float, int, float, np.ndarray]] = []
    for layer in readings.layers:
        ranked = list[tuple[float, int, float, np.ndarray]]()
        for penalty in _PENALTIES:
            logits = _cross_fitted(readings, layer, teach, penalty, seed)
            rank = pairs.share_ahead(readings.path_means(sigmoid(logits)))
            ranked.append((0.5 if rank is None else rank, layer, penalty, logits))
        found.append(max(ranked, key=lambda one: one[0]))
    _, layer, penalty, logits = max(found, key=lambda one: one[0] - (0.0 if one[1] == LAST else _WORTH_A_TAP))
    head = LinearHead.fit(readings, layer, teach, penalty).of_plain_states()
    slope, offset = fit_line(logits, readings, taught)
    rescale(head, slope, offset)
    chosen: dict[str, Any] = {"penalty": penalty} | ({"layer": layer} if layer != LAST else {})
    chosen["auc_by_layer"] = {"last" if layer == LAST else str(layer): rank for rank, layer, *_ in found}
    return TaughtHead(head, sigmoid(slope * logits + offset), teach, chosen)


@dataclass(frozen=True, slots=True)
class LinearHead:
    """A linear head on states that are made standard.

    Attributes:
        linear: maps standard states `[S, hidden]` to logits `[S, 1]`.
        mean: `[hidden]`, subtracted from states to make them standard.
        scale: `[hidden]`, which they are divided by then.
    """

    linear: nn.Linear
    mean: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def fit(cls, readings: Readings, layer: int, problems: np.ndarray, penalty: float) -> "LinearHead":
        """Fit it to the values of some problems' steps, each weighed by the solutions that have it.

        Args:
            readings: the steps.
            layer: the one whose states are read.
            problems: numbers of those that teach.
            penalty: see `_PENALTIES`.
        """
        rows = np.isin(readings.problems, problems)
        states = torch.from_numpy(readings.states_of(layer)[rows])
        mean, scale = states.mean(0), states.std(0) + 1e-6
        states = (states - mean).div_(scale)
        linear = nn.Linear(states.shape[1], 1)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        loss = _value_loss(readings, rows, torch.float32)
        minimise(lambda: loss(linear(states)[:, 0]) + penalty * linear.weight.square().sum(), list(linear.parameters()))
        return cls(linear, mean, scale)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The logits `[S, 1]` of states `[S, hidden]`."""
        return self.linear((states - self.mean) / self.scale)

    def of_plain_states(self) -> nn.Linear:
        """The same head for states as they are; `linear` becomes it."""
        with torch.no_grad():
            self.linear.weight.div_(self.scale)
            self.linear.bias.sub_(self.linear.weight @ self.mean)
        return self.linear


def _cross_fitted(readings: Readings, layer: int, teach: np.ndarray, penalty: float, seed: int) -> np.ndarray:
    """Logits of the teaching problems' steps by heads that were taught on the other fifths; NaN for other steps."""
    logits = np.full(len(readings.values), np.nan, np.float32)
    for fold in np.array_split(np.random.default_rng(seed).permutation(teach), _FOLDS):
        rows = np.isin(readings.problems, fold)
        head = LinearHead.fit(readings, layer, np.setdiff1d(teach, fold), penalty)
        logits[rows] = logits_of(head, readings.states_of(layer)[rows])
    return logits


def minimise(loss_of: Callable[[], torch.Tensor], parameters: list[torch.Tensor]) -> None:
    """Find the parameters of the least loss by L-BFGS."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def _value_loss(readings: Readings, rows: np.ndarray, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """The mean loss of logits of some rows by their values, each weighed by the solutions that have the step."""
    values, samples = (torch.from_numpy(each[rows]).to(dtype) for each in (readings.values, readings.samples))
    total = samples.sum()
    return lambda logits: F.binary_cross_entropy_with_logits(logits, values, samples, reduction="sum") / total


def fit_line(sums: np.ndarray, readings: Readings, rows: np.ndarray) -> tuple[float, float]:
    """The slope and the offset that make probabilities of numbers, `[S]`, by the values of some rows (Platt, 1999).

    The slope is 1, and the offset 0, where a slope that is not above 0 fits best: so little data could turn the ranking
    round.
    """
    line = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    x, loss = torch.from_numpy(sums[rows]).double(), _value_loss(readings, rows, torch.float64)
    minimise(lambda: loss(line[0] * x + line[1]), [line])
    slope, offset = line.detach().tolist()
    return (slope, offset) if slope > 0 else (1.0, 0.0)


def rescale(head: nn.Linear, slope: float, offset: float) -> None:
    """Make a head give `slope` times its logit, plus `offset`."""
    with torch.no_grad():
        head.weight.mul_(slope)
        head.bias.mul_(slope).add_(offset)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The probabilities that logits stand for."""
    return torch.from_numpy(logits).sigmoid().numpy()


def logits_of(head: Callable[[torch.Tensor], torch.Tensor], states: np.ndarray) -> np.ndarray:
    """A head's logits of states `[S, hidden]`, `[S]`."""
    with torch.no_grad():
        return head(torch.from_numpy(states))[:, 0].numpy()


def split(readings: Readings, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the problems into those that teach, and a tenth that measures.

    Raises:
        EspalierError: there are too few.
    """
    problems = np.unique(readings.problems)
    if len(problems) < 10:
        raise EspalierError(f"a verifier needs at least 10 problems with steps, there are {len(problems)}")
    order = np.random.default_rng(seed).permutation(problems)
    measures = max(1, round(_MEASURED * len(order)))
    return order[measures:], order[:measures]


def measure_steps(scores: np.ndarray, readings: Readings, problems: np.ndarray) -> dict[str, Any]:
    """Measure how scores of steps, `[S]`, rank and how well they are calibrated, on some problems."""
    pairs = list[tuple[np.ndarray, np.ndarray]]()
    for problem in problems:
        rows = readings.problems == problem
        counts = np.minimum(readings.samples[rows], _MAX_COUNTED)
        right = np.rint(readings.values[rows] * counts).astype(int)
        pairs.append((np.repeat(scores[rows], right), np.repeat(scores[rows], counts - right)))
    right, wrong = map(np.concatenate, zip(*pairs, strict=True))
    within = auc_of_problems([(auc(*pair), len(pair[0]) * len(pair[1])) for pair in pairs])
    bins, error = calibration([*right, *wrong], [True] * len(right) + [False] * len(wrong))
    return {
        "problems": len(pairs),
        "auc": auc(right, wrong),
        "auc_within_a_problem": within and within.value,
        "ranks": within and asdict(within),
        "calibration": bins,
        "expected_calibration_error": error,
    }
