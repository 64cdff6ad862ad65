import csv
import io
import json
import re

import numpy as np
import pytest
from run_folders import line, run_of, write_run, write_trees
from run_samples import sample
from typer.testing import CliRunner

from espalier.engine.errors import EspalierError
from espalier.experiments.cli.main import app
from espalier.experiments.report import plots
from espalier.experiments.report.runs import differing_fields, load_runs
from espalier.experiments.report.tables import breakdown_tables, differences, main_table
from espalier.experiments.report.trees import problem_rows
from espalier.experiments.report.write import _title, write_report
from espalier.experiments.runs.statistics import calibration
from espalier.search.algorithms import unused_fields, with_defaults
from espalier.search.request import AlgorithmName, SearchRequest


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=True)


@pytest.fixture
def no_plots(monkeypatch):
    """Leaves out the plots, which take seconds, where a test is about something else."""
    monkeypatch.setattr("espalier.experiments.report.write.draw_plots", lambda *_: [])


def test_runs_of_a_sweep_are_found_in_the_order_of_their_numbers(tmp_path):
    for n in (1, 2, 10):
        run_of(tmp_path / "sweep" / f"N{n}-M1", [True], beam_width=n)
    one = run_of(tmp_path / "one", [True])
    runs = load_runs([one, tmp_path / "sweep", tmp_path / "sweep" / "N2-M1"])
    assert [run.name for run in runs] == ["one", "sweep/N1-M1", "sweep/N2-M1", "sweep/N10-M1"]
    assert differing_fields(runs) == ["beam_width"]


@pytest.mark.parametrize(
    ("benchmark", "title"),
    [
        ("demo", "one on demo"),
        ("files/math500.jsonl", "one on math500"),
        ("files/aime.parquet", "one on aime"),
        ("openai/gsm8k:main/test", "one on openai/gsm8k:main/test"),
        ("HuggingFaceH4/MATH-500@v1.0", "one on HuggingFaceH4/MATH-500@v1.0"),
    ],
)
def test_title_names_the_file_or_the_hub_id(tmp_path, benchmark, title):
    run_of(tmp_path / "one", [True], benchmark=benchmark)
    assert _title(load_runs([tmp_path / "one"])) == title


def test_fields_that_an_algorithm_does_not_use_make_no_difference(tmp_path):
    run_of(tmp_path / "a", [True], algorithm="greedy", temperature=0.0, beam_width=4)
    run_of(tmp_path / "b", [True], algorithm="best-of-n", expansion=4)
    run_of(tmp_path / "c", [True], seed=3)
    runs = load_runs([tmp_path])
    assert differing_fields(runs) == ["seed"]
    assert [run.shown_setting("beam_width") for run in runs] == ["–", "2", "2"]


@pytest.mark.parametrize("algorithm", AlgorithmName)
def test_a_report_leaves_out_the_fields_that_the_algorithm_says_it_does_not_use(tmp_path, algorithm):
    request = with_defaults(SearchRequest("-", algorithm, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1))
    run_of(tmp_path / "one", [True], **{**request.to_dict(), "problem": "-"})
    (run,) = load_runs([tmp_path / "one"])
    shown = {name for name in run.configuration if run.setting(name) is not None}
    assert shown & request.to_dict().keys() == {
        name for name, value in request.to_dict().items() if value is not None
    } - unused_fields(request)


def test_the_last_line_of_a_sample_counts_and_an_incomplete_one_does_not(tmp_path):
    folder = write_run(tmp_path / "a", [line("p0", False), line("p1", True), line("p0", True)])
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"unique_id": "p2", "corr')
    (run,) = load_runs([folder])
    assert {sample.unique_id: sample.correct for sample in run.samples} == {"p0": True, "p1": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"unique_id": \n{}\n', "samples.jsonl:1 is damaged"),
        ("[1]\n", "samples.jsonl:1 is damaged: it is not a JSON object"),
        ('{"unique_id": "p0", "correct": 1, "usage": {}}\n', "samples.jsonl:1 is damaged"),
        ('{"unique_id": "p0"}\n', "samples.jsonl:1 is damaged: Sample.__init__() missing"),
        ("", "holds no samples"),
    ],
)
def test_damaged_samples_are_named(tmp_path, text, message):
    folder = run_of(tmp_path / "a", [True])
    (folder / "samples.jsonl").write_text(text)
    with pytest.raises(EspalierError, match=re.escape(message)):
        load_runs([folder])


