"""Combines evidence of paths into one score that ranks paths of a problem, and siblings, and measures how well it does.

The weights of evidence are fitted by a pairwise logistic loss: of two solutions of one problem the right one, and of
two siblings the one that ends right more often, should have the higher score. Every problem weighs the same in each
kind of pair. The sum is then calibrated by a slope and an offset (Platt, 1999), so that scores are probabilities.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from espalier.experiments.runs.folder import write_whole
from espalier.experiments.verifier_training.features import Readings
from espalier.experiments.verifier_training.pairs import share_ahead, sibling_pairs, solution_pairs
from espalier.experiments.verifier_training.training import (
    at_layer,
    best_head,
    calibrated,
    fit_head,
    parts_of,
    place_of,
    save_head,
)
from espalier.prm.base import Sampled
from espalier.prm.families.trunk_evidence import ARCHITECTURE, NAME
from espalier.prm.path_evidence import FEATURES, Combination, PathEvidence

_CHOOSE = 0.2
"""Share of the problems that choose the head and fit the weights: they must not be those that taught the head."""
_DECAY = 1e-3
_WORTH_COMBINING = 0.01


def parts_for_evidence(readings: Readings, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The split of problems of `train_trunk_evidence`; see `parts_of`."""
    return parts_of(readings, seed, choose=_CHOOSE)


@dataclass(frozen=True, slots=True)
class LearnedEvidence:
    """A head on a trunk's states, and how its scores are combined with other evidence.

    Attributes:
        head: maps states to the logit of a step's value.
        combination: makes a score of a path's evidence.
        summary: the content of `training.json`.
    """

    head: torch.nn.Sequential
    combination: Combination
    summary: dict[str, Any]

    def features(self, readings: Readings) -> np.ndarray:
        """The evidence of the path to each step, see `path_features`."""
        return path_features(readings, _scores(self.head, readings, self.summary))


def train_trunk_evidence(
    readings: Readings,
    folder: Path,
    trunk: dict[str, str],
    record: dict[str, Any],
    seed: int,
    tuned: torch.nn.Sequential | None = None,
) -> LearnedEvidence:
    """Train heads on the trunk's states and combine them with other evidence; write what `--verifier-family` takes.

    The problems are split: 70% teach heads, 20% choose one and fit the combination, 10% measure.

    Args:
        readings: of at least 10 problems.
        folder: gets `config.json`, `model.safetensors` and `training.json`.
        trunk: name and digest of the trunk.
        record: what else `training.json` is to say.
        seed: of the split, the initial weights and the batches.
        tuned: a head that was trained with the trunk's last layers, which is only calibrated. Heads that are taught on
            the states of problems that tuned the layers would trust them too much.

    Returns:
        What was learned; `measured` of its summary has the AUC within a problem of whole solutions and of siblings, for
        the score and for each kind of evidence alone.

    Raises:
        EspalierError: there are too few problems, or all steps have one label.
    """
    teach, choose, measure = parts_for_evidence(readings, seed)
    if tuned is None:
        head, summary = best_head(readings, teach, choose, seed)
    else:
        head, summary = tuned, calibrated(tuned, readings, choose)
    features = path_features(readings, _scores(head, readings, summary))
    combination = _fitted(features, readings, choose)
    summary = {
        "trunk": trunk,
        **record,
        "problems_by_use": {"teach": len(teach), "choose": len(choose), "measure": len(measure)},
        **summary,
        "weights": dict(zip(FEATURES, combination.weights, strict=True)),
        "offset": combination.offset,
        "measured": _measured(features, combination, readings, measure),
    }
    config = {"architectures": [ARCHITECTURE], "model_type": NAME, "trunk": trunk}
    config |= {"hidden_size": readings.hidden, "weights": summary["weights"], "offset": summary["offset"]}
    config |= at_layer(summary)
    save_head(head, folder)
    write_whole(folder / "config.json", config)
    write_whole(folder / "training.json", summary)
    return LearnedEvidence(head, combination, summary)


