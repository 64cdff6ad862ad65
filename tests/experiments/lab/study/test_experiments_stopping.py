"""Rules for ending thoughts, replayed on the probes of recorded searches."""

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from run_folders import line, write_run
from run_samples import sample
from typer.testing import CliRunner

from espalier.engine.errors import EspalierError
from espalier.experiments.lab.__main__ import app
from espalier.experiments.lab.study.stopping import choose_rule, holds_probes, replay_rules, stopping_table
from espalier.experiments.report.runs import Run, load_runs
from espalier.search.result import NodeRecord
from espalier.search.rules import StopRule
from espalier.search.tree import Probe


def path(place: int, probed: list[str], answer: str, certainty: float = 0.9) -> list[NodeRecord]:
    """A path of a thought in steps of 10 tokens, with a probe of 5 tokens at each, and an answer of 4 tokens."""
    nodes, parent = [], 0
    for depth, said in enumerate(probed):
        at = 100 * (place + 1) + depth
        probe = Probe(said, certainty, 5)
        nodes.append(NodeRecord(at, parent, (place, *[0] * depth), "hm", None, "", 1, 10, None, 2, "", probe))
        parent = at
    text = f"\\boxed{{{answer}}}"
    nodes.append(NodeRecord(parent + 50, parent, (place, *[0] * len(probed)), text, None, "eos", 1, 4))
    return nodes


ROOT = NodeRecord(0, None, (), "", None, "", 1, 0)


def probed_run(folder: Path, *trees: list[NodeRecord], golds: str = "1", **config: object) -> Run:
    usage = sample("x").usage | {"probe_tokens": 1}
    lines = [line(f"p{i}", True, gold=gold, usage=usage) for i, gold in enumerate(golds)]
    config = {"algorithm": "majority", "beam_width": 2, "probe_every": 10, **config}
    write_run(folder, lines, **config)
    records = [
        {"unique_id": f"p{i}", "epoch": 0, "nodes": [asdict(node) for node in (ROOT, *tree)]}
        for i, tree in enumerate(trees)
    ]
    (folder / "trees.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run,) = load_runs([folder])
    return run


def test_a_rule_ends_each_path_at_its_probe_and_all_probes_until_then_count(tmp_path: Path):
    tree = [*path(0, ["7", "1", "1", "1"], "1"), *path(1, ["2", "3", "1", "2"], "1")]
    run = probed_run(tmp_path / "run", tree)
    assert holds_probes(run)
    table = stopping_table(replay_rules([run], [StopRule(agree=2, tokens=10)]))
    none, ruled = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (none["rule"], none["accuracy %"], none["tokens"]) == ("none", "100.0", "88")
    # One path ends at its third probe, with an answer of 4 tokens; the other goes on to its end, with four probes.
    assert int(ruled["tokens"]) == (30 + 4 + 15) + (44 + 20)
    assert (ruled["rule"], ruled["accuracy %"], ruled["paths ended"]) == ("agree:2,tokens:10", "100.0", "1")
    assert ruled["saved %"] == f"{100 * (1 - 113 / 88):.1f}"


def test_an_early_guess_costs_accuracy_and_a_floor_or_a_certainty_prevents_it(tmp_path: Path):
    guess = path(0, ["7", "7", "1", "1"], "1")
    run = probed_run(tmp_path / "run", guess, path(0, ["1", "1", "1", "1"], "1"), golds="11")
    rules = [StopRule(2, 10), StopRule(2, 30), StopRule(2, 10, 0.95)]
    rows = stopping_table(replay_rules([run], rules)).rows[1:]
    assert [row[2] for row in rows] == ["50.0", "100.0", "100.0"]
    assert [row[3] for row in rows] == ["-50.0", "+0.0", "+0.0"]
    assert [row[-1] for row in rows] == ["2", "2", "0"]


def test_only_probed_runs_of_independent_paths_that_were_not_ended_are_replayed(tmp_path: Path):
    tree = path(0, ["1", "1"], "1")
    assert not holds_probes(probed_run(tmp_path / "beam", tree, algorithm="beam"))
    assert not holds_probes(probed_run(tmp_path / "ended", tree, stop_when="agree:2,tokens:10"))
    run = probed_run(tmp_path / "run", tree)
    (tmp_path / "run" / "trees.jsonl").unlink()
    with pytest.raises(EspalierError, match="run kept no trees, which hold the probes; give --trees to eval"):
        replay_rules([run])


def test_the_command_replays_rules_of_several_strictness_or_those_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("espalier.experiments.lab.study.stopping.draw_rules", lambda *_: None)
    probed_run(tmp_path / "run", [*path(0, ["1", "1", "1"], "1"), *path(1, ["1"], "1")])
    call = ["study", "stopping", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, call)
    assert (found.exit_code, "Thoughts ended early, replayed" in found.output) == (0, True)
    rules = [row["rule"] for row in csv.DictReader(io.StringIO((tmp_path / "out" / "stopping.csv").read_text()))]
    assert rules[0] == "none"
    assert len(rules) == len(set(rules)) == 1 + 2 * 9
    assert CliRunner().invoke(app, [*call, "--stop-when", rules[1], "--stop-when", rules[2]]).exit_code == 0
    assert (tmp_path / "out" / "stopping.csv").read_text().count("\n") == 4
    for rule, why in (
        ("3", "is written like agree:3,tokens:512"),
        ("agree:0,tokens:1", "agree: must be between 1 and 64"),
    ):
        refused = CliRunner().invoke(app, [*call, "--stop-when", rule], env={"COLUMNS": "200"})
        assert (refused.exit_code, why in refused.output) == (2, True)


def test_rules_need_a_run_with_probes(tmp_path: Path):
    write_run(tmp_path / "run", [line("p0", True)])
    call = [
        "study",
        "stopping",
        str(tmp_path / "run"),
        "--out",
        str(tmp_path / "out"),
        "--stop-when",
        "agree:2,tokens:10",
    ]
    refused = CliRunner().invoke(app, call, env={"COLUMNS": "200"})
    assert (refused.exit_code, "no run holds probes of independent paths" in refused.output) == (2, True)


def test_a_rule_is_chosen_on_one_run_and_tried_on_another(tmp_path: Path):
    guess, sure = path(0, ["7", "7", "1", "1", "1", "1", "1"], "1"), path(0, ["1", "1", "1", "1", "1", "1", "1"], "1")
    probed_run(tmp_path / "one", guess, sure, golds="11")
    probed_run(tmp_path / "other", sure, guess, sure, golds="111")
    rules = ["agree:2,tokens:10", "agree:2,tokens:30", "agree:5,tokens:10"]
    call = [
        "study",
        "stopping",
        str(tmp_path / "other"),
        "--calibrate",
        str(tmp_path / "one"),
        "--out",
        str(tmp_path / "out"),
    ]
    found = CliRunner().invoke(app, [*call, *(word for rule in rules for word in ("--stop-when", rule))])
    assert found.exit_code == 0, found.output
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "stopping.csv").read_text())))
    assert [row["run"] for row in rows] == ["one"] * 4 + ["other"] * 4
    # The first saves more, and loses half of the answers; the last saves less.
    assert [row["rule"] for row in rows] == 2 * ["none", rules[0], f"{rules[1]} (chosen)", rules[2]]
    assert [row["accuracy %"] for row in rows[4:]] == ["100.0", "66.7", "100.0", "100.0"]
    assert float(rows[6]["saved %"]) > float(rows[7]["saved %"])
    assert f"{rules[1]} (chosen)" in " ".join(found.output.split())
    assert (tmp_path / "out" / "stopping.svg").exists()


