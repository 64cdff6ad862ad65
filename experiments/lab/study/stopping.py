"""Rules for ending thoughts early, replayed on recorded probes: what each would have saved, and cost in accuracy.

A run that kept its trees and probed its paths (`--probe-every`, `--trees`) holds what any rule would have seen. A path
that a rule ends gives its last probe's answer, and samples as many tokens for it as it did behind its whole thought.
The others are as they were. Answers are compared by exact match, and the paths of a search vote by their number.

    calibrating run ──▶ every rule ──▶ the one that saves most at a small loss ──▶ other problems

`lab study stopping` writes the table and the plot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, quantiles
from typing import Annotated

import typer
from annotated_types import Interval
from rich.console import Console

from espalier.engine.errors import EspalierError
from espalier.experiments.cli.commands.report import show_table
from espalier.experiments.cli.schema_options import with_schema
from espalier.experiments.plots import figure as shared
from espalier.experiments.report.runs import Run, load_runs
from espalier.experiments.report.trees import COMPLETE, trees_in
from espalier.experiments.runs.files import folder_lock, write_whole
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.statistics import paired_interval
from espalier.experiments.runs.table import Table
from espalier.search.algorithms import has_independent_paths
from espalier.search.grading.answers import exact_match_key, extract_answer
from espalier.search.request import Vote
from espalier.search.result import Candidate, NodeRecord
from espalier.search.rules import StopRule, read_stop_rule
from espalier.search.schema import option, optional
from espalier.search.tree import Probe, path_to
from espalier.search.voting.vote import select

_AGREE, _CERTAINTY = (2, 3, 4), (0.0, 0.8, 0.95)


def holds_probes(run: Run) -> bool:
    """Return whether a run's searches were probed, and are of paths that a rule ends one by one."""
    request = run.request
    probed = any(sample.usage.get("probe_tokens") for sample in run.samples)
    return probed and request is not None and has_independent_paths(request) and not request.stop_when


@dataclass(frozen=True, slots=True)
class ReplayedRule:
    """A rule on the searches of one run, beside the same searches without probes and without a rule.

    Attributes:
        run: name of the run.
        rule: the rule; None for the row of no rule.
        accuracy: share of searches with a right answer.
        difference: accuracy less that without a rule.
        low: lower end of the paired 95% interval of the difference.
        high: upper end.
        tokens: mean of generated tokens a search, those of probes too.
        saved: share of the tokens that no rule needs; negative where probes cost more than the rule saves.
        ended: number of paths that the rule ends.
        chosen: whether it was chosen on other problems.
    """

    run: str
    rule: StopRule | None
    accuracy: float
    difference: float
    low: float
    high: float
    tokens: float
    saved: float
    ended: int
    chosen: bool = False


def replay_rules(runs: Sequence[Run], rules: Sequence[StopRule] = ()) -> list[ReplayedRule]:
    """Replay rules on the searches of runs: for each run first a row without a rule, then one for each rule.

    Args:
        runs: runs that hold probes, see `holds_probes`.
        rules: the rules; empty for some of several strictness.

    Raises:
        EspalierError: a run kept no trees, or a file is damaged.
    """
    return [row for run in runs for row in _replay_run(run, rules)]


def choose_rule(rows: Sequence[ReplayedRule], max_loss: float) -> StopRule | None:
    """The rule that saves most tokens and loses at most `max_loss` of the accuracy; None if none saves any."""
    allowed = [row for row in rows if row.rule and row.saved > 0 and row.difference >= -max_loss]
    return max(allowed, key=lambda row: row.saved).rule if allowed else None


