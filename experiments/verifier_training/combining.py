"""Combines evidence of paths into one score that ranks paths of a problem, and siblings, and measures how well it does.

The weights of evidence are fitted by a pairwise logistic loss: of two solutions of one problem the right one should
have the higher score. Every problem weighs the same. The sum is then calibrated by a slope and an offset (Platt, 1999)
on whole solutions, so that their scores are probabilities. Both are fitted on the problems that taught the head, with
scores of heads that were not taught them; see `best_head`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from espalier.experiments.prm_evaluation.metrics import auc_of_problems
from espalier.experiments.prm_evaluation.report import plot_reliability
from espalier.experiments.runs.files import replacing, write_whole
from espalier.experiments.verifier_training.features import LAST, Readings
from espalier.experiments.verifier_training.training import (
    TaughtHead,
    best_head,
    fit_line,
    logits_of,
    measure_steps,
    minimise,
    sibling_pairs,
    sigmoid,
    solution_pairs,
    split,
)
from espalier.prm.base import Sampled
from espalier.prm.families import trunk_evidence
from espalier.prm.path_evidence import FEATURES, Combination, PathEvidence
from espalier.prm.scorers import trunk_head

_DECAY = 1e-3
_WORTH_COMBINING = 0.01


@dataclass(frozen=True, slots=True)
class LearnedEvidence:
    """A head on a trunk's states, and how its scores are combined with other evidence.

    Attributes:
        head: maps states to the logit of a step's value.
        combination: makes a score of a path's evidence.
        summary: the content of `training.json`.
    """

    head: nn.Linear
    combination: Combination
    summary: dict[str, Any]

    @classmethod
    def fit(cls, readings: Readings, taught: TaughtHead, measure: np.ndarray, record: dict[str, Any]) -> Self:
        """Combine a head's scores of the problems that were not taught to it with other evidence; others `measure`."""
        combination = _fitted(path_features(readings, taught.scores), readings, taught.problems)
        summary = (
            record | {"problems_by_use": {"teach": len(taught.problems), "measure": len(measure)}} | taught.summary
        )
        summary |= {"weights": dict(zip(FEATURES, combination.weights, strict=True)), "offset": combination.offset}
        return cls(taught.head, combination, summary)

    def scores(self, readings: Readings) -> np.ndarray:
        """The head's scores of steps, `[S]`."""
        return sigmoid(logits_of(self.head, readings.states_of(self.summary.get("layer", LAST))))

    def features(self, readings: Readings) -> np.ndarray:
        """The evidence of the path to each step, see `path_features`."""
        return path_features(readings, self.scores(readings))

    def measured(self, features: np.ndarray, readings: Readings, problems: np.ndarray) -> dict[str, Any]:
        """Measure how evidence, `[S, len(FEATURES)]`, ranks on some problems, together and alone; see `ranks`."""
        columns = {"score": self.score(features)} | dict(zip(FEATURES, features.T, strict=True))
        return {"problems": len(problems), **ranks(columns, readings, problems)}

    def score(self, features: np.ndarray) -> np.ndarray:
        """The score of each row of evidence, `[S, len(FEATURES)]`."""
        return np.array([self.combination.score(row) for row in features.tolist()])


def train_trunk_evidence(
    readings: Readings,
    folder: Path,
    trunk: dict[str, str],
    record: dict[str, Any],
    seed: int,
    taught: TaughtHead | None = None,
) -> LearnedEvidence:
    """Teach heads on the trunk's states and combine them with other evidence; write what `--verifier-family` takes.

    Nine tenths of the problems teach heads and fit the combination, one measures.

    Args:
        readings: of at least 10 problems.
        folder: gets `config.json`, `model.safetensors` and `training.json`.
        trunk: name and digest of the trunk.
        record: what else `training.json` is to say.
        seed: of the split.
        taught: a head to take; None teaches one.

    Returns:
        What was learned; `measured` of its summary has the AUC within a problem of whole solutions and of siblings, for
        the score and for each kind of evidence alone.

    Raises:
        EspalierError: there are too few problems, or all steps have one label.
    """
    teach, measure = split(readings, seed)
    taught = taught or best_head(readings, teach, seed)
    learned = LearnedEvidence.fit(readings, taught, measure, {"trunk": trunk, **record})
    features = learned.features(readings)
    score = learned.score(features)
    known = auc_of_problems([(solution_pairs(readings, [each]).share_ahead(score), 1.0) for each in measure])
    learned.summary["measured"] = learned.measured(features, readings, measure) | {"ranks": known and asdict(known)}
    _write(folder, trunk_evidence.ARCHITECTURE, trunk_evidence.NAME, readings, learned)
    return learned