def test_no_rule_is_chosen_where_all_lose_too_much(tmp_path: Path):
    run = probed_run(tmp_path / "run", path(0, ["7", "7", "1", "1", "1", "1", "1"], "1"))
    rows = replay_rules([run], [StopRule(2, 10)])
    assert choose_rule(rows, max_loss=0.99) is None
    assert choose_rule(rows, max_loss=1.0) == StopRule(2, 10)
    call = [
        "study",
        "stopping",
        str(tmp_path / "run"),
        "--calibrate",
        str(tmp_path / "run"),
        "--out",
        str(tmp_path / "out"),
    ]
    found = CliRunner().invoke(app, [*call, "--stop-when", "agree:2,tokens:10"])
    assert (found.exit_code, "and loses at most 1 points" in found.output) == (0, True)


def test_calibrating_needs_probes_in_both_runs(tmp_path: Path):
    write_run(tmp_path / "plain", [line("p0", True)])
    probed_run(tmp_path / "run", path(0, ["1", "1"], "1"))
    for one, other in (("plain", "run"), ("run", "plain")):
        call = [
            "study",
            "stopping",
            str(tmp_path / one),
            "--calibrate",
            str(tmp_path / other),
            "--out",
            str(tmp_path / "out"),
        ]
        refused = CliRunner().invoke(app, call, env={"COLUMNS": "200"})
        assert (refused.exit_code, "no run holds probes of independent paths" in refused.output) == (2, True)
