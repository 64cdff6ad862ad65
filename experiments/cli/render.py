"""Renders results in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from espalier.experiments.report.trees import Line, tree_lines
from espalier.experiments.runs.grid import settings_text
from espalier.experiments.runs.record import Unanswered, unanswered_in, unanswered_text, why_unanswered
from espalier.search.result import SearchResult, StopReason
from espalier.search.usage import USAGE_COUNTERS

if TYPE_CHECKING:  # which need what a client alone has not installed
    from espalier.experiments.planning.sweep_cost import Estimate
    from espalier.experiments.runs.summary import Summary
    from espalier.experiments.runs.sweep import Cell

_MAX_STEP_SHOWN = 100
_WIDEST = 400
_STOPPED = {
    StopReason.BUDGET: "cut short by --generator-budget or --verifier-budget",
    StopReason.DEADLINE: "cut short by --time-limit",
    StopReason.CANCELLED: "cancelled",
}


def show_result(console: Console, result: SearchResult, gold: str | None) -> None:
    """Print a search's tree, answer and cost."""
    if result.nodes and len(result.nodes) > 1:
        console.print(search_tree(result))
    verdict = "" if gold is None else f"   (expected {gold})"
    if result.answer:
        probed = f"   (probed: no path has ended; {result.probed.share:.0%} of the probes)" if result.probed else ""
        console.print(Text.assemble(("\nanswer  ", "bold"), (result.answer, "bold green"), probed, verdict))
    else:
        console.print(Text.assemble(("\nno answer", "bold red"), f": {_why_unanswered(result)}{verdict}"))
    console.print(_costs(result))


def _why_unanswered(result: SearchResult) -> str:
    why = why_unanswered(result, None)
    if why is None or why is Unanswered.UNKNOWN:
        return "no path was completed with an answer"
    return f"{why.text}; {why.advice}" if why.advice else why.text


def search_tree(result: SearchResult) -> Tree:
    """Build the search tree: kept steps with scores, the best pruned ones at each fork, and a count of the rest."""
    root = Tree(Text("problem", style="bold"), guide_style="dim")
    branches = [root]
    for line in tree_lines(result.nodes, result.selected_path):
        branches[line.depth + 1 :] = [branches[line.depth].add(_label(line))]
    return root


def _label(line: Line) -> Text:
    if line.left_out:
        return Text(line.text, style="dim")
    score, text = "      " if line.score is None else f"{line.score:.4f}", " ".join(line.text.split())
    if len(text) > _MAX_STEP_SHOWN:
        text = text[:_MAX_STEP_SHOWN] + " …"
    style = "bold green" if line.selected else "dim" if line.faded else ""
    return Text.assemble((score, "cyan"), "  ", (text, style), (line.note and f"  {line.note}", "dim"))


def _costs(result: SearchResult) -> Group:
    a = result.usage
    rows = [
        f"{a.nodes} steps sampled, {a.pruned} pruned, {a.duplicates} merged with an equal sibling",
        f"{a.generated_tokens} tokens generated; computed {a.generator_tokens}, verifier {a.verifier_tokens}; "
        f"sharing saved {a.generator_saved_tokens} and {a.verifier_saved_tokens}",
        f"{a.physical_blocks} KV blocks held, {a.logical_blocks} without sharing "
        f"({a.peak_kv_bytes / 2**20:.1f} MiB at the peak)",
        f"{a.seconds:.2f} s",
    ]
    told = asdict(a)
    notes = [each.note.format_map(told) for name, each in USAGE_COUNTERS.items() if each.note and told[name]]
    rows[1] = "; ".join([rows[1], *notes])
    if a.stopped_paths:
        rows.insert(2, f"decided early: {a.stopped_paths} paths cut short, about {a.stopped_tokens} tokens saved")
    if result.stop_reason in _STOPPED:
        rows.insert(0, _STOPPED[result.stop_reason])
    return Group(*(Text(row, style="dim") for row in rows))


def show_summary(console: Console, summary: Summary, asked: int | None = None, folder: Path | None = None) -> None:
    """Print an evaluation's summary.

    Args:
        console: output console.
        summary: summary of all problems in the run.
        asked: number of problems requested by the command, if it may be lower.
        folder: folder of the run; None if nothing was stored.
    """
    unit, units = ("search", "searches") if summary.epochs > 1 else ("problem", "problems")
    more = summary.problems - (summary.problems if asked is None else asked)
    rows = {
        "benchmark": f"{summary.benchmark}, {summary.problems} problems"
        + (f", {summary.epochs} times each" if summary.epochs > 1 else "")
        + (f", {more} of them from an earlier command in {folder}" if more > 0 else ""),
        "refused": _with_reason(summary, "refused", "could not be searched", folder),
        "ungraded": _with_reason(summary, "ungraded", "could not be graded", folder),
        "accuracy": summary.accuracy_text,
        "no answer": unanswered_text(summary.unanswered, summary.searches),
        "by level": _shares(summary, summary.accuracy_by_level),
        "by subject": _shares(summary, summary.accuracy_by_subject),
        f"tokens per {unit}": f"{summary.generated_tokens:.0f} generated, {summary.verifier_tokens:.0f} verifier",
        "computed ÷ tree": ", ".join(
            f"{role} {ratio:.3f}"
            for role, ratio in (("generator", summary.generator_redundancy), ("verifier", summary.verifier_redundancy))
            if ratio is not None
        ),
        "blocks held ÷ logical": "" if summary.blocks_shared is None else f"{summary.blocks_shared:.2f} at the peak",
        "derived": f"{summary.derived} from larger searches, whose time and memory are not these"
        * (summary.derived > 0),
        "time": f"{summary.seconds:.1f} s, {summary.problems_per_minute:.1f} {units}/min"
        if summary.problems_per_minute
        else "",
        "grader": summary.grader,
    }
    console.print(grid_of(rows.items(), (0, 2)))


