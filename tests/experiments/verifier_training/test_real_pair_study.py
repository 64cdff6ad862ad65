"""The study of a real pair: figures that follow from the recorded outcomes, and a page that says them."""

import json
from statistics import fmean
from typing import Any

import pytest
from readme_files import ROOT, text_of

from espalier.experiments.runs.statistics import paired_bootstrap_interval, wilson_interval

STUDY: dict[str, Any] = json.loads((ROOT / "experiments/results/verifier-study/pair.json").read_text(encoding="utf-8"))
BASELINES = {
    "ahead_of_smalls_majority": STUDY["small"]["right"]["majority"],
    "ahead_of_larges_majority": STUDY["large"]["right"]["majority"],
}


@pytest.mark.parametrize("name", STUDY["searches"])
def test_a_searchs_figures_follow_from_its_outcomes_and_are_on_the_page(name: str):
    search = STUDY["searches"][name]
    right = search["right"]
    assert len(right) == len(STUDY["problems"]) == 200
    assert search["accuracy"] == pytest.approx(fmean(right))
    assert search["interval"] == pytest.approx(wilson_interval(sum(right), len(right)), abs=1e-4)
    for key, baseline in BASELINES.items():
        differences = [mine - other for mine, other in zip(right, baseline, strict=True)]
        assert search[key]["ahead"] == pytest.approx(fmean(differences))
        assert search[key]["interval"] == pytest.approx(paired_bootstrap_interval(differences), abs=1e-4)
    low, high = search["interval"]
    ahead, (least, most) = search["ahead_of_smalls_majority"].values()
    signed = [f"{100 * share:+.1f}".replace("-", "−") for share in (ahead, least, most)]
    page = text_of("experiments/verifier_training/README.md").replace("*", "")
    assert (
        f"| {search['accuracy']:.1%} ({100 * low:.1f}–{100 * high:.1f}) | {signed[0]} ({signed[1]} to {signed[2]}) |"
        in page
    )
