"""Batch evaluation: runs every problem of a benchmark through one executor and grades the answers."""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from espalier.engine.errors import InvalidRequestError, RequestTooLargeError
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.fewer_paths import with_fewer_paths
from espalier.experiments.runs.files import append, folder_lock
from espalier.experiments.runs.folder import RunFolder
from espalier.experiments.runs.record import Sample, refused_sample, sample_of, tree_record
from espalier.experiments.runs.summary import Summary, search_fields, summarise
from espalier.search.algorithms import own_code
from espalier.search.grading.math_verify import Grade, Grader
from espalier.search.grading.notation.numerals import number_in
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.result import SearchResult
from espalier.search.run.executor import Executor

_Grades = list["Future[Grade]"]
"""Grades of one answer, by each accepted answer."""
_Key = tuple[str, int]
"""Id of a problem, and epoch."""
_InGrading = tuple["_Writer", Problem, int, SearchResult, _Grades]
"""A result of a problem and epoch whose answer is being graded, and where it is written."""


class _Writer:
    """Collects the samples of one run, and appends them and their trees to its folder, if it has one.

    Attributes:
        samples: those that the run has, by problem and epoch.
        missing: the searches wanted that have no sample at first, or were refused.
        paths: the N of a run whose results are derived from those of a larger search; 0 for the run that searches.
        run: name of the folder.
    """

    def __init__(
        self,
        evaluation: "Evaluation",
        folder: RunFolder | None,
        wanted: Iterable[_Key],
        stack: ExitStack,
        paths: int = 0,
    ) -> None:
        self.samples = {sample.key: sample for sample in folder.samples_of(evaluation.problems)} if folder else {}
        self.missing = list(filter(self.lacks, wanted))
        self.paths = paths
        self.run = folder.folder.name if folder else ""
        trees = folder.open_trees(self.missing) if folder and evaluation.keep_trees else None
        self._lines = stack.enter_context(folder.open_samples()) if folder else None
        self._trees = stack.enter_context(trees) if trees else None

    def lacks(self, key: _Key) -> bool:
        """Return true if the search has no sample yet, or was refused."""
        return key not in self.samples or self.samples[key].refused

    def write(self, sample: Sample, result: SearchResult | None = None) -> None:
        """Add a sample, and the tree of its search.

        Raises:
            EspalierError: they cannot be written; the samples before are kept.
        """
        self.samples[sample.key] = sample
        if self._trees and result:  # before its sample; see `RunFolder.open_trees`
            append(self._trees, tree_record(sample, result))
        if self._lines:
            append(self._lines, asdict(sample))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Searches problems, and grades the answers: what the runs of one command have in common.

    Searches do not share cached prompts, so that each one's usage does not depend on other searches or on
    interruptions. A time limit counts from the start of each search, as all are submitted at once.

    Attributes:
        executor: runs the searches; it decides how many run at once.
        problems: the problems of the benchmark; samples of other problems in a folder are ignored.
        grader: grades answers in its own processes while searches continue.
        benchmark: name of the benchmark.
        asked: the problems to search, in order; None for all.
        epochs: how often each is searched; epoch e has the request's seed plus e.
        keep_trees: whether `trees.jsonl` in a folder gets each search's tree.
        on_sample: called with each new sample, derived ones too.
    """

    executor: Executor
    problems: Sequence[Problem]
    grader: Grader
    benchmark: str
    asked: Sequence[Problem] | None = None
    epochs: int = 1
    keep_trees: bool = False
    on_sample: Callable[[Sample], None] | None = None

    @property
    def searches(self) -> dict[_Key, Problem]:
        """The problems to search, by id and epoch, in order."""
        asked = self.problems if self.asked is None else self.asked
        return {(problem.unique_id, epoch): problem for epoch in range(self.epochs) for problem in asked}

    def configuration(self, request: SearchRequest) -> dict[str, Any]:
        """Return what a run's samples depend on, for its `config.json`.

        The search with every default filled in, a digest of its code if it is the user's own, the models' digests, and
        the grader's rule if it is not math-verify.
        """
        effective = self.executor.defaults.fill(request)
        return {
            "benchmark": self.benchmark,
            **search_fields(effective),
            **own_code(effective),
            **self.executor.describe_models(),
            **({"grader": self.grader.rule} if self.grader.rule else {}),
        }

    def summary(self, request: SearchRequest, samples: Sequence[Sample]) -> Summary:
        """Return the summary of a run's samples."""
        fields = search_fields(self.executor.defaults.fill(request))
        return summarise(samples, self.benchmark, fields, self.grader.name)

    def run(
        self,
        request: SearchRequest,
        folder: RunFolder | None = None,
        smaller: Sequence[tuple[RunFolder, int]] = (),
    ) -> Summary:
        """Search the problems concurrently, and grade the answers.

        Args:
            request: the search; its problem is replaced by each problem.
            folder: stores samples as they arrive; None stores nothing. Answers in it that could not be graded are
                graded again without another search.
            smaller: folders of runs whose searches have the first paths of this one, with their N; see `fewer_paths`.
                They get those samples which they lack, before this run gets its own; only this run gets a summary.

        Returns:
            The summary of the requested problems and of all others with samples in the folder.

        Raises:
            InvalidRequestError: the request is invalid; see `Orchestrator.submit` for other errors. No search has
                started.
            EspalierError: another process writes to the folder.
        """
        with ExitStack() as stack:
            for each in [*([folder] if folder else []), *(other for other, _ in smaller)]:
                stack.enter_context(folder_lock(each.folder))
            searches = self.searches
            own = _Writer(self, folder, searches, stack)
            samples = own.samples
            if folder:
                folder.ask(len(samples.keys() | searches))
            wanted = {key: searches[key] for key in own.missing}
            writers = [*(_Writer(self, each, wanted, stack, paths) for each, paths in smaller), own]
            by_id = {problem.unique_id: problem for problem in self.problems}
            for sample in [sample for sample in samples.values() if sample.ungraded]:
                grade = _grade(_submit(by_id[sample.unique_id], sample.answer, self.grader), self.grader)
                if grade.error != sample.error:
                    own.write(replace(sample, correct=grade.correct, error=grade.error))
            last = time.monotonic()
            for writer, sample, result in self._searched(wanted, request, writers):
                if writer.paths:
                    writer.write(sample, result)
                else:
                    now, before = time.monotonic(), samples.get(sample.key)
                    if not (sample.refused and before and before.refused and before.error == sample.error):
                        own.write(replace(sample, wall_seconds=now - last), result)
                    last = now
                if self.on_sample:
                    self.on_sample(sample)
            places = {problem.unique_id: place for place, problem in enumerate(self.problems)}
            in_order = sorted(samples.values(), key=lambda sample: (places[sample.unique_id], sample.epoch))
            summary = self.summary(request, in_order)
            if folder:
                folder.write_summary(summary)
        return summary

    def _searched(
        self, wanted: Mapping[_Key, Problem], request: SearchRequest, writers: Sequence[_Writer]
    ) -> Iterator[tuple[_Writer, Sample, SearchResult | None]]:
        """Yield samples and results in the order of grading; the engine never waits for a grade.

        The last of the `writers` is the run's own: samples derived for smaller searches come before its own, so that
        none is missing once that is written.
        """
        executor, grader, own = self.executor, self.grader, writers[-1]
        by_search: dict[str, _Key] = {}
        max_tokens = executor.defaults.fill(request).max_tokens
        grading = list[list[_InGrading]]()  # the results that follow from one search, which are written together

        def graded(group: list[_InGrading]) -> Iterator[tuple[_Writer, Sample, SearchResult]]:
            for writer, problem, epoch, found, grades in group:
                source = own.run if writer.paths else ""
                yield writer, sample_of(problem, found, _grade(grades, grader), epoch, source, max_tokens), found

        try:
            for (name, epoch), problem in wanted.items():
                history = problem.history or request.history
                asked = replace(request, problem=problem.problem, history=history, seed=request.seed + epoch)
                try:
                    # The salt is unique, so that the search computes its own prompts.
                    options = SubmitOptions(salt=secrets.token_bytes(16), timed_from_start=True)
                    by_search[executor.submit(asked, options=options)] = name, epoch
                except (RequestTooLargeError, InvalidRequestError) as error:
                    wrong = error.violations if isinstance(error, InvalidRequestError) else ()
                    if any(violation.field not in ("problem", "history") for violation in wrong):
                        raise
                    yield own, refused_sample(problem, str(error), epoch), None
            while executor.busy:
                for result in executor.step():
                    assert isinstance(result, SearchResult)  # as only searches were submitted
                    key = by_search[result.search_id]
                    problem, epoch = wanted[key], key[1]
                    if result.error:
                        yield own, refused_sample(problem, result.error, epoch), None
                        continue
                    group = list[_InGrading]()
                    for writer in (each for each in writers if each.lacks(key)):
                        paths = writer.paths
                        found = with_fewer_paths(result, paths, executor.equivalence) if paths else result
                        if found:
                            group.append((writer, problem, epoch, found, _submit(problem, found.answer, grader)))
                    grading.append(group)
                for group in [each for each in grading if all(grade.done() for *_, of in each for grade in of)]:
                    grading.remove(group)
                    yield from graded(group)
        finally:  # cancel remaining searches; the caller closes the executor
            executor.drop(by_search)
        for group in grading:
            yield from graded(group)


