"""The study of a real pair: figures that follow from the recorded outcomes, and a page that says them."""

import json
from statistics import fmean
from typing import Any

import pytest
from readme_files import ROOT, text_of

from espalier.experiments.runs.statistics import paired_bootstrap_interval, wilson_interval

STUDY: dict[str, Any] = json.loads((ROOT / "experiments/results/verifier-study/pair.json").read_text(encoding="utf-8"))
PAGE, FIRST_PAGE = (text_of(page).replace("*", "") for page in ("experiments/verifier_training/README.md", "README.md"))

ROWS = {
    "small-greedy": "0.5B, greedy",
    "small-majority-16": "0.5B, majority@16",
    "small-evidence-16": "0.5B, best-of-16 by the 1.5B's evidence",
    "small-beam": "0.5B, beam 4×4 by the 1.5B's evidence",
    "small-dvts": "0.5B, dvts 4×4 by the 1.5B's evidence",
    "small-beam-ratio": "0.5B, beam 4×4 by the 1.5B's `likelihood-ratio`",
    "small-dvts-ratio": "0.5B, dvts 4×4 by the 1.5B's `likelihood-ratio`",
    "large-greedy": "1.5B, greedy",
    "large-majority-4": "1.5B, majority@4",
    "large-majority-16": "1.5B, majority@16",
    "large-beam": "1.5B, beam 4×4 by its own head",
    "large-dvts": "1.5B, dvts 4×4 by its own head",
}
"""The runs whose seconds were taken, and how their rows on the page begin."""


def _ahead_are(search: dict[str, Any], baselines: dict[str, list[int]]) -> None:
    right = search["right"]
    assert search["accuracy"] == pytest.approx(fmean(right))
    assert search["interval"] == pytest.approx(wilson_interval(sum(right), len(right)), abs=1e-4)
    for key, baseline in baselines.items():
        differences = [mine - other for mine, other in zip(right, baseline, strict=True)]
        assert search[key]["ahead"] == pytest.approx(fmean(differences))
        assert search[key]["interval"] == pytest.approx(paired_bootstrap_interval(differences), abs=1e-4)


def _on_the_page(search: dict[str, Any]) -> str:
    """The two cells of a search: its accuracy, and its difference to the small model's majority; one of that itself."""
    low, high = search["interval"]
    ahead, least, most = _points(search["ahead_of_smalls_majority"])
    accuracy = f"{search['accuracy']:.1%} ({100 * low:.1f}–{100 * high:.1f})"
    return f"| {accuracy} |" if least == most == "+0.0" else f"| {accuracy} | {ahead} ({least} to {most}) |"


def _row(page: str, beginning: str) -> str:
    """The first row of a page's tables that begins with this cell."""
    return next(line for line in page.splitlines() if line.startswith(f"| {beginning}"))


def _taken(run: str) -> str:
    """The last two cells of a run: seconds a problem, and its KV at the peak."""
    taken = STUDY["seconds"]["runs"][run]
    return f"| {taken['seconds_a_problem']:.1f} | {taken['peak_kv_bytes'] / 1e6:.0f} |"


def _points(difference: dict[str, Any]) -> list[str]:
    """A difference in percentage points and the ends of its interval, with their signs."""
    shares = (difference["ahead"], *difference["interval"])
    return [f"{100 * share:+.1f}".replace("-", "−") for share in shares]


@pytest.mark.parametrize("name", STUDY["searches"])
def test_a_searchs_figures_follow_from_its_outcomes_and_are_on_the_page(name: str):
    search = STUDY["searches"][name]
    assert len(search["right"]) == len(STUDY["problems"]) == 200
    small, large = (STUDY[model]["right"]["majority"] for model in ("small", "large"))
    _ahead_are(search, {"ahead_of_smalls_majority": small, "ahead_of_larges_majority": large})
    assert _on_the_page(search) in PAGE


@pytest.mark.parametrize("name", STUDY["seconds"]["runs"])
def test_what_a_problem_takes_is_on_the_page(name: str):
    assert _row(PAGE, ROWS[name]).endswith(_taken(name))


def test_sentences_say_the_same_seconds():
    read, write = (
        STUDY["seconds"]["runs"][name]["seconds_a_problem"] for name in ("small-evidence-16", "large-greedy")
    )
    assert f"Greedy, in {write:.1f} seconds a problem, the larger" in PAGE
    assert f"{write:.1f} seconds of the 1.5B" in PAGE
    assert f"more than {read:.0f} seconds of the two together" in PAGE


