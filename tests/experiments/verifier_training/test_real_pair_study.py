"""The study of a real pair: figures that follow from the recorded outcomes, and a page that says them."""

import json
from statistics import fmean
from typing import Any

import pytest
from readme_files import ROOT, text_of

from espalier.experiments.runs.statistics import paired_bootstrap_interval, wilson_interval

STUDY: dict[str, Any] = json.loads((ROOT / "experiments/results/verifier-study/pair.json").read_text(encoding="utf-8"))
PAGE, FIRST_PAGE = (text_of(page).replace("*", "") for page in ("experiments/verifier_training/README.md", "README.md"))


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


@pytest.mark.parametrize("name", STUDY["math500"]["searches"])
def test_so_do_those_on_harder_problems(name: str):
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
    vote = STUDY["math500"]["searches"]["best-of-16, small by evidence"]
    ahead, least, most = _points(vote["ahead_of_smalls_majority"])
    assert f"{vote['accuracy']:.1%} where the majority solves 10.0% ({ahead}, {least[1:]} to {most[1:]})" in FIRST_PAGE
