"""Resolves requests of any kind: the loaded models, their defaults, checks against their limits, and memory bounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from espalier.engine.engine import Engine
from espalier.engine.errors import InvalidRequestError, PoolTooSmallError, Violation
from espalier.engine.guidance.compiled import GrammarCompiler
from espalier.engine.guidance.grammar import Grammar, GrammarError
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.prm.scorer import UNLIMITED, PathLimits, Scorer
from espalier.search.algorithms.base import MemoryEstimate, Scores
from espalier.search.common_fields import PenaltyFields, unknown_bias
from espalier.search.run.generator import Generator


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
    return min(whole, held + blocks_of(batch_tokens, block_size))


def _worst_case(estimates: Sequence[MemoryEstimate], limits: PathLimits, block_size: int, most: int, inner: int) -> int:
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