def test_a_path_without_a_run_is_an_error(tmp_path):
    with pytest.raises(EspalierError, match="holds no run"):
        load_runs([tmp_path])
    with pytest.raises(EspalierError, match="no folder"):
        load_runs([tmp_path / "missing"])


def test_measures_of_one_epoch(tmp_path):
    refused = line("p3", False, stop_reason="refused")
    refused["usage"] = dict.fromkeys(refused["usage"], 0)
    lines = [line("p0", True), line("p1", True), line("p2", False), refused]
    m = load_runs([write_run(tmp_path / "a", lines)])[0].summary
    assert (m.problems, m.searches, m.refused, m.accuracy) == (4, 4, 1, 0.5)
    assert (m.low, m.high) == pytest.approx((0.1500, 0.8500), abs=5e-5)
    assert (m.standard_error, m.pass_at) == (None, {})
    assert (m.generated_tokens, m.verifier_tokens, m.search_seconds, m.peak_kv_mib) == (10, 8, 0.5, 2)
    assert m.wall_seconds == pytest.approx(1 / 3)


def test_measures_of_several_epochs(tmp_path):
    right = {"p0": [1, 1, 1, 1], "p1": [1, 0, 0, 0], "p2": [0, 0, 0, 0]}
    lines = [line(name, bool(r), epoch=e) for name, found in right.items() for e, r in enumerate(found)]
    (run,) = load_runs([write_run(tmp_path / "a", lines)])
    m = run.summary
    assert (m.problems, m.searches, m.accuracy) == (3, 12, pytest.approx(5 / 12))
    assert m.standard_error == pytest.approx(((4 * 7 / 12) ** 2 + (2 / 3) ** 2 + (5 / 3) ** 2) ** 0.5 / 12)
    assert m.pass_at == pytest.approx({1: 5 / 12, 2: 0.5, 4: 2 / 3})
    assert m.high - m.low > 0.6  # the three problems, not twelve searches, are independent
    assert {"searches", "clustered SE, points", "pass@2 %", "pass@4 %"} <= set(main_table([run]).columns)


def test_accuracy_per_level_and_subject(tmp_path):
    lines = [
        line("p0", True, level=1, subject="algebra"),
        line("p1", False, level=2, subject="algebra"),
        line("p2", True, level=2, subject="geometry"),
        line("p3", True, level=10),
    ]
    found = dict(breakdown_tables(load_runs([write_run(tmp_path / "a", lines)])))
    by_level, by_subject = found["level"], found["subject"]
    assert by_level.columns == ["#", "run", "1 (n=1)", "2 (n=2)", "10 (n=1)"]
    assert by_level.rows == [["1", "a", "100", "50", "100"]]
    assert by_subject.columns == ["#", "run", "algebra (n=2)", "geometry (n=1)"]
    assert by_subject.rows == [["1", "a", "50", "100"]]


def test_the_number_of_searches_stands_in_the_header_only_where_it_is_that_of_all_runs(tmp_path):
    for name, solved in (("a", [True, False, True]), ("b", [True])):
        lines = [line(f"p{i}", right, subject="algebra") for i, right in enumerate(solved)]
        write_run(tmp_path / name, [*lines, line("q", False, subject="geometry")])
    runs = load_runs([tmp_path])
    table = dict(breakdown_tables(runs))["subject"]
    assert table.columns == ["#", "run", "algebra", "geometry (n=1)"]
    assert table.rows == [["1", "a", "67 (n=3)", "0"], ["2", "b", "100 (n=1)", "0"]]


