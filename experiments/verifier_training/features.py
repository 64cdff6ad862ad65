"""Hidden states at the ends of steps, what a trunk head reads, taken from whole trees in one pass of the engine."""

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.decoder import Decoder
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Score, Scored
from espalier.experiments.runs.folder import replacing
from espalier.experiments.verifier_training.tree_file import TreeRecord

log = logging.getLogger("espalier.training")
HIDDEN = "hidden"
"""The head that gives hidden states as they are; the generator's model must have it, among its `wide_heads`."""
LAST = 0
"""Stands for the states after the last layer among numbers of layers."""
PART = 50
"""Problems of one file, after which an interrupted run goes on."""


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

    def states_of(self, place: int) -> np.ndarray:
        """The states of one of `layers`, `[S, hidden]`."""
        return self.states[:, place * self.hidden : (place + 1) * self.hidden]

    def path_means(self, column: np.ndarray) -> np.ndarray:
        """The mean of a column, `[S]`, over the steps of the path to each step, float64 `[S]`."""
        sums, lengths = column.astype(np.float64), np.ones(len(column))
        for row, above in enumerate(self.parents.tolist()):
            if above >= 0:
                sums[row] += sums[above]
                lengths[row] += lengths[above]
        return sums / lengths

    @classmethod
    def arrays(cls) -> tuple[str, ...]:
        """Names of the arrays."""
        return "states", "values", "samples", "problems", "parents", "right", "read", "sampled", "steps"


