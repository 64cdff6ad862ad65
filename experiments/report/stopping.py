"""Rules for ending thoughts early, replayed on recorded probes: what each would have saved, and cost in accuracy.

A run that kept its trees and probed its paths (`--probe-every`, `--trees`) holds what any rule would have seen. A path
that a rule ends gives its last probe's answer, and samples as many tokens for it as it did behind its whole thought.
The others are as they were. Answers are compared by exact match, and the paths of a search vote by their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from espalier.engine.errors import EspalierError
from espalier.experiments.report.runs import Run
from espalier.experiments.report.trees import load_trees
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.statistics import paired_interval
from espalier.experiments.runs.table import Table
from espalier.search.algorithms import has_independent_paths
from espalier.search.grading.answers import exact_match_key, extract_answer
from espalier.search.request import Vote
from espalier.search.result import Candidate, NodeRecord
from espalier.search.thoughts.stop_rule import StopRule
from espalier.search.tree import Probe
from espalier.search.voting.vote import select

STOPPING = "stopping.csv"
_COMPLETE = ("eos", "boxed")
_AGREE, _CERTAINTY = (2, 3, 4), (0.0, 0.8, 0.95)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a search gives under a rule: whether its answer is right, the tokens it samples, and paths ended early."""

    right: bool
    tokens: int
    ended: int


def holds_probes(run: Run) -> bool:
    """Return whether a run's searches were probed, and are of paths that a rule ends one by one."""
    request = run.request
    probed = any(sample.usage.get("probe_tokens") for sample in run.samples)
    return probed and request is not None and has_independent_paths(request) and not request.stop_when


def replayed_rules(runs: Sequence[Run], rules: Sequence[StopRule] = ()) -> Table:
    """Replay rules on the searches of runs; a table with a row for each, and one for no rule.

    Savings are of all generated tokens, those of probes too, against the same searches without probes.

    Args:
        runs: runs that hold probes, see `holds_probes`.
        rules: the rules; empty for some of several strictness.

    Raises:
        EspalierError: a run kept no trees, or a file is damaged.
    """
    columns = ["run", "rule", "accuracy %", "difference", "95% interval", "tokens", "saved %", "paths ended"]
    return Table(columns, [row for run in runs for row in _rows(run, rules)])


def _rows(run: Run, rules: Sequence[StopRule]) -> list[list[str]]:
    trees = load_trees(run, run.by_problem.keys())
    searches = [(sample, trees[sample.key]) for sample in run.samples if sample.key in trees]
    if not searches:
        raise EspalierError(f"{run.name} kept no trees, which hold the probes; give --trees to eval")
    whole = [_replay(sample, nodes, None) for sample, nodes in searches]
    accuracy, before = fmean(o.right for o in whole), fmean(o.tokens for o in whole)
    rows = [[run.name, "none", f"{100 * accuracy:.1f}", "", "", f"{before:.0f}", "", ""]]
    for rule in rules or _some_rules([nodes for _, nodes in searches]):
        found = [_replay(sample, nodes, rule) for sample, nodes in searches]
        lost = sum(w.right and not f.right for w, f in zip(whole, found, strict=True))
        won = sum(f.right and not w.right for w, f in zip(whole, found, strict=True))
        low, high = paired_interval(lost, won, len(found))
        tokens = fmean(o.tokens for o in found)
        rows.append([
            run.name,
            str(rule),
            f"{100 * fmean(o.right for o in found):.1f}",
            f"{100 * (won - lost) / len(found):+.1f}",
            f"{100 * low:+.1f} to {100 * high:+.1f}",
            f"{tokens:.0f}",
            f"{100 * (1 - tokens / before):.1f}",
            str(sum(o.ended for o in found)),
        ])  # fmt: skip
    return rows


def _some_rules(trees: Sequence[Sequence[NodeRecord]]) -> list[StopRule]:
    """Rules of several strictness, with floors at the shorter quarter and the middle of all paths' lengths."""
    lengths = [sum(node.tokens for node in path) for nodes in trees for path in _paths(nodes)]
    floors = sorted({max(1, round(q)) for q in quantiles(lengths, n=4)[:2]}) if len(lengths) > 1 else lengths
    return [StopRule(agree, floor, sure) for floor in floors for agree in _AGREE for sure in _CERTAINTY]


def _replay(sample: Sample, nodes: Sequence[NodeRecord], rule: StopRule | None) -> _Outcome:
    seen: dict[int, NodeRecord] = {}
    candidates: list[Candidate] = []
    answering = ended = 0
    for path in _paths(nodes):
        leaf = path[-1]
        end = _end(path, rule) if rule else len(path)
        seen |= {node.node_id: node for node in path[:end]}
        if end < len(path):
            answer = path[end - 1].probe
            assert answer is not None, "a path is ended at a probe"
            answering += leaf.multiplicity * sum(node.tokens for node in path if len(node.text) > node.thought_chars)
            ended += leaf.multiplicity
            candidates.append(Candidate(leaf.node_id, answer.answer, None, leaf.multiplicity, ()))
        elif leaf.termination in _COMPLETE:
            text = "".join(node.text[node.thought_chars :] for node in path)
            candidates.append(Candidate(leaf.node_id, extract_answer(text), None, leaf.multiplicity, ()))
    tokens = answering + sum(node.multiplicity * node.tokens for node in seen.values())
    if rule:
        tokens += sum(node.probe.tokens for node in seen.values() if node.probe)
    best = select(candidates, Vote.MAJORITY).best
    golds = set(map(exact_match_key, sample.gold.split(" or ")))
    return _Outcome(best is not None and exact_match_key(best.answer) in golds, tokens, ended)


def _end(path: Sequence[NodeRecord], rule: StopRule) -> int:
    """How many of a path's nodes there are until a rule ends its thought; all if it never does."""
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
    paths: list[list[NodeRecord]] = []
    for leaf in nodes:
        if leaf.node_id in parents or leaf.parent_id is None:
            continue
        path, node = list[NodeRecord](), leaf
        while node.parent_id is not None:
            path.append(node)
            node = by_id[node.parent_id]
        paths.append(path[::-1])
    return paths