def test_differences_are_over_the_problems_of_both(tmp_path):
    write_run(tmp_path / "a", [line("p0", True), line("p1", False), line("p2", False), line("x", True, asked="one")])
    write_run(tmp_path / "b", [line("p1", True), line("p2", True), line("p0", False), line("x", True, asked="other")])
    (found,) = differences(load_runs([tmp_path]))
    assert (found.problems, found.difference) == (3, pytest.approx(1 / 3))
    assert (found.only_first, found.only_second) == (("p0",), ("p1", "p2"))
    assert (found.p, found.adjusted) == (1.0, 1.0)


def test_an_interval_does_not_contradict_the_p_beside_it(tmp_path):
    """Three problems of twelve, all solved by the second run alone: a bootstrap leaves out 0, McNemar's p is 0.25."""
    run_of(tmp_path / "a", [False] * 12)
    run_of(tmp_path / "b", [True] * 3 + [False] * 9)
    (found,) = differences(load_runs([tmp_path]))
    assert found.p == pytest.approx(0.25)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0 < found.difference < found.high


def test_runs_without_a_common_problem_are_not_compared(tmp_path):
    write_run(tmp_path / "a", [line("p0", True)])
    write_run(tmp_path / "b", [line("p1", True)])
    assert differences(load_runs([tmp_path])) == []


def test_no_mcnemar_where_problems_were_searched_several_times(tmp_path):
    write_run(
        tmp_path / "a", [line("p0", True, epoch=e) for e in range(2)] + [line("p1", e > 0, epoch=e) for e in (0, 1)]
    )
    write_run(tmp_path / "b", [line("p0", True), line("p1", False)])
    (found,) = differences(load_runs([tmp_path]))
    assert (found.p, found.only_first, found.only_second) == (None, ("p1",), ())
    assert found.difference == pytest.approx(-0.25)


@pytest.mark.parametrize("planted", [0.05, 0.0])
def test_a_planted_difference_is_found_and_a_missing_one_is_not(tmp_path, planted):
    """2000 problems of different difficulty; the second run is `planted` more accurate."""
    draws = np.random.default_rng(11)
    first = draws.random(2000) < np.repeat([0.9, 0.6, 0.3, 0.1], 500)
    changed = np.zeros(2000, bool)  # it disagrees on 12% of the problems, in both directions
    wrong, right = np.flatnonzero(~first), np.flatnonzero(first)
    gained, lost = int(120 + 1000 * planted), int(120 - 1000 * planted)
    changed[draws.choice(wrong, gained, replace=False)] = True
    changed[draws.choice(right, lost, replace=False)] = True
    run_of(tmp_path / "a", first.tolist())
    run_of(tmp_path / "b", (first ^ changed).tolist())
    (found,) = differences(load_runs([tmp_path]))
    assert found.difference == pytest.approx(planted)
    assert found.p is not None
    assert found.low is not None
    assert found.high is not None
    assert (found.p < 0.05) == (not found.low <= 0 <= found.high) == bool(planted)


def test_the_test_raises_a_false_alarm_about_5_times_in_100(tmp_path):
    draws = np.random.default_rng(5)
    alarms = 0
    for trial in range(60):
        ease = draws.random(200)
        folder = tmp_path / str(trial)
        for name in "ab":
            run_of(folder / name, (draws.random(200) < ease).tolist())
        (found,) = differences(load_runs([folder]), resamples=500)
        assert found.p is not None
        alarms += found.p < 0.05
    assert alarms <= 7  # more has a probability of 1%


def test_pareto_front_by_hand():
    points = [(1, 0.5), (2, 0.4), (2, 0.7), (3, 0.7), (4, 0.9), (1, 0.2), (4, 0.9)]
    assert plots.pareto_front(points) == [0, 2, 4, 6]
    assert plots.pareto_front([]) == []


def test_calibration_bins_by_hand():
    rows, error = calibration([0.0, 0.05, 0.91, 1.0, 1.0], [False, False, True, False, True])
    found = [(row["mean_score"], row["right"] * row["steps"], row["steps"]) for row in rows]
    assert found == [(pytest.approx(0.025), 0, 2), (pytest.approx(0.97), pytest.approx(2), 3)]
    assert error == pytest.approx((0.05 + (2.91 - 2)) / 5)


