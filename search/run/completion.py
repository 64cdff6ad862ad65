"""One completion request from submission to result: its prompts are read and continued, some at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
from espalier.search.run.executor import ResolvedCompletion, sampling_of
from espalier.search.run.resolve import Resolver
from espalier.search.run.running import Running, Submission
from espalier.search.run.sampled_text import SampledText
from espalier.search.run.worst_case import worst_case
from espalier.search.thoughts.guided import AfterThought, ThoughtEnds
from espalier.search.thoughts.splitting import ThoughtSplitter

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
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    reported: int = 0
    finish_reason: str | None = None
    matcher: Matcher | None = None
    error: str = ""


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
        read = [generator.completion_prompt(prompt, request) for prompt in request.prompts]
        prompts = tuple(tuple(ids) for ids, _, _ in read)
        wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        context = generator.model.config.max_positions
        limits = tuple(min(wanted, context - len(prompt)) for prompt in prompts)
        filled = replace(request, **generator.defaults.sampling_of(request))
        grammar = resolver.compile("text_form", form.grammar) if (form := request.text_form.value) else None
        together = max(1, min(len(prompts), _MAX_BRANCHES // request.samples))
        each: dict[str, int] = {}  # the most of any prompt
        for prompt, most in zip(prompts, limits, strict=True):
            estimates = (MemoryEstimate(request.samples, partial_blocks=1),)
            its = worst_case(resolver.engine, GENERATOR, estimates, PathLimits(len(prompt), most, most))
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
                opened = tuple(opened for _, opened, _ in read)
                warnings = tuple(dict.fromkeys(each for _, _, its in read for each in its))
                of_text = opened, generator.marks, grammar, warnings
                return ResolvedCompletion(filled, prompts, limits, together, blocks, *of_text)

    def __init__(self, resolved: ResolvedCompletion, submission: Submission) -> None:
        super().__init__(resolved, submission)
        self.meter.prompt_tokens = resolved.prompt_tokens
        self._tokenizer = self._engine.model(GENERATOR).tokenizer
        self._waiting = list(range(len(resolved.prompts)))  # prompts that have not begun
        self._prompts: dict[int, ReadPrompt] = {}
        self._choices: dict[int, ChoiceState] = {}
        self._unfinished: dict[int, int] = {}  # choices by prompt that is worked on
        self._held: set[KVSequence] = set()
        self._guide: Matcher | None = None  # at the beginning of a text

    def _begin(self) -> None:
        self._guide = self.matchers[self.resolved.grammar] if self.resolved.grammar else None
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
        self._release_all()
        self._end(reason)

    # ---- prompts

    def _begin_next_prompt(self) -> None:
        if not self._waiting:
            return
        number = self._waiting.pop(0)
        ids, request = self.resolved.prompts[number], self.resolved.request
        self._unfinished[number] = request.samples
        self.meter.generator_tree_tokens += len(ids)
        reads = request.echo and request.logprobs is not None
        sequence = self._open([] if reads else list(ids))
        if reads:  # not from the prefix cache, as each place is read
            positions = tuple(range(len(ids) - 1))
            work = Score(self.search_id, sequence, ids, positions, ids[1:], tag=number, head=LOG_PROBABILITIES)
            self._engine.submit(work)
        else:
            self._sample(number, sequence, ReadPrompt(self._tokenizer.show(list(ids)), ids))

    def _on_prompt_read(self, done: Scored) -> None:
        number: int = done.work.tag
        ids = self.resolved.prompts[number]
        first = self._token(ids[0], None)
        rest = [self._read_token(token_id, values) for token_id, values in zip(ids[1:], done.values, strict=True)]
        self._sample(number, done.work.sequence, ReadPrompt(self._tokenizer.show(list(ids)), ids, (first, *rest)))

    def _sample(self, number: int, sequence: KVSequence, prompt: ReadPrompt) -> None:
        """Begin the choices of a prompt that is read, or end them where nothing is to be sampled."""
        self._prompts[number] = prompt
        request, count = self.resolved.request, self.resolved.request.samples
        sampling = sampling_of(request, len(prompt.token_ids))
        name = ",".join(map(str, prompt.token_ids))
        choices = [
            ChoiceState(
                number * count + i,
                number,
                SampledText(self._tokenizer, request.stop, request.include_stop, self._splitter(number)),
                replace(sampling, key=stream_key(request.seed, name, (i,))),
                matcher=self._matcher_behind(number),
            )
            for i in range(count)
        ]
        self._choices |= {choice.index: choice for choice in choices}
        if self.resolved.max_tokens[number]:
            self._generate(choices, sequence)
            return
        for choice in choices:
            self._finish(choice, "length")
        self._release(sequence)
        self._end_prompt(number)

    def _splitter(self, number: int) -> ThoughtSplitter | None:
        """The splitter of the thought behind a prompt, if it is a conversation and the generator thinks."""
        opened, marks = self.resolved.opened[number], self.resolved.marks
        return None if opened is None or marks is None else ThoughtSplitter(marks, self._tokenizer, opened)

    def _matcher_behind(self, number: int) -> Matcher | None:
        """The matcher of texts behind a prompt; a thought is free where one is told apart."""
        opened, marks = self.resolved.opened[number], self.resolved.marks
        if self._guide is None or opened is None or marks is None:
            return self._guide
        ends = ThoughtEnds.of(marks, self._tokenizer, self._engine.model(GENERATOR).eos_token_ids)
        return AfterThought(self._guide, ends, inside=opened)

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
        tag = Continuation(choices, len(choices))
        self._engine.submit(
            Generate(
                self.search_id,
                sequence,
                samplings,
                left,
                "",
                in_place=in_place,
                head=head,
                matcher=choices[0].matcher,
                tag=tag,
            )
        )

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
        choice.text.end()
        choice.finish_reason = reason
        self._unfinished[choice.prompt] -= 1
        self._report(choice)

    def _report(self, choice: ChoiceState) -> None:
        if not self.options.stream_text:
            return
        first = not choice.reported
        text, reason = choice.text.take(choice.finish_reason is not None), choice.finish_reason
        thought = choice.text.take_thought()
        new, choice.reported = slice(choice.reported, None), len(choice.token_ids)
        of_tokens = tuple(choice.token_ids[new]), tuple(choice.logprobs[new])
        prompt = self._prompts[choice.prompt] if first else None
        self._on_event(TextSampled(self.search_id, choice.index, text, *of_tokens, prompt, reason, thought))

    # ---- tokens

    def _sampled_token(self, token_id: int, logprob: float, values: np.ndarray | None) -> TokenLogprob:
        """A token that was drawn; if it is among the likeliest, its value is theirs to the bit."""
        top = () if values is None else self._top(values)
        same = (each.logprob for each in top if each.token_id == token_id)
        return self._token(token_id, next(same, logprob), top)

    def _read_token(self, token_id: int, values: np.ndarray) -> TokenLogprob:
        return self._token(token_id, float(values[0]), self._top(values))

    def _top(self, values: np.ndarray) -> tuple[TokenLogprob, ...]:
        count = self.resolved.request.logprobs or 0
        ids, found = values[1 : 1 + TOP_TOKENS], values[1 + TOP_TOKENS :]
        return tuple(self._token(int(i), float(its)) for i, its in zip(ids[:count], found[:count], strict=True))

    def _token(self, token_id: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = self._tokenizer.decode_bytes([token_id])
        text = raw.decode(errors="replace") if raw else self._tokenizer.token(token_id)
        return TokenLogprob(token_id, text, raw, logprob, top)

    # ---- sequences and the end

    def _open(self, token_ids: list[int]) -> KVSequence:
        sequence = self._engine.open(GENERATOR, token_ids, self.options.salt, self.search_id)
        self._held.add(sequence)
        return sequence

    def _release(self, sequence: KVSequence) -> None:
        self._held.discard(sequence)
        self._engine.release(sequence)

    def _release_all(self) -> None:
        for sequence in list(self._held):
            self._release(sequence)

    def _end(self, reason: StopReason, error: str = "") -> None:
        resolved = self.resolved
        choices = [self._choices[index] for index in sorted(self._choices)]
        self.end_with(
            CompletionResult(
                search_id=self.search_id,
                prompts=tuple(
                    self._prompts.get(number) or ReadPrompt(self._tokenizer.show(list(ids)), ids)
                    for number, ids in enumerate(resolved.prompts)
                ),
                choices=tuple(map(_choice, choices)) + self._not_begun(),
                stop_reason=reason,
                usage=self.meter.close(),
                configuration=resolved.request,
                error=error,
                warnings=resolved.warnings,
            )
        )

    def _not_begun(self) -> tuple[Choice, ...]:
        """The choices of prompts that were not read before the end; no choice is ever left out."""
        every = range(len(self.resolved.prompts) * self.resolved.request.samples)
        missing = [index for index in every if index not in self._choices]
        return tuple(Choice(i, i // self.resolved.request.samples, "", (), "abort") for i in missing)


def _choice(state: ChoiceState) -> Choice:
    text, reason = state.text, state.finish_reason or "abort"
    ids, logprobs = tuple(state.token_ids), tuple(state.logprobs)
    thought = text.thought, text.thought_tokens
    return Choice(state.index, state.prompt, text.text, ids, reason, text.stopped_by, logprobs, *thought, state.error)
