"""Trains a head to predict the values of steps from hidden states, calibrates it, and measures it on other problems."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from espalier.engine.errors import EspalierError
from espalier.experiments.prm_evaluation.metrics import auc, auc_within
from espalier.experiments.prm_evaluation.show import plot_reliability
from espalier.experiments.runs.folder import write_whole
from espalier.experiments.runs.statistics import calibration
from espalier.experiments.verifier_training.features import LAST, Features
from espalier.prm.scorers.trunk_head import ARCHITECTURE

_HELD_OUT = 0.1
"""Share of the problems that choose the head and calibrate it; as many again measure it."""
_EPOCHS, _PATIENCE = 60, 6
_STEPS_AN_EPOCH = 200
_LEARNING_RATE = 1e-3
_WEIGHT_DECAYS = (1e-3, 1e-1)
_WORTH_A_LAYER = 0.99
"""Share of the loss of one layer below which that of two must be: a few problems choose, by chance if it is close."""
_WORTH_A_TAP = 0.01
"""By how much a head on a middle layer's states must rank better than one after the last: few problems choose."""
_USES = ("train", "choose", "measure")
_MAX_COUNTED = 32
"""A step that more solutions have counts no more than so often in a measure."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Steps of some of the problems, on torch."""

    states: torch.Tensor
    values: torch.Tensor
    samples: torch.Tensor
    problems: np.ndarray


