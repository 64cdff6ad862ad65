"""Reads trees with a trunk, and keeps the states of all tokens that enter one of its layers."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from espalier.engine.engine import Engine
from espalier.engine.errors import EspalierError
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Head
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Score
from espalier.experiments.lab.tuning.entering import BYTES_PER_VALUE, EnteringStates
from espalier.experiments.verifier_training import features
from espalier.experiments.verifier_training.features import Readings, StatesHead, TrunkReader, children_of
from espalier.experiments.verifier_training.tree_file import TreeRecord

ENTERING = "entering"
"""The head that gives the states of `Layers.tap_raw`; the trunk's model must have it."""


def heads_for(trunk: StatesHead) -> dict[str, Head]:
    """The heads that a trunk's model needs whose entering states are kept; see `features.heads_for`."""
    return features.heads_for(trunk) | {ENTERING: lambda states: trunk.model.decoder.layers.states_of(states)[-1]}


class EnteringReader(TrunkReader):
    """A reader that keeps, beside its readings, the states of all tokens that enter a layer; see `entering`."""

    def __init__(
        self, engine: Engine, system_prompt: str, trees: Sequence[TreeRecord], folder: Path, entering: int
    ) -> None:
        """Read nothing yet; see `TrunkReader`. `entering` is the layer."""
        super().__init__(engine, system_prompt, trees, folder)
        self._model.decoder.layers.tap_raw(entering)
        self._kept = EnteringStates()

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
        for tree in self.trees:
            children = children_of(tree)
            tokens += len(self._prompt(tree)) if children else 0
            tokens += sum(len(self._reading(tree, child).token_ids) for of in children.values() for child in of)
        needed = tokens * self._model.config.hidden_size * BYTES_PER_VALUE
        self._folder.mkdir(parents=True, exist_ok=True)
        there = sum(file.stat().st_size for file in self.entering_files if file.is_file())
        if needed - there > (free := shutil.disk_usage(self._folder).free):
            raise EspalierError(
                f"the states of {tokens:,} tokens take {needed / 2**30:.2f} GiB in {self._folder}, where "
                f"{free / 2**30:.2f} are free; give another --out, or fewer problems (--limit) or solutions (-N)"
            )
        return tokens, needed

    def _identity(self) -> list[Any]:
        *of_trunk, layers = super()._identity()
        return [*of_trunk, [*layers, f"entering {self._model.decoder.layers.raw_tap}"]]

    def _part(self, file: Path, trees: Sequence[TreeRecord], first: int) -> Readings:
        """Readings of some trees; the states that enter a layer are written first, so that they are there with them."""
        self._kept = EnteringStates()
        readings = super()._part(file, trees, first)
        self._kept.write(_entering_file(file))
        return readings

    def _steps(self, tree: TreeRecord) -> Iterator[tuple[int, np.ndarray, tuple[float, float]]]:
        self._kept.begin()
        return super()._steps(tree)

    def _values(self, tree: TreeRecord, children: Mapping[int | None, list[int]]) -> Iterator[tuple[int, np.ndarray]]:
        hidden = self._model.config.hidden_size
        for index, values in self._computed(self._root(tree), children, partial(self._work, tree)):
            if index is None:
                self._kept.add(values, of_prompt=True)
            else:
                values, states = np.split(values, [-hidden], axis=1)
                self._kept.add(states)
                yield index, values

    def _root(self, tree: TreeRecord) -> KVSequence:
        """An empty sequence: the states of the prompt's tokens are read, too."""
        return self._engine.open(GENERATOR, [], owner=tree.problem_id)

    def _work(self, tree: TreeRecord, sequence: KVSequence, index: int | None) -> Score:
        if index is not None:
            return super()._work(tree, sequence, index)
        prompt = tuple(self._prompt(tree))
        return Score(tree.problem_id, sequence, prompt, tuple(range(len(prompt))), head=ENTERING)


def _entering_file(file: Path) -> Path:
    """The file of states that enter a layer, beside one of readings."""
    return file.with_suffix(".safetensors")