def test_scores_beyond_0_and_1_fall_into_the_bins_at_the_ends():
    rows, _ = calibration([-3.0, 7.0], [False, True])
    assert [(row["from"], row["steps"]) for row in rows] == [(0.0, 1), (0.9, 1)]


def test_a_tree_shows_the_selected_path_first_and_counts_dead_ends(tmp_path):
    folder = run_of(tmp_path / "a", [True])
    write_trees(folder, "p0")
    (run,) = load_runs([folder])
    ((row,), count) = problem_rows([run], 10)
    (attempt,) = row.attempts
    assert (count, attempt.whole_tree) == (1, True)
    shown = [(line.depth, line.text, line.score, line.selected, line.faded) for line in attempt.lines[:2]]
    assert shown == [
        (0, "47+25=72", 0.9125, True, False),
        (1, "72-24=48\n\n\\boxed{48}", 0.8, True, False),
    ]
    assert attempt.lines[0].note == "×3"
    assert [line.text for line in attempt.lines if line.text.startswith("and ")] == ["and 4 more"]
    assert attempt.lines[-1].text == "47+25=73"
    assert "duplicate" not in str(attempt.lines)


def test_without_trees_the_selected_path_is_shown(tmp_path):
    (run,) = load_runs([run_of(tmp_path / "a", [True])])
    ((row,), _) = problem_rows([run], 1)
    assert [line.text for line in row.attempts[0].lines] == ["47+25=72", "72-24=48", "\\boxed{48}"]


def test_texts_are_found_where_the_command_found_them_and_by_its_field_map(tmp_path, monkeypatch):
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"task": {"text": "1+1?"}, "answer": "1", "id": "p0"}) + "\n")
    command = {"benchmark": str(tmp_path / "tasks.jsonl"), "field_map": {"problem": "task.text"}}
    run_of(tmp_path / "run", [True], benchmark="tasks.jsonl", commands=[command])
    monkeypatch.chdir(tmp_path.parent)  # where the relative name means nothing
    ((row,), _) = problem_rows(load_runs([tmp_path / "run"]), 1)
    assert row.text == "1+1?"


