"""Hidden states at the ends of steps, what heads learn from, read from whole trees in one pass of the engine each.

They are those of the generator that sampled the trees, or of another model, a trunk, which reads the steps' texts.
"""

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.decoder import Decoder
from espalier.engine.models.model import Head, Model
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Score, Scored
from espalier.experiments.runs.files import replacing
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.kernels.layers import UnsupportedShapeError
from espalier.prm.base import ScoreInput
from espalier.prm.families.likelihood import Likelihood
from espalier.prm.families.trunk_evidence import trunk_evidence_head
from espalier.search.rollout import StepRecord

log = logging.getLogger("espalier.training")
HIDDEN = "hidden"
"""The head that gives hidden states as they are; the generator's model must have it, among its `wide_heads`."""
TOKENS_AND_STATES = "tokens-and-states"
"""The head that gives a target's log-probability and the hidden state; a trunk's model must have it."""
LAST = 0
"""Stands for the states after the last layer among numbers of layers."""
PART = 50
"""Problems of one file, after which an interrupted run goes on."""
_ARRAYS = {
    "states": np.float32, "values": np.float32, "samples": np.int64, "problems": np.int64, "parents": np.int64,
    "right": np.int64, "read": np.float64, "sampled": np.float64, "steps": np.int64,
}  # fmt: skip
"""The arrays of `Readings`, with their types."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Steps with a score in a search, that is without those that were cut off, as a model reads them.

    Those of a problem are together, parents first.

    Attributes:
        states: float32 `[S, layers * hidden]`: the state that a step's last token is drawn from, after the last layer
            and as it enters others; see `layers`.
        values: float32 `[S]`, labels in [0, 1].
        samples: int64 `[S]`, how many solutions have the step.
        problems: int64 `[S]`, the number of its problem.
        parents: int64 `[S]`, row of the step before; -1 for a first step.
        right: int64 `[S]`, of a step that ends solutions whether they are right, 1 or 0; -1 where they go on.
        read: float64 `[S, 2]`, sum of the log-probabilities of the step's tokens under the model, and their number.
        sampled: float64 `[S, 2]`, the same of its tokens as the generator sampled them.
        steps: int64 `[S]`, index of the step in its tree.
        layers: those whose states there are, `LAST` first.
    """

    states: np.ndarray
    values: np.ndarray
    samples: np.ndarray
    problems: np.ndarray
    parents: np.ndarray
    right: np.ndarray
    read: np.ndarray
    sampled: np.ndarray
    steps: np.ndarray
    layers: tuple[int, ...] = field(default=(LAST,), kw_only=True)

    @property
    def hidden(self) -> int:
        """Width of the states of one layer."""
        return self.states.shape[1] // len(self.layers)

    def states_of(self, layer: int) -> np.ndarray:
        """The states of one of `layers`, `[S, hidden]`."""
        return np.split(self.states, len(self.layers), axis=1)[self.layers.index(layer)]

    def path_means(self, column: np.ndarray) -> np.ndarray:
        """The mean of a column, `[S]`, over the steps of the path to each step, float64 `[S]`."""
        sums = np.stack([column, np.ones(len(column))])
        for row, above in enumerate(self.parents.tolist()):
            if above >= 0:
                sums[:, row] += sums[:, above]
        return sums[0] / sums[1]


