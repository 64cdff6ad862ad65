"""Resolves requests: the one place where defaults, limits and prompts are worked out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from espalier.engine.engine import Engine
from espalier.engine.errors import InvalidRequestError, PoolTooSmallError, Violation
from espalier.engine.guidance.compiled import GrammarCompiler
from espalier.engine.guidance.grammar import Grammar, GrammarError
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.prm.limits import UNLIMITED, PathLimits
from espalier.prm.scorer import Scorer
from espalier.search.algorithms import (
    algorithms_for_answers,
    answers_suffice,
    last_score_suffices,
    memory_estimate,
    named,
    needs_verifier,
    samples_whole_paths,
    unscored_default,
    verifier_advice,
    what_needs_verifier,
)
from espalier.search.algorithms.base import MemoryEstimate, Scores
from espalier.search.common_fields import DEFAULT_MAX_STEPS, DEFAULT_MAX_TOKENS, PenaltyFields, read_bias, unknown_bias
from espalier.search.completion import CompletionRequest
from espalier.search.form import Form, read_form
from espalier.search.request import SearchRequest, validate
from espalier.search.rollout import Labels, RolloutRequest, RolloutSettings
from espalier.search.run.executor import ResolvedCompletion, ResolvedRequest, ResolvedRollout, ResolvedScores
from espalier.search.run.generator import Generator
from espalier.search.run.rollout_tree import VALUED_AT_ONCE
from espalier.search.score_session import ScoreSessionRequest
from espalier.search.scores import ScoreRequest
from espalier.search.step_rule import read_step_rule
from espalier.search.thoughts.budget import THINKING_MAX_TOKENS, plan_thoughts
from espalier.search.thoughts.mode import read_thinking
from espalier.search.thoughts.probing import plan_probes

_STEP_TOKENS = 50
"""Mean length of steps for bounds on the verifier's tokens where the number of steps has no limit."""
_NO_THOUGHT = "is about thoughts, and the generator has none here: it does not think, or thinking is off; leave it out"
_NO_MARK = "needs a closing mark that is one token, which the model can be kept from; this generator's {!r} is text"
_NOT_PROBED = "binds the whole text, which has no box to probe: leave probe_every out, or give answer_form"
_SCORER_ADVICE = "--verifier names a process reward model, or self"
_MAX_BRANCHES = 64
"""Choices of one completion request that are sampled at a time, unless those of one prompt are more; steps of a session
that are scored at a time."""
_MAX_JUDGED = 8
"""Steps of a session that are scored at a time by rationales."""


