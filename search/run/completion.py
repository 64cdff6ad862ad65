"""One completion request from submission to result: its prompts are read and continued, some at a time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from espalier.engine.errors import PoolTooSmallError
from espalier.engine.execution.sampling import key_after
from espalier.engine.guidance.matcher import Matcher
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.roles import GENERATOR
from espalier.engine.work import (
    LOG_PROBABILITIES,
    TOP_TOKENS,
    Done,
    Generate,
    Generated,
    Sampling,
    Score,
    Scored,
    StopCause,
    stream_key,
)
from espalier.prm.limits import PathLimits
from espalier.search.algorithms.base import MemoryEstimate
from espalier.search.common_fields import DEFAULT_MAX_TOKENS
from espalier.search.completion import (
    Choice,
    CompletionRequest,
    CompletionResult,
    ReadPrompt,
    TextSampled,
    TokenLogprob,
)
from espalier.search.result import StopReason
from espalier.search.run.executor import ResolvedCompletion
from espalier.search.run.resolve import Resolver, sampling_of, worst_case
from espalier.search.run.running import Running, Submission
from espalier.search.run.sampled_text import SampledAnswer, SampledText
from espalier.search.thoughts.reading import AfterThought, make_reader

_MAX_BRANCHES = 64
"""Choices of one request that are sampled at a time, unless those of one prompt are more."""
_TOKENS_AT_A_TIME = 16
"""Tokens that are sampled before the text is looked at, where it is streamed or may stop before its limit."""


@dataclass(slots=True, eq=False)
class ChoiceState:
    """A choice as far as it is sampled."""

    index: int
    prompt: int
    text: SampledText
    sampling: Sampling = field(init=False)
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    reported: int = 0
    finish_reason: str | None = None
    matcher: Matcher | None = None
    error: str = ""

    def result(self) -> Choice:
        """The choice as it is reported; one that was cut, or never begun, ends with `abort`."""
        text, reason = self.text, self.finish_reason or "abort"
        of_tokens = tuple(self.logprobs), text.thought, text.thought_tokens
        sampled = text.text, tuple(self.token_ids), reason, text.stopped_by
        return Choice(self.index, self.prompt, *sampled, *of_tokens, self.error, text.calls)


@dataclass(slots=True, eq=False)
class Continuation:
    """The purpose of a Generate: the choices of its samplings, and how many of them have not come back."""

    choices: Sequence[ChoiceState]
    open: int


class RunningCompletion(Running[ResolvedCompletion, CompletionResult]):
    """A completion; each choice is a sequence of its own, forked from its prompt's."""

    @classmethod
    def resolve(cls, resolver: Resolver, request: CompletionRequest) -> ResolvedCompletion:
        """See `Running`.

        Raises:
            InvalidRequestError: lists every invalid field; NoEmbeddingError if a prompt has tokens without an
                embedding.
            RequestTooLargeError: a prompt fills the model's context; PoolTooSmallError if the KV pool could not hold
                the choices of one prompt alone.
        """
        request.validate()
        resolver.require_in_vocabulary(request)
        generator = resolver.generator
        request = resolver.planned(request)
        prompts = tuple(generator.completion_prompt(prompt, request) for prompt in request.prompts)
        wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        context = generator.model.config.max_positions
        limits = tuple(min(wanted, context - len(prompt.token_ids)) for prompt in prompts)
        filled = replace(request, **generator.defaults.sampling_of(request))
        grammar = request.call_plan and request.call_plan.grammar
        if (form := request.text_form.value) and not request.call_plan:
            grammar = resolver.compile("text_form", form.grammar)
        together = max(1, min(len(prompts), _MAX_BRANCHES // request.samples))
        each: dict[str, int] = {}  # the most of any prompt
        for prompt, most in zip(prompts, limits, strict=True):
            estimates = (MemoryEstimate(request.samples, partial_blocks=1),)
            its = worst_case(resolver.engine, GENERATOR, estimates, PathLimits(len(prompt.token_ids), most, most))
            each = {group: max(count, each.get(group, 0)) for group, count in its.items()}
        while True:
            blocks = {group: together * count for group, count in each.items()}
            try:
                resolver.engine.admission.require_fits_alone(blocks)
            except PoolTooSmallError:
                if together == 1:
                    raise
                together //= 2
            else:
                return ResolvedCompletion(filled, prompts, limits, together, blocks, generator.marks, grammar)

    def __init__(self, resolved: ResolvedCompletion, submission: Submission) -> None:
        super().__init__(resolved, submission)
        self.meter.prompt_tokens = sum(len(prompt.token_ids) for prompt in resolved.prompts)
        self._tokenizer = tokenizer = self._engine.model(GENERATOR).tokenizer
        count = resolved.request.samples
        self._waiting = deque(range(len(resolved.prompts)))  # prompts that have not begun
        self._prompts = [ReadPrompt(tokenizer.show(its.token_ids), tuple(its.token_ids)) for its in resolved.prompts]
        indices = range(len(resolved.prompts) * count)
        self._choices = [ChoiceState(i, i // count, self._empty_text(i // count)) for i in indices]
        self._unfinished: dict[int, int] = {}  # choices by prompt that is worked on
        self._held: set[KVSequence] = set()

    def _empty_text(self, number: int) -> SampledText:
        """A text behind a prompt, which is the answer's alone where a thought is told apart."""
        request, prompt = self.resolved.request, self.resolved.prompts[number]
        calls = request.call_plan.reader() if request.call_plan else None
        how = self._tokenizer, request.stop, request.include_stop
        if self.resolved.marks and prompt.thinks:
            return SampledAnswer(*how, self.resolved.marks, prompt.opened, calls)
        return SampledText(*how, calls)

    def _begin(self) -> None:
        for _ in range(self.resolved.together):
            self._begin_next_prompt()

    def handle(self, done: Done) -> None:
        """See `Running`."""
        self.meter.generator_tokens += done.computed_tokens
        if isinstance(done, Generated):
            self._on_generated(done)
        else:
            self._on_prompt_read(done)
        self.meter.observe(self._engine.footprint(list(self._held)))

    def stop(self, reason: StopReason) -> None:
        """See `Running`; choices end as far as they are."""
        self._engine.cancel(self.search_id)
        for sequence in list(self._held):
            self._release(sequence)
        self._end(reason)

    # ---- prompts

    def _begin_next_prompt(self) -> None:
        if not self._waiting:
            return
        number, request = self._waiting.popleft(), self.resolved.request
        ids = self._prompts[number].token_ids
        self._unfinished[number] = request.samples
        self.meter.generator_tree_tokens += len(ids)
        reads = request.echo and request.logprobs is not None  # not from the prefix cache, as each place is read
        sequence = self._engine.open(GENERATOR, [] if reads else list(ids), self.options.salt, self.search_id)
        self._held.add(sequence)
        if reads:
            positions = tuple(range(len(ids) - 1))
            work = Score(self.search_id, sequence, ids, positions, ids[1:], tag=number, head=LOG_PROBABILITIES)
            self._engine.submit(work)
        else:
            self._sample(number, sequence)

    def _on_prompt_read(self, done: Scored) -> None:
        number: int = done.work.tag
        prompt = self._prompts[number]
        found = zip(prompt.token_ids[1:], done.values, strict=True)
        rest = [self._token(token_id, float(values[0]), self._top(values)) for token_id, values in found]
        self._prompts[number] = replace(prompt, logprobs=(self._token(prompt.token_ids[0], None), *rest))
        self._sample(number, done.work.sequence)

    def _sample(self, number: int, sequence: KVSequence) -> None:
        """Begin the choices of a prompt that is read, or end them where nothing is to be sampled."""
        ids, request = self._prompts[number].token_ids, self.resolved.request
        sampling, name, matcher = sampling_of(request, len(ids)), ",".join(map(str, ids)), self._matcher_behind(number)
        choices = self._choices[number * request.samples : (number + 1) * request.samples]
        for i, choice in enumerate(choices):
            choice.sampling, choice.matcher = replace(sampling, key=stream_key(request.seed, name, (i,))), matcher
        if self.resolved.max_tokens[number]:
            self._generate(choices, sequence)
            return
        for choice in choices:
            self._finish(choice, "length")
        self._release(sequence)
        self._end_prompt(number)

    def _matcher_behind(self, number: int) -> Matcher | None:
        """The matcher of texts behind a prompt; a thought is free where one is told apart."""
        resolved, prompt = self.resolved, self.resolved.prompts[number]
        guide = self.matchers[resolved.grammar] if resolved.grammar else None
        if guide and resolved.request.call_plan:
            guide = resolved.request.call_plan.guide(guide, self._tokenizer)
        if guide is None or resolved.marks is None or not prompt.thinks:
            return guide
        reader = make_reader(resolved.marks, self._tokenizer, calls=resolved.request.call_plan is not None)
        forbidden = self._engine.model(GENERATOR).eos_token_ids
        return AfterThought(guide, reader, forbidden, inside=prompt.opened)

    def _end_prompt(self, number: int) -> None:
        if self._unfinished[number]:
            return
        del self._unfinished[number]
        self._begin_next_prompt()
        if not self._unfinished and not self._waiting:
            self._end(StopReason.FINISHED)

    # ---- choices

    def _generate(self, choices: Sequence[ChoiceState], sequence: KVSequence, in_place: bool = False) -> None:
        """Sample the next tokens of choices that are one so far."""
        request, sampled = self.resolved.request, len(choices[0].token_ids)
        left = self.resolved.max_tokens[choices[0].prompt] - sampled
        head = ""
        if request.logprobs:
            left, head = 1, LOG_PROBABILITIES  # a head is read at the state of the last token
        elif request.stop or self.options.stream_text:
            left = min(left, _TOKENS_AT_A_TIME)
        samplings = tuple(replace(choice.sampling, key=key_after(choice.sampling.key, sampled)) for choice in choices)
        how = {"in_place": in_place, "head": head, "matcher": choices[0].matcher}
        tag = Continuation(choices, len(choices))
        self._engine.submit(Generate(self.search_id, sequence, samplings, left, "", tag=tag, **how))

    def _on_generated(self, done: Generated) -> None:
        purpose: Continuation = done.work.tag
        choices = [purpose.choices[i] for i in done.indices]
        self._held.add(done.sequence)
        purpose.open -= len(choices)
        if not purpose.open and not done.work.in_place:
            self._release(done.work.sequence)
        self.meter.note_step()
        self.meter.nodes += len(choices)
        self.meter.generator_tree_tokens += done.own_tokens
        self.meter.generated_tokens += len(choices) * len(done.token_ids)
        for choice in choices:
            self._extend(choice, done)
        number, still = choices[0].prompt, [choice for choice in choices if choice.finish_reason is None]
        if still:  # all of them, as they are the same so far
            self._generate(still, done.sequence, in_place=len(still) == 1)
            return
        self._release(done.sequence)
        self._end_prompt(number)

    def _extend(self, choice: ChoiceState, done: Generated) -> None:
        """Add the tokens just sampled to a choice, up to a stop text, and end it if it ends with them."""
        before = choice.text.num_tokens
        choice.matcher = done.matcher
        choice.text.add(done.token_ids)
        kept = choice.text.num_tokens - before
        choice.token_ids += done.token_ids[:kept]
        if self.resolved.request.logprobs is not None:
            for token_id, logprob in zip(done.token_ids[:kept], done.log_probabilities, strict=False):
                choice.logprobs.append(self._sampled_token(token_id, logprob, done.values))
        if done.cause is StopCause.ERROR and done.matcher:
            choice.error = done.matcher.error
            self._finish(choice, "error")
        elif choice.text.stopped_by is not None or done.cause is StopCause.EOS:
            self._finish(choice, "stop")
        elif done.cause is StopCause.CONTEXT or len(choice.token_ids) >= self.resolved.max_tokens[choice.prompt]:
            self._finish(choice, "length")
        else:
            self._report(choice)

    def _finish(self, choice: ChoiceState, reason: str) -> None:
        choice.text.end(cut=reason != "stop")
        choice.finish_reason = reason
        self._unfinished[choice.prompt] -= 1
        self._report(choice)

    def _report(self, choice: ChoiceState) -> None:
        if not self.options.stream_text:
            return
        first = not choice.reported
        text, reason = choice.text.take(choice.finish_reason is not None), choice.finish_reason
        thought, calls = choice.text.take_thought(), choice.text.take_calls()
        new, choice.reported = slice(choice.reported, None), len(choice.token_ids)
        of_tokens = tuple(choice.token_ids[new]), tuple(choice.logprobs[new])
        prompt = self._prompts[choice.prompt] if first else None
        self._on_event(TextSampled(self.search_id, choice.index, text, *of_tokens, prompt, reason, thought, calls))

    # ---- tokens

    def _sampled_token(self, token_id: int, logprob: float, values: np.ndarray | None) -> TokenLogprob:
        """A token that was drawn; if it is among the likeliest, its value is theirs to the bit."""
        top = () if values is None else self._top(values)
        same = (each.logprob for each in top if each.token_id == token_id)
        return self._token(token_id, next(same, logprob), top)

    def _top(self, values: np.ndarray) -> tuple[TokenLogprob, ...]:
        count = self.resolved.request.logprobs or 0
        ids, found = values[1 : 1 + TOP_TOKENS], values[1 + TOP_TOKENS :]
        return tuple(self._token(int(i), float(its)) for i, its in zip(ids[:count], found[:count], strict=True))

    def _token(self, token_id: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = self._tokenizer.decode_bytes([token_id])
        text = raw.decode(errors="replace") if raw else self._tokenizer.token(token_id)
        return TokenLogprob(token_id, text, raw, logprob, top)

    # ---- sequences and the end

    def _release(self, sequence: KVSequence) -> None:
        self._held.discard(sequence)
        self._engine.release(sequence)

    def _own_fields(self) -> dict[str, Any]:
        warnings = dict.fromkeys(warning for prompt in self.resolved.prompts for warning in prompt.warnings)
        choices = tuple(choice.result() for choice in self._choices)
        plan = self.resolved.request.call_plan
        told = (*warnings, *(plan.warnings if plan else ()))
        return {"prompts": tuple(self._prompts), "choices": choices, "warnings": told}
