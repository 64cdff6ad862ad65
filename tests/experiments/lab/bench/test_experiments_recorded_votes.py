"""Votes over a run's recorded paths, by its own scores and by simulated ones."""

import json
import statistics
from pathlib import Path

import pytest

from espalier.engine.errors import EspalierError
from espalier.experiments.lab.bench.searches.recorded_votes import (
    RecordedPath,
    read_paths,
    right_by_quarter,
    run,
    share_right,
    simulated,
)
from espalier.search.grading.math_verify import Grader
from espalier.search.request import Vote
from espalier.search.result import Candidate


def path(number: int, right: bool, answer: str) -> RecordedPath:
    return RecordedPath(Candidate(number, answer, None, 1, ()), right, [0.5], [0.5])


PROBLEMS = [
    [path(0, True, "1"), *(path(i, False, "2") for i in (1, 2, 3))],
    [*(path(i, True, "1") for i in (0, 1, 2)), path(3, False, "2")],
]


def test_votes_of_a_run_give_what_the_run_gave(espalier, grader: Grader, tmp_path: Path):
    folder = tmp_path / "run"
    flags = ("--limit", 12, "--algorithm", "best-of-n", "-N", 4, "--trees", "--early-stop", "off", "--out", folder)
    ran = espalier("eval", *flags)
    assert ran.code == 0, ran.err
    problems = read_paths(folder, grader)
    assert [sum(one.candidate.multiplicity for one in paths) for paths in problems] == [4] * 12
    solved = {row["verifier"]: row["weighted"] for row in run(folder)}
    summary = json.loads((folder / "summary.json").read_text())
    assert solved["its scores, last"] == pytest.approx(summary["accuracy"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-N", 2, "-M", 2, "--trees"), "run of beam, whose paths depend on the verifier"),
        (("--algorithm", "majority", "-N", 2), "holds no trees"),
        (("--algorithm", "majority", "-N", 1, "--trees"), "has not both right and wrong paths"),
    ],
)
def test_runs_that_tell_nothing_are_refused(espalier, tmp_path: Path, flags: tuple[object, ...], said: str):
    ran = espalier("eval", "--limit", 1, "--out", tmp_path / "run", *flags)
    assert ran.code == 0, ran.err
    with pytest.raises(EspalierError, match=said):
        run(tmp_path / "run")


def test_right_paths_are_counted_by_quarters_of_their_problem():
    scored = [
        [RecordedPath(Candidate(i, "1" if right else "2", None, 1, ()), right, [score], []) for i, (score, right) in ps]
        for ps in (
            enumerate([(0.1, True), (0.9, True), (0.5, False), (0.6, True), (0.2, False), (0.8, True), (0.3, False)]),
            enumerate([(0.4, True), (0.2, True)]),  # tells nothing: none is wrong
        )
    ]
    scored[0].append(RecordedPath(Candidate(7, "2", None, 1, ()), False, [0.7], []))
    scored[0].append(RecordedPath(Candidate(8, "", None, 1, ()), False, [1.0], []))  # no answer, so no vote
    assert right_by_quarter(scored, lambda path: path.scores[0]) == [1.0, 0.5, 0.0, 0.5]


def test_simulated_scores_rank_as_well_as_they_are_asked_to():
    assert share_right(PROBLEMS, Vote.MAJORITY, lambda _: None) == 0.5

    def solved(vote: Vote, auc: float) -> float:
        return statistics.mean(share_right(PROBLEMS, vote, simulated(PROBLEMS, auc, seed)) for seed in range(200))

    assert solved(Vote.WEIGHTED, 0.5) == 0.5  # all scores are the same
    assert 0.6 < solved(Vote.NAIVE, 0.75) < 0.95
    assert solved(Vote.NAIVE, 0.9999) > 0.98
    assert solved(Vote.WEIGHTED, 0.9999) > 0.98
