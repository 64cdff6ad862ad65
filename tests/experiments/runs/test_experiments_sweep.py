"""Sweeps on tiny random models, their table and their plot."""

import csv
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from run_samples import summary

from espalier.engine.errors import EspalierError
from espalier.experiments.cli.render import show_cells
from espalier.experiments.plots.cells import plot_cells
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.statistics import wilson_interval
from espalier.experiments.runs.sweep import Cell, sweep
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.orchestrator import Orchestrator

PROBLEMS = [Problem(f"p/{i}", f"What is {i}+1?", str(i), i) for i in range(2)]
REQUEST = SearchRequest("-", max_steps=3, max_step_tokens=8)
EVALUATION = {"benchmark", "asked", "epochs", "keep_trees", "on_sample"}


@pytest.fixture
def run(make_orchestrator, grader, tmp_path):
    orchestrator = make_orchestrator()

    def cells(widths: list[int], expansions: list[int], **options: Any) -> list[Cell]:
        folder, request = options.pop("folder", tmp_path / "sweep"), options.pop("request", REQUEST)
        of_evaluation = {name: options.pop(name) for name in EVALUATION & options.keys()}
        evaluation = Evaluation(orchestrator, PROBLEMS, grader, **{"benchmark": "some", **of_evaluation})
        requests = [replace(request, beam_width=n, expansion=m) for n, m in product(widths, expansions)]
        return sweep(evaluation, options.pop("requests", requests), folder, **options)

    run: Any = cells
    run.defaults = orchestrator.defaults
    run.steps = lambda: orchestrator.engine.stats()["generator"].steps
    return run


def cell(n: int, m: int, correct: int, problems: int = 7, tokens: float = 100.0) -> Cell:
    low, high = wilson_interval(correct, problems)
    of_cell = summary(
        problems=problems, correct=correct, accuracy=correct / problems, low=low, high=high, generated_tokens=tokens,
        verifier_tokens=2 * tokens, problems_per_minute=7.0,
    )  # fmt: skip
    return Cell(f"N{n}-M{m}", {"beam_width": n, "expansion": m}, of_cell)


def point(cell: Cell) -> tuple[int, int]:
    return cell.settings["beam_width"], cell.settings["expansion"]


def some_refused(of: Cell, count: int) -> Cell:
    return replace(of, summary=replace(of.summary, refused=count, errors={"refused": "p/1: too long"}))


def figures(cells: list[Cell]) -> dict[tuple[int, int], tuple[Any, ...]]:
    """What each cell computed."""
    return {
        point(c): (
            c.summary.generated_tokens,
            c.summary.verifier_tokens,
            c.summary.generator_redundancy,
            c.summary.verifier_redundancy or 0.0,
        )
        for c in cells
    }


def test_sweep_covers_the_grid_in_order(run):
    seen: list[Cell] = []
    cells = run([1, 2], [1, 3], on_cell=seen.append)
    assert [point(c) for c in cells] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert seen == cells
    for c in cells:
        assert c.summary.problems == 2
        assert (c.summary.configuration["beam_width"], c.summary.configuration["expansion"]) == point(c)
    assert cells[-1].summary.generated_tokens > cells[0].summary.generated_tokens


def test_sweep_writes_its_cells_and_a_run_folder_for_each(run, tmp_path):
    cells = run([1, 2], [2])
    written = json.loads((tmp_path / "sweep" / "cells.json").read_text())
    assert written == json.loads(json.dumps([c.to_dict() for c in cells]))
    for name in ("N1-M2", "N2-M2"):
        folder = tmp_path / "sweep" / name
        assert len((folder / "samples.jsonl").read_text().splitlines()) == 2
        configuration = json.loads((folder / "config.json").read_text())
        assert configuration["beam_width"] == int(name[1])
        assert len(configuration["generator"]) == 64  # the digest of its weights
        assert configuration["beam_width"] == int(name[1])


