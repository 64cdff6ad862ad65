"""A Python function of the user's as a scorer: it is called with the text of each path."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from espalier.engine.errors import CheckpointError, EspalierError
from espalier.engine.models.text_files import shown
from espalier.engine.own_code import file_digest, place_and_reason
from espalier.engine.roles import VERIFIER
from espalier.prm.scorer import ScoredSearch, Scorer, ScoreSession, StepNode, StepScore, steps_with_text

ScoreFunction = Callable[[str, list[str]], float]
"""Takes a problem and the steps of a path so far, and returns the score of the last one, from 0 to 1."""


class FunctionScorer(Scorer):
    """Scores steps by a function, on the thread that runs the searches: all of them wait for it."""

    def __init__(self, function: ScoreFunction) -> None:
        """Create a scorer.

        Raises:
            CheckpointError: it cannot be called.
        """
        if not callable(function):
            raise CheckpointError("it is neither a function nor a Scorer")
        self.name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
        self.digests = {VERIFIER: digest} if (digest := file_digest(function)) else {}
        self._function = function

    def begin(self, search: ScoredSearch) -> ScoreSession:
        """See `Scorer`."""
        return _FunctionSession(self, search.problem)

    def score(self, problem: str, steps: list[str]) -> float:
        """Return the score of the last of `steps`.

        Raises:
            EspalierError: the function fails, or returns no number from 0 to 1; says where.
        """
        given = call(self.name, self._function, problem, steps)
        with suppress(TypeError, ValueError):
            if not isinstance(given, str | bytes) and 0 <= (score := float(given)) <= 1:  # so not NaN
                return score
        raise EspalierError(
            f"--verifier {self.name}: it must return the score of the last step, a number from 0 to 1; it returned "
            f"{shown(given)}"
        )


class _FunctionSession(ScoreSession):
    def __init__(self, scorer: FunctionScorer, problem: str) -> None:
        super().__init__()
        self._scorer = scorer
        self._problem = problem

    def _want(self, node: StepNode, in_place: bool) -> Iterable[StepScore]:
        return (StepScore(node, self._scorer.score(self._problem, [step.text for step in steps_with_text(node)])),)


def call(name: str, method: Callable[..., Any], *given: Any) -> Any:
    """Call what a user's scorer or function consists of.

    Raises:
        EspalierError: it fails; says where.
    """
    try:
        return method(*given)
    except EspalierError:
        raise
    except Exception as error:  # whatever somebody's code does
        raise EspalierError(f"--verifier {name}: failed, {place_and_reason(error)}") from error
