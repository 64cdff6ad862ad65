"""Reports have the shape that others read, and benchmarks measure what they name."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from espalier.engine.models.options import Quantization
from espalier.experiments.cli.main import run_app
from espalier.experiments.cli.options import OptionError
from espalier.experiments.lab.__main__ import app
from espalier.experiments.lab.bench.engine import model_paths, real_models, recurrent_tree
from espalier.experiments.lab.bench.report import Report
from espalier.experiments.lab.bench.searches import rate
from espalier.experiments.runs.evaluate import Evaluation
from espalier.search.request import AlgorithmName


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("espalier.experiments.lab.bench.engine.decode.BATCHES", (1, 3))
    monkeypatch.setattr("espalier.experiments.lab.bench.searches.rate.IN_FLIGHT", (1, 2))
    finish, show, shown = Report.finish, Report.show, dict[Report, list[str]]()

    def watch(report: Report, rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, float]) -> None:
        shown[report] = [str(next(iter(row.values()))) for row in rows]
        show(report, rows, ratios)

    def check(report: Report, rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, float]) -> None:
        assert shown[report] == [str(next(iter(row.values()))) for row in rows], "rows come before the end"
        finish(report, rows, ratios)

    monkeypatch.setattr(Report, "show", watch)
    monkeypatch.setattr(Report, "finish", check)

    def bench(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["bench", *map(str, arguments)])

    return bench


@pytest.fixture
def no_grader_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that compare answers would run beside what is timed."""

    def refuse(*_: object) -> None:
        raise AssertionError("a benchmark of speed votes by exact match")

    monkeypatch.setattr("espalier.search.voting.equivalence.MathVerify", refuse)


def test_engine_benchmark_writes_rows_ratios_and_machine(bench, tmp_path):
    file = tmp_path / "deep" / "engine.json"
    ran = bench(
        *("engine", "--prompt-tokens", 8, "--new-tokens", 4, "--repeats", 1, "--vllm-python", "none", "--json", file)
    )
    assert ran.exit_code == 0, ran.output
    document = json.loads(file.read_text())
    assert set(document) >= {"title", "rows", "ratios", "machine"}
    assert [row["batch"] for row in document["rows"]] == [1, 3]
    assert all(value > 0 for row in document["rows"] for value in row.values())
    assert set(document["ratios"]) == {"decode@1/dense", "decode@3/dense"}
    assert document["ratios"]["decode@1/dense"] == pytest.approx(
        document["rows"][0]["espalier tokens/s"] / document["rows"][0]["dense loop tokens/s"]
    )
    assert set(document["machine"]) >= {"processor", "threads", "python", "packages"}
    assert document["machine"]["packages"]["torch"] == torch.__version__.partition("+")[0] or "+" in torch.__version__
    assert "decode@1/dense" in ran.output


def test_engine_benchmark_takes_in_transformers_and_quantised_weights(bench, tmp_path):
    how = ("--batches", 2, "--quantization", "int8,int4", "--transformers", "--vllm-python", "none")
    ran = bench("engine", "--prompt-tokens", 8, "--new-tokens", 4, "--repeats", 1, *how, "--json", tmp_path / "e.json")
    assert ran.exit_code == 0, ran.output
    document = json.loads((tmp_path / "e.json").read_text())
    others = ("int8", "int4", "dense", "transformers")
    assert set(document["ratios"]) == {f"decode@2/{name}" for name in others}
    assert all(value > 0 for row in document["rows"] for value in row.values())
    assert bench("engine", "--quantization", "int7", "--vllm-python", "none").exit_code == 2


@pytest.mark.usefixtures("no_grader_pool")
@pytest.mark.slow
def test_search_benchmark_compares_numbers_in_flight(bench, tmp_path):
    file = tmp_path / "search.json"
    ran = bench(
        *("search", "-N", 2, "-M", 2, "--algorithms", "beam,best-of-n", "--problems", 1, "--repeats", 1),
        *("--vllm-python", "none", "--json", file),
    )
    assert ran.exit_code == 0, ran.output
    document = json.loads(file.read_text())
    assert len(document["rows"]) >= 2
    assert all(row["problems/min"] > 0 for row in document["rows"])
    assert all(row["95% low"] <= row["accuracy %"] <= row["95% high"] for row in document["rows"])
    searches = ("beam", "beam, unmerged", "best-of-n", "best-of-n, unmerged")
    assert set(document["ratios"]) == {
        f"{s}@{of}" for s in searches for of in ("2/1", "1/transformers", "2/transformers")
    }
    tokens = {row["contestant"]: row["verifier tokens"] for row in document["rows"]}
    assert tokens["espalier beam, unmerged, 2 in flight"] > tokens["espalier beam, 2 in flight"]