def test_sweep_that_is_run_again_computes_only_new_cells(run):
    first = run([1], [1, 2])
    steps = run.steps()
    assert [c.summary.accuracy for c in run([1], [1, 2])] == [c.summary.accuracy for c in first]
    assert run.steps() == steps
    new = []
    run([1], [1, 2, 3], on_sample=new.append)
    assert len(new) == 2


def test_table_lists_all_cells_that_the_folder_holds(run, tmp_path):
    first = run([1], [1, 2])
    both = run([2], [1])
    assert [point(c) for c in both] == [(1, 1), (1, 2), (2, 1)]
    assert both[:2] == first
    assert json.loads((tmp_path / "sweep" / "cells.json").read_text()) == json.loads(
        json.dumps([c.to_dict() for c in both])
    )
    with (tmp_path / "sweep" / "sweep.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(int(row["beam_width"]), int(row["expansion"])) for row in rows] == [(1, 1), (1, 2), (2, 1)]
    for row, c in zip(rows, both, strict=True):
        for column in ("problems", "refused", "correct", "accuracy", "low", "generated_tokens", "verifier_tokens"):
            assert float(row[column]) == getattr(c.summary, column)


def test_limit_adds_problems_and_takes_none_away(run):
    assert run([1], [1], asked=PROBLEMS[:1])[0].summary.problems == 1
    first = run([1], [1])
    assert first[0].summary.problems == 2
    steps = run.steps()
    assert run([1], [1], asked=PROBLEMS[:1]) == first
    assert run.steps() == steps


def test_cell_of_another_benchmark_is_refused_before_any_runs(run, tmp_path):
    run([1], [1])
    steps = run.steps()
    with pytest.raises(EspalierError, match=r'N1-M1 holds a run of another configuration: benchmark is "some" there'):
        run([2], [1], benchmark="other")
    assert run.steps() == steps
    assert not (tmp_path / "sweep" / "N2-M1").exists()


def test_cells_of_any_field_are_added_and_only_they_run(run, tmp_path):
    first = run([1, 2], [2])
    steps = run.steps()
    new = []
    requests = [replace(REQUEST, beam_width=2, expansion=2, seed=seed) for seed in (0, 7)]
    cells = run([], [], requests=requests, on_sample=new.append)
    assert len(new) == 2  # seed 0 was there
    assert run.steps() > steps
    assert [(c.name, c.settings) for c in cells] == [
        ("N1-M2", {"beam_width": 1, "expansion": 2, "seed": 0}),
        ("N2-M2", {"beam_width": 2, "expansion": 2, "seed": 0}),
        ("N2-M2-seed7", {"beam_width": 2, "expansion": 2, "seed": 7}),
    ]
    assert [c.summary for c in cells[:2]] == [c.summary for c in first]
    with (tmp_path / "sweep" / "sweep.csv").open(newline="") as stream:
        assert [row["seed"] for row in csv.DictReader(stream)] == ["0", "0", "7"]


def test_cells_that_differ_in_an_unused_field_only_are_one(run):
    best, beam = (replace(REQUEST, algorithm=AlgorithmName(name), beam_width=2) for name in ("best-of-n", "beam"))
    cells = run([], [], requests=[replace(each, expansion=m) for each in (best, beam) for m in (1, 2)])
    assert [c.name for c in cells] == ["best-of-n-N2", "beam-N2-M1", "beam-N2-M2"]
    assert cells[0].settings == {"algorithm": "best-of-n", "beam_width": 2, "expansion": None}
    steps = run.steps()
    again = run([], [], requests=[replace(best, expansion=4)])
    assert again == cells
    assert run.steps() == steps


def test_a_value_equal_to_the_default_in_effect_is_no_other_cell(run):
    temperature = run.defaults.fill(REQUEST).temperature
    cells = run([], [], requests=[REQUEST, replace(REQUEST, temperature=temperature)])
    assert len(cells) == 1


def test_isolated_refuses_samples_of_searches_that_ran_beside_others(run):
    run([1], [1], command={"in_flight": 32})
    with pytest.raises(EspalierError, match=r"--isolated: .*N1-M1 holds samples of searches that ran beside others"):
        run([1], [1], isolated=True)
    run([2], [1], isolated=True, command={"in_flight": 1})
    run([2], [1], isolated=True, command={"in_flight": 1})


def test_a_cell_computes_the_same_first_last_alone_and_after_an_interruption(run, tmp_path):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    first = figures(run([2, 1], [1, 2], folder=tmp_path / "first"))
    last = figures(run([1, 2], [2, 1], folder=tmp_path / "last"))
    alone = {}
    for n, m in first:
        alone |= figures(run([n], [m], folder=tmp_path / f"alone{n}{m}"))
    with pytest.raises(KeyboardInterrupt):
        run([2], [2], folder=tmp_path / "parts", on_sample=interrupt)
    parts = figures(run([2], [2], folder=tmp_path / "parts"))
    assert first == last == alone
    assert parts[2, 2] == first[2, 2]
    assert all(verifier > 0 for _, verifier, *_ in first.values())


def test_cells_of_other_models_are_not_taken_for_these(run, monkeypatch):
    run([1], [1])
    monkeypatch.setattr(Orchestrator, "describe_models", lambda _: {"verifier": "another digest"})
    with pytest.raises(EspalierError, match=r"another configuration.*verifier"):
        run([1], [1])


def test_plot_is_a_picture_of_the_cells(tmp_path: Path):
    cells = [cell(n, m, correct=n + m, tokens=100.0 * n * m) for n in (1, 2) for m in (1, 2, 4)]
    plot_cells(cells, "some", tmp_path / "accuracy.png")
    pixels = matplotlib.image.imread(tmp_path / "accuracy.png")
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 500
    colours = {tuple(p) for p in (pixels[..., :3].reshape(-1, 3) * 255).astype(int).tolist()}
    assert len(colours) > 20  # lines in several colours, not an empty frame


def test_plot_tells_beam_widths_and_expansions(tmp_path):
    plot_cells([cell(1, 1, 3), cell(1, 2, 4, tokens=200), cell(4, 1, 5)], "some", tmp_path / "accuracy.svg")
    text = (tmp_path / "accuracy.svg").read_text()
    for label in ("N = 1", "N = 4", "M = 1", "M = 2", "accuracy, %", "7 problems"):
        assert f"<!-- {label}" in text or label in text


@pytest.fixture
def drawn(monkeypatch, tmp_path) -> Callable[[list[Cell]], Figure]:
    """Draws cells; returns the figure as it was written."""

    def drawn(cells: list[Cell]) -> Figure:
        figures: list[Figure] = []

        def lay_out(figure: Figure, *_: object, **__: object) -> None:
            figure.canvas.draw()
            figures.append(figure)

        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", lay_out)
            plot_cells(cells, "some", tmp_path / "accuracy.png")
        return figures[0]

    return drawn


def markers(figure: Figure) -> dict[tuple[float, float], tuple[float, float]]:
    """By tokens and accuracy, where in the picture the marker of each cell is."""
    (axes,) = figure.axes
    found = {}
    for line in axes.lines:
        points = np.asarray(line.get_xydata())
        if line.get_marker() in ("o", "s", "D") and len(points) == 1:
            x, y = line.get_transform().transform(points)[0]
            found[tuple(points[0].tolist())] = float(x), float(y)
    return found


def test_cells_of_the_same_cost_and_accuracy_are_drawn_apart(drawn):
    cells = [cell(n, 4 // n, 5, tokens=100.0 + n / 100) for n in (1, 2, 4)] + [cell(1, 1, 2, tokens=20.0)]
    figure = drawn(cells)
    xs = sorted(x for (_, accuracy), (x, _) in markers(figure).items() if accuracy > 50)
    least = 5 / 72 * figure.dpi
    assert len(xs) == 3
    assert min(b - a for a, b in pairwise(xs)) > least
    box = figure.axes[0].get_window_extent()
    assert all(box.x0 < x < box.x1 and box.y0 < y < box.y1 for x, y in markers(figure).values())


def test_no_text_of_the_plot_lies_on_another(drawn):
    figure = drawn([cell(n, m, 5, tokens=100.0 * n * m) for n in (1, 2, 4) for m in (1, 2, 4)])
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == []
    boxes = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert not any(axes.get_window_extent().overlaps(box) for box in boxes)


def test_a_refused_cell_is_named_and_not_drawn_at_nothing(drawn):
    none = some_refused(cell(4, 1, 0, tokens=0), 7)
    figure = drawn([cell(1, 1, 5), some_refused(cell(2, 1, 3, tokens=200.0), 2), none])
    assert {tokens for tokens, _ in markers(figure)} == {100.0, 200.0}
    assert figure._supxlabel.get_text() == "refused: N=2 M=1 (2 of 7), N=4 M=1 (all, not drawn)"
    assert list(drawn([none]).axes[0].lines) == []


def test_plot_has_a_line_for_each_setting_other_than_n_and_m(drawn):
    cells = [cell(n, 2, 3 + n, tokens=100.0 * n) for n in (1, 2)]
    best = [replace(c, settings={"algorithm": "best-of-n", "beam_width": i, "expansion": None, "temperature": 0.6})
            for i, c in enumerate(cells, 1)]  # fmt: skip
    beam = [replace(c, settings={"algorithm": "beam", **c.settings, "temperature": 1.0}) for c in cells]
    labels = [text.get_text() for text in drawn([*best, *beam]).legends[0].get_texts()]
    assert labels == ["best-of-n, temperature 0.6", "beam, temperature 1.0", "M not used", "M = 2"]


def test_other_run_folders_beside_the_cells_are_left_alone(run, tmp_path):
    first = run([1], [1])
    for name, text in (("mine", "{}"), ("model", "not JSON")):
        (tmp_path / "sweep" / name).mkdir()
        (tmp_path / "sweep" / name / "config.json").write_text(text)
    assert run([1], [1]) == first
    assert (tmp_path / "sweep" / "mine" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("correct", [0, 7])
def test_plot_bears_cells_where_none_or_all_are_right(tmp_path, correct):
    plot_cells([cell(1, 1, correct), cell(1, 2, correct, tokens=200)], "some", tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 5000


def test_plot_bears_cells_in_which_nothing_was_generated(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_cells([cell(1, 1, 0, tokens=0.0)], "some", tmp_path / "accuracy.svg")
    assert "N = 1" in (tmp_path / "accuracy.svg").read_text()


def test_table_shows_each_cell_with_its_interval(tmp_path):
    out = StringIO()
    old = cell(4, 2, 7)
    old = replace(old, summary=replace(old.summary, problems_per_minute=None))
    show_cells(Console(file=out, width=160), [cell(1, 2, 3, tokens=123.4), old], tmp_path)
    one, other = [line.split("│") for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [field.strip() for field in one[1:-1]] == ["1", "2", "7", "42.9", "[15.8, 75.0]", "123", "247", "7.0"]
    assert [field.strip() for field in other[1:-1]] == ["4", "2", "7", "100.0", "[64.6, 100.0]", "100", "200", ""]
    assert "refused" not in out.getvalue()


@pytest.mark.parametrize(
    ("refused", "shown"), [(7, ["7, 7 refused", "", "refused"]), (2, ["7, 2 refused", "0.0", "[0.0, 35.4]"])]
)
def test_table_says_where_problems_were_refused_and_why(tmp_path, refused: int, shown: list[str]):
    out = StringIO()
    show_cells(Console(file=out, width=300), [some_refused(cell(1, 2, 0), refused)], tmp_path)
    (row,) = [line.split("│") for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [field.strip() for field in row[3:6]] == shown
    assert f"N=1 M=2: {refused} could not be searched, such as p/1: too long; all are in " in out.getvalue()
    assert str(tmp_path / "N1-M2" / "samples.jsonl") in out.getvalue()