def checker_of(problem: Problem, grader: Grader) -> Callable[[str], bool]:
    """A function that says whether an answer to the problem is right; false if it cannot be graded."""

    @cache
    def is_right(answer: str) -> bool:
        if not (grader.rule or problem.tolerances) and (value := number_in(answer)) is not None:
            numbers = [number_in(gold) for gold in problem.golds]
            # Most answers need no child process; but two numbers that differ may be one, rounded.
            if value in numbers or all(number is not None and number.denominator == 1 for number in (value, *numbers)):
                return value in numbers
        return bool(answer) and _grade(_submit(problem, answer, grader), grader).correct

    return is_right


def _submit(problem: Problem, answer: str, grader: Grader) -> _Grades:
    # Tolerances are of the usual grading; a rule that somebody names holds as it is.
    within = None
    if problem.tolerances and not grader.rule:
        from espalier.search.grading.equality import is_right_within  # imports sympy

        within = partial(is_right_within, tolerances=problem.tolerances)
    return [grader.submit(gold, answer, within) for gold in problem.golds]


def _grade(grades: _Grades, grader: Grader) -> Grade:
    """Right if any accepted answer matches; else the first grade with an error, if there is one."""
    found = [grader.resolve(grade) for grade in grades]
    return next((grade for grade in found if grade.correct), None) or max(found, key=lambda grade: bool(grade.error))
