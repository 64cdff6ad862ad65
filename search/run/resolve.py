"""The base of resolving requests of any kind: the loaded models, their defaults, and checks against their limits."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from espalier.engine.engine import Engine
from espalier.engine.errors import InvalidRequestError, PoolTooSmallError, Violation
from espalier.engine.guidance.compiled import GrammarCompiler
from espalier.engine.guidance.grammar import Grammar, GrammarError
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.prm.scorer import Scorer
from espalier.search.algorithms.base import Scores
from espalier.search.common_fields import PenaltyFields, unknown_bias
from espalier.search.run.generator import Generator

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
