"""What a person sees of a result, on a tree written by hand."""

from collections.abc import Callable
from dataclasses import replace
from io import StringIO

import matplotlib.image
import pytest
from hand_made import BEST, LONG, NODES, ROOT, node, result
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from rich.console import Console
from run_samples import summary

from espalier.experiments.cli.render import search_tree, show_cells, show_result, show_summary
from espalier.experiments.plots.tree import plot_tree
from espalier.experiments.runs.sweep import Cell

SUMMARY = summary(
    problems=300, searches=300, correct=120, accuracy=0.4, low=0.346, high=0.456,
    accuracy_by_level={"1": 0.75, "2": 0.05}, generated_tokens=480.4, verifier_tokens=171.2, verifier_redundancy=1.034,
    generator_redundancy=1.0, blocks_shared=0.42, seconds=61.24, problems_per_minute=293.9,
)  # fmt: skip


def rendered(*, width: int = 200, **changes: object) -> str:
    out = StringIO()
    console = Console(file=out, width=width)
    gold = changes.pop("gold", None)
    show_result(console, result(**changes), gold)
    return out.getvalue()


def line_with(text: str, of: str) -> str:
    (line,) = [line for line in of.splitlines() if text in line]
    return line


def test_tree_shows_scores_marks_and_how_many_merged():
    text = rendered()
    kept = line_with("47+25=72", text)
    assert "0.9125" in kept
    assert "×3" in kept
    assert "pruned" not in kept
    pruned = line_with("47+25=73", text)
    assert "0.2000" in pruned
    assert "✗ pruned" in pruned
    assert "×" not in pruned
    assert "✓ complete" in line_with("72-24=48", text)


def test_tree_leaves_out_merged_twins():
    assert rendered().count("47+25=72") == 1


def test_a_step_takes_one_line_and_a_long_one_is_cut():
    line = line_with("step by step", rendered())
    assert "…" in line
    assert "✗ cut off" in line
    assert line.count("step by step") < LONG.count("step by step")
    assert "72-24=48 \\boxed{48}" in rendered()  # its blank line is a space


def test_step_without_text_is_shown_as_the_end():
    assert "✓ complete" in line_with("(end)", rendered())


def test_only_the_best_few_pruned_at_a_fork_are_shown_and_the_rest_counted():
    text = rendered()
    shown = [f"72-24={40 + i}" in text for i in range(6)]
    assert 1 <= sum(shown) <= 3
    assert shown == sorted(shown, reverse=True)  # the best scored ones
    hidden = 7 - sum(shown) - 1  # with the one that was cut off
    assert f"and {hidden} more" in text


def test_selected_path_comes_first():
    lines = [line for line in rendered().splitlines() if "72-24=" in line or "step by step" in line]
    assert "72-24=48" in lines[0]


def test_children_hang_below_their_parents():
    tree = search_tree(result())
    first, second = tree.children
    assert "47+25=72" in str(first.label)
    assert len(first.children) > 2
    assert not second.children


def test_answer_and_gold_are_shown():
    assert line_with("answer", rendered(gold="49")).split() == ["answer", "48", "(expected", "49)"]
    assert "expected" not in rendered()


def test_search_without_an_answer_says_so():
    text = rendered(answer="", best=None, candidates=(), score=None)
    assert "no answer" in text
    assert "47+25=72" in text


def test_costs_are_shown():
    text = rendered()
    for figure in (
        "12 steps",
        "7 pruned",
        "1 merged",
        "204 tokens",
        "301",
        "64",
        "10 KV blocks",
        "16",
        "3.0 MiB",
        "1.50 s",
    ):
        assert figure in text


def test_paths_that_a_decided_vote_cut_short_are_shown():
    usage = replace(result().usage, stopped_paths=3, stopped_tokens=41)
    assert "3 paths cut short, about 41 tokens" in rendered(usage=usage)
    assert "cut short" not in rendered()


def test_result_without_its_tree_shows_the_answer_alone():
    text = rendered(nodes=())
    assert "48" in text
    assert "pruned\n" not in text


def test_text_in_brackets_is_not_taken_for_markup():
    nodes = (ROOT, node(1, 0, 1, "f on [bold] and [/b] and [a, b]\n\n", 0.5))
    text = rendered(nodes=nodes, answer="[a, b]", best=replace(BEST, node_id=1), gold="[x] [/y]")
    for part in ("[bold]", "[/b]", "[a, b]", "[x] [/y]"):
        assert part in text


def test_scores_that_are_not_there_leave_their_place_empty():
    nodes = tuple(replace(n, score=None) for n in NODES)
    text = rendered(nodes=nodes, score=None, best=replace(BEST, score=None))
    assert "0.9125" not in text
    assert "None" not in text


def test_summary_shows_accuracy_with_its_interval_and_the_costs():
    out = StringIO()
    show_summary(Console(file=out, width=120), SUMMARY)
    text = out.getvalue()
    for figure in ("300 problems", "40.0%", "[34.6, 45.6]", "1: 75%", "2: 5%", "480", "171", "1.034", "0.42", "61.2 s"):
        assert figure in text
    assert "293.9 problems/min" in text


def test_summary_of_samples_without_a_time_claims_no_speed():
    out = StringIO()
    summary = replace(SUMMARY, problems_per_minute=None, verifier_redundancy=None, accuracy_by_level={})
    show_summary(Console(file=out, width=120), summary)
    assert "problems/min" not in out.getvalue()
    assert "by level" not in out.getvalue()