def train_own_evidence(
    readings: Readings, folder: Path, trunk: dict[str, str], record: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Teach a head on the generator's own states, and combine its scores along a path; write what `--verifier` takes.

    The evidence is that of `train_trunk_evidence`, as far as the generator has it of its own paths as it samples them.
    Where it does not rank the teaching problems' solutions better by a hundredth than the head's last score does, that
    stays the score.

    Args:
        readings: of at least 10 problems.
        folder: gets `config.json`, `model.safetensors`, `training.json` and `reliability.svg`.
        trunk: name and digest of the generator.
        record: what else `training.json` is to say.
        seed: of the split.

    Returns:
        The content of `training.json`; it has the `weights` if they are taken. `measured` is of the head's scores of
        steps, with the AUC of the evidence as for `train_trunk_evidence`.

    Raises:
        EspalierError: there are too few problems, or all steps have one label.
    """
    teach, measure = split(readings, seed)
    taught = best_head(readings, teach, seed)
    learned = LearnedEvidence.fit(readings, taught, measure, {"trunk": trunk, **record})
    summary = learned.summary
    ranked = learned.measured(path_features(readings, taught.scores), readings, teach)["auc_solutions"]
    if (ranked["score"] or 0.0) <= (ranked["head"] or 0.0) + _WORTH_COMBINING:
        del summary["weights"], summary["offset"]
    summary["measured"] = measure_steps(learned.scores(readings), readings, measure)
    summary["measured"] |= learned.measured(learned.features(readings), readings, measure)
    _write(folder, trunk_head.ARCHITECTURE, "trunk-head", readings, learned)
    plot_reliability(summary["measured"] | {"threshold": 0.5}, folder / "reliability.svg")
    return summary


def _write(folder: Path, architecture: str, model_type: str, readings: Readings, learned: LearnedEvidence) -> None:
    """Write a verifier: its head, `training.json`, and of that what `config.json` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"score.0.{name}": value.detach().contiguous() for name, value in learned.head.named_parameters()}
    with replacing(folder / "model.safetensors") as partial:
        save_file(tensors, partial)
    config = {"architectures": [architecture], "model_type": model_type, "hidden_size": readings.hidden}
    taken = {name: learned.summary[name] for name in ("trunk", "layer", "weights", "offset") if name in learned.summary}
    write_whole(folder / "config.json", config | taken)
    write_whole(folder / "training.json", learned.summary)


def path_features(readings: Readings, scores: np.ndarray) -> np.ndarray:
    """The evidence of the path to each step, float64 `[S, len(FEATURES)]`, given the head's `scores`, `[S]`."""
    paths: list[PathEvidence] = []
    for row, above in enumerate(readings.parents.tolist()):
        read, sampled = (Sampled(float(sums[row, 0]), int(sums[row, 1])) for sums in (readings.read, readings.sampled))
        step = PathEvidence.of_step(read, sampled, float(scores[row]))
        paths.append(paths[above].and_then(step) if above >= 0 else step)
    return np.array([path.features() for path in paths]).reshape(-1, len(FEATURES))


def _fitted(features: np.ndarray, readings: Readings, problems: np.ndarray) -> Combination:
    """Fit a combination of evidence, `[S, len(FEATURES)]`, on some problems' solutions."""
    ends = np.isin(readings.problems, problems) & (readings.right >= 0)
    mean, scale = features[ends].mean(0), features[ends].std(0) + 1e-9
    x = torch.from_numpy((features - mean) / scale)
    pairs = solution_pairs(readings, problems)
    weights = torch.zeros(len(FEATURES), dtype=torch.float64, requires_grad=True)
    if len(pairs.weights):
        of_pairs = torch.from_numpy(pairs.weights / pairs.weights.sum())

        def loss() -> torch.Tensor:
            margin = (x[pairs.better] - x[pairs.worse]) @ weights
            return (F.softplus(-margin) * of_pairs).sum() + _DECAY * weights.square().sum()

        minimise(loss, [weights])
    found = weights.detach()
    slope, offset = fit_line((x @ found).numpy(), readings, ends)
    each = (slope * found).numpy() / scale
    return Combination(tuple(each.tolist()), float(offset - each @ mean))


def ranks(columns: Mapping[str, np.ndarray], readings: Readings, problems: np.ndarray) -> dict[str, Any]:
    """Measure how often columns of numbers rank a right solution above a wrong one of its problem, and siblings.

    Args:
        columns: float `[S]` each, by name.
        readings: the steps.
        problems: numbers of those that count.

    Returns:
        The AUC of each column in `auc_solutions` and `auc_siblings`; None where there is no pair.
    """
    pairs = {"solutions": solution_pairs(readings, problems), "siblings": sibling_pairs(readings, problems)}
    return {
        f"auc_{kind}": {name: its.share_ahead(column) for name, column in columns.items()}
        for kind, its in pairs.items()
    }
