"""Paths that are stopped because the generator is unsure of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from search_runs import MAJORITY, outcome, run

from espalier.engine.errors import InvalidRequestError
from espalier.engine.work import PathStreams
from espalier.search.growth.confidence import ConfidenceFilter
from espalier.search.growth.policies import Branch
from espalier.search.request import AlgorithmName, EarlyStop, SearchRequest, Vote
from espalier.search.result import Candidate, SearchResult
from espalier.search.rules import UnsureRule, read_unsure_rule
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.running import UsageMeter
from espalier.search.trace import replay, trace_of
from espalier.search.tree import Node, Termination

PATHS = replace(
    MAJORITY,
    beam_width=12,
    early_stop=EarlyStop.OFF,
    temperature=1.0,
    max_steps=None,
    max_step_tokens=None,
    max_tokens=60,
    step_rule="tokens:4",
)
RULE = "first:4,keep:50,group:6"


def path(*steps: list[float], ended: bool = False) -> Node:
    node = Node(0, None, ())
    for step in steps:
        node = Node(node.node_id + 1, node, (*node.path, 0))
        node.log_probabilities, node.num_tokens = tuple(step), len(step)
    if ended:
        node.termination = Termination.EOS
    return node


@pytest.mark.parametrize(
    "text", ["16", "first:16", "first:1,keep:90", "first:16,keep:0", "first:16,keep:100", "first:16,keep:90,group:0"]
)
def test_another_rule_is_refused(text: str):
    with pytest.raises(InvalidRequestError, match=r"stop_unsure: is written like first:16,keep:90"):
        SearchRequest("1+1?", AlgorithmName.MAJORITY, stop_unsure=text).validate()
    assert read_unsure_rule("first:16,keep:90") == UnsureRule(16, 90, 2048)


def end(bar: ConfidenceFilter, node: Node) -> None:
    bar.settled(Branch(node, True, PathStreams(0, "?")), Candidate(node.node_id, "4", None, node.multiplicity, ()))
    bar.begin_round(1)


def test_the_bar_is_a_percentile_of_the_least_sure_groups_of_the_first_paths():
    bar = ConfidenceFilter(UnsureRule(first=4, keep=75, group=2), UsageMeter())
    for low in (-4.0, -1.0, -3.0):
        end(bar, path([0.0, 0.0], [low, low, 0.0], ended=True))
        assert bar.bar is None
    assert not bar.drops(path([-9.0, -9.0, -9.0]))
    end(bar, path([-2.0], ended=True))  # shorter than a group
    assert bar.bar == -3.0
    end(bar, path([-9.0, -9.0], ended=True))
    assert bar.bar == -3.0  # it is set once


@pytest.mark.parametrize(
    ("keep", "counts", "bar"),
    [
        (65, (1,) * 10, -7.0),  # 3.5 of ten are below it: three
        (61, (1,) * 10, -7.0),
        (60, (1,) * 10, -6.0),
        (99, (1,) * 10, -10.0),
        (1, (1,) * 10, -1.0),
        (50, (1, 4, 1), -9.0),  # a path that stands for four counts as four
        (80, (4, 1, 1), -10.0),
        (33, (4, 1, 1), -9.0),
    ],
)
def test_the_bar_keeps_at_least_the_percentage_of_the_first_samples(keep: int, counts: tuple[int, ...], bar: float):
    rule = ConfidenceFilter(UnsureRule(first=sum(counts), keep=keep, group=1), UsageMeter())
    for place, count in enumerate(counts):
        assert rule.bar is None
        node = path([place - 10.0], ended=True)
        node.multiplicity = count
        end(rule, node)
    assert rule.bar == bar


def test_a_path_is_dropped_by_a_group_that_ends_in_its_last_step_and_is_full():
    bar = ConfidenceFilter(UnsureRule(first=2, keep=50, group=3), UsageMeter())
    bar.bar = -1.0
    assert not bar.drops(path([-5.0, -5.0]))
    assert bar.drops(path([-5.0, -5.0], ended=True))
    assert bar.drops(path([-5.0], [0.0, 0.0]))
    assert not bar.drops(path([-5.0, -5.0, 0.0, 0.0], [0.0, 0.0]))  # its second step was dropped where it was sampled
    assert bar.drops(path([0.0] * 9, [0.0, -2.0, -2.0]))


def leaves(result: SearchResult) -> dict[tuple[int, ...], str]:
    """How each sampled path ended, by its first index."""
    parents = {node.parent_id for node in result.nodes}
    return {node.path: node.termination for node in result.nodes if node.node_id not in parents and node.path}


@pytest.mark.parametrize("algorithm", [AlgorithmName.MAJORITY, AlgorithmName.ADAPTIVE])
def test_later_unsure_paths_are_stopped_and_do_not_vote_whatever_runs_beside(
    algorithm: AlgorithmName, make_orchestrator: Callable[..., Orchestrator]
):
    # Nothing is decided before all paths are sampled, so that both sample the same paths.
    own = {"algorithm": algorithm, "expansion": 4, "confidence": 1.0 if algorithm == "adaptive" else None}
    requests = [replace(PATHS, seed=seed, **own) for seed in range(4)]
    stopped_paths = 0
    together_at = make_orchestrator("talker", None)
    together = run(together_at, *(replace(each, stop_unsure=RULE) for each in requests)).results
    together_at.engine.check_drained()
    for request, among in zip(requests, together, strict=True):
        whole = run(make_orchestrator("talker", None), request).only
        ruled = run(make_orchestrator("talker", None), replace(request, stop_unsure=RULE)).only
        assert outcome(ruled) == outcome(among)
        assert replay(trace_of(ruled)) == len(ruled.rounds)
        pruned = [node for node in ruled.nodes if node.termination == "pruned"]
        assert not {node.node_id for node in pruned} & {candidate.node_id for candidate in ruled.candidates}
        assert all(node.path[0] >= 4 for node in pruned), "the first paths run to their ends"
        assert ruled.usage.stopped_paths <= sum(node.multiplicity for node in pruned)
        assert ruled.usage.generated_tokens <= whole.usage.generated_tokens
        stopped_paths += ruled.usage.stopped_paths
        if algorithm is AlgorithmName.MAJORITY:
            ends, unruled = leaves(ruled), leaves(whole)
            assert {at: end for at, end in ends.items() if end != "pruned"}.items() <= unruled.items()
    assert stopped_paths > 0, "no path was stopped, so nothing was shown"


def test_no_path_is_stopped_by_default_or_where_all_paths_are_first(make_orchestrator: Callable[..., Orchestrator]):
    plain = run(make_orchestrator("talker", None), PATHS).only
    assert (plain.usage.stopped_paths, plain.configuration.stop_unsure) == (0, "")
    ruled = run(make_orchestrator("talker", None), replace(PATHS, stop_unsure="first:12,keep:50,group:6")).only
    assert (ruled.usage.stopped_paths, ruled.answer) == (0, plain.answer)
    assert [node.text for node in ruled.nodes] == [node.text for node in plain.nodes]


def test_stopped_paths_are_not_scored(make_orchestrator: Callable[..., Orchestrator]):
    request = replace(PATHS, algorithm=AlgorithmName.BEST_OF_N, vote=Vote.WEIGHTED, stop_unsure=RULE)
    orchestrator = make_orchestrator("talker")
    results = run(orchestrator, *(replace(request, seed=seed) for seed in range(3))).results
    orchestrator.engine.check_drained()
    pruned = [node for result in results for node in result.nodes if node.termination == "pruned"]
    assert pruned
    assert all(node.score is None for node in pruned)
