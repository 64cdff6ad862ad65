"""The Python entry: load the models once, then solve problems one by one or many at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from espalier.engine.errors import EspalierError, MisuseError
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.result import Event, SearchResult
from espalier.search.run.load import RuntimeSettings, load_orchestrator
from espalier.search.schema import from_values

OnProgress = Callable[[int, int, SearchResult], None]
"""Called with how many searches have ended, how many there are, and the result of the one that just ended."""


class Solver:
    """A generator and a verifier on one engine, ready to search.

    Close it, or use it in a `with`. Several threads may call it; their calls run one after the other. To run many
    searches at the same time, give them to one call of `solve_many`.

    Answers that are not plain numbers are compared by math-verify in spawned processes: a script needs the usual
    guard, `if __name__ == "__main__"`, around what it does.

    Example:
        with Solver() as solver:
            print(solver.solve("Tom has 12 coins. He finds 3 more. How many coins does he have now?").answer)
    """

    def __init__(
        self,
        generator: str | None = None,
        verifier: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_memory: int | str | None = None,
        max_running: int = 64,
        on_bytes: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        """Load both models.

        Args:
            generator: a folder, a Hugging Face id (`org/name` or `org/name@revision`) or a registered name; None takes
                the bundled generator.
            verifier: the process reward model, named the same way; None takes the bundled one, "" none.
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
            dtype: `auto`, `float32`, `bfloat16` or `float16`.
            kv_memory: the pool of KV memory that both models share, in bytes or like `4G`; None chooses by the device.
            max_running: searches that grow at the same time at most.
            on_bytes: called with the bytes of weights loaded so far, and of all, while loading.
            **settings: any other field of `RuntimeSettings`.

        Raises:
            CheckpointError: a checkpoint is missing, unsupported or incomplete, or the device is not there.
            InvalidRequestError: a setting is unknown or breaks a rule.
        """
        given = {"generator": generator, "verifier": verifier, "device": device, "dtype": dtype, "kv_memory": kv_memory}
        named = {name: value for name, value in given.items() if value is not None}
        runtime = from_values(RuntimeSettings, {**named, "max_running": max_running, **settings})
        self._orchestrator = load_orchestrator(runtime, on_bytes)
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def solve(
        self, problem: str | SearchRequest, *, on_event: Callable[[Event], None] | None = None, **request: Any
    ) -> SearchResult:
        """Search for the answer of one problem.

        Args:
            problem: the problem's text, or a whole request.
            on_event: called with each event of the search: its start, each step, each complete candidate, its result.
            **request: fields of `SearchRequest`, such as `algorithm="dvts", beam_width=4, expansion=4, seed=7`.

        Raises:
            InvalidRequestError: listing every field that breaks a rule.
            RequestTooLargeError: the search could never fit into the models' context or the KV pool.
            EspalierError: the search failed; the text says why.
        """
        (result,) = self._run([_request(problem, request)], on_event, None)
        if result.error:
            raise EspalierError(result.error)
        return result

    def solve_many(
        self, problems: Iterable[str | SearchRequest], *, on_progress: OnProgress | None = None, **request: Any
    ) -> list[SearchResult]:
        """Search for the answers of many problems at the same time, on one engine.

        A time limit counts from the start of each search.

        Args:
            problems: texts, or whole requests.
            on_progress: called as each search ends.
            **request: fields of `SearchRequest`, the same for all.

        Returns:
            The results in the order of `problems`. A search that failed holds the reason in `error`; the others go on.

        Raises:
            InvalidRequestError: a request breaks a rule; no search has started.
            RequestTooLargeError: a search could never fit; no search has started.
        """
        return self._run([_request(problem, request) for problem in problems], None, on_progress)

    def close(self) -> None:
        """End whatever runs and release the models; closing again does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._orchestrator.close()
                del self._orchestrator

    def _run(
        self,
        requests: list[SearchRequest],
        on_event: Callable[[Event], None] | None,
        on_progress: OnProgress | None,
    ) -> list[SearchResult]:
        with self._lock:
            if self._closed:
                raise MisuseError("the solver is closed; make another one")
            ended: dict[str, SearchResult] = {}
            faults: list[Exception] = []

            def tell(event: Event) -> None:
                try:
                    if on_event:
                        on_event(event)
                except Exception as error:  # the caller's own: it comes out of the call, and is no fault of the search
                    faults.append(error)

            try:
                options = SubmitOptions(timed_from_start=True)
                order = [self._orchestrator.submit(request, tell, options) for request in requests]
                while len(ended) < len(order):
                    for result in self._orchestrator.step():
                        ended[result.search_id] = result
                        if on_progress:
                            on_progress(len(ended), len(order), result)
                    if faults:
                        raise faults[0]
            except BaseException:
                self._orchestrator.close()  # cancels all searches; it takes new ones afterwards
                raise
            return [ended[search_id] for search_id in order]


def _request(problem: str | SearchRequest, given: dict[str, Any]) -> SearchRequest:
    """The request of one problem; algorithms, votes and aggregations may be named by their plain words."""
    base = {"problem": problem} if isinstance(problem, str) else problem.to_dict()
    return from_values(SearchRequest, base | given)