def train_own_evidence(
    readings: Readings, folder: Path, trunk: dict[str, str], record: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Train a head on the generator's own states, see `train_head`, and combine its scores along a path.

    The evidence is that of `train_trunk_evidence`, as far as the generator has it of its own paths as it samples them.
    Where it does not rank the choosing problems' solutions better by a hundredth than the head's last score does, that
    stays the score. Arguments, returns and errors are those of `train_head`; the summary has the `weights` that are
    taken, and `auc_solutions` and `auc_siblings` of them and of each kind of evidence.
    """
    head, summary = fit_head(readings, folder, trunk, record, seed)
    _, choose, measure = parts_of(readings, seed)
    features = path_features(readings, _scores(head, readings, summary))
    combination = _fitted(features, readings, choose)
    of_choosing = _measured(features, combination, readings, choose)["auc_solutions"]
    taken = (of_choosing["score"] or 0.0) > (of_choosing["head"] or 0.0) + _WORTH_COMBINING
    measured = _measured(features, combination, readings, measure)
    summary["measured"] |= {name: measured[name] for name in ("auc_solutions", "auc_siblings")}
    if taken:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = {"weights": dict(zip(FEATURES, combination.weights, strict=True)), "offset": combination.offset}
        summary |= weights
        write_whole(folder / "config.json", config | weights)
    write_whole(folder / "training.json", summary)
    return summary


def _scores(head: torch.nn.Sequential, readings: Readings, chosen: dict[str, Any]) -> np.ndarray:
    """The head's score of each step, `[S]`."""
    states = np.ascontiguousarray(readings.states_of(place_of(readings, chosen)))
    with torch.no_grad():
        return head(torch.from_numpy(states))[:, 0].sigmoid().numpy()


def path_features(readings: Readings, scores: np.ndarray) -> np.ndarray:
    """The evidence of the path to each step, float64 `[S, len(FEATURES)]`, given the head's `scores`, `[S]`."""
    paths: list[PathEvidence] = []
    for row, above in enumerate(readings.parents.tolist()):
        read, sampled = (Sampled(float(sums[row, 0]), int(sums[row, 1])) for sums in (readings.read, readings.sampled))
        step = PathEvidence.of_step(read, sampled, float(scores[row]))
        paths.append(paths[above].and_then(step) if above >= 0 else step)
    return np.array([path.features() for path in paths]).reshape(-1, len(FEATURES))


def _fitted(features: np.ndarray, readings: Readings, problems: np.ndarray) -> Combination:
    rows = np.isin(readings.problems, problems)
    mean, scale = features[rows].mean(0), features[rows].std(0) + 1e-9
    x = torch.from_numpy((features - mean) / scale)
    kinds = [
        pairs for pairs in (solution_pairs(readings, problems), sibling_pairs(readings, problems)) if len(pairs.weights)
    ]
    weights = torch.zeros(len(FEATURES), dtype=torch.float64, requires_grad=True)

    def ranking() -> torch.Tensor:
        loss = _DECAY * weights.square().sum()
        for pairs in kinds:
            margin = (x[pairs.better] - x[pairs.worse]) @ weights
            of_pairs = torch.from_numpy(pairs.weights)
            loss = loss + (F.softplus(-margin) * of_pairs).sum() / of_pairs.sum()
        return loss

    _minimise(ranking, weights)
    found = weights.detach()
    line = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    values, samples = (torch.from_numpy(each[rows].astype(np.float64)) for each in (readings.values, readings.samples))
    sums = (x @ found)[torch.from_numpy(rows)]

    def calibration() -> torch.Tensor:
        each = F.binary_cross_entropy_with_logits(line[0] * sums + line[1], values, reduction="none")
        return (each * samples).sum() / samples.sum()

    _minimise(calibration, line)
    slope, offset = line.detach().tolist()
    slope = slope if slope > 0 else 1.0  # so little data could turn the ranking round
    each = (slope * found).numpy() / scale
    return Combination(tuple(each.tolist()), float(offset - each @ mean))


def _minimise(loss_of: Callable[[], torch.Tensor], parameters: torch.Tensor) -> None:
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def _measured(
    features: np.ndarray, combination: Combination, readings: Readings, problems: np.ndarray
) -> dict[str, Any]:
    scores = np.array([combination.score(row) for row in features.tolist()])
    columns = {"score": scores} | dict(zip(FEATURES, features.T, strict=True))
    return {"problems": len(problems), **ranks(columns, readings, problems)}


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
        f"auc_{kind}": {name: share_ahead(column, its) for name, column in columns.items()}
        for kind, its in pairs.items()
    }
