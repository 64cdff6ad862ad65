"""Evaluations and sweeps that are killed leave, once they are done, what undisturbed ones leave."""

import json
from pathlib import Path

import pytest
from killed_runs import (
    HALF_A_FILE,
    HALF_A_SAMPLE,
    MOMENTS,
    TREE_WITHOUT_SAMPLE,
    finish,
    kill_at,
    kill_at_random,
    results,
)

EVAL = ("eval", "-N", 2, "-M", 2, "--epochs", 2, "--trees", "--threads", 1, "--limit")
SWEEP = ("sweep", "-a", "beam,best-of-n", "-N", "1,2", "-M", "2", "--trees", "--threads", 1, "--limit")
SHARING = ("sweep", "--share-work", *SWEEP[1:])


def same_as(whole: Path):
    def check(out: Path) -> None:
        assert results(out) == results(whole)
        for samples in out.rglob("samples.jsonl"):
            keys = [json.loads(line)["unique_id"] for line in samples.read_text().splitlines()]
            trees = [
                json.loads(line)["unique_id"] for line in (samples.parent / "trees.jsonl").read_text().splitlines()
            ]
            assert sorted(keys) == sorted(trees)

    return check


@pytest.mark.parametrize(
    ("command", "moments"),
    [((*EVAL, 3), (TREE_WITHOUT_SAMPLE, HALF_A_SAMPLE)), ((*SHARING, 3), (HALF_A_FILE,))],
    ids=["eval", "sweep"],
)
def test_what_is_killed_while_it_writes_goes_on_to_the_same_results(command, moments, espalier, tmp_path):
    assert espalier(*command, "--out", tmp_path / "whole").code == 0
    for moment in moments:
        kill_at((*command, "--out", tmp_path / "killed"), moment)
    assert espalier(*command, "--out", tmp_path / "killed").code == 0
    same_as(tmp_path / "whole")(tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("command", [(*EVAL, 12), (*SWEEP, 8), (*SHARING, 8)], ids=["eval", "sweep", "sharing"])
def test_what_is_killed_at_ten_random_moments_and_at_every_step_of_writing_goes_on_to_the_same_results(
    command, tmp_path
):
    seconds = finish((*command, "--out", tmp_path / "whole"))
    check = same_as(tmp_path / "whole")
    kill_at_random(command, tmp_path / "random", seconds, kills=10, seed=18, check=check)
    killed = (*command, "--out", tmp_path / "killed")
    for moment in MOMENTS:
        kill_at(killed, moment)
    finish(killed)
    check(tmp_path / "killed")