def tap_candidates(decoder: Decoder) -> tuple[int, ...]:
    """Have a decoder give the states of layers that heads may rank better on than after the last; returns all of them.

    Those half, two thirds and five sixths of the way; none where the decoder gives no states between layers.
    """
    count = decoder.config.num_layers
    layers = sorted({count // 2, round(2 * count / 3), round(5 * count / 6)} - {0, count})
    try:
        decoder.tap(layers)
    except CheckpointError as error:
        log.info("heads are learned after the last layer only: %s", error)
        return (LAST,)
    return LAST, *decoder.taps


def take_features(
    engine: Engine, trees: Sequence[TreeRecord], folder: Path, on_problem: Callable[[], None]
) -> Readings:
    """Features of all trees, from the files in `folder` as far as they are there.

    Args:
        engine: holds a generator with the head `HIDDEN`.
        trees: of that generator.
        folder: gets a file for each 50 problems.
        on_problem: called for each problem that is done.
    """
    layers = (LAST, *engine.model(GENERATOR).decoder.taps)

    def part(file: Path, some: Sequence[TreeRecord], first: int) -> Readings:
        return _part(engine, some, first, layers)

    files = part_files(trees, folder, lambda some: _digest(some, layers))
    return read_parts(files, trees, part, layers, on_problem)


def part_files(trees: Sequence[TreeRecord], folder: Path, digest: Callable[[Sequence[TreeRecord]], str]) -> list[Path]:
    """The files that keep readings of trees, one for each `PART` of them, named by what theirs depend on."""
    starts = range(0, len(trees), PART)
    return [folder / f"{start:06}-{digest(trees[start : start + PART])}.npz" for start in starts]


def read_parts(
    files: Sequence[Path],
    trees: Sequence[TreeRecord],
    part: Callable[[Path, Sequence[TreeRecord], int], Readings],
    layers: tuple[int, ...],
    on_problem: Callable[[], None],
) -> Readings:
    """Readings of all trees, from the files as far as they are there.

    Args:
        files: see `part_files`; their folder is made.
        trees: what is read.
        part: reads those of one file, given it, them, and the number of the first.
        layers: see `Readings`.
        on_problem: called for each problem that is done.
    """
    parts: list[Readings] = []
    rows = 0
    for start, file in zip(range(0, len(trees), PART), files, strict=True):
        some = trees[start : start + PART]
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            found = part(file, some, start)
            with replacing(file) as partial, partial.open("wb") as stream:
                np.savez(stream, **{name: getattr(found, name) for name in Readings.arrays()})
        read = Readings(**np.load(file), layers=layers)
        read.parents[read.parents >= 0] += rows
        parts.append(read)
        rows += len(read.values)
        for _ in some:
            on_problem()
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Readings.arrays()}
    return Readings(**arrays, layers=parts[0].layers)


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
    row_of: dict[tuple[int, int], int] = {}
    rows: list[tuple[float, int, int, int, int]] = []
    for at, index, _, _ in found:
        tree = trees[at]
        step = tree.steps[index]
        above = next((row_of[at, i] for i in reversed(tree.lineage(index)[:-1]) if (at, i) in row_of), -1)
        row_of[at, index] = len(rows)
        rows.append((step.value, step.samples, first + at, above, -1 if step.end is None else int(bool(step.right))))
    values, samples, problems, parents, right = (
        (np.array(column) for column in zip(*rows, strict=True)) if rows else (np.zeros(0),) * 5
    )
    steps = [trees[at].steps[index] for at, index, _, _ in found]
    sampled = [(sum(step.log_probabilities), len(step.token_ids)) for step in steps]
    return Readings(
        np.array([states for _, _, states, _ in found], np.float32).reshape(-1, len(layers) * hidden),
        values.astype(np.float32),
        samples.astype(np.int64),
        problems.astype(np.int64),
        parents.astype(np.int64),
        right.astype(np.int64),
        np.array([read for _, _, _, read in found], np.float64).reshape(-1, 2),
        np.array(sampled, np.float64).reshape(-1, 2),
        np.array([index for _, index, _, _ in found], np.int64),
        layers=layers,
    )


def _digest(trees: Sequence[TreeRecord], layers: tuple[int, ...]) -> str:
    """Digest of all that features depend on, so that those of fewer or other solutions are not taken for these."""
    names = "token_ids", "value", "samples", "log_probabilities", "end", "right"
    read = [[tree.problem_id, [[getattr(step, name) for name in names] for step in tree.steps]] for tree in trees]
    return hashlib.sha256(json.dumps([Readings.arrays(), layers, read]).encode()).hexdigest()[:16]


def _part(engine: Engine, trees: Sequence[TreeRecord], first: int, layers: tuple[int, ...]) -> Readings:
    found: list[tuple[int, int, np.ndarray, tuple[float, float]]] = []
    for at, tree in enumerate(trees):
        for index, states in _states(engine, tree):
            step = tree.steps[index]
            if step.end != "length" and step.text.strip():
                found.append((at, index, states, (sum(step.log_probabilities), len(step.token_ids))))
    return readings_of(found, trees, first, layers, engine.model(GENERATOR).config.hidden_size)


def _states(engine: Engine, tree: TreeRecord) -> Iterator[tuple[int, np.ndarray]]:
    """Each step's index and the state that its last token was drawn from; every token of the tree is computed once."""
    if not tree.steps:
        return
    *before, token = tree.prompt_token_ids
    root = engine.open(GENERATOR, before, owner=tree.problem_id)
    children: dict[int | None, list[int]] = defaultdict(list)
    for index, step in enumerate(tree.steps):
        children[step.parent].append(index)

    def work(sequence: KVSequence, index: int | None) -> Score:
        ids = (token,) if index is None else tuple(tree.steps[index].token_ids)
        return Score(tree.problem_id, sequence, ids, tuple(range(len(ids))[-2:]), head=HIDDEN)

    last: dict[int | None, np.ndarray] = {}  # the state at the end of each step that is computed
    for index, values in read_tree(engine, root, children, work):
        last[index] = values[-1]
        if index is not None:
            yield index, values[0] if len(values) > 1 else last[tree.steps[index].parent]


def read_tree(
    engine: Engine,
    root: KVSequence,
    children: Mapping[int | None, Sequence[int]],
    work: Callable[[KVSequence, int | None], Score],
) -> Iterator[tuple[int | None, np.ndarray]]:
    """Compute a tree's steps, what paths share once; yields each one's index and values, after its parent's.

    Args:
        engine: has no other work.
        root: the sequence of the prompt, of index None.
        children: indices of the steps behind each step; None for first steps.
        work: what is computed of the prompt or a step, given its sequence.
    """
    places: dict[KVSequence, int | None] = {root: None}
    first = work(root, None)
    engine.submit(first)
    try:
        while engine.busy:
            for done in engine.step():
                assert isinstance(done, Scored)
                sequence = done.work.sequence
                index = places.pop(sequence)
                yield index, done.values
                for child in children.get(index, ()):
                    (fork,) = engine.fork(sequence, 1)
                    places[fork] = child
                    engine.submit(work(fork, child))
                engine.release(sequence)
    except GeneratorExit:
        engine.abandon(first.owner)
        raise