@pytest.mark.parametrize("what", ["refused", "ungraded"])
def test_summary_says_why_a_problem_came_to_nothing_and_names_a_file_only_where_there_is_one(tmp_path, what):
    for folder in (None, tmp_path / "run"):
        out = StringIO()
        summary = replace(SUMMARY, **{what: 2, "errors": {what: "p/7: it takes too much"}})
        show_summary(Console(file=out, width=300), summary, folder=folder)
        assert "such as p/7: it takes too much" in line_with(what, out.getvalue())
        assert (f"all are in {tmp_path / 'run' / 'samples.jsonl'}" in out.getvalue()) == (folder is not None)
        assert ("samples.jsonl" in out.getvalue()) == (folder is not None)


def test_accuracy_is_not_zero_but_unknown_where_no_answer_could_be_graded(tmp_path):
    """As where the grader cannot run at all; a single verdict is enough for a share."""
    count = SUMMARY.searches
    wrong = replace(SUMMARY, correct=0, accuracy=0.0, low=0.0, refused=0, errors={"ungraded": "p/0: it died"})
    for lost, unanswered, known in ((count, 0, False), (count - 3, 3, False), (count - 3, 2, True), (0, count, True)):
        summary = replace(wrong, ungraded=lost, unanswered={"budget": unanswered})
        out = StringIO()
        show_summary(Console(file=out, width=300), summary)
        show_cells(Console(file=out, width=300), [Cell("N1-M1", {"beam_width": 1}, summary)], tmp_path)
        assert ("0.0" in line_with("accuracy  ", out.getvalue())) == known
        assert (f"none of {lost} answers could be graded" in out.getvalue()) == (not known)
        assert ("not graded" in out.getvalue()) == (not known)
        assert ("level" in out.getvalue() or "by subject" in out.getvalue()) == known


def test_summary_tells_problems_of_an_earlier_command_from_those_of_this_one(tmp_path):
    out = StringIO()
    show_summary(Console(file=out, width=300), SUMMARY, 100, tmp_path)
    assert f"300 problems, 200 of them from an earlier command in {tmp_path}" in out.getvalue()
    out = StringIO()
    show_summary(Console(file=out, width=300), SUMMARY, 300, tmp_path)
    assert "earlier" not in out.getvalue()


def test_summary_names_a_benchmark_in_brackets_as_it_is():
    out = StringIO()
    show_summary(Console(file=out, width=120), replace(SUMMARY, benchmark="runs/[a]/x.jsonl"))
    assert "runs/[a]/x.jsonl" in out.getvalue()


# --- the picture of a tree -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_tree_can_be_drawn(tmp_path, suffix):
    file = tmp_path / f"tree.{suffix}"
    plot_tree(result(), "What is 47+25-24?", file)
    assert file.stat().st_size > 3000
    if suffix == "png":
        pixels = matplotlib.image.imread(file)
        assert len({tuple(p) for p in (pixels[..., :3].reshape(-1, 3) * 255).astype(int).tolist()}) > 20


@pytest.fixture
def drawn(monkeypatch, tmp_path) -> Callable[..., Figure]:
    """Draws a tree; returns the figure as it was written."""

    def drawn(title: str, **changes: object) -> Figure:
        figures: list[Figure] = []

        def lay_out(figure: Figure, *_: object, **__: object) -> None:
            figure.canvas.draw()
            figures.append(figure)

        monkeypatch.setattr(Figure, "savefig", lay_out)
        plot_tree(result(**changes), title, tmp_path / "tree.png")
        return figures[0]

    return drawn


def test_heading_of_a_wide_tree_is_large_and_within_the_picture(drawn):
    chain = (ROOT, *(node(i, i - 1, i, f"{i}+1={i + 1}", 0.9, "eos" if i == 12 else "") for i in range(1, 13)))
    figure = drawn("How many buttons does it have now? " * 12, nodes=chain, best=replace(BEST, node_id=12))
    (axes,) = figure.axes
    heading, label = axes.title, axes.texts[0]
    assert heading.get_fontsize() >= 2 * label.get_fontsize()
    box = heading.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1


def test_every_label_of_a_tree_stands_out_from_its_box(drawn):
    scores = [i / 10 for i in range(11)]
    nodes = (ROOT, *(node(1 + i, 0, 1, f"{i}", s, end) for i, s in enumerate(scores) for end in ("pruned",)))
    nodes = (*nodes, *(node(20 + i, 0, 1, f"{i}", s) for i, s in enumerate(scores)))
    (axes,) = drawn("?", nodes=nodes, best=None).axes
    assert len(axes.texts) == 23
    for text in axes.texts:
        patch = text.get_bbox_patch()
        assert patch is not None
        assert contrast(to_rgb(text.get_color()), patch.get_facecolor()[:3]) >= 7, text.get_text()


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Ratio of luminances as accessibility guidelines count it: 4.5 is readable, 7 well."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_same_tree_gives_the_same_drawing(tmp_path):
    for name in ("a.svg", "b.svg"):
        plot_tree(result(), "What is 47+25-24?", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_latex_in_a_problem_or_step_does_not_stop_the_drawing(tmp_path):
    nodes = (ROOT, node(1, 0, 1, "Thus $\\boxed{48}$ and $5 \\begin{x}", 0.5, "eos"))
    best = replace(BEST, node_id=1)
    plot_tree(result(nodes=nodes, best=best), "Find $\\begin{pmatrix} 1 \\end{pmatrix}$ for $5", tmp_path / "tree.svg")
    assert (tmp_path / "tree.svg").stat().st_size > 1000


def test_tree_without_steps_can_be_drawn(tmp_path):
    plot_tree(result(nodes=(ROOT,), best=None, answer=""), "What?", tmp_path / "tree.svg")
    drawn = (tmp_path / "tree.svg").read_text()
    assert "What?</text>" in drawn
    assert "problem</text>" in drawn