def test_problems_in_dispute_come_first_when_not_all_are_shown(tmp_path):
    run_of(tmp_path / "a", [True, True, True, False])
    run_of(tmp_path / "b", [True, True, False, False])
    rows, count = problem_rows(load_runs([tmp_path]), 1)
    assert ([row.sample.unique_id for row in rows], count) == (["p2"], 4)
    assert rows[0].solved == [(1, 1), (0, 1)]


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A report of a 2x2 grid of runs, one with trees."""
    folder = tmp_path_factory.mktemp("grid")
    draws = np.random.default_rng(0)
    for n in (1, 2):
        for m in (1, 2):
            lines = [
                line(f"p{i}", bool(draws.random() < 0.4 + 0.1 * n * m), score=float(draws.random()), gold="<b>1</b>")
                for i in range(12)
            ]
            write_run(folder / "runs" / f"N{n}-M{m}", lines, beam_width=n, expansion=m)
    write_trees(folder / "runs" / "N2-M2", "p0", "p1")
    result = report(folder / "runs", "--out", folder / "out", "--resamples", 200)
    assert result.exit_code == 0, result.output
    return folder / "out", result.output


def test_a_report_writes_every_file(grid):
    out, printed = grid
    names = [
        "accuracy-peak-kv",
        "accuracy-seconds",
        "accuracy-tokens",
        "answer-length",
        "calibration",
        "heat-map",
        "steps",
    ]
    pictures = [f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    tables = ["differences.csv", "report.html", "report.md", "table.csv"]
    assert sorted(file.name for file in out.iterdir()) == sorted(pictures + tables)
    assert "N2-M2" in printed
    assert "4 runs on demo, beam, 12 problems" in printed


def test_the_page_needs_no_other_file(grid):
    page = (grid[0] / "report.html").read_text()
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import|src=", page)
    addresses = set(re.findall(r"(?:href=\"|url\(['\"]?)([^\"')]+)", page))
    assert addresses
    assert all(address.startswith("#") for address in addresses)
    identities = re.findall(r'\bid="([^"]+)"', page)
    assert len(identities) == len(set(identities))
    assert {address[1:] for address in addresses} <= set(identities)
    assert page.count("<svg") == 7
    assert "prefers-color-scheme: dark" in page


def test_plots_take_the_text_color_of_the_page_and_stay_readable_as_files(grid):
    out, _ = grid
    drawn = "".join(re.findall(r"<svg.*?</svg>", (out / "report.html").read_text(), re.DOTALL))
    ink = "#1b1e24"
    assert ink in (out / "heat-map.svg").read_text()
    assert ink not in drawn
    assert "currentColor" in drawn


def test_texts_are_escaped_on_the_page(grid):
    page = (grid[0] / "report.html").read_text()
    assert "&lt;b&gt;1&lt;/b&gt;" in page
    assert "<b>1</b>" not in page


def test_elements_of_the_page_are_closed(grid):
    page = (grid[0] / "report.html").read_text()
    for element in ("details", "summary", "div", "table", "figure", "span", "p"):
        assert len(re.findall(rf"<{element}[\s>]", page)) == page.count(f"</{element}>"), element


def test_tables_for_programs_hold_every_run_and_pair(grid):
    out, _ = grid
    runs = list(csv.DictReader(io.StringIO((out / "table.csv").read_text())))
    assert [(row["run"], row["beam_width"], row["expansion"]) for row in runs] == [
        ("N1-M1", "1", "1"), ("N1-M2", "1", "2"), ("N2-M1", "2", "1"), ("N2-M2", "2", "2"),
    ]  # fmt: skip
    pairs = list(csv.DictReader(io.StringIO((out / "differences.csv").read_text())))
    assert len(pairs) == 6
    accuracy = {row["run"]: float(row["accuracy"]) for row in runs}
    for pair in pairs:
        assert float(pair["difference"]) == pytest.approx(accuracy[pair["second"]] - accuracy[pair["first"]])
        assert len(pair["only_first_problems"].split()) == int(pair["only_first"])


def test_the_same_runs_give_the_same_files(grid, tmp_path):
    out, _ = grid
    write_report(load_runs([out.parent / "runs"]), tmp_path, resamples=200)
    for file in out.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


@pytest.mark.usefixtures("no_plots")
def test_different_problems_are_warned_of(tmp_path):
    run_of(tmp_path / "runs" / "a", [True, False])
    run_of(tmp_path / "runs" / "b", [True])
    result = report(tmp_path / "runs", "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "did not search the same problems" in result.output
    assert "did not search the same problems" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.usefixtures("no_plots")
def test_an_unfinished_run_says_so_and_one_of_a_sweep_that_has_not_begun_too(tmp_path):
    run_of(tmp_path / "runs" / "whole", [True, False, True], asked=3)
    run_of(tmp_path / "runs" / "half", [True, False, True], asked=60)
    (tmp_path / "runs" / "none").mkdir()
    (tmp_path / "runs" / "none" / "config.json").write_text('{"benchmark": "demo", "asked": 60}')
    (tmp_path / "runs" / "model").mkdir()
    (tmp_path / "runs" / "model" / "config.json").write_text('{"hidden_size": 64}')
    result = report(tmp_path / "runs", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "3 of 60, unfinished" in result.output
    assert "warning: half has 3 of 60 searches: interrupted, or still running" in result.output
    assert "warning: not begun yet, or interrupted before: none" in result.output
    for name in ("report.md", "report.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "3 of 60, unfinished" in text
        assert "half has 3 of 60 searches: interrupted, or still running" in text
        assert "whole has" not in text


def test_several_epochs_of_an_unfinished_run_are_counted_as_searches(tmp_path):
    lines = [line("p0", True, epoch=0), line("p0", True, epoch=1), line("p1", True)]
    (run,) = load_runs([write_run(tmp_path / "a", lines, asked=4)])
    table = main_table([run])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["problems"], row["searches"]) == ("2", "3 of 4, unfinished")


def test_drafted_tokens_are_told_with_the_share_that_was_of_use_also_of_samples_with_counters_of_old(tmp_path):
    usage = sample("p0").usage
    spent = {"drafted_tokens": 30, "accepted_tokens": 24}
    of_old = {"ahead_tokens": 16, "ahead_kept_tokens": 4}
    write_run(tmp_path / "with", [line("p0", True, usage=usage | spent | of_old)])
    write_run(tmp_path / "without", [line("p0", True)])
    without, both = (
        main_table(load_runs([*folders])) for folders in ([tmp_path / "without"], sorted(tmp_path.iterdir()))
    )
    titles = ["drafted tokens", "accepted %"]
    assert not set(titles) & set(without.columns)
    rows = [dict(zip(both.columns, row, strict=True)) for row in both.rows]
    assert [[row[title] for title in titles] for row in rows] == [["30", "80.0"], ["0", "–"]]


@pytest.mark.usefixtures("no_plots")
def test_searches_without_an_answer_are_counted_and_explained(tmp_path):
    cut = {"answer": "", "text": "", "unanswered": "max-tokens"}
    old = {"answer": "", "text": ""}
    write_run(tmp_path / "runs" / "a", [line("p0", False, **cut), line("p1", True), line("p2", False, **old)])
    run_of(tmp_path / "runs" / "b", [True] * 3)
    result = report(tmp_path / "runs", "--out", tmp_path / "out")
    said = (
        "2 of 3 searches ended without an answer: 1 cut by --max-tokens, 1 without a recorded reason; raise --max-tok"
    )
    assert f"warning: {said}" in result.output
    page = (tmp_path / "out" / "report.html").read_text()
    assert said in page
    assert re.search(r'<strong>no answer</strong> <span class="dim">cut by --max-tokens</span>', page)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "table.csv").read_text())))
    assert [row["unanswered"] for row in rows] == ["2", "0"]
    assert "no answer" in (tmp_path / "out" / "report.md").read_text()


def test_axes_that_count_have_no_fractions(tmp_path, monkeypatch):
    figures = {}
    monkeypatch.setattr(plots.shared, "save_for_page", lambda drawn, path: figures.setdefault(path.name, drawn) and "")
    run_of(tmp_path / "a", [True, False])
    plots.draw_plots(load_runs([tmp_path / "a"]), tmp_path)
    counts = {
        "steps": [axis for axes in figures["steps"].axes for axis in (axes.xaxis, axes.yaxis)],
        "answer-length": [axes.yaxis for axes in figures["answer-length"].axes],
        "calibration": [figures["calibration"].axes[1].yaxis],
    }
    for name, axes in counts.items():
        for axis in axes:
            assert all(float(tick).is_integer() for tick in axis.get_major_locator()()), name


def test_one_run_alone_without_scores(tmp_path):
    lines = [line("p0", False, score=None, text="", answer="", wall_seconds=0)]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "calibration.svg").write_text("of an earlier report")
    result = report(write_run(tmp_path / "a", lines), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "out" / "calibration.svg").exists()
    assert not (tmp_path / "out" / "accuracy-seconds.svg").exists()
    assert "no answer" in (tmp_path / "out" / "report.html").read_text()


def test_out_that_cannot_be_written_is_named(tmp_path):
    run_of(tmp_path / "a", [True])
    (tmp_path / "file").write_text("")
    result = report(tmp_path / "a", "--out", tmp_path / "file")
    assert isinstance(result.exception, EspalierError)
    assert "name another --out" in str(result.exception)


def test_scipy_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    run_of(tmp_path / "a", [True, False])
    run_of(tmp_path / "b", [True, True])
    with pytest.raises(EspalierError, match=re.escape("pip install 'espalier-search[report]'")):
        differences(load_runs([tmp_path / "a", tmp_path / "b"]))
