"""Resolves a request for a search: works out its defaults, limits, prompts and memory, once."""

from dataclasses import replace

from espalier.engine.errors import InvalidRequestError, PoolTooSmallError, Violation
from espalier.engine.guidance.grammar import Grammar
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.prm.scorer import PathLimits, Scorer
from espalier.search import algorithms
from espalier.search.algorithms.base import MemoryEstimate
from espalier.search.common_fields import DEFAULT_MAX_STEPS
from espalier.search.request import SearchRequest
from espalier.search.run.executor import RenderedPrompt, ResolvedRequest
from espalier.search.run.resolve import Resolver, worst_case
from espalier.search.thoughts.marks import ThoughtMarks
from espalier.search.thoughts.plans import THINKING_MAX_TOKENS, ProbePlan, ThoughtPlan, plan_probes, plan_thoughts

_STEP_TOKENS = 50
"""Mean length of steps for bounds on the verifier's tokens where the number of steps has no limit."""
_NO_THOUGHT = "is about thoughts, and the generator has none here: it does not think, or thinking is off; leave it out"
_NO_MARK = "needs a closing mark that is one token, which the model can be kept from; this generator's {!r} is text"
_NOT_PROBED = "binds the whole text, which has no box to probe: leave probe_every out, or give answer_form"


def resolve_search(resolver: Resolver, request: SearchRequest) -> ResolvedRequest:
    """See `Running.resolve`."""
    generator, defaults = resolver.generator, resolver.defaults
    assert defaults, "an orchestrator with a generator has its defaults"
    warnings = (algorithms.unscored_default(),) if request.algorithm is None and not resolver.scorer else ()
    request = algorithms.named(request, defaults.scores)
    request.validate()
    resolver.require_in_vocabulary(request)
    filled = defaults.fill(request)
    scorer = _scorer_of(resolver, filled)
    prompt = generator.prompt(request.problem, request.history, request.thinking.value.mode)
    _require_thoughts(generator.marks, filled, prompt)
    effective = _with_limits(request, filled, scorer, prompt, generator.model.config.max_positions)
    of_path = PathLimits(len(prompt.token_ids), effective.max_tokens or 1, effective.max_tokens or 1)
    tokenizer, thoughts, probes = generator.model.tokenizer, None, None
    if generator.marks:
        how = effective.thinking.value, prompt.opened, of_path.path_tokens, effective.more_thinking
        thoughts = plan_thoughts(generator.marks, tokenizer, *how)
    if effective.probe_every:
        probes = plan_probes(effective.probe_every, tokenizer, thoughts, generator.model.config.max_positions)
    grammar, probe_grammar = _grammars_of(resolver, effective, probes is not None)
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
        warnings=(*generator.advice(request.problem), *prompt.warnings, *warnings),
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
    if request.text_form and probed:
        raise InvalidRequestError([Violation("text_form", _NOT_PROBED)])
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
    if not (tokens := resolver.expected_tokens):
        return blocks
    expected = _of_length(generator, tokens)
    return _worst_case(resolver, request, expected, verifier and _of_length(verifier, tokens))


def _of_length(limits: PathLimits, tokens: int) -> PathLimits:
    """Bounds with paths of so many tokens, which a verifier reads as about as many."""
    tokens = min(tokens, limits.path_tokens)
    return replace(limits, path_tokens=tokens, step_tokens=min(limits.step_tokens, tokens))


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
