"""Batch evaluation: every problem of a benchmark through one orchestrator, graded, with an interval."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TextIO

from espalier.engine.errors import EspalierError, InvalidRequestError, RequestTooLargeError
from espalier.experiments.benchmarks import Problem
from espalier.experiments.statistics import wilson_interval
from espalier.search.algorithms import revision
from espalier.search.grading import Grader
from espalier.search.ledger import Ledger
from espalier.search.orchestrator import Orchestrator
from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult
from espalier.search.terms import Terms
from espalier.search.voting import GroupingName

REFUSED = "refused"
"""Stop reason of a problem that never ran."""

_TERMS = Terms(timed_from_start=True)
_BEFORE: dict[str, Any] = {
    **{f.name: f.default for f in fields(SearchRequest) if f.default is not MISSING},
    "top_k": 0,
    "min_p": 0.0,
    "grouping": str(GroupingName.SPELLING),
    "revision": 1,
}
"""What counts for a field that an older version's `config.json` lacks: how searches ran before there was the field.

That is a request's default, unless the field's coming changed what is done where it is left open; such fields are
named here.
"""
_FOLLOWED = ("verifier_family",)
"""Fields that older versions lack because they followed from others, which are compared."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One problem's outcome, one line of `samples.jsonl`.

    `answers` are those that candidates gave, with how many gave each. `error` says why a problem was refused or its
    answer could not be graded; such a problem counts as not solved. `asked` is a digest of the problem and its gold
    answer; empty in the samples of older versions.
    """

    unique_id: str
    level: int | None
    gold: str
    answer: str
    correct: bool
    error: str
    score: float | None
    stop_reason: str
    text: str
    answers: dict[str, int]
    accounting: dict[str, Any]
    asked: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.correct, bool) or not isinstance(self.accounting, dict):
            raise TypeError("correct must be true or false, and accounting an object")

    def settles(self, problem: Problem) -> bool:
        """Whether nothing would come of searching `problem` again.

        Something may where it was refused or not graded, for there may be more memory or time now; and where a file of
        the same name now holds another problem or answer.
        """
        same = self.asked == _digest(problem) if self.asked else self.gold == problem.answer
        return same and not self.error


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to.

    Attributes:
        refused: problems that could not be searched, such as those longer than a context; they count as not solved.
        accuracy: share of problems answered right; `low` and `high` bound it at 95% (Wilson).
        generated_tokens: mean tokens sampled for one problem.
        verifier_tokens: mean tokens the verifier computed for one problem.
        verifier_redundancy: verifier tokens computed over verifier tokens in the search trees; 1 is no repetition.
        generator_redundancy: the same for the generator.
        blocks_shared: physical over logical KV blocks at the widest moment of a search, mean over problems.
        seconds: wall time of this run; problems resumed from an earlier run are not in it.
        problems_per_minute: of this run.
        grader: name and version of what judged the answers.
    """

    benchmark: str
    problems: int
    refused: int
    correct: int
    accuracy: float
    low: float
    high: float
    accuracy_by_level: dict[str, float]
    generated_tokens: float
    verifier_tokens: float
    verifier_redundancy: float | None
    generator_redundancy: float
    blocks_shared: float
    seconds: float
    problems_per_minute: float | None
    grader: str
    configuration: dict[str, Any]


