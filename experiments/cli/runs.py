"""Functions shared by the commands that fill run folders."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.experiments.cli.options import Selection
from espalier.experiments.cli.progress import load_executor, share_progress
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.experiments.runs import graders
from espalier.experiments.runs.files import file_lock, folder_lock
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.summary import Summary
from espalier.search.algorithms import named, needs_verifier, unscored_default, verifier_advice, what_needs_verifier
from espalier.search.request import SearchRequest
from espalier.search.run.settings import RuntimeSettings

if TYPE_CHECKING:
    from espalier.experiments.runs.evaluate import Evaluation

EXIT_FAILED, EXIT_USAGE, EXIT_PARTIAL, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 3, 130, 143
"""Exit codes besides 0: nothing was achieved, wrong use, part of it was, Ctrl-C, SIGTERM."""


@contextmanager
def searches_shown(total: int, done: int, at_once: int, runtime: RuntimeSettings) -> Iterator[Callable[[Sample], None]]:
    """Show progress towards `total` searches, of which `done` are done and `at_once` are under way together.

    In the end, prints a warning that most problems have, and how many searches `--verify-incremental` did not check,
    such as those of an earlier command. Yields a callback for each new sample.
    """
    fresh: list[Sample] = []
    with share_progress(total, done, at_once) as advance:

        def on_sample(sample: Sample) -> None:
            fresh.append(sample)
            advance(sample.correct, 1)

        yield on_sample
    warned = [sample.warnings for sample in fresh if sample.warnings]
    if 2 * len(warned) > len(fresh):
        ((first, _),) = Counter(warning for warnings in warned for warning in warnings).most_common(1)
        print(f"warning: of {len(warned)} of {len(fresh)} problems, such as: {first}", file=sys.stderr)
    verified = sum(not sample.refused and not sample.derived_from for sample in fresh) if runtime.verifier else 0
    if runtime.verify_incremental and verified < total:
        why = "this search reads no scores"
        if runtime.verifier:
            why = "others are of an earlier command, refused, or derived; name another --out to search them again"
        what = f"{verified} of {total} searches" if verified else f"nothing, of {total} searches"
        print(f"--verify-incremental verified {what}: {why}", file=sys.stderr)


def exit_code(summaries: Iterable[Summary]) -> int:
    """The exit code for what was evaluated: 0 if every problem was searched and graded."""
    lost = [(summary.refused + summary.ungraded, summary.searches) for summary in summaries]
    if not any(missing for missing, _ in lost):
        return 0
    return EXIT_FAILED if all(missing >= searches for missing, searches in lost) else EXIT_PARTIAL


@contextmanager
def evaluating(
    selection: Selection, runtime: RuntimeSettings, where: ExecutorSettings, out: Path | None, **options: Any
) -> "Iterator[tuple[Evaluation, dict[str, Any]]]":
    """Load the chosen problems, the grader and the models, while nobody else writes to `out`.

    The whole benchmark is loaded: the folder may hold samples of other problems, and it tells which are current.

    Yields the evaluation, for whose `options` see `Evaluation`, and what describes the command; see `describe_command`.
    """
    from espalier.experiments.runs.evaluate import Evaluation
    from espalier.experiments.runs.provenance import describe_command

    problems, name = selection.load(runtime.offline), selection.benchmark
    asked, checker = selection.of(problems), graders.make_grader(selection.grader, runtime.grader_memory)
    with writing_to(out), closing(load_executor(runtime, where, longest_first=True)) as executor, checker:
        command = describe_command(name, runtime, executor, selection.fields)
        yield Evaluation(executor, problems, checker, name, asked, **options), command


@contextmanager
def writing_to(out: Path | None, is_file: bool = False) -> Iterator[None]:
    """Hold the lock of a command's output, if it has one; on Ctrl-C or SIGTERM, print where finished work is stored.

    Raises:
        EspalierError: another process writes there; see `folder_lock`.
    """
    lock = nullcontext() if out is None else file_lock(out) if is_file else folder_lock(out)
    try:
        with lock:
            yield
    except KeyboardInterrupt:
        kept = f"what was finished is in {out}; the same command resumes" if out else "nothing was kept"
        print(f"interrupted: {kept}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def searches_for(requests: Sequence[SearchRequest], runtime: RuntimeSettings) -> list[SearchRequest]:
    """The requests; where they name no search and there is no verifier, with the default search, of which a line tells.

    Raises:
        InvalidRequestError, CheckpointError: see `verifier_for`.
    """
    if runtime.verifier or all(request.algorithm for request in requests):
        return list(requests)
    found = [named(request, "none") for request in requests]
    _require_generator(runtime)
    verifier_for(found, runtime)  # whose error is all that is told
    print(f"notice: {unscored_default()}", file=sys.stderr)
    return found


def verifier_for(requests: Sequence[SearchRequest], runtime: RuntimeSettings) -> str:
    """The verifier to load: none where no search uses scores.

    Raises:
        InvalidRequestError: a search uses scores, and the settings name no verifier; before anything is loaded.
        CheckpointError: there is no such generator.
    """
    scored = [what_needs_verifier(request) for request in requests if needs_verifier(request)]
    if scored and not runtime.verifier:
        _require_generator(runtime)
        what = f"{scored[0]} needs one, and there is none for --generator {runtime.generator}; {verifier_advice()}"
        raise InvalidRequestError([Violation("verifier", what)])
    return runtime.verifier if scored else ""


def _require_generator(runtime: RuntimeSettings) -> None:
    """Tell before anything else that there is no such generator, where nothing is to be downloaded."""
    from espalier.engine.models.hub import require_name
    from espalier.experiments.planning.roofline import MODELS

    if runtime.generator not in MODELS:  # which `espalier plan` takes without a checkpoint
        require_name(runtime.generator)
