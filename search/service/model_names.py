"""Names of models: the served pair's name, and behind an @ the search that answers.

NAME@beam-n4-m4     an algorithm with N and M
NAME@majority-16    -16 is short for -n16
NAME@best-of-16     short for best-of-n-n16
NAME                the default search: without a verifier majority, else beam
NAME@plain          no search: plain sampling
"""

import re
from collections.abc import Callable
from typing import Any

from espalier.engine.errors import InvalidRequestError, Violation, nearest
from espalier.search.algorithms import algorithms_that_run, default_algorithm, unscored_default, verifier_advice
from espalier.search.algorithms.base import Scores
from espalier.search.completion import PLAIN
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.service.errors import UnknownModelError

_EXAMPLES = (PLAIN, "greedy", "majority-16", "best-of-16", "beam-n4-m4", "dvts-n4-m4", "auto")
_LONGEST_FIRST = sorted(AlgorithmName, key=len, reverse=True)
_SHORT = [rf"{name.removesuffix('-n')}(?=-n?\d)" for name in AlgorithmName if name.endswith("-n")]
_STRATEGY = re.compile(
    rf"(?P<algorithm>{'|'.join(_LONGEST_FIRST)}|{'|'.join(_SHORT)})"
    r"(?:-n?(?P<beam_width>\d{1,6}))?(?:-m(?P<expansion>\d{1,6}))?",
    re.ASCII,
)


def short_name(checkpoint: str) -> str:
    """Return a name for a folder, a file or a hub id: its last part, without revision or quantisation."""
    last = checkpoint.rstrip("/").rpartition("/")[2].partition("@")[0].partition(":")[0].removesuffix(".gguf")
    return re.sub(r"[^\w.+-]+", "-", last, flags=re.ASCII).strip("-.")[:128] or "espalier"


class ModelNames:
    """The models that are offered, and the searches that their names ask for."""

    def __init__(self, name: str, created: int, scores: Callable[[], Scores] = lambda: "steps") -> None:
        """Create names.

        Args:
            name: of the served pair.
            created: since when it is served, in seconds since 1970.
            scores: returns those of the loaded verifier, which decide what runs.
        """
        self._name = name
        self._created = created
        self._scores = scores

    @property
    def searches(self) -> list[AlgorithmName]:
        """Searches that run with the loaded models."""
        return algorithms_that_run(self._scores())

    @property
    def default_search(self) -> AlgorithmName:
        """The search of a request that names none, with more paths than one."""
        return default_algorithm(SearchRequest("-"), self._scores())

    @property
    def notice(self) -> str:
        """A line for callers where no verifier is loaded; else empty."""
        return unscored_default() if self._scores() == "none" else ""

    def is_plain(self, model: str) -> bool:
        """True if a model's name asks for no search."""
        return model == f"{self._name}@{PLAIN}"

    def require_plain(self, model: str) -> None:
        """Check the name of a model where nothing is searched: with `@plain` or without a strategy.

        Raises:
            UnknownModelError: there is no such model.
            InvalidRequestError: its name says a search.
        """
        if self.search_fields(model):
            text = f"a text completion never searches: use the model {self._name}, or /v1/chat/completions"
            raise InvalidRequestError([Violation("model", text)])

    def search_fields(self, model: str) -> dict[str, Any]:
        """Return the fields of a request that a model's name says; none for plain sampling.

        Raises:
            UnknownModelError: there is no such model.
        """
        if self.is_plain(model):
            return {}
        name, at, strategy = model.partition("@")
        if name == self._name and not at:
            return {}
        found = _STRATEGY.fullmatch(strategy)
        if name != self._name or not found:
            raise UnknownModelError(self._unknown(model))
        algorithm = found["algorithm"]
        algorithm = algorithm if algorithm in list(AlgorithmName) else f"{algorithm}-n"
        numbers = {field: int(found[field]) for field in ("beam_width", "expansion") if found[field]}
        return {"algorithm": algorithm, **numbers}

    def listed(self) -> list[dict[str, Any]]:
        """Return the pair and some of its searches, those that run."""
        names = [self._name, *(f"{self._name}@{strategy}" for strategy in _EXAMPLES)]
        return [self._described(name) for name in names if self._runs(name)]

    def model(self, name: str) -> dict[str, Any]:
        """Return one model as the OpenAI API describes it.

        Raises:
            UnknownModelError: there is no such model, or its search does not run.
        """
        self.require_running(name)
        return self._described(name)

    def require_running(self, name: str) -> None:
        """Check that there is a model and that its search runs with the loaded verifier.

        Raises:
            UnknownModelError: it is not so.
        """
        if not self._runs(name):
            why = "needs a verifier and none is loaded"
            if self._scores() != "none":
                why = "reads the scores of steps, and the verifier scores whole answers"
            raise UnknownModelError(f"{name[:200]} {why}; {verifier_advice()}")

    def _runs(self, name: str) -> bool:
        return self.search_fields(name).get("algorithm", self.default_search) in self.searches

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "espalier"}

    def _unknown(self, model: str) -> str:
        return (
            f"there is no model {model[:200]!r}; there is {self._name}, and {self._name}@SEARCH, where SEARCH is "
            f"ALGORITHM, ALGORITHM-nN or ALGORITHM-nN-mM, such as beam-n4-m4, majority-16 or best-of-16, and ALGORITHM "
            f"is one of {', '.join(self.searches)}, or {PLAIN} for no search"
            + nearest(model, [self._name, *(f"{self._name}@{name}" for name in (*AlgorithmName, PLAIN, *_EXAMPLES))])
        )
