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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Done, Generate, Generated, Sampling, StopCause, stream_key
from espalier.prm.limits import PathLimits
from espalier.search.algorithms.base import MemoryEstimate
from espalier.search.grading.answers import boxed, exact_match_key, extract_answer
from espalier.search.grading.notation.numerals import number_in
from espalier.search.result import StopReason
from espalier.search.rollout import Labels, RolloutRequest, RolloutResult, RolloutStep, grade
from espalier.search.run.executor import ResolvedRollout
from espalier.search.run.generator import Generator
from espalier.search.run.resolve import Resolver, penalties_of, worst_case
from espalier.search.run.running import Running, Submission, digests

VALUED_AT_ONCE = 4
"""Steps of a problem whose continuations are sampled at the same time; they bound its memory."""


@dataclass(slots=True, eq=False)
class _Step:
    """A step of the tree, or its root.

    Attributes:
        record: what the file will say of it.
        draws: the solutions that drew it, by their numbers.
        sequence: None once nothing more is sampled from it.
        depth: steps from the root.
        path_tokens: tokens from the prompt to its end.
        path_text: their text.
    """

    record: RolloutStep
    draws: tuple[int, ...]
    sequence: KVSequence | None
    parent: "_Step | None" = None
    depth: int = 0
    path_tokens: int = 0
    path_text: str = ""
    children: "list[_Step]" = field(default_factory=list)

    @property
    def growing(self) -> bool:
        """True if the next step of one of its solutions is still being sampled."""
        return not self.record.end and sum(child.record.samples for child in self.children) < self.record.samples

    def lineage(self) -> "list[_Step]":
        """The steps from a first one to this, without the root."""
        return [] if self.parent is None else [*self.parent.lineage(), self]

    def reached(self) -> bool:
        """Return true if any known solution or continuation of the step ends right."""
        own = self.record.right or self.record.continuations_right
        return bool(own or any(child.reached() for child in self.children))


