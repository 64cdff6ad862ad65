"""The oracle: exact labels of a solution's steps, and a beam search on the engine that they prune."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling, StopCause, stream_key
from espalier.experiments.demo.problems import DELIMITER, MAX_OPERATIONS, Problem
from espalier.experiments.lab.recipe.networks import GENERATOR as GENERATOR_FOLDER
from espalier.experiments.lab.recipe.networks import TEMPERATURE
from espalier.experiments.lab.recipe.tokenizer import chat_prompt

_EQUATION = re.compile(r"(?:\([a-z]\) )?(\d+)([+-])(\d+)=(\d+)")
_BOXED = re.compile(r"\\boxed\{(\d+)\}")


def parse_equation(step: str) -> tuple[int, int, int] | None:
    """Returns left operand, signed right operand and result of `(a) 1+2=3` or `3-2=1`, or None for any other text."""
    match = _EQUATION.fullmatch(step.strip())
    if match is None:
        return None
    left, sign, right, result = match.groups()
    return int(left), int(right) if sign == "+" else -int(right), int(result)


def parse_answer(step: str) -> str | None:
    r"""Returns the digits inside `\boxed{...}`, or None for any other text."""
    match = _BOXED.fullmatch(step.strip())
    return match.group(1) if match else None


def numbers_of(solution: str) -> tuple[int, tuple[int, ...]]:
    """Returns start and signed operands of a reference solution.

    Raises:
        ValueError: The text is not a reference solution of this task.
    """
    equations = [parse_equation(step) for step in solution.split(DELIMITER)[:-1]]
    parsed = [parts for parts in equations if parts is not None]
    if not parsed or len(parsed) != len(equations):
        raise ValueError(f"not a running-quantity solution: {solution!r}")
    return parsed[0][0], tuple(operand for _, operand, _ in parsed)


def label_steps(start: int, operands: Sequence[int], steps: Sequence[str]) -> list[bool]:
    """Labels each step: right if it and all before it are right.

    Step k must continue the running value, apply the k-th operand and have the right result; the step after the last
    operand must give the final value as the answer. Nothing that follows the answer is right.
    """
    labels: list[bool] = []
    value, right = start, True
    for index, step in enumerate(steps):
        if index < len(operands):
            right = right and parse_equation(step) == (value, operands[index], value + operands[index])
            value += operands[index]
        else:
            right = right and index == len(operands) and parse_answer(step) == str(value)
        labels.append(right)
    return labels


_MAX_STEP_TOKENS = 40
_AT_ONCE = 50
"""Problems searched together: what the engine's pool holds."""


@dataclass(frozen=True, slots=True)
class BeamPath:
    """Steps without delimiters, the oracle's label of each, how many samples drew them, and whether they end."""

    steps: tuple[str, ...] = ()
    labels: tuple[bool, ...] = ()
    count: int = 1
    finished: bool = False

    @property
    def right(self) -> bool:
        """True if all steps are."""
        return not self.labels or self.labels[-1]


@dataclass(frozen=True, slots=True)
class OracleBeam:
    """One problem's search: the paths of its last beam, right ones first, and those that were pruned on the way."""

    kept: list[BeamPath]
    pruned: list[BeamPath]

    @property
    def solved(self) -> bool:
        """True if the beam has a right path that ends."""
        return any(path.right and path.finished for path in self.kept)


def make_engine(pair: Path) -> Engine:
    """An engine for the generator of a pair's folder, in float32 on CPU."""
    import torch

    return Engine({GENERATOR: load_generator(Checkpoint(pair / GENERATOR_FOLDER), torch.float32, "cpu")})


def beam_search(
    engine: Engine, problems: Sequence[Problem], *, beam_width: int, expansion: int, seed: int
) -> list[OracleBeam]:
    """Search every problem, sampling at the pair's temperature.

    Each round every unfinished path samples `expansion` steps (the first round starts from `beam_width` empty paths),
    and the right ones among the candidates and the finished paths stay, filled up with wrong ones to `beam_width`. With
    an expansion of 1 these are independent samples.
    """
    beams: list[OracleBeam] = []
    for first in range(0, len(problems), _AT_ONCE):
        searches = [_Search(engine, p, beam_width, expansion, seed) for p in problems[first : first + _AT_ONCE]]
        for _ in range(MAX_OPERATIONS + 2):
            for search in searches:
                search.sample()
            while engine.busy:
                for done in engine.step():
                    search = done.work.owner
                    assert isinstance(search, _Search)
                    assert isinstance(done, Generated)
                    search.candidates.append(done)
            for search in searches:
                search.prune()
        for search in searches:
            engine.abandon(search)
        beams += [OracleBeam([path for path, _ in search.beam], search.pruned) for search in searches]
    return beams


class _Search:
    """One problem's beam; the owner of its work in the engine."""

    def __init__(self, engine: Engine, problem: Problem, beam_width: int, expansion: int, seed: int) -> None:
        self.candidates: list[Generated] = []
        self.pruned: list[BeamPath] = []
        self._engine, self._problem, self._seed = engine, problem, seed
        self._beam_width, self._expansion = beam_width, expansion
        prompt = engine.model(GENERATOR).tokenizer.encode(chat_prompt(problem.text))
        root = engine.open(GENERATOR, prompt, owner=self)
        self.beam: list[tuple[BeamPath, KVSequence]] = [(BeamPath(count=beam_width), root)]

    def sample(self) -> None:
        """Ask for the next step of every unfinished path."""
        for index, (path, sequence) in enumerate(self.beam):
            if path.finished:
                continue
            place = (len(path.steps), index)
            keys = [
                stream_key(self._seed, self._problem.text, (*place, i)) for i in range(path.count * self._expansion)
            ]
            samplings = tuple(Sampling(TEMPERATURE, key=key) for key in keys)
            self._engine.submit(Generate(self, sequence, samplings, _MAX_STEP_TOKENS, DELIMITER))

    def prune(self) -> None:
        """Keep the best of the candidates and the finished paths."""
        paths = {sequence: path for path, sequence in self.beam}
        found = [(path, sequence) for path, sequence in self.beam if path.finished]
        for done in sorted(self.candidates, key=lambda done: done.indices):
            steps = (*paths[done.work.sequence].steps, done.text.removesuffix(DELIMITER))
            labels = tuple(label_steps(self._problem.start, self._problem.operands, steps))
            finished = done.cause is not StopCause.DELIMITER
            found.append((BeamPath(steps, labels, len(done.indices), finished), done.sequence))
        self.candidates = []
        room = self._beam_width
        self.beam = []
        for path, sequence in sorted(found, key=lambda pair: not pair[0].right):
            if count := min(room, path.count):
                self.beam.append((BeamPath(path.steps, path.labels, count, path.finished), sequence))
                room -= count
            else:
                self.pruned.append(path)
