"""Scorers of the user's own: functions of a path's text, and `Scorer`s with a guard around what they do."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, cast

from espalier.engine.errors import CheckpointError, EspalierError
from espalier.engine.models.text_files import shown
from espalier.engine.own_code import file_digest, load_code, place_and_reason
from espalier.engine.roles import VERIFIER
from espalier.engine.work import Done
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
        self.digests = _digests_of(function)
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


def _digests_of(code: Any) -> dict[str, str]:
    return {VERIFIER: digest} if (digest := file_digest(code)) else {}


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


class _GuardedScorer:
    """A `Scorer` of the user's own; what a method of it raises, or returns wrong, fails the search in one line.

    Results record a digest of the file of its class, unless it has digests itself.
    """

    def __init__(self, its: Scorer) -> None:
        kind = type(its)
        if not getattr(its, "name", ""):
            raise CheckpointError(f"{kind.__module__}:{kind.__qualname__}: a Scorer must have a name")
        self.name, self._its = its.name, its
        self.digests = its.digests or _digests_of(kind)

    def __getattr__(self, attribute: str) -> Any:
        value = call(self.name, getattr, self._its, attribute)
        return partial(call, self.name, value) if callable(value) else value

    def begin(self, search: ScoredSearch) -> "_GuardedSession":
        """See `Scorer`."""
        session = call(self.name, self._its.begin, search)
        if not isinstance(session, ScoreSession):
            raise EspalierError(f"--verifier {self.name}: begin must return a ScoreSession, returned {shown(session)}")
        return _GuardedSession(self.name, session)


class _GuardedSession(ScoreSession):
    def __init__(self, name: str, its: ScoreSession) -> None:
        super().__init__()
        self.name, self.its = name, its
        self.head, self.prompt_tokens = its.head, its.prompt_tokens
        for method in ("prefill", "score_sampled", "is_check", "release", "sequences", "close"):
            setattr(self, method, partial(call, name, getattr(its, method)))

    @property
    def pending(self) -> int:
        return call(self.name, getattr, self.its, "pending")

    def _want(self, node: StepNode, in_place: bool) -> Iterator[StepScore]:
        return self._each(self.its.want, node, in_place)

    def _skip(self, node: StepNode) -> Iterator[StepScore]:
        return self._each(self.its.skip, node)

    def _take(self, done: Done) -> Iterator[StepScore]:
        return self._each(self.its.take, done)

    def _each(self, method: Callable[..., Iterable[StepScore]], *given: Any) -> Iterator[StepScore]:
        """The scores that a method returns, one at a time: a generator goes on once the last one is stored."""
        scores = call(self.name, iter, call(self.name, method, *given))
        while (score := call(self.name, next, scores, None)) is not None:
            if not isinstance(score, StepScore):
                raise EspalierError(f"--verifier {self.name}: must return StepScores, returned {shown(score)}")
            value = score.score
            if value is not None and not (isinstance(value, int | float) and 0 <= value <= 1):
                rule = f"a score is a number from 0 to 1 or None, not {shown(value)}"
                raise EspalierError(f"--verifier {self.name}: {rule}")
            yield score


def scorer_of(own: Scorer | ScoreFunction) -> Scorer:
    """The scorer that a caller gives, or one of a function.

    Raises:
        CheckpointError: it is neither; says why.
    """
    return cast(Scorer, _GuardedScorer(own)) if isinstance(own, Scorer) else FunctionScorer(own)


def load_own(name: str) -> Scorer:
    """Load the scorer of `--verifier MODULE:NAME`, which names a function or a `Scorer`.

    Raises:
        CheckpointError: there is none of the name; says why.
    """
    try:
        own = load_code(name)
        if isinstance(own, type) and issubclass(own, Scorer):
            raise CheckpointError(f"it is a class; name an instance, such as scorer = {own.__name__}()")
        return scorer_of(own)
    except EspalierError as error:
        raise CheckpointError(f"--verifier {name}: {error}") from error