class RolloutTree:
    """The solutions of one problem while they are sampled. Pass all finished engine work of its owner to `handle`.

    Attributes:
        finished: whether nothing is left to sample; the engine holds nothing for it then.
        depth: steps of its longest path.
    """

    def __init__(
        self,
        engine: Engine,
        resolved: ResolvedRollout,
        is_right: Callable[[str], bool] | None,
        owner: str,
        salt: bytes = b"",
    ) -> None:
        """Open the problem's prompt and start sampling.

        Args:
            engine: has the generator.
            resolved: what is sampled; the problem's text and the seed fix every draw.
            is_right: tells whether an answer is right; None if nothing is graded.
            owner: of the engine's work.
            salt: of the prefix cache.
        """
        self.finished = False
        self.depth = 0
        settings, prompt, defaults = resolved.request, resolved.prompt, resolved.defaults
        filters = defaults.top_k, defaults.top_p, defaults.min_p
        self._engine = engine
        self._owner = owner
        self._settings = settings
        self._is_right = is_right
        self._sampling = Sampling(settings.temperature or 0.0, *filters, penalties=penalties_of(settings, len(prompt)))
        self._max_tokens = min(settings.max_tokens, defaults.max_positions - len(prompt))
        self._to_value: deque[_Step] = deque()
        self._growing = settings.solutions  # solutions without an end
        self._valuing = 0
        self._searches: dict[_Step, list[Iterator[_Step]]] = {}  # binary searches, by the step that they wait for
        self._searched = False
        self._forks: set[KVSequence] = set()  # that continuations are sampled from
        sequence = engine.open(GENERATOR, list(prompt), salt, owner)
        root = _Step(RolloutStep(None, "", [], [], settings.solutions), tuple(range(settings.solutions)), sequence)
        self._steps = [root]
        self._sample(root)

    def handle(self, done: Generated) -> None:
        """Process one finished piece of work."""
        if done.work.delimiter:
            self._add(done.work.tag, done)
        else:
            self._add_continuation(done.work.tag, done)
        self._go_on()

    def sequences(self) -> list[KVSequence]:
        """The sequences of steps that it holds."""
        return [step.sequence for step in self._steps if step.sequence is not None]

    def release(self) -> None:
        """Give back what it holds, whether or not it is finished; the owner's work must have been cancelled."""
        self.finished = True
        for step in self._steps:
            self._release(step)
        for fork in self._forks:
            self._engine.release(fork)
        self._forks.clear()

    def steps(self) -> tuple[RolloutStep, ...]:
        """The whole tree, parents first, as far as it is sampled."""
        steps = sorted(self._steps[1:], key=lambda step: (step.depth, step.draws))  # not as they happened to end
        places: dict[_Step | None, int] = {step: place for place, step in enumerate(steps)}
        for step in steps:
            step.record.parent = places.get(step.parent)
        records = tuple(step.record for step in steps)
        if self._settings.labels is Labels.BINARY_SEARCH:
            for step in steps:
                step.record.value = float(step.reached())
        elif self._is_right:
            grade(records, self._is_right)
        return records

    def _generate(
        self, step: _Step, sequence: KVSequence, paths: Iterable[tuple[int, ...]], max_tokens: int, delimiter: str
    ) -> None:
        """Sample from the end of a step, once for each path, which says by what random numbers."""
        keys = [stream_key(self._settings.seed, self._settings.problem, path) for path in paths]
        samplings = tuple(replace(self._sampling, key=key) for key in keys)
        max_tokens = min(max_tokens, self._max_tokens - step.path_tokens)
        self._engine.submit(Generate(self._owner, sequence, samplings, max_tokens, delimiter=delimiter, tag=step))

    def _sample(self, step: _Step) -> None:
        """Sample the next step of every solution that has `step`."""
        assert step.sequence is not None
        paths = [(draw, step.depth) for draw in step.draws]
        self._generate(step, step.sequence, paths, self._settings.max_step_tokens, "\n\n")

    def _add(self, parent: _Step, done: Generated) -> None:
        draws = tuple(parent.draws[i] for i in done.indices)
        record = RolloutStep(
            None, done.text, done.token_ids, [round(value, 6) for value in done.log_probabilities], len(draws)
        )
        used, text = parent.path_tokens + len(done.token_ids), parent.path_text + done.text
        step = _Step(record, draws, done.sequence, parent, parent.depth + 1, used, text)
        self._steps.append(step)
        self.depth = max(self.depth, step.depth)
        parent.children.append(step)
        delimited = done.cause is StopCause.DELIMITER
        if done.cause is StopCause.EOS:
            record.end = "eos"
        elif delimited and boxed(done.text).answer:
            record.end = "boxed"
        elif not delimited or step.depth >= self._settings.max_steps or used >= self._max_tokens:
            record.end = "length"
        if record.end is None:
            if self._settings.labels is Labels.MONTE_CARLO:
                self._to_value.append(step)
            self._sample(step)
        else:
            self._growing -= len(draws)
            record.answer = None if record.end == "length" else extract_answer(text)
            record.right = self._grade(record.answer)
            self._release(step)
        self._release(parent)

    def _grade(self, answer: str | None) -> bool | None:
        """Return whether an answer is right; None if nothing is graded."""
        return None if self._is_right is None else answer is not None and self._is_right(answer)

    def _continue(self, step: _Step) -> None:
        """Sample a step's continuations, from a fork: its own sequence may be sampled from too."""
        assert step.sequence is not None
        (fork,) = self._engine.fork(step.sequence, 1)
        self._forks.add(fork)
        self._release(step)
        self._valuing += 1
        paths = [(step.draws[0], step.depth, i) for i in range(self._settings.continuations)]
        self._generate(step, fork, paths, self._max_tokens, "")

    def _add_continuation(self, step: _Step, done: Generated) -> None:
        self._engine.release(done.sequence)
        answer = extract_answer(step.path_text + done.text) if done.cause is StopCause.EOS else None
        step.record.continuation_answers += [answer or ""] * len(done.indices)
        step.record.continuations += len(done.indices)
        step.record.continuations_right += bool(self._grade(answer)) * len(done.indices)
        if step.record.continuations == self._settings.continuations:
            self._valuing -= 1
            self._forks.discard(done.work.sequence)
            self._engine.release(done.work.sequence)
            for search in self._searches.pop(step, ()):
                self._advance(search)

    def _go_on(self) -> None:
        """Sample the continuations that are due; finish if there are none."""
        if self._settings.labels is Labels.BINARY_SEARCH and not self._growing and not self._searched:
            self._searched = True
            for step in self._steps:
                if step.record.end and not step.record.right:
                    self._advance(self._search(step))
        while self._to_value and self._valuing < VALUED_AT_ONCE:
            self._continue(self._to_value.popleft())
        if not (self._valuing or self._growing):
            self.release()

    def _search(self, leaf: _Step) -> Iterator[_Step]:
        """Search a wrong solution's first wrong step; yields each step whose continuations it needs."""
        path = leaf.lineage()
        right, wrong = 0, len(path)  # lengths of prefixes; of these, those that can still end right and those that not
        while wrong - right > 1:
            middle = (right + wrong) // 2
            step = path[middle - 1]
            if not step.reached() and not step.record.continuations:
                yield step
            right, wrong = (middle, wrong) if step.reached() else (right, middle)

    def _advance(self, search: Iterator[_Step]) -> None:
        if (step := next(search, None)) is None:
            return
        if step not in self._searches:
            self._to_value.append(step)
        self._searches.setdefault(step, []).append(search)

    def _release(self, step: _Step) -> None:
        """Release a step's sequence once nothing more is sampled from it; a binary search may need any to the end."""
        searched_later = self._settings.labels is Labels.BINARY_SEARCH and not step.record.end
        needed = step.growing or step in self._to_value or searched_later
        if step.sequence is not None and (self.finished or not needed):
            self._engine.release(step.sequence)
            step.sequence = None


