"""Reads a generator's solutions with another model, the trunk: each tree once, with what its paths share."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from espalier.engine.engine import Engine
from espalier.engine.errors import EspalierError
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Head, Model
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Score
from espalier.experiments.verifier_training.entering import BYTES_PER_VALUE, EnteringStates
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

ENTERING = "entering"
"""The head that gives the states of `Layers.tap_raw`; the trunk's model must have it where they are kept."""
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
    return {TOKENS_AND_STATES: trunk, ENTERING: lambda states: trunk.model.decoder.states_of(states)[-1]}


class TreeReader:
    """Reads trees with a trunk, and keeps what it reads in files."""

    def __init__(self, engine: Engine, system_prompt: str, trees: Sequence[TreeRecord], folder: Path) -> None:
        """Read nothing yet.

        Args:
            engine: holds the trunk as a generator, with `heads_for` it. If its decoder gives the states that enter a
                layer as they are (`Decoder.tap_raw`), those of all tokens are kept beside the readings; see `entering`.
            system_prompt: the trunk's own.
            trees: of any generator.
            folder: gets a file for each 50 problems.
        """
        self._engine = engine
        self._family = Likelihood(engine.model(GENERATOR), system_prompt)
        self._decoder = engine.model(GENERATOR).decoder
        self._trees = trees
        self._folder = folder

    @property
    def files(self) -> list[Path]:
        """The files of the readings, of each 50 problems one."""
        return part_files(self._trees, self._folder, self._digest)

    @property
    def entering_files(self) -> list[Path]:
        """The files of states that enter a layer, beside those of the readings."""
        return list(map(_entering_file, self.files))

    def require_room(self) -> tuple[int, int]:
        """Return how many tokens are read, each of a tree's once, and bytes of their states that enter a layer.

        Raises:
            EspalierError: the folder has no room for those that are not there yet.
        """
        tokens = 0
        for tree in self._trees:
            children = _children(tree)
            tokens += len(self._prompt(tree)) if children else 0
            tokens += sum(len(self._reading(tree, child).token_ids) for of in children.values() for child in of)
        needed = tokens * self._family.model.config.hidden_size * BYTES_PER_VALUE
        self._folder.mkdir(parents=True, exist_ok=True)
        there = sum(file.stat().st_size for file in self.entering_files if file.is_file())
        if needed - there > (free := shutil.disk_usage(self._folder).free):
            raise EspalierError(
                f"the states of {tokens:,} tokens take {needed / 2**30:.2f} GiB in {self._folder}, where "
                f"{free / 2**30:.2f} are free; give another --out, or fewer problems (--limit) or solutions (-N)"
            )
        return tokens, needed

    def read(self, on_problem: Callable[[], None]) -> Readings:
        """Readings of all trees, from the files as far as they are there; `on_problem` is called as one is done."""
        return read_parts(self.files, self._trees, self._part, self._layers, on_problem)

    @property
    def _layers(self) -> tuple[int, ...]:
        return LAST, *self._decoder.taps

    @property
    def _keeps(self) -> bool:
        return self._decoder.raw_tap is not None

    def _digest(self, trees: Sequence[TreeRecord]) -> str:
        """Digest of all that readings depend on."""
        names = "parent", "text", "log_probabilities", "value", "samples", "end", "right"
        read = [[tree.problem, [[getattr(step, name) for name in names] for step in tree.steps]] for tree in trees]
        layers = [*self._layers, *([f"entering {self._decoder.raw_tap}"] if self._keeps else [])]
        of = [Readings.arrays(), self._family.model.digest, self._family.prompt_ids("2"), layers, read]
        return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]

    def _part(self, file: Path, trees: Sequence[TreeRecord], first: int) -> Readings:
        """Readings of some trees; the states that enter a layer are written first, so that they are there with them."""
        kept = EnteringStates()
        found: list[tuple[int, int, np.ndarray, tuple[float, float]]] = []
        for at, tree in enumerate(trees):
            kept.begin()
            for index, values in self._steps(tree):
                if index is None:
                    kept.add(values, of_prompt=True)
                    continue
                if self._keeps:
                    values, states = np.split(values, [-self._family.model.config.hidden_size], axis=1)
                    kept.add(states)
                found.append((at, index, values[-1, 1:], (float(values[:, 0].sum()), len(values))))
        if self._keeps:
            kept.write(_entering_file(file))
        return readings_of(found, trees, first, self._layers, self._family.model.config.hidden_size)

    def _prompt(self, tree: TreeRecord) -> list[int]:
        return self._family.prompt_ids(self._family.plain_text.of(tree.problem))

    def _reading(self, tree: TreeRecord, index: int) -> ScoreInput:
        """The tokens that are read of a step."""
        steps = (tree.steps[i].text for i in tree.lineage(index) if _is_read(tree.steps[i]))
        return self._family.read(self._family.plain_text.path(tree.problem, steps))

    def _steps(self, tree: TreeRecord) -> Iterator[tuple[int | None, np.ndarray]]:
        """Each step that is read, after its parent: its index, and of its tokens the values of `TOKENS_AND_STATES`.

        If the states that enter a layer are kept, first those of the prompt, of index None.
        """
        children = _children(tree)
        if not children:
            return
        prompt, owner, keeps = self._prompt(tree), tree.problem_id, self._keeps
        root = self._engine.open(GENERATOR, [] if keeps else prompt, owner=owner)

        def work(sequence: KVSequence, index: int | None) -> Score:
            if index is not None:
                read = self._reading(tree, index)
                how = {"targets": read.targets, "head": TOKENS_AND_STATES}
                return Score(owner, sequence, read.token_ids, read.score_positions, **how)
            ids = tuple(prompt) if keeps else ()
            return Score(owner, sequence, ids, tuple(range(len(ids))), head=ENTERING if keeps else "")

        for index, values in read_tree(self._engine, root, children, work):
            if index is not None or keeps:
                yield index, values


def _entering_file(file: Path) -> Path:
    """The file of states that enter a layer, beside one of readings."""
    return file.with_suffix(".safetensors")


def _is_read(step: StepRecord) -> bool:
    """Return whether a step has a score in a search: those that were cut off, and those without text, have none."""
    return step.end != "length" and bool(step.text.strip())


def _children(tree: TreeRecord) -> dict[int | None, list[int]]:
    """Indices of the steps that are read, by that of the one before; None for first steps."""
    children: dict[int | None, list[int]] = {}
    for index, step in enumerate(tree.steps):
        if _is_read(step):
            above = next((i for i in reversed(tree.lineage(index)[:-1]) if _is_read(tree.steps[i])), None)
            children.setdefault(above, []).append(index)
    return children
