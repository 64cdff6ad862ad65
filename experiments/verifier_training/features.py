"""Hidden states at the ends of steps, what a trunk head reads, taken from whole trees in one pass of the engine."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Score, Scored
from espalier.experiments.verifier_training.tree_file import TreeRecord

HIDDEN = "hidden"
"""The head that gives the hidden state as it is; the generator's model must have it."""
_PART = 50
"""Problems of one file, after which an interrupted run goes on."""


@dataclass(frozen=True, slots=True)
class Features:
    """Steps with a score in a search, that is without those that were cut off.

    Attributes:
        states: float32 `[S, hidden]`: the state that a step's last token is drawn from.
        values: float32 `[S]`, labels in [0, 1].
        samples: int64 `[S]`, how many solutions have the step.
        problems: int64 `[S]`, the number of its problem.
    """

    states: np.ndarray
    values: np.ndarray
    samples: np.ndarray
    problems: np.ndarray


def take_features(
    engine: Engine, trees: Sequence[TreeRecord], folder: Path, on_problem: Callable[[], None]
) -> Features:
    """Features of all trees, from the files in `folder` as far as they are there.

    Args:
        engine: holds a generator with the head `HIDDEN`.
        trees: of that generator.
        folder: gets a file for each 50 problems.
        on_problem: called for each problem that is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Features] = []
    for start in range(0, len(trees), _PART):
        some = trees[start : start + _PART]
        file = folder / f"{start:06}-{_digest(some)}.npz"
        if not file.is_file():
            part, partial = _part(engine, some, start), folder / f"{start:06}.partial.npz"
            np.savez(partial, states=part.states, values=part.values, samples=part.samples, problems=part.problems)
            partial.replace(file)
        parts.append(Features(**np.load(file)))
        for _ in some:
            on_problem()
    names = ("states", "values", "samples", "problems")
    return Features(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _digest(trees: Sequence[TreeRecord]) -> str:
    """Digest of all that features depend on, so that those of fewer or other solutions are not taken for these."""
    read = [[tree.problem_id, [[step.token_ids, step.value, step.samples] for step in tree.steps]] for tree in trees]
    return hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16]


def _part(engine: Engine, trees: Sequence[TreeRecord], first: int) -> Features:
    states: list[np.ndarray] = []
    rows: list[tuple[float, int, int]] = []
    for number, tree in enumerate(trees, start=first):
        for index, state in _states(engine, tree):
            step = tree.steps[index]
            if step.end != "length" and step.text.strip():
                states.append(state)
                rows.append((step.value, step.samples, number))
    values, samples, problems = zip(*rows, strict=True) if rows else ((), (), ())
    hidden = engine.model(GENERATOR).config.hidden_size
    return Features(
        np.array(states, np.float32).reshape(-1, hidden),
        np.array(values, np.float32),
        np.array(samples, np.int64),
        np.array(problems, np.int64),
    )


def _states(engine: Engine, tree: TreeRecord) -> Iterator[tuple[int, np.ndarray]]:
    """Each step's index and the state that its last token was drawn from; every token of the tree is computed once."""
    if not tree.steps:
        return
    owner = tree.problem_id
    root = engine.open(GENERATOR, tree.prompt_token_ids[:-1], owner=owner)
    engine.submit(Score(owner, root, (tree.prompt_token_ids[-1],), (0,), head=HIDDEN))
    children: dict[int | None, list[int]] = {}
    for index, step in enumerate(tree.steps):
        children.setdefault(step.parent, []).append(index)
    places: dict[KVSequence, int | None] = {root: None}
    last: dict[int | None, np.ndarray] = {}  # the state at the end of each step that is computed
    try:
        while engine.busy:
            for done in engine.step():
                assert isinstance(done, Scored)
                sequence = done.work.sequence
                index = places.pop(sequence)
                last[index] = done.values[-1]
                if index is not None:
                    yield index, done.values[0] if len(done.values) > 1 else last[tree.steps[index].parent]
                for child in children.get(index, ()):
                    (fork,) = engine.fork(sequence, 1)
                    places[fork] = child
                    ids = tuple(tree.steps[child].token_ids)
                    read = (len(ids) - 2, len(ids) - 1) if len(ids) > 1 else (0,)
                    engine.submit(Score(owner, fork, ids, read, head=HIDDEN))
                engine.release(sequence)
    except GeneratorExit:
        engine.abandon(owner)
        raise