class RunningRollout(Running[ResolvedRollout, RolloutResult]):
    """The solutions of a problem, sampled as a tree."""

    @classmethod
    def resolve(cls, resolver: Resolver, request: RolloutRequest) -> ResolvedRollout:
        """See `Running`.

        Raises:
            InvalidRequestError: lists every invalid field; NoEmbeddingError if the prompt has tokens without an
                embedding.
            RequestTooLargeError: the prompt fills the model's context; PoolTooSmallError if the KV pool could not hold
                all solutions.
        """
        request.validate()
        resolver.require_in_vocabulary(request)
        resolved = resolve_rollout(resolver.engine, resolver.generator, request)
        resolver.require_fits(resolved.blocks, "solutions or max_tokens")
        return resolved

    def __init__(self, resolved: ResolvedRollout, submission: Submission) -> None:
        super().__init__(resolved, submission)
        self.digests = digests(submission.engine, None)
        self.meter.prompt_tokens = len(resolved.prompt)
        self._tree: RolloutTree | None = None

    def _begin(self) -> None:
        golds = self.resolved.request.golds
        is_right = _checker(golds) if golds else self.resolved.is_right
        self._tree = RolloutTree(self._engine, self.resolved, is_right, self.search_id, self.options.salt)
        self.meter.generator_tree_tokens += len(self.resolved.prompt)

    def handle(self, done: Done) -> None:
        """See `Running`."""
        self.meter.generator_tokens += done.computed_tokens
        assert self._tree
        assert isinstance(done, Generated)
        self.meter.note_step()
        self.meter.nodes += 1
        self.meter.generator_tree_tokens += done.own_tokens
        self.meter.generated_tokens += len(done.indices) * len(done.token_ids)
        depth = self._tree.depth
        self._tree.handle(done)
        if self._tree.depth > depth:  # once a level, as a search's is taken once a round
            self.meter.observe(self._engine.footprint(self._tree.sequences()))
        if self._tree.finished:
            self._end(StopReason.FINISHED)

    def stop(self, reason: StopReason) -> None:
        """See `Running`; the tree is as far as it is sampled."""
        self._engine.cancel(self.search_id)
        if self._tree:
            self._tree.release()
        self._end(reason)

    def _own_fields(self) -> dict[str, Any]:
        steps = self._tree.steps() if self._tree else ()
        return {"prompt_token_ids": self.resolved.prompt, "steps": steps, "digests": self.digests}


def _checker(golds: Sequence[str]) -> Callable[[str], bool]:
    """A function that says whether an answer has the value or the text of a right one; it needs no other process."""
    numbers = {number for gold in golds if (number := number_in(gold)) is not None}
    keys = {exact_match_key(gold) for gold in golds}

    @cache
    def is_right(answer: str) -> bool:
        return ((value := number_in(answer)) is not None and value in numbers) or exact_match_key(answer) in keys

    return is_right


def resolve_rollout(engine: Engine, generator: Generator, request: RolloutRequest) -> ResolvedRollout:
    """Work out what follows from a request: its prompt, its sampling, and the most blocks that its tree holds.

    Raises:
        InvalidRequestError, NoEmbeddingError, RequestTooLargeError: see `Generator.prompt`.
    """
    prompt = tuple(generator.prompt_ids(request.problem, request.history))
    most = min(request.max_tokens, generator.model.config.max_positions - len(prompt))
    valued = 0 if request.labels is Labels.OUTCOME else VALUED_AT_ONCE * request.continuations
    limits = PathLimits(len(prompt), most, min(request.max_step_tokens, most))
    blocks = worst_case(engine, GENERATOR, [MemoryEstimate(request.solutions + valued)], limits)
    filled = replace(request, **generator.defaults.sampling_of(request))
    return ResolvedRollout(filled, prompt, generator.defaults, blocks)
