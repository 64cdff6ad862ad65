"""`espalier advise`: samples once, resumes, and writes a file that `auto` takes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from espalier.experiments.advice.advise import sampling_request
from espalier.experiments.cli import runs
from espalier.search.algorithms import last_score_suffices
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest

SMALL = (
    "advise",
    "--limit",
    4,
    "--paths",
    4,
    "-a",
    "greedy,majority,best-of-n,beam",
    "-N",
    "1,2",
    "-M",
    2,
    "--threads",
    1,
)


def test_paths_are_sampled_once_and_the_file_is_what_auto_takes(espalier, tmp_path, monkeypatch):
    shown: list[tuple[int, int, int]] = []

    @contextmanager
    def count(total: int, done: int, _at_once: int) -> Iterator[Callable[[int, int], None]]:
        more: list[int] = []
        yield lambda _right, count: more.append(count)
        shown.append((total, done, sum(more)))

    monkeypatch.setattr(runs, "share_progress", count)
    ran = espalier(*SMALL, "--out", tmp_path / "out")
    assert ran.code == 0
    assert shown == [(4, 0, 4)] * 3, "the samples, greedy and the beam search: each is shown up to its own end"
    assert "advice  withheld\n  4 problems are too few to tell, take 20 or more" in ran.out
    shown.clear()
    assert "right in any of k paths: 1: " in ran.out
    assert "predicted" in ran.out
    sampled = (tmp_path / "out/samples/samples.jsonl").read_bytes()
    assert len(sampled.splitlines()) == 4
    again = json.loads(espalier(*SMALL, "--out", tmp_path / "out", "--target", 0.5, "--json").out)
    assert shown == [(4, 4, 0)] * 3
    assert (again["advice"], again["withheld"], again["cut"]) == (None, True, {})
    assert (tmp_path / "out/samples/samples.jsonl").read_bytes() == sampled
    assert again == json.loads((tmp_path / "out/advice.json").read_text())
    assert (again["problems"], again["paths"]) == (4, 4)
    found = {(row["search"]["algorithm"], row["search"].get("beam_width")): row for row in again["searches"]}
    assert found.keys() == {(name, n) for name in ("majority", "best-of-n", "beam") for n in (1, 2)} | {
        ("greedy", None)
    }
    greedy = [json.loads(line) for line in (tmp_path / "out/greedy/samples.jsonl").read_text().splitlines()]
    assert found["greedy", None]["basis"] == "run"
    assert found["greedy", None]["accuracy"] == sum(sample["correct"] for sample in greedy) / 4
    computed = sum(sample["usage"]["generator_tokens"] for sample in greedy) / 4
    assert found["greedy", None]["generator_tokens"] == round(computed)
    beam = [json.loads(line) for line in (tmp_path / "out/beam-2x2/samples.jsonl").read_text().splitlines()]
    assert found["beam", 2]["basis"] == "run"
    assert found["beam", 2]["accuracy"] == sum(sample["correct"] for sample in beam) / 4
    assert found["beam", 1]["basis"] == "predicted"
    assert found["majority", 2]["verifier_tokens"] == 0 < found["best-of-n", 2]["verifier_tokens"]


def test_paths_that_were_cut_are_said_and_nothing_is_advised_from_them(espalier, tmp_path):
    """The searches are of other lengths, too: one cut at its tokens, one at its steps."""
    flags = ("advise", "--limit", 20, "--paths", 2, "-a", "majority", "-N", 2, "--threads", 1)
    for limit, reason in ((("--max-tokens", 24), "max-tokens"), (("--max-steps", 1), "max-steps")):
        ran = espalier(*flags, *limit, "--out", tmp_path / reason)
        assert f"40 of 40 paths were cut: 40 cut by --{reason}; raise --{reason}\n" in ran.out
        assert "advice  withheld\n  too many paths did not come to their end: 40 of 40 paths" in ran.out
        assert json.loads((tmp_path / reason / "advice.json").read_text())["cut"] == {reason: 40}


def test_all_steps_are_scored_where_a_search_reads_them():
    best_of_n, by_least = (
        SearchRequest("1+1?", AlgorithmName.BEST_OF_N, aggregation=how) for how in (Aggregation.LAST, Aggregation.MIN)
    )
    beam = SearchRequest("1+1?", AlgorithmName.BEAM)
    sampled = [sampling_request(requests, 4) for requests in ([best_of_n], [best_of_n, beam], [by_least])]
    assert [last_score_suffices(request) for request in sampled] == [True, False, False]


def test_auto_runs_the_best_search_of_a_file(espalier, tmp_path):
    searches = [({"algorithm": "majority", "beam_width": 4}, 0.7), ({"algorithm": "majority", "beam_width": 2}, 0.9)]
    rows = [
        {"search": search, "candidates": 4, "accuracy": accuracy, "generator_tokens": 100, "verifier_tokens": 0}
        for search, accuracy in searches
    ]
    (tmp_path / "advice.json").write_text(json.dumps({"format": 1, "searches": rows}))
    options = ("--algorithm", "auto", "-N", 4, "-M", 4, "--advice", tmp_path / "advice.json", "--limit", 1)
    assert espalier("eval", *options, "--threads", 1, "--out", tmp_path / "auto").code == 0
    run = json.loads((tmp_path / "auto/config.json").read_text())
    assert (run["algorithm"], run["beam_width"]) == ("majority", 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--temperature", "0.6,1.0"), "advise samples once"),
        (("--generator-budget", 100), "leave out budgets"),
        (("--budget", "much"), "--budget"),
    ],
)
def test_what_one_set_of_samples_cannot_tell_is_refused(espalier, tmp_path, options, said):
    ran = espalier(*SMALL, *options, "--out", tmp_path / "out")
    assert ran.code != 0
    assert said in ran.err
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_advice_is_refused(espalier, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    ran = espalier("solve", "-a", "auto", "--advice", tmp_path / "x.json", "What is 2 + 3?")
    assert ran.code != 0
    assert "no file of `espalier advise`" in ran.err


@pytest.mark.slow
def test_five_searches_of_the_bundled_pair_are_forecast_within_four_points_on_average(espalier, tmp_path):
    """`espalier advise`, which runs beam 2x8, and five more: the interval of each forecast holds its run's accuracy."""
    searches = [("beam", 4, 4), ("beam", 8, 2), ("dvts", 4, 4), ("dvts", 8, 2), ("best-of-n", 32, 1)]
    lists = ("-a", "beam,dvts,best-of-n", "-N", "2,4,8,32", "-M", "2,4,8")
    advice = json.loads(espalier("advise", "--limit", 200, *lists, "--out", tmp_path / "advice", "--json").out)
    found = {
        (row["search"]["algorithm"], row["search"]["beam_width"], row["search"].get("expansion", 1)): row
        for row in advice["searches"]
    }
    errors = []
    for search in searches:
        options = ("-a", search[0], "-N", search[1], "-M", search[2])
        run = json.loads(espalier("eval", "--limit", 200, *options, "--json").out)
        assert found[search]["basis"] == "predicted"
        assert found[search]["low"] <= run["accuracy"] <= found[search]["high"], search
        errors.append(abs(found[search]["accuracy"] - run["accuracy"]))
    assert sum(errors) / len(errors) <= 0.04, errors
