"""Samples the solutions of many problems on a server; grades and values are made here."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.engine.roles import GENERATOR
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.verifier_training.rollouts import TreeSampler, checker_of
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.search.client import SearchClient
from espalier.search.grading.math_verify import Grader
from espalier.search.result import StopReason
from espalier.search.rollout import (
    Labels,
    RolloutRequest,
    RolloutResult,
    RolloutSettings,
    grade,
    without_neutral_penalties,
)
from espalier.search.server_info import ServerInfo

_OF_MODELS = (GENERATOR, "dtype", "system_prompt")


def remote_configuration(info: ServerInfo, benchmark: str, settings: RolloutSettings) -> dict[str, Any]:
    """Everything known here that rollouts of a server depend on besides the problem; see `tree_file.claim`."""
    models = {name: info.models.get(name) for name in _OF_MODELS}
    asked = {name: value for name, value in asdict(settings).items() if value is not None or name == "temperature"}
    return {**models, "sampled": "by a server", "benchmark": benchmark, **without_neutral_penalties(asked)}


@dataclass(frozen=True, slots=True)
class RemoteSampler(TreeSampler):
    """Samples the solutions of problems on a server, `in_flight` problems at once."""

    client: SearchClient
    settings: RolloutSettings
    grader: Grader
    in_flight: int

    def __post_init__(self) -> None:
        if self.settings.labels is Labels.BINARY_SEARCH:
            raise EspalierError(
                "--labels binary-search grades while it samples, which a server does not; leave out --endpoint, or "
                "take outcome or monte-carlo"
            )

    def sample(self, problems: Sequence[Problem]) -> Iterator[TreeRecord]:
        """Yield the tree of each problem, in the order in which they finish; what cannot be sampled says why.

        Raises:
            EspalierError: the server cannot be reached, or ends a tree early.
        """
        waiting, running = iter(problems), dict[Future[RolloutResult], Problem]()
        with ThreadPoolExecutor(self.in_flight) as threads:
            try:
                while True:
                    for problem in waiting:
                        running[threads.submit(self._ask, problem)] = problem
                        if len(running) >= 2 * self.in_flight:  # half of them wait here, while others are graded
                            break
                    if not running:
                        return
                    for done in wait(running, return_when=FIRST_COMPLETED).done:
                        yield self._record(running.pop(done), done.result)
            except BaseException:
                self.client.close()  # ends what is in flight, on the server too
                raise

    def _ask(self, problem: Problem) -> RolloutResult:
        history = tuple(problem.history)
        return self.client.rollout(RolloutRequest(**asdict(self.settings), problem=problem.problem, history=history))

    def _record(self, problem: Problem, result_of: Callable[[], RolloutResult]) -> TreeRecord:
        record = TreeRecord(problem.unique_id, problem.problem, problem.answer)
        try:
            result = result_of()
        except InvalidRequestError as error:
            return TreeRecord(problem.unique_id, problem.problem, problem.answer, refused=str(error))
        if result.stop_reason is not StopReason.FINISHED:
            raise EspalierError(
                f"the server ended the tree of {problem.unique_id} early ({result.stop_reason}); sample fewer "
                "--solutions, lower --max-tokens, or serve with more --search-seconds"
            )
        grade(result.steps, checker_of(problem, self.grader))
        record.prompt_token_ids.extend(result.prompt_token_ids)
        record.steps.extend(result.steps)
        return record