@pytest.mark.usefixtures("no_grader_pool")
def test_search_floor_compares_searches_with_their_products_alone(bench, tmp_path):
    file = tmp_path / "floor.json"
    ran = bench("search-floor", "-N", 2, "-M", 2, "--problems", 2, "--repeats", 1, "--json", file)
    assert ran.exit_code == 0, ran.output
    merged, unmerged = json.loads(file.read_text())["rows"]
    assert merged["tera-operations a problem"] < unmerged["tera-operations a problem"]
    for row in (merged, unmerged):
        of_library = row["tera-operations/s"] / row["oneDNN tera-operations/s"]
        assert row["share of the time"] == pytest.approx(of_library)


def test_search_benchmark_refuses_an_algorithm_that_the_baseline_does_not_have(bench):
    ran = bench("search", "--algorithms", "beam,mcts", "--vllm-python", "none")
    assert ran.exit_code == 2
    assert "--algorithms" in ran.output


@pytest.mark.parametrize("unknown", ["int9", "none"])
def test_search_benchmark_refuses_an_unknown_quantization(bench, unknown):
    ran = bench("search", "--quantization", f"int8,{unknown}", "--vllm-python", "none")
    assert ran.exit_code == 2
    assert "--quantization" in ran.output


def test_search_benchmark_refuses_an_unknown_peer(bench):
    ran = bench("search", "--peers", "vllm,sglang", "--vllm-python", "none")
    assert ran.exit_code == 2
    assert "'sglang' is not one of" in ran.output


