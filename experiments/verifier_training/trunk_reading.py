"""Reads a generator's solutions with another model, the trunk: each tree once, with what its paths share."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Score, Scored
from espalier.experiments.verifier_training.features import LAST, Readings, below, joined, readings_of
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.prm.families.likelihood import Likelihood
from espalier.prm.families.trunk_evidence import trunk_evidence_head
from espalier.search.rollout import StepRecord

TOKENS_AND_STATES = "tokens-and-states"
"""The head that gives a target's log-probability and the hidden state; the trunk's model must have it."""
_PART = 50
"""Problems of one file, after which an interrupted run goes on."""


class StatesHead:
    """The head `TOKENS_AND_STATES` of a model that is loaded after it; `model` must be set before it is used."""

    model: Model

    def __call__(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See `TOKENS_AND_STATES`."""
        return trunk_evidence_head(self.model.head, lambda states: states, self.model.decoder)(hidden, targets)


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
    layers = (LAST, *engine.model(GENERATOR).decoder.taps)
    parts: list[Readings] = []
    rows = 0
    for start in range(0, len(trees), _PART):
        some = trees[start : start + _PART]
        file = folder / f"{start:06}-{_digest(family, some, layers)}.npz"
        if not file.is_file():
            part, partial = _part(engine, family, some, start, layers), folder / f"{start:06}.partial.npz"
            np.savez(partial, **{name: getattr(part, name) for name in Readings.arrays()})
            partial.replace(file)
        parts.append(below(Readings(**np.load(file), layers=layers), rows))
        rows += len(parts[-1].values)
        for _ in some:
            on_problem()
    return joined(parts)


def _digest(family: Likelihood, trees: Sequence[TreeRecord], layers: tuple[int, ...]) -> str:
    """Digest of all that readings depend on."""
    names = "parent", "text", "log_probabilities", "value", "samples", "end", "right"
    read = [[tree.problem, [[getattr(step, name) for name in names] for step in tree.steps]] for tree in trees]
    prompt = family.prompt_ids("2")
    return hashlib.sha256(json.dumps([family.model.digest, prompt, layers, read]).encode()).hexdigest()[:16]


def _part(
    engine: Engine, family: Likelihood, trees: Sequence[TreeRecord], first: int, layers: tuple[int, ...]
) -> Readings:
    found = [
        (at, index, states, read)
        for at, tree in enumerate(trees)
        for index, read, states in _steps(engine, family, tree)
    ]
    return readings_of(found, trees, first, layers, engine.model(GENERATOR).config.hidden_size)


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
