"""Resolves requests: the one place where defaults, limits and prompts are worked out."""

from dataclasses import replace
from functools import cached_property

from espalier.engine.engine import Engine
from espalier.engine.errors import InvalidRequestError, Violation
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.prm.generative import GenerativeVerifier
from espalier.prm.scorers.base import StepScorer
from espalier.prm.verifier import Verifier
from espalier.search.algorithms import (
    algorithms_for_answers,
    answers_suffice,
    memory_estimate,
    needs_verifier,
    verifier_advice,
    with_defaults,
)
from espalier.search.request import DEFAULT_MAX_TOKENS, AlgorithmName, SearchRequest, validate
from espalier.search.run.executor import ResolvedRequest
from espalier.search.run.generator import Generator
from espalier.search.run.memory import PathLimits, RationaleLimits, verifier_limits, with_rationales, worst_case_blocks


class Resolver:
    """Resolves requests for the models of one engine; may be called on any thread."""

    def __init__(self, engine: Engine, generator: Generator, verifier: Verifier | StepScorer | None) -> None:
        self._engine = engine
        self._generator = generator
        self._scorer = verifier if isinstance(verifier, StepScorer) else None
        self._verifier = None if isinstance(verifier, StepScorer) else verifier

    def effective(self, request: SearchRequest) -> SearchRequest:
        """Return the request with every default filled in from the algorithm, the checkpoint and the context size.

        None remains for absent limits and for fields that the algorithm does not use. The path's token limit is that of
        a prompt which leaves room for it.
        """
        generator = self._generator
        temperature = generator.temperature if request.temperature is None else request.temperature
        return replace(
            with_defaults(request),
            temperature=0.0 if request.algorithm is AlgorithmName.GREEDY else temperature,
            top_k=generator.top_k if request.top_k is None else request.top_k,
            top_p=generator.top_p if request.top_p is None else request.top_p,
            min_p=generator.min_p if request.min_p is None else request.min_p,
            max_tokens=min(request.max_tokens or DEFAULT_MAX_TOKENS, generator.model.config.max_positions),
        )

    def resolve(self, request: SearchRequest) -> ResolvedRequest:
        """Validate a request and work out what follows from it.

        Raises:
            InvalidRequestError: lists every invalid field; NoEmbeddingError if the problem has tokens without an
                embedding in a model.
            RequestTooLargeError: the prompt fills a model's context; PoolTooSmallError if the KV pool could not hold
                the search alone.
        """
        validate(request)
        effective = self.effective(request)
        scored = needs_verifier(effective)
        self._require_scores(effective, scored)
        prompt = tuple(self._generator.prompt_ids(request.problem, request.history))
        assert effective.max_tokens is not None
        path_tokens = min(effective.max_tokens, self._generator.model.config.max_positions - len(prompt))
        effective = replace(effective, max_tokens=path_tokens)
        limits = PathLimits(len(prompt), path_tokens, min(effective.max_step_tokens, path_tokens))
        verifier_prompt, verifier_limits = (), None
        if self._verifier and scored:
            verifier_prompt = self._verifier.prompt_ids(request.problem_text)
            verifier_limits = self._verifier_limits(self._verifier, len(verifier_prompt), effective.max_steps, limits)
        blocks = self._worst_case(effective, limits, verifier_limits)
        self._engine.admission.require_fits_alone(blocks)
        warnings = self._generator.advice(request.problem)
        return ResolvedRequest(effective, limits, verifier_limits, blocks, prompt, verifier_prompt, warnings)

    def _require_scores(self, request: SearchRequest, scored: bool) -> None:
        """Raise InvalidRequestError if the algorithm needs scores that no verifier gives."""
        if scored and not (self._verifier or self._scorer):
            what = f"{request.algorithm} needs a verifier and none is loaded; {verifier_advice()}"
        elif self._verifier and self._verifier.family.info.whole_answers and not answers_suffice(request):
            family, fit = self._verifier.family.name, " or ".join(algorithms_for_answers())
            what = f"{request.algorithm} reads the scores of steps, and {family} scores whole answers; choose {fit}"
        else:
            return
        raise InvalidRequestError([Violation("algorithm", what)])

    @cached_property
    def _same_vocabulary(self) -> bool:
        """Whether both models have the same vocabulary; computed once, as it may have 150,000 tokens."""
        assert self._verifier is not None
        return self._verifier.family.model.tokenizer.vocabulary == self._generator.model.tokenizer.vocabulary

    def _verifier_limits(
        self, verifier: Verifier, prompt_tokens: int, max_steps: int, generator: PathLimits
    ) -> PathLimits:
        family, context = verifier.family, verifier.family.context
        special_tokens = family.max_special_tokens, family.max_probe_tokens
        limits = verifier_limits(generator, prompt_tokens, context, max_steps, self._same_vocabulary, *special_tokens)
        if isinstance(family, GenerativeVerifier):
            rationale = RationaleLimits(0, family.settings.chains, family.rationale_tokens)
            return with_rationales(limits, context, family.closing_tokens, rationale)
        return replace(limits, step_tokens=limits.path_tokens) if family.info.whole_answers else limits

    def _worst_case(self, request: SearchRequest, generator: PathLimits, verifier: PathLimits | None) -> dict[str, int]:
        """Maximum number of blocks that a search can hold, by role."""
        size, estimates = self._engine.settings.block_size, memory_estimate(request)
        checked = tuple(replace(estimate, paths=estimate.paths + 1) for estimate in estimates)  # with the path checked
        in_generator = checked if self._scorer and self._scorer.full_rescore else estimates
        blocks = {GENERATOR: worst_case_blocks(in_generator, generator, size)}
        if verifier:
            assert self._verifier is not None
            in_verifier = checked if self._verifier.full_rescore else estimates
            blocks[VERIFIER] = worst_case_blocks(in_verifier, verifier, size)
        return blocks