def _shares(summary: Summary, accuracy_by: Mapping[str, float]) -> str:
    return "  ".join(f"{group}: {100 * share:.0f}%" for group, share in accuracy_by.items()) * summary.is_graded


def _with_reason(summary: Summary, what: str, meaning: str, folder: Path | None) -> str:
    """Number of problems that failed in this way, and the first reason; refers to the samples file for the others."""
    if not (count := getattr(summary, what)):
        return ""
    others = f"; all are in {folder / 'samples.jsonl'}" if folder and count > 1 else ""
    return f"{count} {meaning}, such as {summary.errors[what]}{others}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as it is, wider than the terminal if need be: a figure cut off would be a wrong one."""
    width = console.width
    needed = console.measure(table, options=console.options.update(width=_WIDEST, max_width=_WIDEST)).maximum
    console.width = max(needed, width)
    console.print(table)
    console.width = width


def table_of(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = (), **options: Any
) -> Table:
    """A table of texts, none of them broken; columns stand on the right, but the first and those named in `left`.

    `options` are those of `rich.table.Table`.
    """
    table = Table(**options)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place and name not in left else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def grid_of(rows: Iterable[tuple[str, str]], padding: tuple[int, int] | tuple[int, int, int, int] = (0, 1)) -> Table:
    """Names and their values beside them, without a border; values that are empty are left out."""
    table = Table(show_header=False, box=None, padding=padding)
    for name, value in rows:
        if value:
            table.add_row(Text(name, style="bold"), Text(value))
    return table


def show_cells(console: Console, cells: list[Cell], folder: Path) -> None:
    """Print the table of a sweep whose run folders are in `folder`."""
    short = {"beam_width": "N", "expansion": "M"}
    names = [short.get(name, name.replace("_", "\n")) for name in (cells[0].settings if cells else ())]
    columns = (
        *names, "problems", "accuracy\n%", "95%\ninterval", "tokens\ngenerated", "verifier\ntokens", "problems\n/min",
    )  # fmt: skip
    narrow = len(names) > len(short)
    rows = map(_cell_row, cells)
    print_whole(console, table_of(columns, rows, columns, pad_edge=not narrow, padding=(0, 0 if narrow else 1)))
    unanswered = unanswered_in(
        [(settings_text(cell.settings), cell.summary.unanswered, cell.summary.searches) for cell in cells]
    )
    if unanswered:
        console.print(unanswered, highlight=False, markup=False)
    for cell in cells:
        for what, meaning in (("refused", "could not be searched"), ("ungraded", "could not be graded")):
            if why := _with_reason(cell.summary, what, meaning, folder / cell.name):
                console.print(f"{settings_text(cell.settings)}: {why}", highlight=False, markup=False)


def _cell_row(cell: Cell) -> list[str]:
    s = cell.summary
    return [
        *("" if value is None else str(value) for value in cell.settings.values()),
        f"{s.problems}" + (f", {s.refused} refused" if s.refused else ""),
        "" if cell.refused or not s.is_graded else _percent(s.accuracy),
        "refused" if cell.refused else f"[{_percent(s.low)}, {_percent(s.high)}]" if s.is_graded else "not graded",
        f"{s.generated_tokens:.0f}",
        f"{s.verifier_tokens:.0f}",
        "" if s.problems_per_minute is None else f"{s.problems_per_minute:.1f}",
    ]


def show_estimates(console: Console, estimates: list[Estimate]) -> None:
    """Print what the cells of a sweep are expected to cost."""
    from espalier.experiments.planning.sweep_cost import LONGEST

    basis = "estimated from"
    columns = "cell", "to\nsearch", "generated\ntokens", "verifier\ntokens", "min", "peak\nMiB", basis
    rows = [
        (
            each.name, str(each.searches), _short(each.generated_tokens), _short(each.verifier_tokens),
            "?" if each.minutes is None else f"{each.minutes:.1f}", f"{each.peak_kv_bytes / 2**20:.1f}", each.basis,
        )
        for each in estimates
    ]  # fmt: skip
    print_whole(console, table_of(columns, rows, (basis,)))
    known = [each.minutes for each in estimates if each.minutes is not None]
    minutes = f"{sum(known):.1f} minutes" if len(known) == len(estimates) else "minutes unknown without samples"
    console.print(
        f"{len(estimates)} cells, {sum(each.searches for each in estimates):,} searches, "
        f"{_short(sum(each.generated_tokens for each in estimates))} generated and "
        f"{_short(sum(each.verifier_tokens for each in estimates))} verifier tokens, {minutes}",
        highlight=False,
    )
    if any(each.basis == LONGEST for each in estimates):
        console.print("longest paths: no samples to go by; every path as long as allowed, usually far too much")


def _short(count: float) -> str:
    """Format a large number like 1.2k or 3.4M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"
