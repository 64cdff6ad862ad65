"""Resolves requests: the loaded models, their defaults, limits, prompts and memory bounds; searches, once for all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from espalier.engine.engine import Engine
from espalier.engine.errors import InvalidRequestError, PoolTooSmallError, Violation
from espalier.engine.guidance.compiled import GrammarCompiler
from espalier.engine.guidance.grammar import Grammar, GrammarError
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.work import NO_PENALTIES, Penalties, Sampling
from espalier.prm.limits import UNLIMITED, PathLimits
from espalier.prm.scorer import Scorer
from espalier.search import algorithms
from espalier.search.algorithms.base import MemoryEstimate, Scores
from espalier.search.common_fields import DEFAULT_MAX_STEPS, PenaltyFields, unknown_bias
from espalier.search.completion import CompletionRequest
from espalier.search.request import SearchRequest
from espalier.search.run.executor import RenderedPrompt, ResolvedRequest
from espalier.search.run.generator import Generator
from espalier.search.schema import Parsed
from espalier.search.thoughts.marks import ThoughtMarks
from espalier.search.thoughts.plans import THINKING_MAX_TOKENS, ProbePlan, ThoughtPlan, plan_probes, plan_thoughts

R = TypeVar("R", SearchRequest, CompletionRequest)


def worst_case(engine: Engine, role: str, estimates: Sequence[MemoryEstimate], limits: PathLimits) -> dict[str, int]:
    """Maximum number of blocks of one model that a search holds, by KV group; see `worst_case_blocks`."""
    size, batch_tokens = engine.settings.block_size, engine.settings.max_batch_tokens
    return {
        pool.name: worst_case_states(estimates, limits)
        if pool.holds_states
        else worst_case_blocks(estimates, limits, size, pool.window, batch_tokens)
        for pool in engine.schedulers[role].pools
    }


def worst_case_states(estimates: Sequence[MemoryEstimate], limits: PathLimits) -> int:
    """Maximum number of recurrent states that a search holds: one for each sequence, whatever its length."""
    each = 1 + limits.probes if limits.max_probe_tokens else 1  # with those of the forks that are fed probe tokens
    if limits.rationales:  # of a path while it is scored: its text, its rationales, the parts that verdicts read
        each = 1 + 2 * limits.rationales.chains
    paths = max((its.paths + its.steps) * each + its.partial_blocks for its in estimates)
    return 1 + paths  # and the prompt's


def worst_case_blocks(
    estimates: Sequence[MemoryEstimate],
    limits: PathLimits,
    block_size: int,
    window: int | None = None,
    batch_tokens: int = 0,
) -> int:
    """Maximum number of blocks of one KV group that a search holds, over the peaks that `estimates` describe.

    Every sequence may hold one block more than its tokens fill, its own copy of a partial block; so may each fork of
    it that is fed probe tokens. With a `window` a sequence holds no more than that; while a step runs, what the step
    writes is held besides, of `batch_tokens` at most.
    """
    whole = _most_blocks(estimates, limits, block_size, UNLIMITED, inner=1)
    if window is None:
        return whole
    in_window = (window - 1) // block_size + 2  # it begins inside one block, and ends inside another
    held = _most_blocks(estimates, limits, block_size, in_window, inner=in_window)
    return min(whole, held + blocks_of(batch_tokens, block_size))


def _most_blocks(
    estimates: Sequence[MemoryEstimate], limits: PathLimits, block_size: int, most: int, inner: int
) -> int:
    """The same where a sequence holds `most` blocks, and an inner node of a path `inner` that others do not."""

    def held(tokens: int) -> int:
        return min(most, blocks_of(tokens, block_size))

    if limits.rationales:
        # Of a path while it is scored: its text, which may not be in the prefix cache, and its rationales. A rationale,
        # and then the part of it that its verdict reads, is written after a copy of the text's partial block.
        its = limits.rationales
        path = step = held(its.text_tokens) + its.chains * (held(its.tokens) + 1)
    else:
        probe = limits.probes * (held(limits.max_probe_tokens) + 1) if limits.max_probe_tokens else 0
        path = held(limits.path_tokens) + 1 + probe
        step = held(min(limits.step_tokens, limits.path_tokens)) + 1 + probe
    return held(limits.prompt_tokens) + max(
        estimate.paths * path + estimate.steps * step + estimate.partial_blocks * inner for estimate in estimates
    )


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks of so many tokens."""
    return -(-tokens // block_size)


_SCORER_ADVICE = "--verifier names a process reward model, or self"


def sampling_of(request: SearchRequest | CompletionRequest, prompt_tokens: int) -> Sampling:
    """The sampling of a request, whose defaults are filled in, behind a prompt of so many tokens; without a key."""
    filters = request.temperature or 0.0, request.top_k or 0, request.top_p or 1.0, request.min_p or 0.0
    return Sampling(*filters, penalties=penalties_of(request, prompt_tokens))


def penalties_of(request: PenaltyFields, prompt_tokens: int) -> Penalties:
    """The penalties of a request whose defaults are filled in."""
    of_tokens = request.repetition_penalty or 1.0, request.presence_penalty or 0.0, request.frequency_penalty or 0.0
    bias = request.logit_bias.value
    return Penalties(*of_tokens, bias, prompt_tokens) if bias or of_tokens != (1, 0, 0) else NO_PENALTIES


class Resolver:
    """Resolves requests for the models of one engine; each kind of request does so in its `Running.resolve`.

    May be used on any thread.

    Attributes:
        engine: runs the models.
        scorer: of steps; None if there is none.
        expected_tokens: tokens of a usual path, for which searches reserve memory; None for the path's limit.
        grammars: compiles what binds texts; None without a generator.
        defaults: fill in requests; None without a generator.
    """

    def __init__(
        self, engine: Engine, generator: Generator | None, scorer: Scorer | None, expected_tokens: int | None = None
    ) -> None:
        self.engine = engine
        self.scorer = scorer
        self.expected_tokens = expected_tokens
        self._generator = generator
        self.grammars = GrammarCompiler(generator.model) if generator else None
        scores: Scores = scorer.needs.scores if scorer else "none"
        self.defaults = replace(generator.defaults, scores=scores) if generator else None

    @property
    def generator(self) -> Generator:
        """The generator."""
        assert self._generator, "an orchestrator without a generator is asked for scores alone"
        return self._generator

    @property
    def tokenizer(self) -> TextTokenizer:
        """Of the model that steps are counted for: the generator, or the verifier where there is none."""
        return self.engine.model(GENERATOR if self._generator else VERIFIER).tokenizer

    def scorer_of_texts(self, field: str) -> Scorer:
        """The scorer of given texts.

        Raises:
            InvalidRequestError: there is none; `field` of the request says so.
        """
        scorer = self.scorer
        if scorer is None or scorer.needs.reads != "text":
            name = f"{scorer.name} scores steps as they are sampled" if scorer else "no verifier is loaded"
            raise InvalidRequestError([Violation(field, f"cannot be scored: {name}; {_SCORER_ADVICE}")])
        return scorer

    def require_in_vocabulary(self, request: PenaltyFields) -> None:
        """Check that the generator has the tokens that a request names.

        Raises:
            InvalidRequestError: it lacks one.
        """
        vocabulary = self.generator.model.config.vocab_size
        if wrong := unknown_bias(request.logit_bias.value, vocabulary):
            raise InvalidRequestError([Violation("logit_bias", wrong)])

    def planned(self, request: R) -> R:
        """Return a request with the plan of its answers' calls, if tools may be called.

        Raises:
            InvalidRequestError: the generator cannot call tools, or not as is asked for.
        """
        if not request.callable_tools:
            return request
        from espalier.search.tools.forms import no_form  # for requests with tools alone
        from espalier.search.tools.plan import plan_calls

        if (form := self.generator.call_form) is None:
            why = f"cannot be called: {no_form(self.generator.model.tokenizer)}"
            raise InvalidRequestError([Violation("tools", why)])
        how = {"must": request.must_call, "several": request.parallel_tool_calls, "text": request.text_form.value}
        plan = plan_calls(request.tools.value, request.callable_tools, form, **how, compile=self.compile)
        return replace(request, tools=Parsed(str(request.tools), plan))

    def require_fits(self, blocks: Mapping[str, int], lower: str) -> None:
        """Check that the KV pool could hold so many blocks.

        Raises:
            PoolTooSmallError: it could not; the message advises to `lower` something.
        """
        try:
            self.engine.admission.require_fits_alone(blocks)
        except PoolTooSmallError as error:
            raise PoolTooSmallError(error.needed_bytes, error.pool_bytes, lower) from None

    def compile(self, field: str, grammar_of: Callable[[], Grammar], keep: bool = True) -> Grammar:
        """Compile the grammar of a form; where it is to be kept, for the request's start.

        Raises:
            InvalidRequestError: it is none, or too complex; `field` of the request says so.
        """
        assert self.grammars, "searches and completions need a generator"
        try:
            self.grammars.prepare(grammar := grammar_of(), keep)
        except GrammarError as error:
            raise InvalidRequestError([Violation(field, f"cannot be used: {error}")]) from None
        return grammar


_STEP_TOKENS = 50
"""Mean length of steps for bounds on the verifier's tokens where the number of steps has no limit."""
_NO_THOUGHT = "is about thoughts, and the generator has none here: it does not think, or thinking is off; leave it out"
_NO_MARK = "needs a closing mark that is one token, which the model can be kept from; this generator's {!r} is text"
_NOT_PROBED = "leaves a path no box to probe; leave probe_every out"


def resolve_search(resolver: Resolver, request: SearchRequest) -> ResolvedRequest:
    """See `Running.resolve`."""
    generator, defaults = resolver.generator, resolver.defaults
    assert defaults, "an orchestrator with a generator has its defaults"
    warnings = (algorithms.unscored_default(),) if request.algorithm is None and not resolver.scorer else ()
    request = algorithms.named(request, defaults.scores)
    request.validate()
    resolver.require_in_vocabulary(request)
    filled = resolver.planned(defaults.fill(request))
    scorer = _scorer_of(resolver, filled)
    tools = filled.tools.value.tools if filled.tools.value else ()
    listed = [tool.for_template for tool in tools]
    prompt = generator.prompt(request.problem, request.history, request.thinking.value.mode, listed)
    _require_thoughts(generator.marks, filled, prompt)
    effective = _with_limits(request, filled, scorer, prompt, generator.model.config.max_positions)
    of_path = PathLimits(len(prompt.token_ids), effective.max_tokens or 1, effective.max_tokens or 1)
    tokenizer, thoughts, probes = generator.model.tokenizer, None, None
    if generator.marks:
        how = effective.thinking.value, prompt.opened, of_path.path_tokens, effective.more_thinking
        thoughts = plan_thoughts(generator.marks, tokenizer, *how)
        if effective.call_plan:  # whose address the model writes in place of the answer's header
            thoughts = replace(thoughts, header=())
    if effective.probe_every:
        probes = plan_probes(effective.probe_every, tokenizer, thoughts, generator.model.config.max_positions)
    grammar, probe_grammar = _grammars_of(resolver, effective, probes is not None)
    plan = effective.call_plan
    limits = _generator_limits(of_path, effective, scorer, thoughts, probes)
    reads = scorer if scorer and not scorer.needs.question_lengths else None
    verifier_prompt = reads.prompt(request.problem_text) if reads else ()
    final_only = scorer is not None and scorer.needs.score_final_only(algorithms.last_score_suffices(effective))
    verifier_limits = None
    if reads:
        steps = min(
            effective.max_steps or max(DEFAULT_MAX_STEPS, limits.path_tokens // _STEP_TOKENS), limits.path_tokens
        )
        verifier_limits = reads.bounds(len(verifier_prompt), limits, steps, tokenizer)
        if verifier_limits and final_only:
            verifier_limits = replace(verifier_limits, step_tokens=verifier_limits.path_tokens)
    return ResolvedRequest(
        request=effective,
        generator_limits=limits,
        verifier_limits=verifier_limits,
        blocks=_blocks(resolver, effective, limits, verifier_limits),
        generator_prompt=tuple(prompt.token_ids),
        verifier_prompt=verifier_prompt,
        score_final_only=final_only,
        warnings=(*generator.advice(request.problem), *prompt.warnings, *warnings, *(plan.warnings if plan else ())),
        thoughts=thoughts,
        probes=probes,
        grammar=grammar,
        probe_grammar=probe_grammar,
    )


def _scorer_of(resolver: Resolver, request: SearchRequest) -> Scorer | None:
    """The scorer of a search; None if it uses no scores.

    Raises:
        InvalidRequestError: the algorithm needs scores that are not there.
    """
    scorer = resolver.scorer
    if not algorithms.needs_verifier(request):
        return None
    if not scorer:
        what, advice = algorithms.what_needs_verifier(request), algorithms.verifier_advice()
        what = f"{what} needs a verifier and none is loaded; {advice}"
    elif scorer.needs.scores == "answers" and not algorithms.answers_suffice(request):
        name, fit = scorer.name, " or ".join(algorithms.algorithms_for_answers())
        what = f"{request.algorithm} reads the scores of steps, and {name} scores whole answers; choose {fit}"
    else:
        return scorer
    raise InvalidRequestError([Violation("algorithm", what)])


def _require_thoughts(marks: ThoughtMarks | None, request: SearchRequest, prompt: RenderedPrompt) -> None:
    """Check that the generator thinks as fields of the request need it.

    Raises:
        InvalidRequestError: it does not.
    """
    asked = [name for name in ("stop_when", "more_thinking") if getattr(request, name)]
    if asked and not prompt.thinks:
        raise InvalidRequestError([Violation(name, _NO_THOUGHT) for name in asked])
    if request.more_thinking and marks and marks.closing.token_id is None:
        raise InvalidRequestError([Violation("more_thinking", _NO_MARK.format(marks.closing.text))])


def _with_limits(
    given: SearchRequest, filled: SearchRequest, scorer: Scorer | None, prompt: RenderedPrompt, context: int
) -> SearchRequest:
    """The `filled` request with the limits that depend on its prompt, unless they were `given`."""
    most = filled.max_tokens if given.max_tokens or not prompt.thinks else THINKING_MAX_TOKENS
    max_tokens = min(most or 1, context - len(prompt.token_ids))
    max_steps, probe_every = filled.max_steps, filled.probe_every
    if prompt.thinks and max_steps and given.max_steps is None:
        max_steps = max(max_steps, max_tokens // _STEP_TOKENS)
    if scorer and scorer.needs.reads == "probes" and not probe_every:
        probe_every = 1  # at the end of every step
    return replace(filled, max_tokens=max_tokens, max_steps=max_steps, probe_every=probe_every)


def _grammars_of(resolver: Resolver, request: SearchRequest, probed: bool) -> tuple[Grammar | None, Grammar | None]:
    """The grammars of a search: of its paths, and of its probes.

    Raises:
        InvalidRequestError: a form is none, or too complex; a path of a form cannot be probed.
    """
    if probed and (field := "tools" if request.call_plan else "text_form" if request.text_form else ""):
        raise InvalidRequestError([Violation(field, _NOT_PROBED)])
    if request.call_plan:
        return request.call_plan.grammar, None
    if form := request.text_form.value:
        return resolver.compile("text_form", form.grammar), None
    if not (form := request.answer_form.value):
        return None, None
    resolver.compile("answer_form", form.grammar, keep=False)  # whose error is of what the caller wrote
    of_path = resolver.compile("answer_form", form.in_box)
    return of_path, resolver.compile("answer_form", form.to_brace) if probed else None


def _generator_limits(
    limits: PathLimits,
    request: SearchRequest,
    scorer: Scorer | None,
    thoughts: ThoughtPlan | None,
    probes: ProbePlan | None,
) -> PathLimits:
    """The `limits` of a path with those of a step, and of what is read behind one."""
    step_tokens = limits.path_tokens
    if request.max_step_tokens:
        beyond = request.step_rule.value.overrun(thoughts is not None)
        if thoughts:  # what the host writes behind a step is held with it
            beyond += max(map(len, (thoughts.closing, thoughts.header, thoughts.think_on)))
        step_tokens = min(request.max_step_tokens + beyond, step_tokens)
    behind = (*([probes.max_tokens] if probes else []), *(scorer.needs.question_lengths if scorer else ()))
    of_probes = {"max_probe_tokens": max(behind, default=0), "probes": max(1, len(behind))}
    return replace(limits, step_tokens=step_tokens, **of_probes)


def _blocks(
    resolver: Resolver, request: SearchRequest, generator: PathLimits, verifier: PathLimits | None
) -> dict[str, int]:
    """The blocks to reserve for a search, by KV group: at most, or with paths of the expected length.

    Raises:
        PoolTooSmallError: the pool does not hold the search alone at its limit, or not one of its whole paths.
    """
    blocks = _worst_case(resolver, request, generator, verifier)
    if not (expected := resolver.expected_tokens):
        return blocks

    def expectation(limits: PathLimits) -> PathLimits:  # a verifier reads paths as about as many tokens
        path_tokens, step_tokens = min(expected, limits.path_tokens), min(expected, limits.step_tokens)
        return replace(limits, path_tokens=path_tokens, step_tokens=min(step_tokens, path_tokens))

    return _worst_case(resolver, request, expectation(generator), verifier and expectation(verifier))


def _worst_case(
    resolver: Resolver, request: SearchRequest, generator: PathLimits, verifier: PathLimits | None
) -> dict[str, int]:
    """Maximum number of blocks that a search can hold, by KV group.

    Whole paths need not go on together: of those that the KV pool does not hold together, some are computed again.
    """
    estimates, engine = algorithms.memory_estimate(request), resolver.engine
    rescored = resolver.scorer.needs.rescored_in_searches if resolver.scorer else ""

    def blocks_of(role: str, limits: PathLimits) -> dict[str, int]:
        """Blocks of one role; with the path that is checked, where its scores are computed again."""
        also = [replace(each, paths=each.paths + 1) for each in estimates] if role == rescored else estimates
        return worst_case(engine, role, also, limits)

    of_verifier = blocks_of(VERIFIER, verifier) if verifier else {}
    while True:
        blocks = blocks_of(GENERATOR, generator) | of_verifier
        try:
            engine.admission.require_fits_alone(blocks)
            return blocks
        except PoolTooSmallError:
            if not algorithms.algorithm_of(request).whole_paths or all(estimate.paths == 1 for estimate in estimates):
                raise
        halves = [(estimate.paths + 1) // 2 for estimate in estimates]
        estimates = tuple(MemoryEstimate(paths, partial_blocks=paths - 1) for paths in halves)
