"""The problems of a report, each with the searches of all runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.engine.errors import EspalierError
from espalier.experiments.report.runs import Run
from espalier.experiments.report.trees import Line, load_trees, selected_nodes, tree_lines
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.experiments.runs.record import Sample


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run's search of a problem: the run's number in the table, the sample, its tree, whether it is whole."""

    number: int
    run: Run
    sample: Sample
    lines: list[Line]
    whole_tree: bool


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """A problem with the attempts of all runs; `text` is empty if the benchmark is not at hand.

    `sample` is one of it, which tells its id, gold answer, level and subject. `solved` holds for each run the right
    answers and the searches.
    """

    sample: Sample
    text: str
    solved: list[tuple[int, int]]
    attempts: list[Attempt]


def problem_rows(runs: Sequence[Run], most: int) -> tuple[list[ProblemRow], int]:
    """Rows of at most `most` problems, those on which runs disagree first, and the number of all problems.

    Raises:
        EspalierError: a file of trees is damaged.
    """
    found = list(dict.fromkeys(name for run in runs for name in run.by_problem))
    verdicts = {name: {sample.correct for run in runs for sample in run.by_problem.get(name, [])} for name in found}
    kept = sorted(found, key=lambda name: len(verdicts[name]) == 1)[:most]
    attempts: dict[str, list[Attempt]] = {name: [] for name in kept}
    for number, run in enumerate(runs, start=1):
        trees = load_trees(run, attempts.keys())  # one run's trees at a time, as they may be large
        for name in kept:
            for sample in run.by_problem.get(name, []):
                nodes = trees.get((name, sample.epoch))
                if nodes:
                    lines = tree_lines(nodes, selected_nodes(nodes, sample.text))
                else:
                    lines = [Line(depth, step, selected=True) for depth, step in enumerate(sample.steps)]
                attempts[name].append(Attempt(number, run, sample, lines, bool(nodes)))
    texts = _texts(runs)
    rows: list[ProblemRow] = []
    for name, its in attempts.items():
        by_run = [run.by_problem.get(name, []) for run in runs]
        solved = [(sum(sample.correct for sample in samples), len(samples)) for samples in by_run]
        first = its[0].sample
        rows.append(ProblemRow(first, texts.get((name, first.gold), ""), solved, its))
    return rows, len(found)


def _texts(runs: Sequence[Run]) -> dict[tuple[str, str], str]:
    """Texts of the problems by id and gold answers; a benchmark that cannot be loaded adds none."""
    texts: dict[tuple[str, str], str] = {}
    for benchmark, fields in dict.fromkeys(run.source for run in runs):
        try:
            problems = load_benchmark(benchmark, field_map=dict(fields), offline=True, notify=lambda _: None)
        except EspalierError:  # moved since the run; samples do not hold the problems
            continue
        texts |= {(problem.unique_id, " or ".join(problem.golds)): problem.problem for problem in problems}
    return texts
