"""The scorer of a process reward model: any family, on a KV cache of its own."""

from typing import Any

from espalier.engine.errors import CheckpointError, RequestTooLargeError
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.roles import VERIFIER
from espalier.prm.base import PrmFamily
from espalier.prm.generative import GenerativeFamily, RationaleSession
from espalier.prm.limits import PathLimits, verifier_limits
from espalier.prm.scorer import ScoredSearch, Scorer, ScorerNeeds, ScoreSession
from espalier.prm.session import StepSession, VerifierSession


class Verifier(Scorer):
    """Scores steps by a family's model, as the engine's verifier.

    Attributes:
        family: how the model reads a path.
    """

    def __init__(self, family: PrmFamily, full_rescore: bool = False) -> None:
        """Create a verifier; with `full_rescore`, every score is also computed from the whole text and compared.

        Raises:
            CheckpointError: `full_rescore` is set for a generative family, which is not incremental.
        """
        generative = isinstance(family, GenerativeFamily)
        if full_rescore and generative:
            raise CheckpointError(
                f"--verify-incremental: {family.name} reads the whole text for every step, so there is nothing to "
                "compare it with; leave the flag out"
            )
        self._session: type[VerifierSession[Any]] = RationaleSession if generative else StepSession
        self.family = family
        self.name = family.name
        of_step = "if enough" if family.costly else "never"
        read = "tokens" if family.info.of_sampling else "text"
        self.needs = ScorerNeeds(
            reads=read,
            final_only="always" if family.info.whole_answers else of_step,
            merges=read,
            rescored=VERIFIER if full_rescore else "",
        )
        self._same_vocabulary: dict[TextTokenizer, bool] = {}

    @property
    def identity(self) -> str:
        """See `Scorer`."""
        return self.family.identity

    def prompt(self, problem: str) -> tuple[int, ...]:
        """See `Scorer`."""
        family, ids = self.family, tuple(self.family.prompt_ids(self.family.plain_text.of(problem)))
        family.model.require_embedded(VERIFIER, ids)
        limit, own = family.context, family.model.config.max_positions
        if len(ids) >= limit:
            rationales = f", of which rationales leave {limit}" if limit < own else ""
            raise RequestTooLargeError(
                f"the problem has {len(ids)} verifier tokens and the verifier's context is {own}{rationales}"
            )
        return ids

    def bounds(self, prompt_tokens: int, generator: PathLimits, max_steps: int, tokenizer: TextTokenizer) -> PathLimits:
        """See `Scorer`."""
        family = self.family
        if tokenizer not in self._same_vocabulary:  # compared once, as there may be 150,000 tokens
            self._same_vocabulary[tokenizer] = family.model.tokenizer.vocabulary == tokenizer.vocabulary
        same = self._same_vocabulary[tokenizer]
        special_tokens = family.max_special_tokens, family.max_probe_tokens, 1 + len(family.other_probes)
        return family.bounds(
            verifier_limits(generator, prompt_tokens, family.context, max_steps, same, *special_tokens)
        )

    def begin(self, search: ScoredSearch) -> ScoreSession:
        """See `Scorer`."""
        return self._session(self.family, search, self.rescore_check(search, self.family.rounding))
