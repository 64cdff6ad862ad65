"""The Python API: load the models once, then solve problems one by one or in batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack

from espalier.engine.errors import EspalierError
from espalier.search.algorithms import unscored_default
from espalier.search.python_names import in_python, python_names
from espalier.search.request import SearchFields, SearchRequest, SubmitOptions, make_request, several, with_own_code
from espalier.search.result import Event, SearchResult
from espalier.search.run.executor_loop import SharedExecutor
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings, SolverSettings
from espalier.search.schema import from_values

if TYPE_CHECKING:
    from espalier.prm.scorer import Scorer
    from espalier.prm.scorers.own import ScoreFunction

log = logging.getLogger("espalier.search")

OnProgress = Callable[[int, int, SearchResult], None]
"""Called with the number of finished searches, the number of all searches, and the result that just arrived."""


class Solver:
    """A generator and a verifier on one engine.

    Call `close`, or use it as a context manager. Thread-safe, but concurrent calls run one after the other; use
    `solve_many` to run searches concurrently.

    Answers that are not plain numbers are compared by math-verify in child processes, which do not import the script.

    Example:
        problem = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
        with Solver() as solver:
            print(solver.solve(problem).answer)
    """

    @python_names()
    def __init__(
        self,
        generator: str | None = None,
        verifier: str | Scorer | ScoreFunction | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_memory: int | str | None = None,
        max_running: int = 64,
        on_bytes: Callable[[int, int], None] | None = None,
        **settings: Unpack[SolverSettings],
    ) -> None:
        """Load both models.

        Args:
            generator: a folder, a Hugging Face id (`org/name` or `org/name@revision`) or a registered name; None loads
                the bundled generator.
            verifier: the process reward model, named the same way, or the folder of a trunk head, `self`, `confidence`
                or `lowest-confidence`; or a function of yours, which takes a problem and the steps of a path and
                returns the score of the last one, from 0 to 1, or a `Scorer`, or the `MODULE:NAME` of either. "" loads
                none.
                None loads the bundled one with the bundled generator, else none: searches that need one are then
                refused, and the default is majority, greedy for a single path, of which a logged line tells.
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
            dtype: `auto`, `float32`, `bfloat16` or `float16`.
            kv_memory: size of the KV pool shared by both models, in bytes or as text like `4G`; None depends on the
                device.
            max_running: maximum number of searches running at once.
            on_bytes: called during loading with the bytes of weights loaded so far and the total.
            **settings: other fields of `RuntimeSettings`.

        Raises:
            CheckpointError: a checkpoint is missing, unsupported or incomplete, or the device is not available.
            InvalidRequestError: a setting is unknown or invalid.
        """
        name, own = (verifier, None) if verifier is None or isinstance(verifier, str) else ("", verifier)
        given = {"generator": generator, "verifier": name, "device": device, "dtype": dtype, "kv_memory": kv_memory}
        named = {name: value for name, value in given.items() if value is not None}
        runtime = from_values(RuntimeSettings, {**named, "max_running": max_running, **settings})
        orchestrator = load_orchestrator(runtime, on_bytes, own)
        if orchestrator.defaults.scores == "none":
            log.warning("%s", in_python(unscored_default()))
        self._shared = SharedExecutor(orchestrator, "solver")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @python_names()
    def solve(
        self,
        problem: str | SearchRequest,
        *,
        on_event: Callable[[Event], None] | None = None,
        **request: Unpack[SearchFields],
    ) -> SearchResult:
        """Search for the answer to one problem.

        Args:
            problem: the problem's text, or a `SearchRequest`.
            on_event: called with each event: start, steps, complete candidates, result.
            **request: fields of `SearchRequest`, such as `algorithm="dvts", beam_width=4, expansion=4, seed=7`.

        Raises:
            InvalidRequestError: lists every invalid field.
            RequestTooLargeError: the search cannot fit into a model's context or the KV pool.
            EspalierError: the search failed; the message says why.
        """
        (result,) = self._run([make_request(problem, with_own_code(request))], on_event, None)
        if result.error:
            raise EspalierError(result.error)
        return result

    @python_names()
    def solve_many(
        self,
        problems: Iterable[str | SearchRequest],
        *,
        on_progress: OnProgress | None = None,
        **request: Unpack[SearchFields],
    ) -> list[SearchResult]:
        """Search for the answers to many problems concurrently.

        Time limits count from the start of each search.

        Args:
            problems: texts, or `SearchRequest`s.
            on_progress: called when a search finishes.
            **request: fields of `SearchRequest`, applied to all.

        Returns:
            The results, in the order of `problems`. A failed search has its reason in `error` and does not stop the
            others.

        Raises:
            TypeError: `problems` is a single problem, or holds what is none.
            InvalidRequestError: a request is invalid; no search has started.
            RequestTooLargeError: a search cannot fit; no search has started.
        """
        fields = with_own_code(request)
        return self._run([make_request(problem, fields) for problem in several(problems)], None, on_progress)

    def close(self) -> None:
        """Cancel running searches and release the models; closing twice is allowed."""
        self._shared.close()

    def _run(
        self,
        requests: list[SearchRequest],
        on_event: Callable[[Event], None] | None,
        on_progress: OnProgress | None,
    ) -> list[SearchResult]:
        ended: dict[str, SearchResult] = {}
        faults: list[Exception] = []

        def tell(event: Any) -> None:  # an `Event`, as all these are searches
            try:
                if on_event:
                    on_event(event)
            except Exception as error:  # of the caller's callback: raised below, the search itself is fine
                faults.append(error)

        with self._shared.stepped() as orchestrator:
            options = SubmitOptions(timed_from_start=True)
            order = [orchestrator.submit(request, tell, options) for request in requests]
            while len(ended) < len(order):
                for result in orchestrator.step():
                    assert isinstance(result, SearchResult)
                    if result.error or result.warnings:
                        warnings = tuple(map(in_python, result.warnings))
                        result = replace(result, error=in_python(result.error), warnings=warnings)
                    ended[result.search_id] = result
                    if on_progress:
                        on_progress(len(ended), len(order), result)
                if faults:
                    raise faults[0]
            return [ended[search_id] for search_id in order]
