"""Incremental verification: a node's verifier sequence is its parent's plus the node's step."""

from collections.abc import Hashable

from espalier.engine.engine import Engine
from espalier.engine.errors import RequestTooLargeError
from espalier.engine.sequence import Sequence
from espalier.engine.turns import VERIFIER
from espalier.engine.work import Score
from espalier.prm.base import PrmFamily


class Verifier:
    """Scores steps through an engine, each step's tokens exactly once."""

    def __init__(self, engine: Engine, family: PrmFamily) -> None:
        self._engine = engine
        self.family = family

    def open(self, owner: Hashable, problem: str, salt: bytes = b"") -> tuple[Sequence, int]:
        """A verifier sequence of `owner` that holds the problem, and its length in tokens; `salt` as in `Engine.open`.

        Raises:
            RequestTooLargeError: when the problem alone fills the verifier's context.
        """
        ids = self.family.prompt_ids(problem)
        limit = self.family.model.config.max_positions
        if len(ids) >= limit:
            raise RequestTooLargeError(
                f"the problem has {len(ids)} verifier tokens and the verifier's context is {limit}"
            )
        return self._engine.open(VERIFIER, ids, salt, owner), len(ids)

    def prefill(self, owner: Hashable, root: Sequence) -> None:
        """Queue the computation of the problem, so that its forks share it."""
        self._engine.submit(Score(owner, root, (), ()))

    def score(
        self, owner: Hashable, parent: Sequence, step: str, max_tokens: int, in_place: bool = False
    ) -> Score | None:
        """Queue the scoring of one more step after `parent`, whose own tokens are computed.

        Args:
            owner: whose work it is.
            parent: the verifier sequence of the path so far.
            step: the step's text.
            max_tokens: the most tokens the step may take.
            in_place: extend `parent` itself instead of a fork of it.

        Returns:
            The submitted work, whose `sequence` is the new node's, or None when the step is longer than `max_tokens`:
            such a step has no score, and is not cut short to get one.
        """
        ids, read_at = self.family.step_ids(step)
        if len(ids) > max_tokens:
            return None
        sequence = parent if in_place else self._engine.fork(parent, 1)[0]
        work = Score(owner, sequence, tuple(ids), (read_at,))
        self._engine.submit(work)
        return work
