"""Samples the solutions of many problems at once, here or on a server, into a file that can be continued."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from espalier.engine.engine import Engine
from espalier.engine.errors import EspalierError, InvalidRequestError, NoEmbeddingError, RequestTooLargeError
from espalier.engine.models.options import Quantization
from espalier.engine.roles import GENERATOR
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.evaluate import checker_of
from espalier.experiments.runs.files import open_lines
from espalier.experiments.runs.record import CutPaths, Unanswered
from espalier.experiments.verifier_training.tree_file import TreeRecord, read_trees, write_tree
from espalier.search.client import SearchClient
from espalier.search.grading.math_verify import Grader
from espalier.search.result import StopReason
from espalier.search.rollout import (
    Labels,
    RolloutRequest,
    RolloutResult,
    RolloutSettings,
    StepRecord,
    grade,
    without_neutral_penalties,
)
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.rollout import resolve_rollout
from espalier.search.server_info import ServerInfo

_OF_MODELS = (GENERATOR, "dtype", "system_prompt")


def configuration_of(
    generator: Generator, benchmark: str, settings: RolloutSettings, quantization: Quantization
) -> dict[str, Any]:
    """Everything that rollouts depend on besides the problem; see `tree_file.claim`."""
    model = generator.model
    unused = {"continuations"} if settings.labels is Labels.OUTCOME else set()
    asked = without_neutral_penalties(asdict(settings) | generator.defaults.sampling_of(settings))
    return {
        "generator": model.digest,
        **({} if quantization is Quantization.NONE else {"generator_quantization": str(quantization)}),
        "dtype": str(model.decoder.dtype),
        "system_prompt": generator.system_prompt,
        "filters": [generator.defaults.top_k, generator.defaults.top_p, generator.defaults.min_p],
        "benchmark": benchmark,
        **{name: value for name, value in asked.items() if name not in unused},
    }


def remote_configuration(info: ServerInfo, benchmark: str, settings: RolloutSettings) -> dict[str, Any]:
    """Everything known here that rollouts of a server depend on besides the problem; see `tree_file.claim`."""
    models = {name: info.models.get(name) for name in _OF_MODELS}
    asked = {name: value for name, value in asdict(settings).items() if value is not None or name == "temperature"}
    return {**models, "sampled": "by a server", "benchmark": benchmark, **without_neutral_penalties(asked)}


Sample = Callable[[Sequence[Problem]], Iterator[TreeRecord]]
"""Yields the tree of each problem, in the order in which they finish; what cannot be sampled says why."""


def sample_into(path: Path, problems: Sequence[Problem], sample: Sample) -> Iterator[TreeRecord]:
    """Sample the problems that the file `path` lacks; each is appended once it is whole, and then yielded."""
    done = {tree.problem_id for tree in read_trees(path)}
    with open_lines(path) as stream:
        for tree in sample([problem for problem in problems if problem.unique_id not in done]):
            write_tree(stream, tree)
            yield tree


def _request(problem: Problem, settings: RolloutSettings) -> RolloutRequest:
    return RolloutRequest(**asdict(settings), problem=problem.problem, history=tuple(problem.history))


def _tree(problem: Problem, result: RolloutResult) -> TreeRecord:
    """The record of a problem's tree.

    Raises:
        EspalierError: the tree is not whole.
    """
    if result.stop_reason is not StopReason.FINISHED:
        raise EspalierError(
            f"the tree of {problem.unique_id} ended early ({result.error or result.stop_reason}); sample fewer "
            "--solutions, lower --max-tokens, or let the server of --endpoint serve with more --search-seconds"
        )
    prompt, steps = list(result.prompt_token_ids), list[StepRecord](result.steps)
    return TreeRecord(problem.unique_id, problem.problem, problem.answer, prompt, steps)


def _refused(problem: Problem, why: EspalierError) -> TreeRecord:
    return TreeRecord(problem.unique_id, problem.problem, problem.answer, refused=str(why))


@dataclass(frozen=True, slots=True)
class RolloutSampler:
    """Samples the solutions of problems in this process; at most `in_flight` problems at once, where memory allows."""

    engine: Engine
    generator: Generator
    settings: RolloutSettings
    grader: Grader
    in_flight: int

    def sample(self, problems: Sequence[Problem]) -> Iterator[TreeRecord]:
        """See `Sample`."""
        waiting, running = iter(problems), dict[str, Problem]()
        orchestrator = Orchestrator(self.engine, self.generator, None, self.in_flight)
        try:
            while True:
                for problem in waiting:
                    try:
                        resolved = resolve_rollout(self.engine, self.generator, _request(problem, self.settings))
                        self.engine.admission.require_fits_alone(resolved.blocks)
                    except (RequestTooLargeError, NoEmbeddingError, InvalidRequestError) as error:
                        yield _refused(problem, error)
                        continue
                    graded = replace(resolved, is_right=checker_of(problem, self.grader))
                    running[orchestrator.submit(graded)] = problem
                    if len(running) >= self.in_flight:
                        break
                if not running:
                    return
                for result in orchestrator.step():
                    assert isinstance(result, RolloutResult)
                    yield _tree(running.pop(result.search_id), result)
        finally:
            orchestrator.close()


@dataclass(frozen=True, slots=True)
class RemoteSampler:
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
        with ThreadPoolExecutor(self.in_flight) as threads:
            try:
                asked = {threads.submit(self.client.rollout, _request(each, self.settings)): each for each in problems}
                for done in as_completed(asked):
                    yield self._record(asked.pop(done), done)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self.client.close()  # ends what is in flight, on the server too
                raise

    def _record(self, problem: Problem, done: Future[RolloutResult]) -> TreeRecord:
        try:
            result = done.result()
        except InvalidRequestError as error:
            return _refused(problem, error)
        tree = _tree(problem, result)
        grade(result.steps, checker_of(problem, self.grader))
        return tree


def cut_solutions(trees: Sequence[TreeRecord], settings: RolloutSettings) -> CutPaths:
    """The solutions of rollouts that were cut, and by what."""
    counts = Counter[Unanswered]()
    for tree in trees:
        for index, step in enumerate(tree.steps):
            if step.end not in ("length", "budget"):
                continue
            lengths = [len(tree.steps[above].token_ids) for above in tree.lineage(index)]
            limits = {
                Unanswered.MAX_TOKENS: sum(lengths) >= settings.max_tokens,
                Unanswered.MAX_STEPS: len(lengths) >= settings.max_steps,
                Unanswered.MAX_STEP_TOKENS: lengths[-1] >= settings.max_step_tokens,
            }
            counts[next((reason for reason, reached in limits.items() if reached), Unanswered.CONTEXT)] += step.samples
    return CutPaths.among([counts], sum(tree.outcomes[1] for tree in trees))