def stopping_table(rows: Sequence[ReplayedRule]) -> Table:
    """A row for each rule and run; the one that was chosen is marked."""
    return Table.of({
        "run": [row.run for row in rows],
        "rule": [f"{row.rule or 'none'}{' (chosen)' * row.chosen}" for row in rows],
        "accuracy %": [f"{100 * row.accuracy:.1f}" for row in rows],
        "difference": [f"{100 * row.difference:+.1f}" if row.rule else "" for row in rows],
        "95% interval": [f"{100 * row.low:+.1f} to {100 * row.high:+.1f}" if row.rule else "" for row in rows],
        "tokens": [f"{row.tokens:.0f}" for row in rows],
        "saved %": [f"{100 * row.saved:.1f}" if row.rule else "" for row in rows],
        "paths ended": [str(row.ended) if row.rule else "" for row in rows],
    })  # fmt: skip


def draw_rules(rows: Sequence[ReplayedRule], path: Path) -> None:
    """Draw accuracy gained against tokens saved as `.svg` and `.png`, a color for each run, chosen rules filled."""
    with shared.panels(6.4, 4.2) as (figure, (axes,)):
        axes.axhline(0, ls=":", lw=1, color="grey")
        for place, run in enumerate(dict.fromkeys(row.run for row in rows)):
            of_run, color = [row for row in rows if row.run == run], shared.COLORS[place % len(shared.COLORS)]
            figures = ([getattr(row, name) for row in of_run] for name in ("difference", "low", "high"))
            bars = shared.error_bars(*figures)
            x, y = ([100 * getattr(row, name) for row in of_run] for name in ("saved", "difference"))
            axes.errorbar(x, y, yerr=bars, color=color, lw=0, elinewidth=1, alpha=0.4)
            axes.plot(x, y, "o", color=color, mfc="none", ms=6, label=run)
            picked = [place for place, row in enumerate(of_run) if row.chosen]
            axes.plot([x[i] for i in picked], [y[i] for i in picked], "o", color=color, ms=6)
        axes.set(xlabel="tokens saved, %", ylabel="accuracy gained, points")
        axes.grid(alpha=0.25)
        figure.legend(loc="outside upper center", ncols=5)
        shared.save_for_page(figure, path)


@with_schema
def command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders that eval wrote with --probe-every and --trees, or folders of such."
        ),
    ],
    out: Path = option(Path("stopping"), "Folder for the table and the plot."),
    stop_when: Annotated[
        list[str] | None,
        typer.Option(help="Replay these rules of --stop-when; default: rules of several strictness."),
    ] = None,
    calibrate: Path | None = optional("Choose the rule that saves most tokens on this run of other problems."),
    max_loss: float = option(1.0, "Accuracy in points that a rule may lose on --calibrate.", Interval(ge=0, le=100)),
) -> None:
    """Replay rules that end thoughts early on recorded probes: a table and a plot of accuracy against tokens saved."""
    try:
        rules = [read_stop_rule(text) for text in stop_when or ()]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--stop-when") from None
    probed = list(filter(holds_probes, load_runs(runs)))
    calibrating = list(filter(holds_probes, load_runs([calibrate]))) if calibrate else []
    for flag, lacks in {"RUN": not probed, "--calibrate": calibrate and not calibrating}.items():
        if lacks:
            why = "no run holds probes of independent paths; eval with --probe-every and --trees, without --stop-when"
            raise typer.BadParameter(why, param_hint=flag)
    rows, chosen = replay_rules(calibrating, rules), None
    if calibrate:
        rules = list(dict.fromkeys(row.rule for row in rows if row.rule))
        chosen = choose_rule(rows, max_loss / 100)
    rows += replay_rules(probed, rules)
    if chosen:
        rows = [replace(row, chosen=row.rule == chosen) for row in rows]
    table = stopping_table(rows)
    with folder_lock(out):
        write_whole(out / "stopping.csv", table.csv())
        draw_rules([row for row in rows if row.rule], out / "stopping")
    console = Console(highlight=False, markup=False)
    show_table(console, "Thoughts ended early, replayed", table)
    if calibrate and not chosen:
        typer.echo(f"warning: no rule saves tokens on {calibrate} and loses at most {max_loss:g} points", err=True)
    console.print(f"table  {out / 'stopping.csv'}\nplot   {out / 'stopping.svg'}, stopping.png")


