"""Reads a generator's solutions with another model, the trunk: each tree once, with what its paths share."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Head, Model
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Score
from espalier.experiments.verifier_training.features import (
    LAST,
    Readings,
    part_files,
    read_parts,
    read_tree,
    readings_of,
)
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.prm.base import ScoreInput
from espalier.prm.families.likelihood import Likelihood
from espalier.prm.families.trunk_evidence import trunk_evidence_head
from espalier.search.rollout import StepRecord

TOKENS_AND_STATES = "tokens-and-states"
"""The head that gives a target's log-probability and the hidden state; the trunk's model must have it."""


class StatesHead:
    """The head `TOKENS_AND_STATES` of a model that is loaded after it; `model` must be set before it is used."""

    model: Model

    def __call__(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See `TOKENS_AND_STATES`."""
        return trunk_evidence_head(self.model.head, lambda states: states, self.model.decoder)(hidden, targets)


def heads_for(trunk: StatesHead) -> dict[str, Head]:
    """The heads that a trunk's model needs; it is to be given to `trunk` once it is loaded."""
    return {TOKENS_AND_STATES: trunk}


class TreeReader:
    """Reads trees with a trunk, and keeps what it reads in files."""

    def __init__(self, engine: Engine, system_prompt: str, trees: Sequence[TreeRecord], folder: Path) -> None:
        """Read nothing yet.

        Args:
            engine: holds the trunk as a generator, with `heads_for` it.
            system_prompt: the trunk's own.
            trees: of any generator.
            folder: gets a file for each 50 problems.
        """
        self._engine = engine
        self._family = Likelihood(engine.model(GENERATOR), system_prompt)
        self._decoder = engine.model(GENERATOR).decoder
        self.trees = trees
        self._folder = folder

    @property
    def files(self) -> list[Path]:
        """The files of the readings, of each 50 problems one."""
        return part_files(self.trees, self._folder, self._digest)

    def read(self, on_problem: Callable[[], None]) -> Readings:
        """Readings of all trees, from the files as far as they are there; `on_problem` is called as one is done."""
        return read_parts(self.files, self.trees, self._part, self._layers, on_problem)

    @property
    def _layers(self) -> tuple[int, ...]:
        return LAST, *self._decoder.taps

    def _digest(self, trees: Sequence[TreeRecord]) -> str:
        """Digest of all that readings depend on."""
        names = "parent", "text", "log_probabilities", "value", "samples", "end", "right"
        read = [[tree.problem, [[getattr(step, name) for name in names] for step in tree.steps]] for tree in trees]
        of = [Readings.arrays(), self._family.model.digest, self._family.prompt_ids("2"), self._states_read(), read]
        return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]

    def _states_read(self) -> list[int | str]:
        """The states that are read of a step: numbers of layers, or words."""
        return list(self._layers)

    def _part(self, file: Path, trees: Sequence[TreeRecord], first: int) -> Readings:
        """Readings of some trees."""
        found = [
            (at, index, values[-1, 1:], (float(values[:, 0].sum()), len(values)))
            for at, tree in enumerate(trees)
            for index, values in self._steps(tree)
        ]
        return readings_of(found, trees, first, self._layers, self._family.model.config.hidden_size)

    def _prompt(self, tree: TreeRecord) -> list[int]:
        return self._family.prompt_ids(self._family.plain_text.of(tree.problem))

    def _reading(self, tree: TreeRecord, index: int) -> ScoreInput:
        """The tokens that are read of a step."""
        steps = (tree.steps[i].text for i in tree.lineage(index) if _is_read(tree.steps[i]))
        return self._family.read(self._family.plain_text.path(tree.problem, steps))

    def _steps(self, tree: TreeRecord) -> Iterator[tuple[int, np.ndarray]]:
        """Each step that is read, after its parent: its index, and of its tokens the values of `TOKENS_AND_STATES`."""
        if children := children_of(tree):
            for index, values in read_tree(self._engine, self._root(tree), children, partial(self._work, tree)):
                if index is not None:
                    yield index, values

    def _root(self, tree: TreeRecord) -> KVSequence:
        """The sequence of a tree's prompt."""
        return self._engine.open(GENERATOR, self._prompt(tree), owner=tree.problem_id)

    def _work(self, tree: TreeRecord, sequence: KVSequence, index: int | None) -> Score:
        """The work on a step of a tree, or on its prompt, of index None."""
        if index is None:
            return Score(tree.problem_id, sequence, (), ())
        read = self._reading(tree, index)
        how = {"targets": read.targets, "head": TOKENS_AND_STATES}
        return Score(tree.problem_id, sequence, read.token_ids, read.score_positions, **how)


def _is_read(step: StepRecord) -> bool:
    """Return whether a step has a score in a search: those that were cut off, and those without text, have none."""
    return step.end != "length" and bool(step.text.strip())


def children_of(tree: TreeRecord) -> dict[int | None, list[int]]:
    """Indices of the steps that are read, by that of the one before; None for first steps."""
    children: dict[int | None, list[int]] = {}
    for index, step in enumerate(tree.steps):
        if _is_read(step):
            above = next((i for i in reversed(tree.lineage(index)[:-1]) if _is_read(tree.steps[i])), None)
            children.setdefault(above, []).append(index)
    return children