def test_what_the_judge_costs_and_how_other_votes_differ_from_it_are_on_the_page():
    judge, votes = STUDY["searches"]["best-of-16, small by judge"], STUDY["small"]["right"]
    seconds, peak_kv = judge["seconds_a_problem"], judge["peak_kv_bytes_of_the_first_24"]
    assert _row(PAGE, "0.5B, best-of-16 by the 1.5B as `judge`").endswith(f"| {seconds:.0f} | {peak_kv / 1e6:.0f} |")
    ahead, least, most = _points(judge["ahead_of_smalls_majority"])
    cells = f"| {judge['auc_solutions']:.3f} | | {judge['accuracy']:.1%} | {ahead} ({least} to {most}) |"
    assert _row(PAGE, "[`judge`]").endswith(cells)
    for vote, said in (
        ("score", "{0} points ({1} to {2}) worse"),
        ("likelihood_ratio", "{0} points (−{1} to +{2}) better"),
        ("confidence", "(+{0}, −{1} to +{2})"),
    ):
        differences = [other - mine for mine, other in zip(judge["right"], votes[vote], strict=True)]
        points = _points({"ahead": fmean(differences), "interval": paired_bootstrap_interval(differences)})
        assert said.format(*(each[1:] for each in points)) in PAGE


@pytest.mark.parametrize(
    ("run", "row"),
    {
        "small-majority-16": "0.5B, majority of 16",
        "small-evidence-16": "0.5B, weighted vote of 16",
        "small-beam-ratio": "0.5B, beam search 4 × 4",
        "large-greedy": "1.5B, greedy",
        "large-majority-16": "1.5B, majority of 16",
    }.items(),
)
def test_what_a_problem_takes_is_on_the_first_page(run: str, row: str):
    assert _row(FIRST_PAGE, row).endswith(_taken(run))


def test_the_first_page_says_what_the_larger_model_gains_alone():
    for right, row in (
        (STUDY["searches"]["greedy, large"]["right"], "1.5B, greedy"),
        (STUDY["large"]["right"]["majority"], "1.5B, majority of 16"),
    ):
        differences = [mine - other for mine, other in zip(right, STUDY["small"]["right"]["majority"], strict=True)]
        ahead, least, most = _points({"ahead": fmean(differences), "interval": paired_bootstrap_interval(differences)})
        cells = f"| {row} | {fmean(right):.1%} | {ahead} ({least[1:]} to {most[1:]}) |"
        assert _row(FIRST_PAGE, row).startswith(cells)


@pytest.mark.parametrize("name", STUDY["math500"]["searches"])
def test_on_harder_problems_figures_follow_from_outcomes_too(name: str):
    section = STUDY["math500"]
    search = section["searches"][name]
    assert len(search["right"]) == len(section["problems"]) == 100
    small, large = (section["searches"][f"majority@{vote}"]["right"] for vote in ("16, small", "8, large"))
    _ahead_are(search, {"ahead_of_smalls_majority": small, "ahead_of_larges_majority": large})
    assert _on_the_page(search) in PAGE
    for paths in section["paths"].values():
        assert all(f"{share:.1%}" in PAGE for share in paths.values())


@pytest.mark.parametrize("scores", ["evidence", "likelihood-ratio"])
def test_the_first_page_says_what_searches_of_the_small_model_gain(scores: str):
    gains = [
        _points(STUDY["searches"][f"{search} 4x4, small by {scores}"]["ahead_of_smalls_majority"])
        for search in ("beam", "dvts")
    ]
    assert " and ".join(f"{ahead} ({least[1:]} to {most[1:]})" for ahead, least, most in gains) in FIRST_PAGE


def test_the_first_page_says_what_the_larger_models_own_searches_gain():
    for search in ("beam 4x4", "dvts 4x4"):
        ahead, least, most = _points(STUDY["searches"][f"{search}, large by its own head"]["ahead_of_larges_majority"])
        assert f"{ahead}, {least} to {most}" in FIRST_PAGE


def test_the_first_page_says_what_the_small_models_searches_gain_on_harder_problems():
    searches = STUDY["math500"]["searches"]
    for name, words in (
        ("best-of-16, small by evidence", "where the majority solves 10.0%"),
        ("beam 4x4, small by likelihood-ratio", "at a third more tokens"),
    ):
        ahead, least, most = _points(searches[name]["ahead_of_smalls_majority"])
        assert f"{searches[name]['accuracy']:.1%} {words} ({ahead}, {least[1:]} to {most[1:]})" in FIRST_PAGE
    sampled = [
        searches[name]["generated_tokens"] for name in ("beam 4x4, small by likelihood-ratio", "majority@16, small")
    ]
    assert sampled[0] / sampled[1] == pytest.approx(4 / 3, abs=0.02)
