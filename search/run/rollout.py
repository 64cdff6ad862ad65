"""One request for rollouts from submission to result."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from espalier.engine.engine import Engine
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Done, Generated
from espalier.prm.limits import PathLimits
from espalier.search.algorithms.base import MemoryEstimate
from espalier.search.grading.answers import exact_match_key
from espalier.search.grading.notation.numerals import number_in
from espalier.search.result import StopReason
from espalier.search.rollout import Labels, RolloutRequest, RolloutResult, RolloutSettings
from espalier.search.run.executor import ResolvedRollout
from espalier.search.run.generator import Generator
from espalier.search.run.resolve import Resolver
from espalier.search.run.rollout_tree import VALUED_AT_ONCE, RolloutTree
from espalier.search.run.running import Running, Submission, digests
from espalier.search.run.worst_case import worst_case


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
        generator = resolver.generator
        prompt = tuple(generator.prompt_ids(request.problem, request.history))
        request = replace(request, **generator.defaults.sampling_of(request))
        blocks = rollout_blocks(resolver.engine, generator, len(prompt), request)
        resolver.require_fits(blocks, "solutions or max_tokens")
        return ResolvedRollout(request, prompt, generator.defaults, blocks)

    def __init__(self, resolved: ResolvedRollout, submission: Submission) -> None:
        super().__init__(resolved, submission)
        self.digests = digests(submission.engine, None)
        self.meter.prompt_tokens = len(resolved.prompt)
        self._tree: RolloutTree | None = None

    def _begin(self) -> None:
        its, request = self.resolved, self.resolved.request
        is_right = _checker(request.golds) if request.golds else None
        asked = request.problem, its.prompt, request
        self._tree = RolloutTree(
            self._engine, its.defaults, *asked, is_right, owner=self.search_id, salt=self.options.salt
        )
        self.meter.generator_tree_tokens += len(its.prompt)

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

    def _end(self, reason: StopReason, error: str = "") -> None:
        self.end_with(
            RolloutResult(
                search_id=self.search_id,
                prompt_token_ids=self.resolved.prompt,
                steps=self._tree.steps() if self._tree else (),
                stop_reason=reason,
                usage=self.meter.close(),
                configuration=self.resolved.request,
                digests=self.digests,
                error=error,
            )
        )


def _checker(golds: Sequence[str]) -> Callable[[str], bool]:
    """A function that says whether an answer has the value or the text of a right one; it needs no other process."""
    numbers = {number for gold in golds if (number := number_in(gold)) is not None}
    keys = {exact_match_key(gold) for gold in golds}

    @cache
    def is_right(answer: str) -> bool:
        return ((value := number_in(answer)) is not None and value in numbers) or exact_match_key(answer) in keys

    return is_right


def rollout_blocks(engine: Engine, generator: Generator, prompt: int, settings: RolloutSettings) -> dict[str, int]:
    """Maximum number of blocks that a tree of rollouts holds, by KV group, behind so many tokens of its prompt."""
    most = min(settings.max_tokens, generator.model.config.max_positions - prompt)
    valued = 0 if settings.labels is Labels.OUTCOME else VALUED_AT_ONCE * settings.continuations
    limits = PathLimits(prompt, most, min(settings.max_step_tokens, most))
    return worst_case(engine, GENERATOR, [MemoryEstimate(settings.solutions + valued)], limits)
