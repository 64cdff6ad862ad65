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
from espalier.experiments.runs.record import STOPPED, Unanswered, unanswered_in, unanswered_text, why_unanswered
from espalier.experiments.runs.summary import Summary
from espalier.search.result import USAGE_COUNTERS, SearchResult

if TYPE_CHECKING:  # which need what a client alone has not installed
    from espalier.experiments.planning.sweep_cost import Estimate
    from espalier.experiments.runs.sweep import Cell

_MAX_STEP_SHOWN = 100
_WIDEST = 400
_LOST = {"refused": "could not be searched", "ungraded": "could not be graded"}
"""Figures of a summary that count problems without a verdict, and what happened to these."""


def show_result(console: Console, result: SearchResult, gold: str | None) -> None:
    """Print a search's tree, answer and cost."""
    if result.nodes and len(result.nodes) > 1:
        console.print(search_tree(result))
    verdict = "" if gold is None else f"   (expected {gold})"
    if result.answer:
        probed = f"   (probed: no path has ended; {result.probed.share:.0%} of the probes)" if result.probed else ""
        console.print(Text.assemble(("\nanswer  ", "bold"), (result.answer, "bold green"), probed, verdict))
    else:
        why = "no path was completed with an answer"
        if (reason := why_unanswered(result, None)) not in (None, Unanswered.UNKNOWN):
            why = "; ".join(filter(None, (reason.text, reason.advice)))
        console.print(Text.assemble(("\nno answer", "bold red"), f": {why}{verdict}"))
    console.print(_costs(result))


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
    a, told = result.usage, asdict(result.usage)
    notes = [each.note.format_map(told) for name, each in USAGE_COUNTERS.items() if each.note and told[name]]
    rows = [
        STOPPED[result.stop_reason].text if result.stop_reason in STOPPED else "",
        f"{a.nodes} steps sampled, {a.pruned} pruned, {a.duplicates} merged with an equal sibling",
        "; ".join([
            f"{a.generated_tokens} tokens generated",
            f"computed {a.generator_tokens}, verifier {a.verifier_tokens}",
            f"sharing saved {a.generator_saved_tokens} and {a.verifier_saved_tokens}",
            *notes,
        ]),
        a.stopped_paths
        and f"decided early: {a.stopped_paths} paths cut short, about {a.stopped_tokens} tokens saved",
        f"{a.physical_blocks} KV blocks held, {a.logical_blocks} without sharing "
        f"({a.peak_kv_bytes / 2**20:.1f} MiB at the peak)",
        f"{a.seconds:.2f} s",
    ]  # fmt: skip
    return Group(*(Text(row, style="dim") for row in rows if row))


def show_summary(console: Console, summary: Summary, asked: int | None = None, folder: Path | None = None) -> None:
    """Print an evaluation's summary.

    Args:
        console: output console.
        summary: summary of all problems in the run.
        asked: number of problems requested by the command, if it may be lower.
        folder: folder of the run; None if nothing was stored.
    """
    unit, units = ("search", "searches") if summary.epochs > 1 else ("problem", "problems")
    more = 0 if asked is None else summary.problems - asked
    ratios = {"generator": summary.generator_redundancy, "verifier": summary.verifier_redundancy}
    derived = f"{summary.derived} from larger searches, whose time and memory are not these" * bool(summary.derived)
    pace = summary.problems_per_minute
    rows = {
        "benchmark": f"{summary.benchmark}, {summary.problems} problems"
        + (f", {summary.epochs} times each" if summary.epochs > 1 else "")
        + (f", {more} of them from an earlier command in {folder}" if more > 0 else ""),
        **{what: _with_reason(summary, what, meaning, folder) for what, meaning in _LOST.items()},
        "accuracy": summary.accuracy_text,
        "no answer": unanswered_text(summary.unanswered, summary.searches),
        "by level": _shares(summary, summary.accuracy_by_level),
        "by subject": _shares(summary, summary.accuracy_by_subject),
        f"tokens per {unit}": f"{summary.generated_tokens:.0f} generated, {summary.verifier_tokens:.0f} verifier",
        "computed ÷ tree": ", ".join(f"{role} {share:.3f}" for role, share in ratios.items() if share is not None),
        "blocks held ÷ logical": "" if summary.blocks_shared is None else f"{summary.blocks_shared:.2f} at the peak",
        "derived": derived,
        "time": f"{summary.seconds:.1f} s, {pace:.1f} {units}/min" if pace else "",
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


def percents(share: float, low: float, high: float) -> tuple[str, str]:
    """A share and its interval in percent."""
    return f"{100 * share:.1f}", f"[{100 * low:.1f}, {100 * high:.1f}]"


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
    rows: list[list[str]] = []
    for cell in cells:
        s, unknown = cell.summary, ("", "refused" if cell.refused else "not graded")
        rows.append([
            *("" if value is None else str(value) for value in cell.settings.values()),
            f"{s.problems}" + (f", {s.refused} refused" if s.refused else ""),
            *(percents(s.accuracy, s.low, s.high) if s.is_graded and not cell.refused else unknown),
            *(f"{s.generated_tokens:.0f}", f"{s.verifier_tokens:.0f}"),
            "" if s.problems_per_minute is None else f"{s.problems_per_minute:.1f}",
        ])  # fmt: skip
    print_whole(console, table_of(columns, rows, columns, pad_edge=not narrow, padding=(0, 0 if narrow else 1)))
    lines = [unanswered_in([(settings_text(c.settings), c.summary.unanswered, c.summary.searches) for c in cells])]
    for cell in cells:
        for what, meaning in _LOST.items():
            if why := _with_reason(cell.summary, what, meaning, folder / cell.name):
                lines.append(f"{settings_text(cell.settings)}: {why}")
    for line in filter(None, lines):
        console.print(line)


def show_estimates(console: Console, estimates: list[Estimate]) -> None:
    """Print what the cells of a sweep are expected to cost."""
    from espalier.experiments.planning.sweep_cost import LONGEST

    columns = "cell", "to\nsearch", "generated\ntokens", "verifier\ntokens", "min", "peak\nMiB", "estimated from"
    rows = [
        (
            each.name, str(each.searches), _short(each.generated_tokens), _short(each.verifier_tokens),
            "?" if each.minutes is None else f"{each.minutes:.1f}", f"{each.peak_kv_bytes / 2**20:.1f}", each.basis,
        )
        for each in estimates
    ]  # fmt: skip
    print_whole(console, table_of(columns, rows, columns[-1:]))
    known = [each.minutes for each in estimates if each.minutes is not None]
    minutes = f"{sum(known):.1f} minutes" if len(known) == len(estimates) else "minutes unknown without samples"
    tokens = (
        f"{_short(sum(getattr(each, f'{role}_tokens') for each in estimates))} {role}"
        for role in ("generated", "verifier")
    )
    searches = f"{sum(each.searches for each in estimates):,} searches"
    console.print(f"{len(estimates)} cells, {searches}, {' and '.join(tokens)} tokens, {minutes}")
    if any(each.basis == LONGEST for each in estimates):
        console.print("longest paths: no samples to go by; every path as long as allowed, usually far too much")


def _short(count: float) -> str:
    """Format a large number like 1.2k or 3.4M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def size_of(count: float, digits: int = 1) -> str:
    """Format bytes like 1.2 GiB."""
    unit, power = ("GiB", 30) if count >= 2**30 else ("MiB", 20) if count >= 2**20 else ("KiB", 10)
    return f"{count / 2**power:.{digits}f} {unit}"