def train_head(
    features: Features, folder: Path, trunk: dict[str, str], record: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Train heads of one and two layers, and write the best one as a folder that `--verifier` takes; see `best_head`.

    Two layers are taken where their loss is lower by a hundredth or more.

    A head's logit is calibrated by a slope and an offset (Platt, 1999), which its last layer takes in, as the first
    takes in the scaling of the states. The problems are split: 80% train, 10% choose and calibrate, 10% measure.

    Args:
        features: of at least 10 problems.
        folder: gets `config.json`, `model.safetensors`, `training.json` and `reliability.svg`.
        trunk: name and digest of the generator.
        record: what else `training.json` is to say.
        seed: of the split, the initial weights and the batches.

    Returns:
        The content of `training.json`.

    Raises:
        EspalierError: there are too few problems, or all steps have one label.
    """
    return fit_head(features, folder, trunk, record, seed)[1]


def fit_head(
    features: Features, folder: Path, trunk: dict[str, str], record: dict[str, Any], seed: int
) -> tuple[nn.Sequential, dict[str, Any]]:
    """The same; returns the head, too."""
    train, choose, measure = parts_of(features, seed)
    head, chosen = best_head(features, train, choose, seed)
    counts = {
        name: int(np.isin(features.problems, its).sum())
        for name, its in zip(_USES, (train, choose, measure), strict=True)
    }
    summary = {
        "trunk": trunk,
        **record,
        "steps": counts,
        **chosen,
        "measured": _measure(head, _part(features, measure, place_of(features, chosen))),
    }
    save_head(head, folder)
    config = {"architectures": [ARCHITECTURE], "model_type": "trunk-head", "trunk": trunk}
    write_whole(folder / "config.json", config | {"hidden_size": features.hidden} | at_layer(chosen))
    write_whole(folder / "training.json", summary)
    plot_reliability(summary["measured"] | {"threshold": 0.5}, folder / "reliability.svg")
    return head, summary


def best_head(
    features: Features, train: np.ndarray, choose: np.ndarray, seed: int
) -> tuple[nn.Sequential, dict[str, Any]]:
    """The best of heads of one and two layers on the states of each of the features' layers; and what was tried.

    Of each layer's heads the one of the least loss, see `train_head`; of those the one that ranks the steps of the
    choosing problems best, the one after the last layer unless another is better by a hundredth.

    Args:
        features: steps of all problems.
        train: numbers of the problems that train.
        choose: numbers of those that choose and calibrate.
        seed: of the initial weights and the batches.

    Returns:
        The head, and what is recorded; `layer` is the one whose states it reads as they enter it, if not the last ones.

    Raises:
        EspalierError: all steps have one label.
    """
    found: list[tuple[float, nn.Sequential, dict[str, Any]]] = []
    for place, layer in enumerate(features.layers):
        its = _part(features, choose, place)
        head, chosen = _best_head(_part(features, train, place), its, seed)
        rank = _measure(head, its)["auc_within_a_problem"] or 0.5
        found.append((rank, head, chosen | ({"layer": layer} if layer != LAST else {})))
    best = max(range(len(found)), key=lambda place: found[place][0] - (_WORTH_A_TAP if place else 0.0))
    ranks = {
        str(layer) if layer != LAST else "last": rank for layer, (rank, *_) in zip(features.layers, found, strict=True)
    }
    _, head, chosen = found[best]
    return head, chosen | ({"auc_by_layer": ranks} if len(ranks) > 1 else {})


def linear_head(
    features: Features, train: Sequence[int], choose: Sequence[int], seed: int
) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A head of one layer on the states after the last layer, made standard; see `best_head`.

    Returns:
        The head, and the mean and the scale, `[hidden]`, that make states standard for it; see `fold_in`.

    Raises:
        EspalierError: all steps have one label.
    """
    of_train, of_choose = (_part(features, np.asarray(part), 0) for part in (train, choose))
    _require_labels(of_train)
    mean, scale = _standard(of_train)
    torch.manual_seed(seed)
    head = _new_head(features.hidden, 1)
    _fit(head, of_train, of_choose, mean, scale, max(_WEIGHT_DECAYS))
    return head, mean, scale


def calibrated(head: nn.Sequential, features: Features, choose: np.ndarray) -> dict[str, float]:
    """Calibrate a head on the states after the last layer, in place; returns what is recorded of it."""
    slope, offset = _calibrate(head, _part(features, choose, 0))
    return {"calibration_slope": slope, "calibration_offset": offset}


def place_of(features: Features, chosen: dict[str, Any]) -> int:
    """The place among the features' layers of the one that a head was learned on; see `best_head`."""
    return features.layers.index(chosen.get("layer", LAST))


def at_layer(chosen: dict[str, Any]) -> dict[str, int]:
    """The entry of `config.json` for the layer of a head; see `prm.heads.layer_of`."""
    return {"layer": chosen["layer"]} if "layer" in chosen else {}


def _best_head(train: _Part, choose: _Part, seed: int) -> tuple[nn.Sequential, dict[str, Any]]:
    _require_labels(train)
    mean, scale = _standard(train)
    tried: list[tuple[float, nn.Sequential, dict[str, Any]]] = []
    for layers in (1, 2):
        for decay in _WEIGHT_DECAYS:
            torch.manual_seed(seed)
            head = _new_head(train.states.shape[1], layers)
            loss, epochs = _fit(head, train, choose, mean, scale, decay)
            tried.append((loss, head, {"layers": layers, "weight_decay": decay, "epochs": epochs, "loss": loss}))
    loss, head, chosen = min(tried, key=lambda one: one[0] / (1.0 if one[2]["layers"] == 1 else _WORTH_A_LAYER))
    fold_in(head, mean, scale)
    slope, offset = _calibrate(head, choose)
    return head, {
        "heads": [one for _, _, one in tried],
        "chosen": chosen,
        "calibration_slope": slope,
        "calibration_offset": offset,
    }


def _require_labels(part: _Part) -> None:
    if float(part.values.min()) == float(part.values.max()):
        raise EspalierError("all steps have the same value, so there is nothing to learn; sample more problems")


def _standard(part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and scale that states are made standard with."""
    return part.states.mean(0), part.states.std(0) + 1e-6


def parts_of(features: Features, seed: int, choose: float = _HELD_OUT) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split the problems into those that train, those that choose, a share `choose`, and a tenth that measures.

    Raises:
        EspalierError: there are too few.
    """
    problems = np.unique(features.problems)
    if len(problems) < 10:
        raise EspalierError(f"a verifier needs at least 10 problems with steps, there are {len(problems)}")
    order = np.random.default_rng(seed).permutation(problems)
    chooses, measures = (max(1, round(share * len(order))) for share in (choose, _HELD_OUT))
    return order[chooses + measures :], order[:chooses], order[chooses : chooses + measures]


def _part(features: Features, problems: np.ndarray, place: int) -> _Part:
    chosen = np.isin(features.problems, problems)
    states = torch.from_numpy(np.ascontiguousarray(features.states_of(place)[chosen]))
    values = torch.from_numpy(features.values[chosen])
    return _Part(states, values, torch.from_numpy(features.samples[chosen]).float(), features.problems[chosen])


def _new_head(hidden: int, layers: int) -> nn.Sequential:
    inner = [module for _ in range(layers - 1) for module in (nn.Linear(hidden, hidden), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(hidden, 1))


def _fit(
    head: nn.Sequential, train: _Part, choose: _Part, mean: torch.Tensor, scale: torch.Tensor, decay: float
) -> tuple[float, int]:
    """Train until the loss on other problems rises no more; returns it and the epochs. The best weights are kept."""
    states, others = (train.states - mean) / scale, (choose.states - mean) / scale
    batch = min(4096, max(64, len(states) // _STEPS_AN_EPOCH))
    optimizer = torch.optim.AdamW(head.parameters(), lr=_LEARNING_RATE, weight_decay=decay)
    best, kept, since = float("inf"), head.state_dict(), 0
    epochs = 0
    while epochs < _EPOCHS and since < _PATIENCE:
        epochs += 1
        for rows in torch.randperm(len(states)).split(batch):
            optimizer.zero_grad()
            _loss(head(states[rows])[:, 0], train.values[rows], train.samples[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(_loss(head(others)[:, 0], choose.values, choose.samples))
        since += 1
        if loss < best:
            best, kept, since = loss, {name: value.clone() for name, value in head.state_dict().items()}, 0
    head.load_state_dict(kept)
    return best, epochs


def _loss(logits: torch.Tensor, values: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with soft labels, each step weighed by the solutions that have it."""
    return (F.binary_cross_entropy_with_logits(logits, values, reduction="none") * samples).sum() / samples.sum()


def fold_in(head: nn.Sequential, mean: torch.Tensor, scale: torch.Tensor) -> None:
    """Make the first layer of a head for standard states take states as they are."""
    first = head[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.weight.div_(scale)
        first.bias.sub_(first.weight @ mean)


def _calibrate(head: nn.Sequential, choose: _Part) -> tuple[float, float]:
    """Fit a slope and an offset of the logit, and make the last layer give it."""
    last = head[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        logits = head(choose.states)[:, 0]
    line = torch.tensor([1.0, 0.0], requires_grad=True)
    optimizer = torch.optim.LBFGS([line], max_iter=100)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(line[0] * logits + line[1], choose.values, choose.samples)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    slope, offset = line.detach().tolist()
    if not slope > 0:
        slope, offset = 1.0, 0.0  # nothing was learned that could be turned round by so little data
    with torch.no_grad():
        last.weight.mul_(slope)
        last.bias.mul_(slope).add_(offset)
    return slope, offset


def _measure(head: nn.Sequential, part: _Part) -> dict[str, Any]:
    """Ranking and calibration of scores on problems that training has not seen."""
    with torch.no_grad():
        scores = head(part.states)[:, 0].sigmoid().numpy()
    counts = np.minimum(part.samples.numpy().astype(int), _MAX_COUNTED)
    right = np.rint(part.values.numpy() * counts).astype(int)
    pairs = [
        (np.repeat(scores[rows], right[rows]).tolist(), np.repeat(scores[rows], (counts - right)[rows]).tolist())
        for rows in (part.problems == problem for problem in np.unique(part.problems))
    ]
    all_right, all_wrong = ([score for pair in pairs for score in pair[side]] for side in (0, 1))
    bins, error = calibration(all_right + all_wrong, [True] * len(all_right) + [False] * len(all_wrong))
    return {
        "problems": len(pairs),
        "auc": auc(all_right, all_wrong),
        "auc_within_a_problem": auc_within(pairs),
        "calibration": bins,
        "expected_calibration_error": error,
    }


def save_head(head: nn.Sequential, folder: Path) -> None:
    """Write a head's layers as `score.0`, `score.1`, … of `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = [layer for layer in head if isinstance(layer, nn.Linear)]
    named = {f"score.{i}.{name}": value for i, layer in enumerate(layers) for name, value in layer.named_parameters()}
    save_file({name: value.detach().contiguous() for name, value in named.items()}, folder / "model.safetensors")