@pytest.mark.parametrize(
    ("options", "remedy"),
    [(["--peers", "vllm"], "--vllm-python"), (["--search-and-learn", "."], "has no folder sal")],
    ids=["no vLLM", "no search-and-learn"],
)
def test_search_benchmark_without_the_peer_that_was_asked_for_says_so(bench, options, remedy):
    ran = bench("search", "--vllm-python", "none", *options)
    assert ran.exit_code == 1
    assert remedy in str(ran.exception)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets who solves which problem."""
    outcome = vars(rate)["_Run"]

    def set_outcomes(ours: list[bool], theirs: list[bool]) -> None:
        def of_ours(problems: list[Any], setup: Any, _: object) -> Any:
            return outcome(120.0 if setup.quantization == "int8" else 60.0, ours[: len(problems)], 1.0, 1.0)

        def of_theirs(_: object, problems: list[Any], *__: object) -> Any:
            return outcome(30.0, theirs[: len(problems)], 1.0, 1.0)

        monkeypatch.setattr(rate, "_ours", of_ours)
        monkeypatch.setattr(rate, "_theirs", of_theirs)

    return set_outcomes


def test_search_benchmark_judges_all_contestants_by_the_problems_that_all_solve(outcomes):
    outcomes([True, False, False], [True] * 3)
    rows, ratios = rate_of(problems=3, peer_problems=1)
    assert [row["accuracy %"] for row in rows] == [100.0] * len(rows)
    assert ratios["beam@32/transformers"] == 2


def test_search_benchmark_compares_accuracy_by_problem_and_has_rows_of_each_precision(outcomes):
    outcomes([True, True, False, False], [False, True, True, True])
    rows, ratios = rate_of(problems=4, peer_problems=4, quantizations=[Quantization.INT8])
    of = {row["contestant"]: row for row in rows}
    int8 = of["espalier beam, unmerged, int8, 32 in flight"]
    assert int8["minus last peer"] == -25
    assert int8["minus, low"] < -25 < 0 < int8["minus, high"]
    peer = of["search-and-learn beam, float32, rewritten on transformers"]
    assert peer["minus last peer"] == 0
    assert ratios["beam, unmerged@32/transformers"] == 2
    assert ratios["beam, unmerged, int8@32/transformers"] == 4


def rate_of(problems: int, peer_problems: int, quantizations: Sequence[Quantization] = ()) -> Any:
    peers: dict[str, Any] = {"transformers": None}
    counts = problems, peer_problems, 1
    return rate.run([AlgorithmName.BEAM], 2, 2, *counts, peers, quantizations)


@pytest.mark.usefixtures("no_grader_pool")
@pytest.mark.slow
def test_early_stop_benchmark_shows_equal_answers_and_what_is_saved(bench, tmp_path):
    file = tmp_path / "early-stop.json"
    ran = bench("early-stop", "--limit", 2, "-N", 5, "--json", file)
    assert ran.exit_code == 0, ran.output
    document = json.loads(file.read_text())
    rows = {(row["search"], row["stop"]): row for row in document["rows"]}
    assert len(rows) == 12
    assert all(row["same"] == 2 for row in rows.values())
    assert all(row["generated"] <= rows[search, "off"]["generated"] for (search, _), row in rows.items())
    assert document["ratios"]["best-of-n, naive, frugal"] == 1


def test_prefix_benchmark_compares_shared_reading_with_plain(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("espalier.experiments.lab.bench.engine.prefix.SHARED", (0, 40))
    file = tmp_path / "prefix.json"
    ran = bench("prefix", "--children", 3, "--new-tokens", 2, "--repeats", 1, "--json", file)
    assert ran.exit_code == 0, ran.output
    document = json.loads(file.read_text())
    assert [row["shared tokens"] for row in document["rows"]] == [0, 40]
    assert all(row["tree-aware ms/step"] > 0 and row["plain ms/step"] > 0 for row in document["rows"])
    assert set(document["ratios"]) == {"prefix@0/plain", "prefix@40/plain"}


def test_paths_of_a_decoder_are_timed_beside_generate(bench, tmp_path, monkeypatch):
    small = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    for name, value in {**small, "num_attention_heads": 2, "num_key_value_heads": 1}.items():
        monkeypatch.setitem(model_paths.SHAPE, name, value)
    file = tmp_path / "paths.json"
    ran = bench(
        *("model-paths", "--families", "qwen3", "--batches", "1,2", "--prompt-tokens", 4, "--new-tokens", 3),
        *("--repeats", 1, "--json", file),
    )
    assert ran.exit_code == 0, ran.output
    document = json.loads(file.read_text())
    columns = [
        f"{who}, {what}" for what in ("decode", "prefill") for who in ("transformers path", "native", "generate")
    ]
    assert [list(row) for row in document["rows"]] == [["model", "batch", *columns]] * 2
    assert all(row[column] > 0 for row in document["rows"] for column in columns)
    assert "decode qwen3@2/generate" in document["ratios"]
    assert "'bert' is not one of llama" in bench("model-paths", "--families", "bert").output


def test_recurrent_tree_computes_each_token_of_a_tree_once_and_generate_whole_paths_again(bench, monkeypatch, tmp_path):
    heads = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    dims = {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")}
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": 61, "num_hidden_layers": 4}
    monkeypatch.setattr(recurrent_tree, "_SMALL", small | heads | dims)
    path = tmp_path / "found.json"
    bench("recurrent-tree", "--prompt-tokens", 8, "--step-tokens", 3, "--steps", 2, "--threads", 1, "--json", path)
    beam, best_of_n = json.loads(path.read_text())["rows"]
    assert (beam["tokens of the tree"], best_of_n["tokens of the tree"]) == (8 + 32 * 3, 8 + 16 * 6)
    for row in (beam, best_of_n):
        assert row["computed ÷ tree"] <= 1 < row["by generate, computed ÷ tree"]
        assert row["states at most"] <= recurrent_tree.PATHS + recurrent_tree.KEPT
        assert row["states copied"] <= 2 * recurrent_tree.PATHS


def test_a_real_checkpoint_is_compared_on_each_path(bench, tmp_path, tiny_checkpoints, monkeypatch):
    monkeypatch.setattr(real_models, "_alone", lambda function, *args: function(*args))
    file, threads = tmp_path / "real.json", torch.get_num_threads()
    ran = bench("real-models", tiny_checkpoints["qwen2-tied"], "--new-tokens", 4, "--json", file)
    torch.set_num_threads(threads)
    assert ran.exit_code == 0, ran.output
    rows = json.loads(file.read_text())["rows"]
    paths = [("native", "float32"), ("native", "int8"), ("transformers", "float32"), ("transformers", "int8")]
    assert [(row["path"], row["weights"]) for row in rows] == paths
    for row in rows:
        assert row["cosine of logits"] > (0.99 if row["weights"] == "int8" else 0.999999)
        assert row["weights"] == "int8" or row["same tokens"] == "4 of 4"


def test_float32_and_int8_take_turns_on_each_model(bench, tmp_path, tiny_checkpoints):
    file, threads = tmp_path / "int8.json", torch.get_num_threads()
    small = tiny_checkpoints["qwen2-tied"]
    ran = bench("int8-weights", small, "--batches", "1,2", "--new-tokens", 3, "--repeats", 1, "--json", file)
    torch.set_num_threads(threads)
    assert ran.exit_code == 0, ran.output
    found = json.loads(file.read_text())
    assert [(row["model"], row["batch"]) for row in found["rows"]] == [(small.stem, 1), (small.stem, 2)]
    assert all(row["float32, ms a step"] > 0 < row["int8, ms a step"] for row in found["rows"])
    assert found["ratios"].keys() == {f"{small.stem}@1", f"{small.stem}@2"}


def test_part_of_the_demo_benchmark_keeps_its_mix_of_levels(monkeypatch, tmp_path):
    from espalier.experiments.lab.bench.searches import accuracy

    taken: list[int] = []

    def stop(_: object) -> None:
        raise RuntimeError("seen enough")

    monkeypatch.setattr(accuracy, "load_orchestrator", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(Evaluation, "configuration", lambda *_: {})
    monkeypatch.setattr(Evaluation, "run", lambda its, *_: taken.extend(p.level for p in its.problems) or stop(None))
    for limit in (25, 50, 100, 300):
        taken.clear()
        with pytest.raises(RuntimeError, match="seen enough"):
            accuracy.run(limit, 0, tmp_path / str(limit))
        assert len(taken) == limit
        counts = [taken.count(level) for level in (1, 2, 3, 4, 5)]
        assert max(counts) - min(counts) <= 1, f"limit {limit}: {counts}"


def test_rows_are_printed_and_written_as_they_come(tmp_path, capsys):
    report, file = Report("some title", tmp_path / "deep" / "x.json"), tmp_path / "deep" / "x.json"
    rows = [{"batch": 1, "rate": 1234.5678}]
    report.show(rows, {})
    assert capsys.readouterr().out.splitlines() == ["some title", "batch 1  rate 1,235"]
    rows.append({"batch": 64, "rate": 2.5})
    report.show(rows, {"a/b": 1.5})
    assert capsys.readouterr().out.splitlines() == ["batch 64  rate 2.5"], "a row is printed once"
    document = json.loads(file.read_text())
    assert (document["rows"], document["ratios"], document["complete"]) == (rows, {"a/b": 1.5}, False)
    rows[0]["rate"] = 1300.0
    report.show(rows, {"a/b": 1.5})
    assert capsys.readouterr().out.splitlines() == ["batch 1  rate 1,300"], "as another round has changed it"
    report.finish(rows, {"a/b": 1.5})
    assert json.loads(file.read_text()) == document | {"rows": rows, "complete": True}
    assert list(file.parent.iterdir()) == [file]


def test_a_benchmark_that_is_cut_short_leaves_what_it_has_measured(bench, tmp_path, monkeypatch):
    from espalier.experiments.lab.bench.engine import prefix

    def measure(_: object, shared: int, *others: object) -> float:
        if shared == 512:
            raise KeyboardInterrupt
        return 1.0 + shared

    monkeypatch.setattr(prefix, "_step_seconds", measure)
    ran = bench("prefix", "--repeats", 1, "--json", tmp_path / "prefix.json")
    assert ran.exit_code != 0
    assert "shared tokens 128" in ran.output
    document = json.loads((tmp_path / "prefix.json").read_text())
    assert [row["shared tokens"] for row in document["rows"]] == [0, 128]
    assert not document["complete"]


def test_no_name_or_figure_is_cut_where_a_table_is_wider_than_the_terminal(capsys):
    names = [f"column{number}ofmanycolumns" for number in range(12)]
    Report("some title").finish([dict.fromkeys(names, 1.25)], {})
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert shown.count("1.25") == len(names)


def test_a_pipe_gets_one_document(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        got = pool.submit(pipe.read_text)
        report = Report("some title", pipe)
        report.show([{"batch": 1}], {})
        report.finish([{"batch": 1}, {"batch": 2}], {})
        assert json.loads(got.result(timeout=10))["rows"] == [{"batch": 1}, {"batch": 2}]
    assert pipe.is_fifo()


def test_table_and_file_hold_the_same_figures(tmp_path, capsys):
    rows = [{"batch": 1, "rate": 1234.5678}, {"batch": 64, "rate": 2.5}]
    Report("some title", tmp_path / "x.json").finish(rows, {"a/b": 1.234})
    out = capsys.readouterr().out
    for text in ("some title", "1,235", "2.5", "64", "a/b  1.23x"):
        assert text in out
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == rows


def test_no_file_is_written_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Report("some title").show([{"batch": 1}], {})
    Report("some title").finish([{"batch": 1}], {})
    assert list(tmp_path.iterdir()) == []


def test_benchmark_of_an_unknown_checkpoint_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lab", "bench", "engine", "--generator", "nope"])
    with pytest.raises(SystemExit) as ended:
        run_app(app)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no checkpoint 'nope'" in line


def test_algorithms_benchmark_within_a_budget(bench, tmp_path):
    arguments = ["algorithms", "--limit", 2, "--seeds", 1, "--paths", "4", "--only", "beam", "--only", "best-of-n"]
    arguments += ["--out", tmp_path / "runs", "--json", tmp_path / "a.json", "--generator-budget", 25]
    assert bench(*arguments).exit_code == 0
    document = json.loads((tmp_path / "a.json").read_text())
    assert all(20 < row["generated tokens"] <= 25 and not row["accuracy %"] for row in document["rows"])
    assert document["ratios"] == {}
    folders = {folder.name for folder in (tmp_path / "runs").iterdir()}
    assert folders == {"best-of-n-4-budget25-seed0", "beam-4-budget25-seed0"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("engine", "--json", "."), "--json: cannot write '.': Is a directory"),
        (("engine", "--json", "/proc/a/b.json"), "--json: cannot write '/proc/a/b.json'"),
        (("algorithms", "--plot", "a.gif"), "--plot: 'a.gif' must end in .svg, .png or .pdf"),
        (("algorithms", "--plot", "nowhere/a.svg"), "--plot: cannot write 'nowhere/a.svg': there is no folder"),
    ],
)
def test_a_file_that_cannot_be_written_ends_a_benchmark_before_it_measures(bench, monkeypatch, arguments, said):
    for name in ("engine.decode", "searches.algorithms"):
        monkeypatch.setattr(f"espalier.experiments.lab.bench.{name}.run", None)  # who calls it fails
    error = bench(*arguments).exception
    assert isinstance(error, OptionError)
    assert said in str(error)


@pytest.mark.slow
def test_algorithms_benchmark_compares_each_with_best_of_n_and_resumes(bench, tmp_path):
    arguments = ["algorithms", "--limit", 2, "--seeds", 2, "--paths", "1,4", "--out", tmp_path / "runs"]
    arguments += ["--plot", tmp_path / "plot.svg", "--json", tmp_path / "a.json"]
    assert bench(*arguments).exit_code == 0
    document = json.loads((tmp_path / "a.json").read_text())
    rows = {(row["algorithm"], row["paths"]): row for row in document["rows"]}
    scored = set(AlgorithmName) - {AlgorithmName.GREEDY, AlgorithmName.CHAIN}
    assert set(rows) == {("greedy", 1), ("chain", 1), ("pass@N", 4)} | {(name, 4) for name in scored}
    assert all(rows["pass@N", 4]["accuracy %"] >= rows[name, 4]["accuracy %"] for name in ("best-of-n", "majority"))
    assert rows["beam", 4]["against best-of-n"] == pytest.approx(
        rows["beam", 4]["accuracy %"] - rows["best-of-n", 4]["accuracy %"]
    )
    assert (tmp_path / "plot.svg").read_text().lstrip().startswith("<?xml")
    samples = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("samples.jsonl")}
    assert len(samples) == 2 * (2 + len(scored))
    assert bench(*arguments).exit_code == 0
    again = json.loads((tmp_path / "a.json").read_text())
    assert again["rows"] == document["rows"]


@pytest.mark.slow
def test_host_time_is_measured_without_a_model_and_with_a_gpus_plan() -> None:
    from espalier.experiments.lab.bench.engine.host import ROWS, run

    rows, ratios = run(steps=30, repeats=1)
    assert [row["rows"] for row in rows] == list(ROWS)
    assert all(value > 0 for row in rows for value in row.values())
    assert ratios == {}


@pytest.mark.slow
def test_host_time_of_a_token_is_measured_early_and_late_on_a_path(bench: Callable[..., Any], tmp_path) -> None:
    assert bench("long-path", "--tokens", "2000", "--repeats", "1", "--json", str(tmp_path / "a.json")).exit_code == 0
    document = json.loads((tmp_path / "a.json").read_text())
    assert [row["step rule"] for row in document["rows"]] == ["paragraph", "tokens:64"]
    assert all(row[f"at {place} tokens, µs"] > 0 for row in document["rows"] for place in (500, 2000))
    assert len(document["ratios"]) == 2