class Resolver:
    """Resolves requests for the models of one engine; may be called on any thread."""

    def __init__(
        self, engine: Engine, generator: Generator | None, scorer: Scorer | None, expected_tokens: int | None = None
    ) -> None:
        """Create a resolver; searches reserve memory for paths of `expected_tokens` instead of their limit.

        Its `grammars` compiles what binds texts, its `defaults` fill in requests; None without a generator.
        """
        self._engine = engine
        self._given_generator = generator
        self._scorer = scorer
        self._expected_tokens = expected_tokens
        self.grammars = GrammarCompiler(generator.model) if generator else None
        scores: Scores = scorer.needs.scores if scorer else "none"
        self.defaults = replace(generator.defaults, scores=scores) if generator else None

    @property
    def _generator(self) -> Generator:
        assert self._given_generator, "an orchestrator without a generator is asked for scores alone"
        return self._given_generator

    def resolve(self, request: SearchRequest) -> ResolvedRequest:
        """Validate a request and work out what follows from it.

        Raises:
            InvalidRequestError: lists every invalid field; NoEmbeddingError if the problem has tokens without an
                embedding in a model.
            RequestTooLargeError: the prompt fills a model's context; PoolTooSmallError if the KV pool could not hold
                the search alone.
        """
        assert self.defaults, "an orchestrator without a generator is asked for scores alone"
        defaulted = request.algorithm is None
        request = named(request, self.defaults.scores)
        validate(request)
        self._require_in_vocabulary(request)
        effective = self.defaults.fill(request)
        scorer = self._scorer_of(effective)
        thinking = read_thinking(request.thinking)
        prompted = self._generator.prompt(request.problem, request.history, thinking.mode)
        prompt = tuple(prompted.token_ids)
        most = effective.max_tokens if request.max_tokens or not prompted.thinks else THINKING_MAX_TOKENS
        path_tokens = min(most or 1, self._generator.model.config.max_positions - len(prompt))
        effective = replace(effective, max_tokens=path_tokens)
        thoughts = None
        if marks := self._generator.marks:
            of_paths = prompted.opened, path_tokens, request.more_thinking
            thoughts = plan_thoughts(marks, self._generator.model.tokenizer, thinking, *of_paths)
        if prompted.thinks and effective.max_steps and request.max_steps is None:
            effective = replace(effective, max_steps=max(effective.max_steps, path_tokens // _STEP_TOKENS))
        step_tokens = path_tokens
        if effective.max_step_tokens:
            overrun = read_step_rule(effective.step_rule).overrun(thoughts is not None)
            step_tokens = min(effective.max_step_tokens + overrun, path_tokens)
        asked = [name for name in ("stop_when", "more_thinking") if getattr(effective, name)]
        if asked and not prompted.thinks:
            raise InvalidRequestError([Violation(name, _NO_THOUGHT) for name in asked])
        if effective.more_thinking and marks and marks.closing.token_id is None:
            raise InvalidRequestError([Violation("more_thinking", _NO_MARK.format(marks.closing.text))])
        if scorer and scorer.needs.reads == "probes" and not effective.probe_every:
            effective = replace(effective, probe_every=1)  # at the end of every step
        probes = None
        if every := effective.probe_every:
            model = self._generator.model
            probes = plan_probes(every, model.tokenizer, thoughts, model.config.max_positions)
        grammar, probe_grammar = self._grammars_of(effective, probed=probes is not None)
        behind = (*([probes.max_tokens] if probes else []), *(scorer.needs.question_lengths if scorer else ()))
        limits = PathLimits(len(prompt), path_tokens, step_tokens, max(behind, default=0), max(1, len(behind)))
        verifier_prompt, verifier_limits = (), None
        if scorer and not scorer.needs.question_lengths:
            tokenizer = self._generator.model.tokenizer
            verifier_prompt = scorer.prompt(request.problem_text)
            steps = min(effective.max_steps or max(DEFAULT_MAX_STEPS, path_tokens // _STEP_TOKENS), path_tokens)
            verifier_limits = scorer.bounds(len(verifier_prompt), limits, steps, tokenizer)
        final_only = scorer is not None and scorer.needs.score_final_only(last_score_suffices(effective))
        if verifier_limits and final_only:
            verifier_limits = replace(verifier_limits, step_tokens=verifier_limits.path_tokens)
        blocks = self._worst_case(effective, limits, verifier_limits)
        if self._expected_tokens:
            expected = self._expected(limits, self._expected_tokens)
            of_verifier = verifier_limits and self._expected(verifier_limits, self._expected_tokens)
            blocks = self._worst_case(effective, expected, of_verifier)
        warnings = (*self._generator.advice(request.problem), *prompted.warnings)
        if defaulted and not self._scorer:
            warnings = (*warnings, unscored_default())
        return ResolvedRequest(
            effective,
            limits,
            verifier_limits,
            blocks,
            prompt,
            verifier_prompt,
            final_only,
            warnings,
            thoughts,
            probes,
            grammar,
            probe_grammar,
        )

    def resolve_completion(self, request: CompletionRequest) -> ResolvedCompletion:
        """Validate a completion request and work out what follows from it.

        Raises:
            InvalidRequestError: lists every invalid field; NoEmbeddingError if a prompt has tokens without an
                embedding.
            RequestTooLargeError: a prompt fills the model's context; PoolTooSmallError if the KV pool could not hold
                the choices of one prompt alone.
        """
        request.validate()
        self._require_in_vocabulary(request)
        generator = self._generator
        read = [generator.completion_prompt(prompt, request) for prompt in request.prompts]
        prompts = tuple(tuple(ids) for ids, _, _ in read)
        wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        context = generator.model.config.max_positions
        limits = tuple(min(wanted, context - len(prompt)) for prompt in prompts)
        filled = replace(request, **generator.defaults.sampling_of(request))
        grammar = self._prepared("text_form", request.text_form, Form.grammar) if request.text_form else None
        together = max(1, min(len(prompts), _MAX_BRANCHES // request.samples))
        each: dict[str, int] = {}  # the most of any prompt
        for prompt, most in zip(prompts, limits, strict=True):
            estimates = (MemoryEstimate(request.samples, partial_blocks=1),)
            its = worst_case(self._engine, GENERATOR, estimates, PathLimits(len(prompt), most, most))
            each = {group: max(count, each.get(group, 0)) for group, count in its.items()}
        while True:
            blocks = {group: together * count for group, count in each.items()}
            try:
                self._engine.admission.require_fits_alone(blocks)
            except PoolTooSmallError:
                if together == 1:
                    raise
                together //= 2
            else:
                opened = tuple(opened for _, opened, _ in read)
                warnings = tuple(dict.fromkeys(each for _, _, its in read for each in its))
                of_text = opened, generator.marks, grammar, warnings
                return ResolvedCompletion(filled, prompts, limits, together, blocks, *of_text)

    def resolve_scores(self, request: ScoreRequest) -> ResolvedScores:
        """Validate a request for scores and work out what follows from it.

        Raises:
            InvalidRequestError: lists every invalid field; there is no verifier, or it scores no given texts.
            RequestTooLargeError: the problem fills the verifier's context; PoolTooSmallError if the KV pool could not
                hold all solutions.
        """
        request.validate()
        scorer = self._scorer_of_texts("solutions")
        prompt = scorer.prompt(request.problem_text)
        tokenizer = self._tokenizer
        lengths = [[len(tokenizer.encode(step)) for step in steps] for steps in request.solutions]
        limits = PathLimits(0, max(map(sum, lengths)), max(map(max, lengths)))
        bounds = scorer.bounds(len(prompt), limits, max(map(len, lengths)), tokenizer)
        paths = len(set(request.solutions)) + (scorer.needs.rescored == VERIFIER)
        blocks = worst_case(self._engine, VERIFIER, (MemoryEstimate(paths, paths),), bounds) if bounds else {}
        self._require_fits(blocks, "the number or the length of the solutions")
        return ResolvedScores(request, prompt, blocks)

    def resolve_score_session(self, request: ScoreSessionRequest) -> ResolvedScores:
        """Validate the request of a session and work out what follows from it; raises as `resolve_scores`."""
        request.validate()
        scorer = self._scorer_of_texts("problem")
        prompt, most = scorer.prompt(request.problem_text), request.max_tokens
        limits = PathLimits(0, most, most)
        bounds = scorer.bounds(len(prompt), limits, request.max_nodes, self._tokenizer)
        if not bounds:
            return ResolvedScores(request, prompt)
        # Nothing of a path that is judged by rationales stays behind.
        judged = bounds.rationales is not None
        together = min(request.max_nodes, _MAX_JUDGED if judged else _MAX_BRANCHES)
        checked = MemoryEstimate(together if judged else int(scorer.needs.rescored == VERIFIER))
        paths = worst_case(self._engine, VERIFIER, (checked,), bounds)  # with the problem
        size = self._engine.settings.block_size
        # The first and the last block of a node's tokens are its own; so are those of what is fed to read its score.
        probes = together * bounds.probes if bounds.max_probe_tokens else 0
        of_probes = probes * (_blocks(bounds.max_probe_tokens, size) + 1)
        held = _blocks(most, size) + 2 * request.max_nodes + of_probes
        states = request.max_nodes + probes
        of_states = {pool.name for pool in self._engine.schedulers[VERIFIER].pools if pool.holds_states}
        blocks = {pool: count + (states if pool in of_states else held) for pool, count in paths.items()}
        self._require_fits(blocks, "max_nodes or max_tokens of the session")
        return ResolvedScores(request, prompt, blocks, together, UNLIMITED if judged else most)

    def resolve_rollout(self, request: RolloutRequest) -> ResolvedRollout:
        """Validate a request for rollouts and work out what follows from it.

        Raises:
            InvalidRequestError: lists every invalid field; NoEmbeddingError if the prompt has tokens without an
                embedding.
            RequestTooLargeError: the prompt fills the model's context; PoolTooSmallError if the KV pool could not hold
                all solutions.
        """
        request.validate()
        self._require_in_vocabulary(request)
        generator = self._generator
        prompt = tuple(generator.prompt_ids(request.problem, request.history))
        request = replace(request, **generator.defaults.sampling_of(request))
        blocks = rollout_blocks(self._engine, generator, len(prompt), request)
        self._require_fits(blocks, "solutions or max_tokens")
        return ResolvedRollout(request, prompt, generator.defaults, blocks)

    def _require_in_vocabulary(self, request: PenaltyFields) -> None:
        vocabulary = self._generator.model.config.vocab_size
        if wrong := unknown_bias(read_bias(request.logit_bias), vocabulary):
            raise InvalidRequestError([Violation("logit_bias", wrong)])

    def _grammars_of(self, request: SearchRequest, probed: bool) -> tuple[Grammar | None, Grammar | None]:
        """The grammars of a search: of its paths, and of its probes.

        Raises:
            InvalidRequestError: a form is none, or too complex; a path of a form cannot be probed.
        """
        if request.text_form and probed:
            raise InvalidRequestError([Violation("text_form", _NOT_PROBED)])
        if request.text_form:
            return self._prepared("text_form", request.text_form, Form.grammar), None
        if not (form := request.answer_form):
            return None, None
        self._prepared("answer_form", form, Form.grammar, keep=False)  # whose error is of what the caller wrote
        of_path = self._prepared("answer_form", form, Form.in_box)
        return of_path, self._prepared("answer_form", form, Form.to_brace) if probed else None

    def _prepared(self, field: str, form: str, grammar_of: Callable[[Form], Grammar], keep: bool = True) -> Grammar:
        """Compile a form, for its search where it is to be kept.

        Raises:
            InvalidRequestError: it is none, or too complex; `field` of the request says so.
        """
        assert self.grammars, "searches and completions need a generator"
        try:
            self.grammars.prepare(grammar := grammar_of(read_form(form)), keep)
        except GrammarError as error:
            raise InvalidRequestError([Violation(field, f"cannot be used: {error}")]) from None
        return grammar

    def _require_fits(self, blocks: Mapping[str, int], lower: str) -> None:
        try:
            self._engine.admission.require_fits_alone(blocks)
        except PoolTooSmallError as error:
            raise PoolTooSmallError(error.needed_bytes, error.pool_bytes, lower) from None

    @property
    def _tokenizer(self) -> TextTokenizer:
        """Of the model that steps are counted for: the generator, or the verifier where there is none."""
        return self._engine.model(GENERATOR if self._given_generator else VERIFIER).tokenizer

    def _scorer_of_texts(self, field: str) -> Scorer:
        """The scorer of given texts.

        Raises:
            InvalidRequestError: there is none; `field` of the request says so.
        """
        scorer = self._scorer
        if scorer is None or scorer.needs.reads != "text":
            name = f"{scorer.name} scores steps as they are sampled" if scorer else "no verifier is loaded"
            raise InvalidRequestError([Violation(field, f"cannot be scored: {name}; {_SCORER_ADVICE}")])
        return scorer

    def _scorer_of(self, request: SearchRequest) -> Scorer | None:
        """The scorer of a search; None if it uses no scores.

        Raises:
            InvalidRequestError: the algorithm needs scores that are not there.
        """
        scorer = self._scorer
        if not needs_verifier(request):
            return None
        if not scorer:
            what = f"{what_needs_verifier(request)} needs a verifier and none is loaded; {verifier_advice()}"
        elif scorer.needs.scores == "answers" and not answers_suffice(request):
            name, fit = scorer.name, " or ".join(algorithms_for_answers())
            what = f"{request.algorithm} reads the scores of steps, and {name} scores whole answers; choose {fit}"
        else:
            return scorer
        raise InvalidRequestError([Violation("algorithm", what)])

    @staticmethod
    def _expected(limits: PathLimits, tokens: int) -> PathLimits:
        """Bounds with paths of so many tokens, which a verifier reads as about as many."""
        tokens = min(tokens, limits.path_tokens)
        return replace(limits, path_tokens=tokens, step_tokens=min(limits.step_tokens, tokens))

    def _worst_case(self, request: SearchRequest, generator: PathLimits, verifier: PathLimits | None) -> dict[str, int]:
        """Maximum number of blocks that a search can hold, by KV group.

        Whole paths need not go on together: of those that the KV pool does not hold together, some are computed again.

        Raises:
            PoolTooSmallError: the pool does not hold the search alone, or not one of its whole paths.
        """
        estimates = memory_estimate(request)
        rescored = self._scorer.needs.rescored_in_searches if self._scorer else ""
        of_verifier = self._blocks_of(VERIFIER, estimates, verifier, rescored) if verifier else {}
        while True:
            blocks = self._blocks_of(GENERATOR, estimates, generator, rescored) | of_verifier
            try:
                self._engine.admission.require_fits_alone(blocks)
                return blocks
            except PoolTooSmallError:
                if not samples_whole_paths(request) or all(estimate.paths == 1 for estimate in estimates):
                    raise
            halves = [(estimate.paths + 1) // 2 for estimate in estimates]
            estimates = tuple(MemoryEstimate(paths, partial_blocks=paths - 1) for paths in halves)

    def _blocks_of(
        self, role: str, estimates: Sequence[MemoryEstimate], limits: PathLimits, rescored: str
    ) -> dict[str, int]:
        """The same for one role; with the path that is checked, where its scores are computed again."""
        if role == rescored:
            estimates = [replace(estimate, paths=estimate.paths + 1) for estimate in estimates]
        return worst_case(self._engine, role, estimates, limits)


def rollout_blocks(engine: Engine, generator: Generator, prompt: int, settings: RolloutSettings) -> dict[str, int]:
    """Maximum number of blocks that a tree of rollouts holds, by KV group, behind so many tokens of its prompt."""
    most = min(settings.max_tokens, generator.model.config.max_positions - prompt)
    valued = 0 if settings.labels is Labels.OUTCOME else VALUED_AT_ONCE * settings.continuations
    limits = PathLimits(prompt, most, min(settings.max_step_tokens, most))
    return worst_case(engine, GENERATOR, [MemoryEstimate(settings.solutions + valued)], limits)


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
    whole = _worst_case(estimates, limits, block_size, UNLIMITED, inner=1)
    if window is None:
        return whole
    in_window = (window - 1) // block_size + 2  # it begins inside one block, and ends inside another
    held = _worst_case(estimates, limits, block_size, in_window, inner=in_window)
    return min(whole, held + _blocks(batch_tokens, block_size))


def _worst_case(estimates: Sequence[MemoryEstimate], limits: PathLimits, block_size: int, most: int, inner: int) -> int:
    """The same where a sequence holds `most` blocks, and an inner node of a path `inner` that others do not."""

    def held(tokens: int) -> int:
        return min(most, _blocks(tokens, block_size))

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


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
