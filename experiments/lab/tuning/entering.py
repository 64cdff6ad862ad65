"""States that enter one of a trunk's layers, of all tokens of trees, kept in files: the layers above are tuned on them.

Each file belongs to one of readings (`features`) and holds, bfloat16 `[T, hidden]`, the states of the tokens of
each problem: of the prompt, then of each step that was read, in the order of the readings' rows. What is computed for a
step is the token before it and its tokens but the last, so that the last of its states is the one that heads read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from espalier.experiments.runs.files import replacing
from espalier.experiments.verifier_training.features import Readings

BYTES_PER_VALUE = torch.bfloat16.itemsize
"""Residual streams have a few very large values: the range of float16 is too small for those of some models."""
_STATES, _PROMPTS = "states", "prompts"


class EnteringStates:
    """The states of some problems, as they are read."""

    def __init__(self) -> None:
        """Begin without any."""
        self._prompts: list[int] = []
        self._states: list[torch.Tensor] = []

    def begin(self) -> None:
        """Begin another problem."""
        self._prompts.append(0)

    def add(self, states: np.ndarray, of_prompt: bool = False) -> None:
        """Add those of a prompt or of a step, float32 `[tokens, hidden]`."""
        if of_prompt:
            self._prompts[-1] = len(states)
        self._states.append(torch.from_numpy(states).to(torch.bfloat16))

    def write(self, file: Path) -> None:
        """Write them, as a whole or not at all."""
        states = torch.cat(self._states) if self._states else torch.zeros(0, 0, dtype=torch.bfloat16)
        with replacing(file) as partial:
            save_file({_STATES: states, _PROMPTS: torch.tensor(self._prompts)}, partial)


@dataclass(frozen=True, slots=True)
class TreeStates:
    """One problem's tree: its tokens, and its steps.

    Attributes:
        states: float32 `[T, hidden]`, those that enter the layer.
        positions: int64 `[T]`, places in the text.
        sees: bool `[T, T]`, whether a token attends to another: its own and those before it on its path.
        ends: int64 `[S]`, the token of each step that heads read.
        rows: int64 `[S]`, the steps' rows of the readings.
    """

    states: torch.Tensor
    positions: torch.Tensor
    sees: torch.Tensor
    ends: torch.Tensor
    rows: np.ndarray


class KeptStates:
    """The files of all problems' states; each tree is read when it is asked for."""

    def __init__(self, files: Sequence[Path], readings: Readings) -> None:
        """Take the files that were written with these readings."""
        self._readings = readings
        self._place: list[tuple[Path, int, int]] = []  # by problem: file, first row there, tokens of the prompt
        lengths = readings.read[:, 1].astype(np.int64)
        of_problems = np.bincount(readings.problems, weights=lengths).astype(np.int64) if len(lengths) else lengths
        for file in files:
            with safe_open(file, "pt") as stored:
                prompts = stored.get_tensor(_PROMPTS).tolist()
            first = 0
            for prompt in prompts:
                self._place.append((file, first, prompt))
                first += prompt + (int(of_problems[len(self._place) - 1]) if prompt else 0)

    def tokens(self, problem: int) -> int:
        """Number of tokens of a problem's tree."""
        of_steps = self._readings.read[self._readings.problems == problem, 1]
        return self._place[problem][2] + int(of_steps.sum())

    def tree(self, problem: int) -> TreeStates:
        """One problem's; it must have steps."""
        readings = self._readings
        rows = np.flatnonzero(readings.problems == problem)
        file, first, prompt = self._place[problem]
        # Part 0 is the prompt, part i + 1 the problem's step i.
        lengths = np.array([prompt, *readings.read[rows, 1].astype(np.int64)])
        above = np.array([-1, *np.maximum(readings.parents[rows] - rows[0], -1) + 1])
        on_path = np.eye(len(lengths), dtype=bool)
        begins = np.zeros(len(lengths), np.int64)
        for part in range(1, len(lengths)):
            on_path[part] |= on_path[above[part]]
            begins[part] = begins[above[part]] + lengths[above[part]]
        part_of = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        ends = torch.from_numpy(np.cumsum(lengths))
        positions = torch.arange(len(part_of)) - (ends - torch.from_numpy(lengths + begins))[part_of]
        sees = torch.from_numpy(on_path)[part_of][:, part_of] & (positions[:, None] >= positions)
        with safe_open(file, "pt") as stored:
            states = stored.get_slice(_STATES)[first : first + len(part_of)].float()
        return TreeStates(states, positions, sees, ends[1:] - 1, rows)