class RunFolder:
    """A folder with one run's `config.json`, `samples.jsonl` and `summary.json`; running again resumes it."""

    def __init__(self, folder: Path, configuration: dict[str, Any]) -> None:
        """Open or create `folder`.

        A run of an older version goes on where all that its `config.json` lacks is as it was before there was the
        field, and is written with it then.

        Raises:
            EspalierError: when it cannot be made, or holds a run of another configuration or of none, or one that
                cannot be read.
        """
        self.folder = folder
        self._samples = folder / "samples.jsonl"
        config = folder / "config.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else configuration
        except OSError as error:
            raise EspalierError(f"cannot use {folder} for a run: {error}") from error
        except ValueError as error:
            raise EspalierError(f"{config} is damaged: {error}; name another --out") from error
        if self._samples.exists() and not config.is_file():
            raise EspalierError(f"{folder} holds samples and no config.json to say of what run; name another --out")
        if differing := _differing(found, configuration):
            names = ", ".join(differing)
            raise EspalierError(f"{folder} holds a run of another configuration ({names} differ); name another --out")
        config.write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")

    def done(self) -> list[Sample]:
        """Samples of earlier runs, one for each problem; a last line cut short by a crash is left out.

        Raises:
            EspalierError: when a line before the last is damaged.
        """
        lines = (
            self._samples.read_text(encoding="utf-8", errors="replace").split("\n") if self._samples.is_file() else []
        )
        by_id: dict[str, Sample] = {}
        for number, line in enumerate(lines, start=1):
            try:
                sample = Sample(**json.loads(line)) if line.strip() else None
            except (ValueError, TypeError) as error:
                if number == len(lines):
                    break
                raise EspalierError(f"{self._samples}:{number} is damaged: {error}; mend or remove the line") from error
            if sample:
                by_id[sample.unique_id] = sample
        return list(by_id.values())

    def settled(self, problems: Iterable[Problem]) -> list[Sample]:
        """Samples of earlier runs for those of `problems` that need not be searched again; see `Sample.settles`.

        Raises:
            EspalierError: as `done` does.
        """
        by_id = {problem.unique_id: problem for problem in problems}
        return [s for s in self.done() if s.unique_id in by_id and s.settles(by_id[s.unique_id])]

    def open_samples(self) -> TextIO:
        """`samples.jsonl`, to append to; what follows its last whole line is cut off first."""
        if self._samples.is_file():
            text = self._samples.read_text(encoding="utf-8", errors="replace")
            last = text[text.rfind("\n") + 1 :]
            if last:
                whole = text + "\n" if last in (json.dumps(asdict(s)) for s in self.done()) else text[: -len(last)]
                partial = self._samples.with_suffix(".partial")
                partial.write_text(whole, encoding="utf-8")
                partial.replace(self._samples)
        return self._samples.open("a", encoding="utf-8")

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`."""
        (self.folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")


def _differing(found: Any, configuration: dict[str, Any]) -> list[str]:
    """Names of the fields in which a configuration read from a file is another than `configuration`."""
    if not isinstance(found, dict):
        return ["all"]
    lacking = object()
    before = {name: found.get(name, _BEFORE.get(name, lacking)) for name in configuration}
    before |= {name: configuration[name] for name in _FOLLOWED if name in configuration and name not in found}
    unknown = found.keys() - configuration
    return sorted({name for name, value in configuration.items() if before[name] != value} | unknown)


def run_configuration(benchmark: str, request: SearchRequest, orchestrator: Orchestrator) -> dict[str, Any]:
    """What the samples of a run depend on, for its `config.json`: the search, and the models by their digests."""
    search = {name: value for name, value in request.to_dict().items() if name != "problem"}
    return {"benchmark": benchmark, **search, "revision": revision(request), **orchestrator.describe_models()}


def evaluate(
    orchestrator: Orchestrator,
    problems: list[Problem],
    request: SearchRequest,
    grader: Grader,
    *,
    benchmark: str,
    folder: RunFolder | None = None,
    on_sample: Callable[[Sample], None] | None = None,
) -> Summary:
    """Search every problem, many at once, and grade the answers.

    A time limit counts from the start of each search, for they are all submitted at once.

    Args:
        orchestrator: how many run at once is its to decide.
        problems: what to solve.
        request: the search; its problem text is replaced by each problem's.
        grader: judges the answers, in its own processes while searches go on.
        benchmark: its name, for the summary.
        folder: where samples are kept as they come; None keeps none.
        on_sample: called with each new sample.

    Raises:
        InvalidRequestError: and others of `Orchestrator.submit`, before any search starts.
    """
    samples = folder.settled(problems) if folder else []
    finished = {sample.unique_id for sample in samples}
    started = time.monotonic()
    fresh = 0
    stream = folder.open_samples() if folder else None
    try:
        for sample in _run(orchestrator, [p for p in problems if p.unique_id not in finished], request, grader):
            samples.append(sample)
            fresh += sample.stop_reason != REFUSED
            if stream:
                stream.write(json.dumps(asdict(sample)) + "\n")
                stream.flush()
            if on_sample:
                on_sample(sample)
    finally:
        if stream:
            stream.close()
    summary = summarise(samples, benchmark, request, grader.name, time.monotonic() - started, fresh)
    if folder:
        folder.write_summary(summary)
    return summary


def _run(
    orchestrator: Orchestrator, problems: list[Problem], request: SearchRequest, grader: Grader
) -> Iterable[Sample]:
    """Samples in the order in which they are graded; the engine never waits for a grade."""
    by_search: dict[str, Problem] = {}
    grading: list[tuple[Problem, SearchResult, Future[bool]]] = []
    try:
        for problem in problems:
            try:
                by_search[orchestrator.submit(replace(request, problem=problem.problem), terms=_TERMS)] = problem
            except RequestTooLargeError as error:
                yield _refused(problem, str(error))
            except InvalidRequestError as error:
                if any(violation.field != "problem" for violation in error.violations):
                    raise
                yield _refused(problem, str(error))
        while orchestrator.busy:
            for result in orchestrator.step():
                problem = by_search[result.search_id]
                if result.error:
                    yield _refused(problem, result.error)
                    continue
                grading.append((problem, result, grader.submit(problem.answer, result.answer)))
            ready = [entry for entry in grading if entry[2].done()]
            if ready:
                grading = [entry for entry in grading if entry not in ready]
            yield from (_sample(*entry, grader) for entry in ready)
    finally:
        orchestrator.close()
    yield from (_sample(*entry, grader) for entry in grading)


def _sample(problem: Problem, result: SearchResult, future: "Future[bool]", grader: Grader) -> Sample:
    grade = grader.resolve(future)
    return Sample(
        unique_id=problem.unique_id,
        level=problem.level,
        gold=problem.answer,
        answer=result.answer,
        correct=grade.correct,
        error=grade.error,
        score=result.score,
        stop_reason=str(result.stop_reason),
        text=result.best.text if result.best else "",
        answers=_answers(result),
        accounting=asdict(result.accounting),
        asked=_digest(problem),
    )


def _answers(result: SearchResult) -> dict[str, int]:
    answers: Counter[str] = Counter()
    for candidate in result.candidates:
        if candidate.answer:
            answers[candidate.answer] += candidate.multiplicity
    return dict(answers)


def _refused(problem: Problem, why: str) -> Sample:
    """A problem that cannot be searched, such as one longer than a model's context: counted, and the reason kept."""
    return Sample(
        unique_id=problem.unique_id,
        level=problem.level,
        gold=problem.answer,
        answer="",
        correct=False,
        error=why,
        score=None,
        stop_reason=REFUSED,
        text="",
        answers={},
        accounting=asdict(Ledger().close()),
        asked=_digest(problem),
    )


def _digest(problem: Problem) -> str:
    return hashlib.sha256(json.dumps([problem.problem, problem.answer]).encode()).hexdigest()[:16]


def summarise(
    samples: list[Sample], benchmark: str, request: SearchRequest, grader: str, seconds: float, fresh: int
) -> Summary:
    """Totals over samples; `fresh` of them took `seconds`."""
    correct = sum(sample.correct for sample in samples)
    count = len(samples)
    low, high = wilson_interval(correct, count)
    levels = sorted({s.level for s in samples if s.level is not None})
    by_level = {level: [s.correct for s in samples if s.level == level] for level in levels}

    def total(name: str) -> float:
        return sum(sample.accounting[name] for sample in samples)

    shares = [
        s.accounting["physical_blocks"] / s.accounting["logical_blocks"]
        for s in samples
        if s.accounting["logical_blocks"]
    ]
    verifier_tree = total("verifier_tree_tokens")
    configuration = {f.name: getattr(request, f.name) for f in fields(request) if f.name != "problem"}
    return Summary(
        benchmark=benchmark,
        problems=count,
        refused=sum(sample.stop_reason == REFUSED for sample in samples),
        correct=correct,
        accuracy=correct / count if count else 0.0,
        low=low,
        high=high,
        accuracy_by_level={str(level): sum(right) / len(right) for level, right in by_level.items()},
        generated_tokens=total("generated_tokens") / max(1, count),
        verifier_tokens=total("verifier_tokens") / max(1, count),
        verifier_redundancy=total("verifier_tokens") / verifier_tree if verifier_tree else None,
        generator_redundancy=total("generator_tokens") / max(1.0, total("generator_tree_tokens")),
        blocks_shared=sum(shares) / len(shares) if shares else 1.0,
        seconds=seconds,
        problems_per_minute=60 * fresh / seconds if fresh else None,
        grader=grader,
        configuration=configuration,
    )
