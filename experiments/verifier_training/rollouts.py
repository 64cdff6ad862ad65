"""Samples the solutions of many problems at once, into a file that can be continued."""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from espalier.engine.engine import Engine
from espalier.engine.errors import InvalidRequestError, NoEmbeddingError, RequestTooLargeError
from espalier.engine.models.options import Quantization
from espalier.engine.scheduling.admission import Reservation
from espalier.engine.work import Generated
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.cut_paths import CutPaths
from espalier.experiments.runs.jsonl import open_lines
from espalier.experiments.runs.record import Unanswered
from espalier.experiments.verifier_training.tree_file import TreeRecord, read_trees, write_tree
from espalier.search.grading.math_verify import Grader
from espalier.search.grading.notation.numerals import number_in
from espalier.search.rollout import Labels, RolloutSettings, without_neutral_penalties
from espalier.search.run.generator import Generator
from espalier.search.run.rollout import rollout_blocks
from espalier.search.run.rollout_tree import RolloutTree


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


class TreeSampler(ABC):
    """Samples the solutions of problems as trees."""

    __slots__ = ()

    @abstractmethod
    def sample(self, problems: Sequence[Problem]) -> Iterator[TreeRecord]:
        """Yield the tree of each problem, in the order in which they finish; what cannot be sampled says why."""

    def write(self, path: Path, problems: Sequence[Problem]) -> Iterator[TreeRecord]:
        """Sample the problems that the file `path` lacks; each is appended once it is whole, and then yielded."""
        done = {tree.problem_id for tree in read_trees(path)}
        with open_lines(path) as stream:
            for tree in self.sample([problem for problem in problems if problem.unique_id not in done]):
                write_tree(stream, tree)
                yield tree


@dataclass(frozen=True, slots=True)
class RolloutSampler(TreeSampler):
    """Samples the solutions of problems in this process; at most `in_flight` problems at once, where memory allows."""

    engine: Engine
    generator: Generator
    settings: RolloutSettings
    grader: Grader
    in_flight: int

    def sample(self, problems: Sequence[Problem]) -> Iterator[TreeRecord]:
        """See `TreeSampler`."""
        waiting, engine = deque(problems), self.engine
        running: dict[str, tuple[TreeRecord, RolloutTree, Reservation]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.in_flight:
                    problem = waiting[0]
                    try:
                        prompt = self.generator.prompt_ids(problem.problem, problem.history)
                        blocks = rollout_blocks(engine, self.generator, len(prompt), self.settings)
                        if (reservation := engine.admission.try_reserve(blocks, problem.unique_id)) is None:
                            break
                        is_right = checker_of(problem, self.grader)
                        asked = problem.problem, prompt, self.settings
                        tree = RolloutTree(engine, self.generator.defaults, *asked, is_right, problem.unique_id)
                        record = TreeRecord(problem.unique_id, problem.problem, problem.answer, prompt)
                        running[problem.unique_id] = record, tree, reservation
                    except (RequestTooLargeError, NoEmbeddingError, InvalidRequestError) as error:
                        yield TreeRecord(problem.unique_id, problem.problem, problem.answer, refused=str(error))
                    waiting.popleft()
                for done in engine.step():
                    assert isinstance(done, Generated)
                    running[str(done.work.owner)][1].handle(done)
                for owner in [owner for owner, (_, tree, _) in running.items() if tree.finished]:
                    record, tree, reservation = running.pop(owner)
                    engine.admission.release(reservation)
                    record.steps.extend(tree.steps())
                    yield record
        finally:
            for owner, (_, _, reservation) in running.items():
                engine.abandon(owner)
                engine.admission.release(reservation)


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


def checker_of(problem: Problem, grader: Grader) -> Callable[[str], bool]:
    """A function that says whether an answer to the problem is right."""

    @cache
    def is_right(answer: str) -> bool:
        value = number_in(answer)
        for gold in problem.golds:
            if value is not None and not grader.rule and (number := number_in(gold)) is not None:
                if number == value:
                    return True  # most answers, without a child process
            elif grader.grade(gold, answer).correct:
                return True
        return False

    return is_right
