"""Searches that are derived from a larger one are, field by field, those that a search of their own finds."""

import json
import secrets
from dataclasses import asdict, replace
from typing import Any

import pytest

from espalier.engine.errors import EspalierError
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.fewer_paths import holds_the_paths_of, with_fewer_paths, without_early_stop
from espalier.experiments.runs.folder import read_samples
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.sweep import sweep
from espalier.search.request import Aggregation, AlgorithmName, EarlyStop, SearchRequest, SubmitOptions, Vote
from espalier.search.result import SearchResult, StopReason
from espalier.search.run.orchestrator import Orchestrator

UNKNOWN = {
    "peak_kv_bytes", "generator_peak_kv_bytes", "verifier_peak_kv_bytes", "logical_blocks", "physical_blocks",
    "queue_seconds", "first_step_seconds", "seconds",
}  # fmt: skip
PROBLEMS = [Problem(f"p/{i}", f"What is {i}+1?", str(i % 3), i) for i in range(3)]
BEST = SearchRequest(
    "-", AlgorithmName.BEST_OF_N, 9, max_steps=5, max_step_tokens=12, max_tokens=40, seed=2, early_stop=EarlyStop.OFF
)
MAJORITY = replace(BEST, algorithm=AlgorithmName.MAJORITY)


def search(orchestrator: Orchestrator, requests: list[SearchRequest]) -> list[SearchResult]:
    """Results in the order of requests, of searches that share no prompts."""
    ids = [orchestrator.submit(request, options=SubmitOptions(salt=secrets.token_bytes(8))) for request in requests]
    found: dict[str, SearchResult] = {}
    while orchestrator.busy:
        found |= {result.search_id: result for result in orchestrator.step()}
    return [found[one] for one in ids]


def all_of(result: SearchResult) -> dict[str, Any]:
    """Everything a result holds but what depends on timing or on the order of creation."""
    text = {node.node_id: node.path for node in result.nodes}
    usage = {name: value for name, value in asdict(result.usage).items() if name not in UNKNOWN}
    rest = {
        name: getattr(result, name) for name in ("answer", "score", "stop_reason", "configuration", "grader", "error")
    }
    return {
        "best": result.best and (text[result.best.node_id], result.best.multiplicity, result.best.text),
        "candidates": [replace(each, node_id=0) for each in result.candidates],
        "paths": [text[each.node_id] for each in result.candidates],
        "nodes": sorted(
            (n.path, text.get(n.parent_id or 0), n.text, n.score, n.termination, n.multiplicity, n.tokens)
            for n in result.nodes
        ),
        **usage,
        **rest,
    }


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize(
    ("verifier", "request_"),
    [
        ("classifier", BEST),
        ("math-prm", replace(BEST, vote=Vote.NAIVE, aggregation=Aggregation.PROD, seed=7)),
        ("classifier", replace(BEST, merge_duplicates=False)),
        ("classifier", replace(MAJORITY, vote=Vote.WEIGHTED)),
        (None, MAJORITY),
    ],
    ids=["best-of-n", "step-scores", "unmerged", "weighted", "majority"],
)
def test_the_first_paths_of_a_search_are_a_smaller_search(make_orchestrator, verifier, request_, temperature):
    orchestrator = make_orchestrator(verifier=verifier, kv_memory_bytes=2**23)
    asked = [replace(request_, problem=p.problem, temperature=temperature) for p in PROBLEMS]
    larger = search(orchestrator, asked)
    if request_.merge_duplicates and temperature < 1:
        assert sum(result.usage.duplicates for result in larger) > 0, "paths must share steps"
    for paths in (1, 2, 5, 8):
        smaller = search(orchestrator, [replace(request, beam_width=paths) for request in asked])
        for whole, alone in zip(larger, smaller, strict=True):
            derived = with_fewer_paths(whole, paths, orchestrator.equivalence)
            assert derived is not None
            assert all_of(derived) == all_of(alone)


def test_a_search_that_was_cut_off_or_computed_again_gives_none(make_orchestrator):
    orchestrator = make_orchestrator(kv_memory_bytes=2**23)
    (whole,) = search(orchestrator, [replace(BEST, problem="What is 1+1?")])
    again = replace(whole.usage, verifier_tokens=whole.usage.verifier_tokens + 1)
    for changed in (replace(whole, stop_reason=StopReason.DEADLINE), replace(whole, usage=again)):
        assert with_fewer_paths(changed, 2, orchestrator.equivalence) is None


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"expansion": 3}, True),  # not used
        ({"seed": 3}, False),
        ({"vote": Vote.MAJORITY}, False),
        ({"beam_width": 9}, False),
        ({"generator_budget": 100}, False),
        ({"algorithm": AlgorithmName.BEAM}, False),
    ],
)
def test_only_searches_that_differ_in_nothing_but_n_share_their_paths(change, holds):
    smaller = replace(BEST, **({"beam_width": 4} | change))
    assert holds_the_paths_of(BEST, smaller) is holds
    assert not holds_the_paths_of(smaller, BEST)


@pytest.mark.parametrize("limit", ["generator_budget", "verifier_budget", "time_limit"])
def test_what_is_split_among_paths_or_cuts_them_off_is_not_shared(limit):
    larger = replace(BEST, **{limit: 1000})
    assert not holds_the_paths_of(larger, replace(larger, beam_width=2))


@pytest.mark.parametrize("early_stop", [EarlyStop.DECIDED, EarlyStop.FRUGAL])
def test_a_search_that_may_end_early_holds_no_paths_of_others(early_stop):
    larger = replace(BEST, early_stop=early_stop)
    assert not holds_the_paths_of(larger, replace(larger, beam_width=2))


