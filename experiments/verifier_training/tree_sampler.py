"""Samples the solutions of one problem as a tree, and values its steps by continuations forked from it.

All solutions start from one prompt, and go on together while they draw the same tokens. A step's continuations fork
its sequence, so that nothing before it is computed again. The value of a step, its label, is

- `outcome`: the share of its solutions that end right (Cobbe et al., arXiv:2110.14168);
- `monte-carlo`: that share with R more continuations of the step (Math-Shepherd, arXiv:2312.08935; its solutions are
  continuations too, since each goes on from the step by itself);
- `binary-search`: 1 where any known solution or continuation of the step ends right, else 0. Continuations are sampled
  where a binary search for the first wrong step of a wrong solution looks (OmegaPRM, arXiv:2406.06592).
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling, StopCause, stream_key
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.verifier_training.settings import Labels, RolloutSettings
from espalier.experiments.verifier_training.tree_file import StepRecord, TreeRecord
from espalier.search.grading.answers import extract_answer
from espalier.search.grading.boxes import boxed
from espalier.search.run.generator import Generator

VALUED_AT_ONCE = 4
"""Steps of a problem whose continuations are sampled at the same time; they bound its memory."""


@dataclass(slots=True, eq=False)
class _Step:
    """A step of the tree, or its root.

    Attributes:
        draws: the solutions that drew it, by their numbers.
        expected: solutions whose next step is being sampled.
        continued: continuations that are being sampled.
        wanted: whether continuations are still to be sampled.
    """

    parent: "_Step | None"
    draws: tuple[int, ...]
    sequence: KVSequence | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    end: str | None = None
    answer: str | None = None
    right: bool | None = None
    expected: int = 0
    continued: int = 0
    wanted: bool = False
    continuations: int = 0
    continuations_right: int = 0
    children: "list[_Step]" = field(default_factory=list)

    def lineage(self) -> "list[_Step]":
        """The steps from a first one to this, without the root."""
        path: list[_Step] = []
        step = self
        while step.parent is not None:
            path.append(step)
            step = step.parent
        return path[::-1]

    def solutions(self) -> tuple[int, int]:
        """Number of solutions that have this step, and of those that end right."""
        right = len(self.draws) if self.right else 0
        return len(self.draws), right + sum(child.solutions()[1] for child in self.children)

    def reached(self) -> bool:
        """Return true if any known solution or continuation of the step ends right."""
        return bool(self.right or self.continuations_right or any(child.reached() for child in self.children))


class ProblemTree:
    """The solutions of one problem while they are sampled. Pass all finished engine work of its owner to `handle`.

    Attributes:
        finished: whether nothing is left to sample; the engine holds nothing for it then.
    """

    def __init__(
        self,
        engine: Engine,
        generator: Generator,
        owner: Hashable,
        problem: Problem,
        settings: RolloutSettings,
        is_right: Callable[[str], bool],
    ) -> None:
        """Open the problem's prompt and start sampling.

        Raises:
            RequestTooLargeError: the prompt leaves no room for an answer.
            NoEmbeddingError: the prompt has tokens without an embedding.
        """
        self.finished = False
        self._engine = engine
        self._owner = owner
        self._problem = problem
        self._settings = settings
        self._is_right = is_right
        self._temperature = generator.temperature if settings.temperature is None else settings.temperature
        self._filters = generator.top_k, generator.top_p, generator.min_p
        self._prompt_ids = generator.prompt_ids(problem.problem, problem.history)
        sequence = engine.open(GENERATOR, self._prompt_ids, owner=owner)
        self._most_tokens = min(settings.max_tokens, generator.model.config.max_positions - len(self._prompt_ids))
        self._steps: list[_Step] = []
        self._to_value: deque[_Step] = deque()
        self._sampling_steps = self._valuing = 0
        self._searches: dict[_Step, list[Iterator[_Step]]] = {}  # binary searches, by the step that they wait for
        self._searched = False
        self._root = _Step(None, tuple(range(settings.solutions)), sequence)
        self._sample(self._root)

    def handle(self, done: Generated) -> None:
        """Process one finished piece of work."""
        step: _Step = done.work.tag
        if done.work.delimiter:
            self._add(step, done)
        else:
            self._add_continuation(step, done)
        self._go_on()

    def record(self) -> TreeRecord:
        """The whole tree."""
        steps = sorted(self._steps, key=lambda step: (len(step.lineage()), step.draws))  # not as they happened to end
        places = {step: place for place, step in enumerate(steps)}
        records = [
            StepRecord(
                None if step.parent is self._root or step.parent is None else places[step.parent],
                step.text,
                step.token_ids,
                [round(value, 6) for value in step.log_probabilities],
                len(step.draws),
                step.end,
                step.answer,
                step.right,
                step.continuations,
                step.continuations_right,
                round(self._value(step), 6),
            )
            for step in steps
        ]
        return TreeRecord(
            self._problem.unique_id, self._problem.problem, self._problem.answer, self._prompt_ids, records
        )

    def _value(self, step: _Step) -> float:
        if self._settings.labels is Labels.BINARY_SEARCH:
            return float(step.reached())
        solutions, right = step.solutions()
        return (right + step.continuations_right) / (solutions + step.continuations)

    def _sample(self, step: _Step) -> None:
        """Sample the next step of every solution that has `step`."""
        assert step.sequence is not None
        depth = len(step.lineage())
        step.expected = len(step.draws)
        self._sampling_steps += 1
        left = self._most_tokens - sum(len(one.token_ids) for one in step.lineage())
        samplings = tuple(self._sampling(draw, depth) for draw in step.draws)
        most = min(self._settings.max_step_tokens, left)
        self._engine.submit(Generate(self._owner, step.sequence, samplings, most, tag=step))

    def _sampling(self, *path: int) -> Sampling:
        key = stream_key(self._settings.seed, self._problem.problem, path)
        return Sampling(self._temperature, *self._filters, key=key)

    def _add(self, parent: _Step, done: Generated) -> None:
        draws = tuple(parent.draws[i] for i in done.indices)
        step = _Step(parent, draws, done.sequence, done.text, done.token_ids, done.log_probabilities)
        self._steps.append(step)
        parent.children.append(step)
        parent.expected -= len(draws)
        self._sampling_steps -= not parent.expected
        path = step.lineage()
        used = sum(len(one.token_ids) for one in path)
        if done.cause is StopCause.EOS:
            step.end = "eos"
        elif done.cause is StopCause.DELIMITER and boxed(done.text).answer:
            step.end = "boxed"
        elif (
            done.cause is not StopCause.DELIMITER or len(path) >= self._settings.max_steps or used >= self._most_tokens
        ):
            step.end = "length"
        if step.end is None:
            if self._settings.labels is Labels.MONTE_CARLO:
                self._want(step)
            self._sample(step)
        else:
            step.answer = None if step.end == "length" else extract_answer("".join(one.text for one in path))
            step.right = step.answer is not None and self._is_right(step.answer)
            self._release(step)
        self._release(parent)

    def _want(self, step: _Step) -> None:
        step.wanted = True
        self._to_value.append(step)

    def _add_continuation(self, step: _Step, done: Generated) -> None:
        self._engine.release(done.sequence)
        text = "".join(one.text for one in step.lineage()) + done.text
        right = done.cause is StopCause.EOS and self._is_right(extract_answer(text))
        step.continuations += len(done.indices)
        step.continuations_right += right * len(done.indices)
        step.continued -= len(done.indices)
        if not step.continued:
            self._valuing -= 1
            self._engine.release(done.work.sequence)
            self._release(step)
            for search in self._searches.pop(step, ()):
                self._advance(search)

    def _go_on(self) -> None:
        while self._to_value and self._valuing < VALUED_AT_ONCE:
            self._continue(self._to_value.popleft())
        if self._valuing or self._sampling_steps:
            return
        if self._settings.labels is Labels.BINARY_SEARCH and not self._searched:
            self._searched = True
            for step in self._steps:
                if step.end and not step.right:
                    self._advance(self._search(step))
            self._go_on()
            return
        self._searched = self.finished = True
        for step in (self._root, *self._steps):
            self._release(step)

    def _continue(self, step: _Step) -> None:
        """Sample a step's continuations, from a fork: its own sequence may be sampled from too."""
        step.wanted = False
        assert step.sequence is not None
        left = self._most_tokens - sum(len(one.token_ids) for one in step.lineage())
        (fork,) = self._engine.fork(step.sequence, 1)
        step.continued = self._settings.continuations
        self._valuing += 1
        depth = len(step.lineage())
        samplings = tuple(self._sampling(step.draws[0], depth, i) for i in range(step.continued))
        self._engine.submit(Generate(self._owner, fork, samplings, left, delimiter="", tag=step))

    def _search(self, leaf: _Step) -> Iterator[_Step]:
        """Search a wrong solution's first wrong step; yields each step whose continuations it needs."""
        path = leaf.lineage()
        right, wrong = 0, len(path)  # lengths of prefixes; of these, those that can still end right and those that not
        while wrong - right > 1:
            middle = (right + wrong) // 2
            step = path[middle - 1]
            if not step.reached() and not step.continuations:
                yield step
            right, wrong = (middle, wrong) if step.reached() else (right, middle)

    def _advance(self, search: Iterator[_Step]) -> None:
        if (step := next(search, None)) is None:
            return
        self._searches.setdefault(step, []).append(search)
        if not step.wanted and not step.continued:
            self._want(step)

    def _release(self, step: _Step) -> None:
        """Release a step's sequence once nothing more is sampled from it."""
        keep = self._settings.labels is Labels.BINARY_SEARCH and not self._searched and step.end is None
        if self.finished or not (step.expected or step.wanted or step.continued or keep or self._searches):
            if step.sequence is not None:
                self._engine.release(step.sequence)
            step.sequence = None
