"""Reads a generator's solutions with another model, the trunk: each tree once, with what its paths share."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Score, Scored
from espalier.experiments.verifier_training.features import Features
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.prm.families.likelihood import Likelihood
from espalier.prm.families.trunk_evidence import trunk_evidence_head
from espalier.search.rollout import StepRecord

TOKENS_AND_STATES = "tokens-and-states"
"""The head that gives a target's log-probability and the hidden state; the trunk's model must have it."""
_PART = 50
"""Problems of one file, after which an interrupted run goes on."""


@dataclass(frozen=True, slots=True)
class Readings(Features):
    """Steps as a trunk reads them, those of a problem together, parents first.

    Attributes:
        parents: int64 `[S]`, row of the step before; -1 for a first step.
        right: int64 `[S]`, of a step that ends solutions whether they are right, 1 or 0; -1 where they go on.
        read: float64 `[S, 2]`, sum of the log-probabilities of the step's tokens under the trunk, and their number.
        sampled: float64 `[S, 2]`, the same of its tokens as the generator sampled them.
    """

    parents: np.ndarray
    right: np.ndarray
    read: np.ndarray
    sampled: np.ndarray


class StatesHead:
    """The head `TOKENS_AND_STATES` of a model that is loaded after it; `model` must be set before it is used."""

    model: Model

    def __call__(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See `TOKENS_AND_STATES`."""
        return trunk_evidence_head(self.model.head, lambda states: states)(hidden, targets)


def read_trees(
    engine: Engine, system_prompt: str, trees: Sequence[TreeRecord], folder: Path, on_problem: Callable[[], None]
) -> Readings:
    """Readings of all trees, from the files in `folder` as far as they are there.

    Args:
        engine: holds the trunk as a generator, with the head `TOKENS_AND_STATES`.
        system_prompt: the trunk's own.
        trees: of any generator.
        folder: gets a file for each 50 problems.
        on_problem: called for each problem that is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    family = Likelihood(engine.model(GENERATOR), system_prompt)
    parts: list[Readings] = []
    rows = 0
    for start in range(0, len(trees), _PART):
        some = trees[start : start + _PART]
        file = folder / f"{start:06}-{_digest(family, some)}.npz"
        if not file.is_file():
            part, partial = _part(engine, family, some, start), folder / f"{start:06}.partial.npz"
            np.savez(partial, **{name: getattr(part, name) for name in _names()})
            partial.replace(file)
        part = Readings(**np.load(file))
        part.parents[part.parents >= 0] += rows
        rows += len(part.values)
        parts.append(part)
        for _ in some:
            on_problem()
    return Readings(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _names()})


def _names() -> list[str]:
    return [field.name for field in fields(Readings)]


def _digest(family: Likelihood, trees: Sequence[TreeRecord]) -> str:
    """Digest of all that readings depend on."""
    names = "parent", "text", "log_probabilities", "value", "samples", "end", "right"
    read = [[tree.problem, [[getattr(step, name) for name in names] for step in tree.steps]] for tree in trees]
    prompt = family.prompt_ids("2")
    return hashlib.sha256(json.dumps([family.model.digest, prompt, read]).encode()).hexdigest()[:16]


def _part(engine: Engine, family: Likelihood, trees: Sequence[TreeRecord], first: int) -> Readings:
    found: list[tuple[np.ndarray, tuple[float, float]]] = []
    rows: list[tuple[float, int, int, int, int]] = []
    sampled: list[tuple[float, float]] = []
    for number, tree in enumerate(trees, start=first):
        row_of: dict[int, int] = {}
        for index, read, state in _steps(engine, family, tree):
            step = tree.steps[index]
            above = next((row_of[at] for at in reversed(tree.lineage(index)[:-1]) if at in row_of), -1)
            row_of[index] = len(rows)
            found.append((state, read))
            rows.append((step.value, step.samples, number, above, -1 if step.end is None else int(bool(step.right))))
            sampled.append((sum(step.log_probabilities), len(step.token_ids)))
    values, samples, problems, parents, right = (
        (np.array(column) for column in zip(*rows, strict=True)) if rows else (np.zeros(0),) * 5
    )
    hidden = engine.model(GENERATOR).config.hidden_size
    return Readings(
        np.array([state for state, _ in found], np.float32).reshape(-1, hidden),
        values.astype(np.float32),
        samples.astype(np.int64),
        problems.astype(np.int64),
        parents.astype(np.int64),
        right.astype(np.int64),
        np.array([read for _, read in found], np.float64).reshape(-1, 2),
        np.array(sampled, np.float64).reshape(-1, 2),
    )


def _is_read(step: StepRecord) -> bool:
    """Return whether a step has a score in a search: those that were cut off, and those without text, have none."""
    return step.end != "length" and bool(step.text.strip())


def _steps(
    engine: Engine, family: Likelihood, tree: TreeRecord
) -> Iterator[tuple[int, tuple[float, float], np.ndarray]]:
    """Each step that is read, after its parent: index, log-probability and number of its tokens, state at its end."""
    owner, problem = tree.problem_id, family.plain_text.of(tree.problem)
    children: dict[int | None, list[int]] = {}
    for index, step in enumerate(tree.steps):
        if _is_read(step):
            above = next((i for i in reversed(tree.lineage(index)[:-1]) if _is_read(tree.steps[i])), None)
            children.setdefault(above, []).append(index)
    if not children:
        return
    root = engine.open(GENERATOR, family.prompt_ids(problem), owner=owner)
    engine.submit(Score(owner, root, (), ()))
    places: dict[KVSequence, int | None] = {root: None}
    try:
        while engine.busy:
            for done in engine.step():
                assert isinstance(done, Scored)
                sequence = done.work.sequence
                index = places.pop(sequence)
                if index is not None:
                    yield index, (float(done.values[:, 0].sum()), len(done.values)), done.values[-1, 1:]
                for child in children.get(index, ()):
                    steps = (tree.steps[i].text for i in tree.lineage(child) if _is_read(tree.steps[i]))
                    reading = family.read(family.plain_text.path(tree.problem, steps))
                    (fork,) = engine.fork(sequence, 1)
                    places[fork] = child
                    how = {"targets": reading.targets, "head": TOKENS_AND_STATES}
                    engine.submit(Score(owner, fork, reading.token_ids, reading.score_positions, **how))
                engine.release(sequence)
    except GeneratorExit:
        engine.abandon(owner)
        raise