def test_searches_that_share_their_paths_run_to_their_end():
    decided = replace(BEST, early_stop=EarlyStop.DECIDED)
    beam = replace(decided, algorithm=AlgorithmName.BEAM)
    assert without_early_stop([decided, beam]) == [BEST, beam]
    with pytest.raises(EspalierError, match="--early-stop frugal"):
        without_early_stop([replace(BEST, early_stop=EarlyStop.FRUGAL)])


@pytest.fixture
def run(make_orchestrator, grader, tmp_path):
    def run(name: str, widths: list[int], problems=PROBLEMS, **options: Any):
        made = make_orchestrator(kv_memory_bytes=2**23)
        requests = [replace(BEST, beam_width=n) for n in widths]
        sampled: list[Sample] = []
        how = {"epochs": 2, "keep_trees": True, "on_sample": sampled.append}
        cells = sweep(Evaluation(made, problems, grader, "some", **how), requests, tmp_path / name, **options)
        return {cell.settings["beam_width"]: cell for cell in cells}, sampled

    return run


def test_derived_samples_and_trees_are_those_of_a_search_but_for_its_seconds_and_memory(run, tmp_path):
    alone, _ = run("alone", [1, 3, 6])
    shared, sampled = run("shared", [1, 3, 6], share_work=True)
    assert len(sampled) == 3 * 3 * 2
    for n in (1, 3, 6):
        one, other = (
            {sample.key: sample for sample in read_samples(tmp_path / name / shared[n].name)}
            for name in ("alone", "shared")
        )
        assert one.keys() == other.keys()
        for key, sample in other.items():
            assert sample.derived_from == ("" if n == 6 else shared[6].name)
            if n < 6:
                assert {name for name, value in sample.usage.items() if value is None} == UNKNOWN
                assert sample.wall_seconds == 0
            known = {name: value for name, value in sample.usage.items() if name not in UNKNOWN}
            assert known.items() <= one[key].usage.items()
            plain = {"usage": {}, "wall_seconds": 0, "derived_from": ""}
            assert replace(sample, **plain) == replace(one[key], **plain)
        trees = [
            {(t["unique_id"], t["epoch"]): t["nodes"] for t in map(json.loads, path.read_text().splitlines())}
            for path in (tmp_path / name / shared[n].name / "trees.jsonl" for name in ("alone", "shared"))
        ]
        assert trees[0] == trees[1]
        assert len(trees[0]) == 6
        a, b = alone[n].summary, shared[n].summary
        assert (a.accuracy, a.generated_tokens, a.verifier_tokens) == (
            b.accuracy,
            b.generated_tokens,
            b.verifier_tokens,
        )


def test_no_table_shows_seconds_or_memory_of_derived_cells(run):
    cells, _ = run("shared", [1, 3], share_work=True)
    assert (cells[1].summary.derived, cells[3].summary.derived) == (6, 0)
    for name in (
        *("seconds", "problems_per_minute", "blocks_shared", "generator_redundancy"),
        *("search_seconds", "peak_kv_bytes", "wall_seconds", "peak_kv_mib"),
    ):
        assert getattr(cells[1].summary, name) is None, name
    assert cells[3].summary.search_seconds > 0
    assert cells[3].summary.seconds > 0


def test_only_what_is_missing_is_derived_and_searched(run, tmp_path):
    run("some", [2], PROBLEMS[:1])
    cells, sampled = run("some", [2, 4], share_work=True)
    assert len(sampled) == 6 + 4
    samples = {sample.key: sample for sample in read_samples(tmp_path / "some" / cells[2].name)}
    assert [key for key, sample in samples.items() if not sample.derived_from] == [("p/0", 0), ("p/0", 1)]
    _, sampled = run("some", [2, 3, 4], share_work=True)
    assert len(sampled) == 6, "a cell between others that are there is searched"


def test_what_the_larger_search_was_refused_is_searched(make_orchestrator, grader, tmp_path):
    made = make_orchestrator(kv_memory_bytes=2**17)
    requests = [replace(BEST, beam_width=n) for n in (1, 64)]
    cells = sweep(Evaluation(made, PROBLEMS, grader, "some"), requests, tmp_path / "sweep", share_work=True)
    assert [(cell.summary.refused, cell.summary.derived) for cell in cells] == [(0, 0), (3, 0)]


def test_a_sweep_of_the_demo_shares_work_when_told_and_says_what_is_derived(espalier, tmp_path):
    command = ("sweep", "-a", "best-of-n", "-N", "1,3", "--limit", 3, "--share-work", "--out", tmp_path / "sweep")
    rows = json.loads(espalier(*command, "--dry-run", "--json").out)
    assert [(row["name"], row["searches"], row["basis"]) for row in rows] == [
        ("N1-M1", 0, "derived from a larger N"),
        ("N3-M1", 3, "longest paths"),
    ]
    ran = espalier(*command)
    assert ran.code == 0
    assert {sample.derived_from for sample in read_samples(tmp_path / "sweep" / "N1-M1")} == {"N3-M1"}
    assert len(read_samples(tmp_path / "sweep" / "N1-M1")) == len(load_benchmark("demo", 3))
    assert espalier(*command, "--isolated").code == 2
    refused = espalier(*command[:7], "--early-stop", "off", "--isolated", "--in-flight", 1, "--out", tmp_path / "sweep")
    assert refused.code == 2
    assert "--isolated" in refused.err
