"""Reads a generator's solutions with another model, the trunk: each tree once, with what its paths share."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Head, Model
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Score
from espalier.experiments.verifier_training.features import TreeReader, is_read
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.prm.base import ScoreInput
from espalier.prm.families.likelihood import Likelihood
from espalier.prm.families.trunk_evidence import trunk_evidence_head

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


class TrunkReader(TreeReader):
    """Reads trees of any generator with a trunk."""

    named_by = "problem"
    depends_on = "parent", "text", "log_probabilities", "value", "samples", "end", "right"

    def __init__(self, engine: Engine, system_prompt: str, trees: Sequence[TreeRecord], folder: Path) -> None:
        """Read nothing yet; see `TreeReader`.

        Args:
            engine: holds the trunk as a generator, with `heads_for` it.
            system_prompt: the trunk's own.
            trees: of any generator.
            folder: gets the files.
        """
        super().__init__(engine, trees, folder)
        self._family = Likelihood(self._model, system_prompt)

    def _identity(self) -> list[Any]:
        return [self._model.digest, self._family.prompt_ids("2"), list(self._layers)]

    def _steps(self, tree: TreeRecord) -> Iterator[tuple[int, np.ndarray, tuple[float, float]]]:
        if children := children_of(tree):
            for index, values in self._values(tree, children):
                yield index, values[-1, 1:], (float(values[:, 0].sum()), len(values))

    def _values(self, tree: TreeRecord, children: Mapping[int | None, list[int]]) -> Iterator[tuple[int, np.ndarray]]:
        """Of each step that is read, after its parent: its index, and of its tokens what `TOKENS_AND_STATES` gives."""
        for index, values in self._computed(self._root(tree), children, partial(self._work, tree)):
            if index is not None:
                yield index, values

    def _prompt(self, tree: TreeRecord) -> list[int]:
        return self._family.prompt_ids(self._family.plain_text.of(tree.problem))

    def _reading(self, tree: TreeRecord, index: int) -> ScoreInput:
        """The tokens that are read of a step."""
        steps = (tree.steps[i].text for i in tree.lineage(index) if is_read(tree.steps[i]))
        return self._family.read(self._family.plain_text.path(tree.problem, steps))

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


def children_of(tree: TreeRecord) -> dict[int | None, list[int]]:
    """Indices of the steps that are read, by that of the one before; None for first steps."""
    children: dict[int | None, list[int]] = {}
    for index, step in enumerate(tree.steps):
        if is_read(step):
            above = next((i for i in reversed(tree.lineage(index)[:-1]) if is_read(tree.steps[i])), None)
            children.setdefault(above, []).append(index)
    return children