def tap_candidates(decoder: Decoder) -> tuple[int, ...]:
    """Have a decoder give the states of layers that heads may rank better on than after the last; returns all of them.

    Those half, two thirds and five sixths of the way; none where the decoder gives no states between layers.
    """
    count = decoder.config.num_layers
    layers = sorted({count // 2, round(2 * count / 3), round(5 * count / 6)} - {0, count})
    try:
        decoder.layers.tap(layers)
    except UnsupportedShapeError as error:
        log.info("heads are learned after the last layer only: %s", error)
        return (LAST,)
    return LAST, *decoder.layers.taps


class TreeReader(ABC):
    """Reads trees with a model, and keeps what it reads in files, of each `PART` problems one."""

    named_by: ClassVar[str]
    """Attribute of a problem that its readings depend on."""
    depends_on: ClassVar[tuple[str, ...]]
    """Attributes of a step that they depend on."""

    def __init__(self, engine: Engine, trees: Sequence[TreeRecord], folder: Path) -> None:
        """Read nothing yet; `folder` gets the files. The engine holds the model as a generator, and has no work."""
        self.trees = trees
        self._engine = engine
        self._model = engine.model(GENERATOR)
        self._folder = folder

    @property
    def files(self) -> list[Path]:
        """The files of the readings, named by all that theirs depend on."""
        starts = range(0, len(self.trees), PART)
        return [self._folder / f"{start:06}-{self._digest(self.trees[start : start + PART])}.npz" for start in starts]

    def read(self, on_problem: Callable[[], None]) -> Readings:
        """Readings of all trees, from the files as far as they are there; `on_problem` is called as one is done."""
        parts: list[Readings] = []
        rows = 0
        for start, file in zip(range(0, len(self.trees), PART), self.files, strict=True):
            some = self.trees[start : start + PART]
            if not file.is_file():
                self._folder.mkdir(parents=True, exist_ok=True)
                found = self._part(file, some, start)
                with replacing(file) as partial, partial.open("wb") as stream:
                    np.savez(stream, **{name: getattr(found, name) for name in _ARRAYS})
            parts.append(Readings(**np.load(file), layers=self._layers))
            parts[-1].parents[parts[-1].parents >= 0] += rows
            rows += len(parts[-1].values)
            for _ in some:
                on_problem()
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        return Readings(**arrays, layers=self._layers)

    @property
    def _layers(self) -> tuple[int, ...]:
        return LAST, *self._model.decoder.layers.taps

    @abstractmethod
    def _identity(self) -> list[Any]:
        """Values that readings depend on besides the trees."""

    @abstractmethod
    def _steps(self, tree: TreeRecord) -> Iterator[tuple[int, np.ndarray, tuple[float, float]]]:
        """Each step that has a score, after its parent: its index, its states, and `read`."""

    def _digest(self, trees: Sequence[TreeRecord]) -> str:
        read = [
            [getattr(tree, self.named_by), [[getattr(step, name) for name in self.depends_on] for step in tree.steps]]
            for tree in trees
        ]
        return hashlib.sha256(json.dumps([list(_ARRAYS), *self._identity(), read]).encode()).hexdigest()[:16]

    def _part(self, file: Path, trees: Sequence[TreeRecord], first: int) -> Readings:
        """Readings of the trees of one file, of which the first is number `first`."""
        found = [(at, *of_step) for at, tree in enumerate(trees) for of_step in self._steps(tree)]
        return readings_of(found, trees, first, self._layers, self._model.config.hidden_size)

    def _computed(
        self,
        root: KVSequence,
        children: Mapping[int | None, Sequence[int]],
        work: Callable[[KVSequence, int | None], Score],
    ) -> Iterator[tuple[int | None, np.ndarray]]:
        """Compute a tree's steps, what paths share once; yields each one's index and values, after its parent's.

        Args:
            root: the sequence of the prompt, of index None.
            children: indices of the steps behind each step; None for first steps.
            work: what is computed of the prompt or a step, given its sequence.
        """
        engine, first = self._engine, work(root, None)
        places: dict[KVSequence, int | None] = {root: None}
        engine.submit(first)
        try:
            while engine.busy:
                for done in engine.step():
                    assert isinstance(done, Scored)
                    index = places.pop(sequence := done.work.sequence)
                    yield index, done.values
                    for child in children.get(index, ()):
                        (fork,) = engine.fork(sequence, 1)
                        places[fork] = child
                        engine.submit(work(fork, child))
                    engine.release(sequence)
        finally:
            engine.abandon(first.owner)


class OwnReader(TreeReader):
    """Reads, with the generator that sampled them and has the head `HIDDEN`, the states that tokens were drawn from."""

    named_by = "problem_id"
    depends_on = "token_ids", "value", "samples", "log_probabilities", "end", "right"

    def _identity(self) -> list[Any]:
        return [self._layers]

    def _steps(self, tree: TreeRecord) -> Iterator[tuple[int, np.ndarray, tuple[float, float]]]:
        if not tree.steps:
            return
        *before, token = tree.prompt_token_ids
        root = self._engine.open(GENERATOR, before, owner=tree.problem_id)
        children: dict[int | None, list[int]] = defaultdict(list)
        for index, step in enumerate(tree.steps):
            children[step.parent].append(index)

        def work(sequence: KVSequence, index: int | None) -> Score:
            ids = (token,) if index is None else tuple(tree.steps[index].token_ids)
            return Score(tree.problem_id, sequence, ids, tuple(range(len(ids))[-2:]), head=HIDDEN)

        last: dict[int | None, np.ndarray] = {}  # the state at the end of each step that is computed
        for index, values in self._computed(root, children, work):
            last[index] = values[-1]
            if index is not None and is_read(step := tree.steps[index]):
                states = values[0] if len(values) > 1 else last[step.parent]
                yield index, states, (sum(step.log_probabilities), len(step.token_ids))


def is_read(step: StepRecord) -> bool:
    """Return whether a step has a score in a search: those that were cut off, and those without text, have none."""
    return step.end != "length" and bool(step.text.strip())


def read_before(tree: TreeRecord, index: int) -> int | None:
    """The index of the last step before another one that is read; None if there is none."""
    return next((i for i in reversed(tree.lineage(index)[:-1]) if is_read(tree.steps[i])), None)


def readings_of(
    found: Sequence[tuple[int, int, np.ndarray, tuple[float, float]]],
    trees: Sequence[TreeRecord],
    first: int,
    layers: tuple[int, ...],
    hidden: int,
) -> Readings:
    """The readings of some trees' steps, parents before their children.

    Args:
        found: of each step that has a score: the place of its tree in `trees`, its index, its states, and `read`.
        trees: the trees.
        first: number of the first one.
        layers: see `Readings`.
        hidden: width of the states of one layer.
    """
    row_of: dict[tuple[int, int | None], int] = {}
    rows: list[tuple[Any, ...]] = []
    for at, index, states, read in found:
        step = trees[at].steps[index]
        row_of[at, index] = len(rows)
        above, right = row_of.get((at, read_before(trees[at], index)), -1), -1 if step.end is None else bool(step.right)
        sampled = sum(step.log_probabilities), len(step.token_ids)
        rows.append((states, step.value, step.samples, first + at, above, right, read, sampled, index))
    widths = {"states": (len(layers) * hidden,), "read": (2,), "sampled": (2,)}
    arrays = {
        name: np.array([row[place] for row in rows], dtype).reshape(len(rows), *widths.get(name, ()))
        for place, (name, dtype) in enumerate(_ARRAYS.items())
    }
    return Readings(**arrays, layers=layers)


# ---- trunks


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
        tokens = read.token_ids, read.score_positions, read.targets
        return Score(tree.problem_id, sequence, *tokens, head=TOKENS_AND_STATES)


def children_of(tree: TreeRecord) -> dict[int | None, list[int]]:
    """Indices of the steps that are read, by that of the one before; None for first steps."""
    children: dict[int | None, list[int]] = defaultdict(list)
    for index, step in enumerate(tree.steps):
        if is_read(step):
            children[read_before(tree, index)].append(index)
    return children
