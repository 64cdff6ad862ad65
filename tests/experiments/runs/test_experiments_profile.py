"""Chrome traces of engine steps, and the records that they are made of."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from search_runs import BEAM, run
from typer.testing import CliRunner

from espalier.engine.stats import StepRecord
from espalier.experiments.cli.main import app
from espalier.experiments.runs.chrome_trace import profiled
from espalier.search.run.orchestrator import Orchestrator

pytest.importorskip("torch")


@pytest.mark.parametrize("ahead", [False, True])
def test_every_batch_is_recorded_once_in_order_of_its_phases(
    make_orchestrator: Callable[..., Orchestrator], ahead: bool
):
    orchestrator = make_orchestrator(launch_ahead=ahead)
    records: list[StepRecord] = []
    orchestrator.engine.on_step = records.append
    run(orchestrator, BEAM)
    for role, stats in orchestrator.engine.stats().items():
        mine = [record for record in records if record.role == role]
        assert (len(mine), sum(one.tokens for one in mine)) == (stats.steps, stats.computed_tokens)
        assert sum(one.copied_blocks for one in mine) == stats.copied_blocks
    for one in records:
        times = [one.schedule_start, one.launch_start, one.launch_end, one.wait_start, one.wait_end, one.update_end]
        assert times == sorted(times)
        assert one.tokens >= one.rows
    assert any(one.reads for one in records if one.role == "verifier")
    assert all(not one.draws for one in records if one.role == "verifier")


def test_observing_does_not_change_a_search(make_orchestrator: Callable[..., Orchestrator], tmp_path: Path):
    plain = run(make_orchestrator(), BEAM).only
    orchestrator = make_orchestrator()
    with profiled(orchestrator, tmp_path / "trace.json"):
        observed = run(orchestrator, BEAM).only
    assert [(n.path, n.text, n.score) for n in observed.nodes] == [(n.path, n.text, n.score) for n in plain.nodes]
    assert orchestrator.engine.on_step is None


def test_a_trace_has_slices_of_every_phase_and_counters_of_the_pool(
    make_orchestrator: Callable[..., Orchestrator], tmp_path: Path
):
    orchestrator = make_orchestrator()
    with profiled(orchestrator, tmp_path / "trace.json"):
        run(orchestrator, BEAM)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = sum(stats.steps for stats in orchestrator.engine.stats().values())
    slices = [event for event in events if event["ph"] == "X"]
    for phase in ("scheduling", "launch", "wait", "update"):
        assert sum(event["name"] == phase for event in slices) == steps
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    whole = [event for event in slices if event["name"].endswith(" step")]
    assert {"rows", "tokens", "draws", "live_blocks", "bytes"} <= whole[0]["args"].keys()
    blocks = [event["args"]["live"] for event in events if event["ph"] == "C" and event["name"] == "verifier blocks"]
    assert max(blocks) > 0
    used = [event["args"] for event in events if event["name"] == "live KV bytes"]
    assert max(one["generator"] for one in used) > 0


def test_the_file_is_whole_after_an_interrupt(make_orchestrator: Callable[..., Orchestrator], tmp_path: Path):
    orchestrator = make_orchestrator()
    orchestrator.submit(BEAM)

    def interrupted() -> None:
        with profiled(orchestrator, tmp_path / "trace.json"):
            for _ in range(3):
                orchestrator.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    orchestrator.close()
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 3


def test_solve_and_eval_write_a_trace_and_refuse_other_files(tmp_path: Path):
    for command in (["solve"], ["eval", "--limit", "1"]):
        file = tmp_path / f"{command[0]}.json"
        done = CliRunner().invoke(app, [*command, "-N", "1", "-M", "2", "--profile", str(file)])
        assert done.exit_code == 0, done.output
        assert json.loads(file.read_text())["traceEvents"]
    refused = CliRunner().invoke(app, ["solve", "--profile", str(tmp_path / "trace.txt")])
    assert "--profile" in str(refused.exception)
    assert "must end in .json" in str(refused.exception)