def _replay_run(run: Run, rules: Sequence[StopRule]) -> list[ReplayedRule]:
    trees = trees_in(run.folder, run.by_problem.keys())
    searches = [(sample, _paths(trees[sample.key])) for sample in run.samples if sample.key in trees]
    if not searches:
        raise EspalierError(f"{run.name} kept no trees, which hold the probes; give --trees to eval")
    was_right, before = (), 1.0
    rows: list[ReplayedRule] = []
    for rule in (None, *(rules or _some_rules([path for _, paths in searches for path in paths]))):
        right, tokens, ended = zip(*(_replay(sample, paths, rule) for sample, paths in searches), strict=True)
        if rule is None:
            was_right, before = right, fmean(tokens)
        won = sum(now and not before for before, now in zip(was_right, right, strict=True))
        lost = won + sum(was_right) - sum(right)
        interval = (won - lost) / len(right), *paired_interval(lost, won, len(right))
        spent, saved = fmean(tokens), 1 - fmean(tokens) / before
        rows.append(ReplayedRule(run.name, rule, fmean(right), *interval, spent, saved, sum(ended)))
    return rows


def _some_rules(paths: Iterable[Sequence[NodeRecord]]) -> list[StopRule]:
    """Rules of several strictness, with floors at the shorter quarter and the middle of all paths' lengths."""
    lengths = [sum(node.tokens for node in path) for path in paths]
    floors = sorted({max(1, round(q)) for q in quantiles(lengths, n=4)[:2]}) if len(lengths) > 1 else lengths
    return [StopRule(agree, floor, sure) for floor in floors for agree in _AGREE for sure in _CERTAINTY]


def _replay(sample: Sample, paths: Sequence[Sequence[NodeRecord]], rule: StopRule | None) -> tuple[bool, int, int]:
    """Replay a rule: if the answer of a search is right, the tokens that it samples, and its paths that end early."""
    seen: dict[int, NodeRecord] = {}
    candidates: list[Candidate] = []
    answering = ended = 0
    for path in paths:
        leaf = path[-1]
        end = _end(path, rule) if rule else len(path)
        seen |= {node.node_id: node for node in path[:end]}
        if end < len(path):
            probe = path[end - 1].probe
            assert probe is not None, "a path is ended at a probe"
            answering += leaf.multiplicity * sum(node.tokens for node in path if len(node.text) > node.thought_chars)
            ended += leaf.multiplicity
            answer = probe.answer
        elif leaf.termination in COMPLETE:
            answer = extract_answer("".join(node.text[node.thought_chars :] for node in path))
        else:
            continue
        candidates.append(Candidate(leaf.node_id, answer, None, leaf.multiplicity, ()))
    tokens = answering + sum(node.multiplicity * node.tokens for node in seen.values())
    if rule:
        tokens += sum(node.probe.tokens for node in seen.values() if node.probe)
    best = select(candidates, Vote.MAJORITY).best
    golds = set(map(exact_match_key, sample.gold.split(" or ")))
    return best is not None and exact_match_key(best.answer) in golds, tokens, ended


def _end(path: Sequence[NodeRecord], rule: StopRule) -> int:
    """Number of a path's nodes until a rule ends its thought; all if it never does."""
    probes: list[Probe] = []
    tokens = 0
    for place, node in enumerate(path, start=1):
        tokens += node.tokens
        if node.probe:
            probes.insert(0, node.probe)
            if rule.holds(probes, tokens):
                return place
    return len(path)


def _paths(nodes: Sequence[NodeRecord]) -> list[list[NodeRecord]]:
    """The paths of a search from their first steps to their ends."""
    by_id, parents = {node.node_id: node for node in nodes}, {node.parent_id for node in nodes}
    leaves = [node for node in nodes if node.node_id not in parents and node.parent_id is not None]
    return [path_to(by_id, leaf.node_id) for leaf in leaves]
