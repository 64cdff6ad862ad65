"""Batch evaluation: runs every problem of a benchmark through one orchestrator and grades the answers."""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TextIO

from espalier.engine.errors import InvalidRequestError, RequestTooLargeError
from espalier.experiments.evaluation.benchmarks import Problem
from espalier.experiments.evaluation.run_folder import RunFolder
from espalier.experiments.evaluation.sample import Sample, refused_sample, sample_of
from espalier.experiments.evaluation.summary import Summary, search_fields, summarise
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.result import SearchResult
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.voting.equality import is_right_within
from espalier.search.voting.math_verify import Grade, Grader

_Grades = list["Future[bool]"]
"""Grades of one answer, by each accepted answer."""


def run_configuration(
    benchmark: str, request: SearchRequest, orchestrator: Orchestrator, grader: Grader | None = None
) -> dict[str, Any]:
    """Return what a run's samples depend on, for its `config.json`.

    The search with every default filled in, the models' digests, and the grader's rule if it is not math-verify.
    """
    search = search_fields(orchestrator.effective(request))
    graded = {"grader": grader.rule} if grader and grader.rule else {}
    return {"benchmark": benchmark, **search, **orchestrator.describe_models(), **graded}


def left_open(request: SearchRequest) -> list[str]:
    """Names of the fields of `request` that are None."""
    return [name for name, value in request.to_dict().items() if value is None]


def evaluate(
    orchestrator: Orchestrator,
    problems: list[Problem],
    request: SearchRequest,
    grader: Grader,
    *,
    benchmark: str,
    limit: int | None = None,
    asked: Sequence[Problem] | None = None,
    epochs: int = 1,
    keep_trees: bool = False,
    folder: RunFolder | None = None,
    on_sample: Callable[[Sample], None] | None = None,
) -> Summary:
    """Search many problems concurrently, and grade the answers.

    Searches do not share cached prompts, so that each one's usage does not depend on other searches or on
    interruptions. A time limit counts from the start of each search, as all are submitted at once.

    Args:
        orchestrator: runs the searches; it decides how many run at once.
        problems: the problems of the benchmark; samples of other problems in the folder are ignored.
        request: the search; its problem is replaced by each problem.
        grader: grades answers in its own processes while searches continue.
        benchmark: name of the benchmark, for the summary.
        limit: number of problems to search from the start; None for all.
        asked: the problems to search, in order, instead of those from the start.
        epochs: how often each is searched; epoch e has the request's seed plus e.
        keep_trees: whether `trees.jsonl` in the folder gets each search's tree.
        folder: stores samples as they arrive; None stores nothing. Answers in it that could not be graded are graded
            again without another search.
        on_sample: called with each new sample.

    Returns:
        The summary of the requested problems and of all others with samples in the folder.

    Raises:
        InvalidRequestError: the request is invalid; see `Orchestrator.submit` for other errors. No search has started.
    """
    samples = {sample.key: sample for sample in folder.samples_of(problems)} if folder else {}
    asked = problems[:limit] if asked is None else asked
    keys = [(problem, epoch) for epoch in range(epochs) for problem in asked]
    wanted = [(p, e) for p, e in keys if (p.unique_id, e) not in samples or samples[p.unique_id, e].refused]
    with (
        folder.open_samples() if folder else nullcontext() as stream,
        folder.open_trees() if folder and keep_trees else nullcontext() as trees,
    ):

        def keep(sample: Sample) -> None:
            samples[sample.key] = sample
            if stream:
                stream.write(json.dumps(asdict(sample)) + "\n")
                stream.flush()

        for sample in _graded_again(problems, list(samples.values()), grader):
            keep(sample)
        last = time.monotonic()
        for sample in _run(orchestrator, wanted, request, grader, trees):
            now = time.monotonic()
            if not _refused_as_before(sample, samples.get(sample.key)):
                keep(replace(sample, wall_seconds=now - last))
            last = now
            if on_sample:
                on_sample(sample)
    places = {problem.unique_id: place for place, problem in enumerate(problems)}
    in_order = sorted(samples.values(), key=lambda sample: (places[sample.unique_id], sample.epoch))
    summary = summarise(in_order, benchmark, orchestrator.effective(request), grader.name)
    if folder:
        folder.write_summary(summary)
    return summary


def _refused_as_before(sample: Sample, before: Sample | None) -> bool:
    return before is not None and before.refused and sample.refused and before.error == sample.error


def _graded_again(problems: list[Problem], samples: list[Sample], grader: Grader) -> Iterator[Sample]:
    """Yield those of `samples` that were not graded before and are now."""
    by_id = {problem.unique_id: problem for problem in problems}
    for sample in samples:
        if sample.ungraded:
            grade = _grade(_submit(by_id[sample.unique_id], sample.answer, grader), grader)
            if grade.error != sample.error:
                yield replace(sample, correct=grade.correct, error=grade.error)


def _run(
    orchestrator: Orchestrator,
    wanted: list[tuple[Problem, int]],
    request: SearchRequest,
    grader: Grader,
    trees: TextIO | None,
) -> Iterable[Sample]:
    """Yield samples of problems and epochs in the order of grading; the engine never waits for a grade."""
    by_search: dict[str, tuple[Problem, int]] = {}
    grading: list[tuple[Problem, int, SearchResult, _Grades]] = []
    try:
        for problem, epoch in wanted:
            asked = replace(request, problem=problem.problem, seed=request.seed + epoch)
            try:
                by_search[orchestrator.submit(asked, options=_submit_options())] = problem, epoch
            except RequestTooLargeError as error:
                yield refused_sample(problem, str(error), epoch)
            except InvalidRequestError as error:
                if any(violation.field != "problem" for violation in error.violations):
                    raise
                yield refused_sample(problem, str(error), epoch)
        while orchestrator.busy:
            for result in orchestrator.step():
                problem, epoch = by_search[result.search_id]
                if result.error:
                    yield refused_sample(problem, result.error, epoch)
                    continue
                if trees:
                    nodes = [asdict(node) for node in result.nodes]
                    trees.write(json.dumps({"unique_id": problem.unique_id, "epoch": epoch, "nodes": nodes}) + "\n")
                    trees.flush()
                grading.append((problem, epoch, result, _submit(problem, result.answer, grader)))
            ready = [entry for entry in grading if all(future.done() for future in entry[3])]
            if ready:
                grading = [entry for entry in grading if entry not in ready]
            yield from (sample_of(problem, found, _grade(of, grader), epoch) for problem, epoch, found, of in ready)
    finally:  # cancel remaining searches; the caller closes the orchestrator
        orchestrator.drop(by_search)
    yield from (sample_of(problem, found, _grade(of, grader), epoch) for problem, epoch, found, of in grading)


def _submit_options() -> SubmitOptions:
    """Options of one search; its salt is unique, so that it computes its own prompts."""
    return SubmitOptions(salt=secrets.token_bytes(16), timed_from_start=True)


def _submit(problem: Problem, answer: str, grader: Grader) -> _Grades:
    # Tolerances are of the usual grading; a rule that somebody names holds as it is.
    within = partial(is_right_within, tolerances=problem.tolerances) if problem.tolerances and not grader.rule else None
    return [grader.submit(gold, answer, within) for gold in problem.golds]


def _grade(grades: _Grades, grader: Grader) -> Grade:
    """Right if any accepted answer matches; else the first grade with an error, if there is one."""
    found = [grader.resolve(grade) for grade in grades]
    return next((grade for grade in found if grade.correct), None) or max(found, key=lambda grade: bool(grade.error))
