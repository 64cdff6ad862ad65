"""The search that is advised, and the reasons."""

from dataclasses import replace

import numpy as np
import pytest

from espalier.engine.errors import EspalierError
from espalier.experiments.advice.forecast import Basis, Forecast
from espalier.experiments.advice.recommend import Budget, Findings, cheapest_first, read_budget, recommend
from espalier.experiments.runs.record import CutPaths, Unanswered

FOUND = Findings({1: 0.3, 16: 0.8}, path_rank=0.8, sibling_rank=0.75, sibling_pairs=90, useful_width=16)


def forecast(name: str, solved: float, seconds: float) -> Forecast:
    outcomes = (np.arange(200) < 200 * solved).astype(float)
    return Forecast(
        {"algorithm": name}, 4, Basis.RECORDED, solved, solved - 0.05, solved + 0.05, 100 * seconds, 0.0, seconds,
        outcomes,
    )  # fmt: skip


ONE, VOTE, BEST, BEAM = (
    forecast("one", 0.3, 1), forecast("vote", 0.5, 4), forecast("best", 0.7, 8), forecast("beam", 0.9, 9),
)  # fmt: skip
ALL = [BEAM, ONE, BEST, VOTE]


def test_the_cheapest_search_that_reaches_the_target_is_advised():
    assert recommend(ALL, ONE, [ONE, VOTE], FOUND, target=0.6).search is BEST
    advice = recommend(ALL, ONE, [ONE, VOTE], FOUND, target=0.68)
    assert advice.search is BEST
    assert any("below the target" in reason for reason in advice.reasons)
    assert any("+20.0 points" in reason for reason in advice.reasons)
    unreached = recommend(ALL, ONE, [ONE, VOTE], FOUND, target=0.95)
    assert unreached.search is BEAM
    assert "none reaches 95%" in unreached.reasons[0]


def test_the_best_search_within_a_budget_is_advised():
    assert recommend(ALL, ONE, [ONE, VOTE], FOUND, budget=Budget(seconds=8)).search is BEST
    assert recommend(ALL, ONE, [ONE, VOTE], FOUND, budget=Budget(tokens=500)).search is VOTE
    assert recommend(ALL, ONE, [ONE, VOTE], FOUND).search is BEAM
    none = recommend(ALL, ONE, [ONE, VOTE], FOUND, budget=Budget(seconds=0.5))
    assert none.search is None
    assert "no search fits" in none.reasons[0]


def test_search_that_will_not_help_is_said_and_why():
    flat = [ONE, forecast("vote", 0.3, 4)]
    blind = Findings({1: 0.3, 16: 0.8}, path_rank=0.51)
    same = Findings({1: 0.3, 16: 0.32}, path_rank=0.8)
    for found, why in ((blind, "no better than chance"), (same, "raise --temperature"), (FOUND, "neither")):
        advice = recommend(flat, ONE, flat, found)
        assert advice.search is None
        assert "search will not help" in advice.reasons[0]
        assert why in advice.reasons[1]


def test_a_verifier_that_adds_nothing_to_a_vote_is_said():
    advice = recommend([ONE, VOTE, forecast("best", 0.5, 8)], ONE, [ONE, VOTE], FOUND)
    assert advice.search is VOTE
    assert "adds nothing to a vote" in advice.reasons[-1]


def test_searches_that_cost_more_and_solve_no_more_are_left_out():
    worse = forecast("worse", 0.4, 5)
    assert cheapest_first([*ALL, worse]) == [ONE, VOTE, BEST, BEAM]


@pytest.mark.parametrize(("text", "budget"), [("2.5s", Budget(seconds=2.5)), ("3000", Budget(tokens=3000))])
def test_budgets_are_seconds_or_tokens(text, budget):
    assert read_budget(text) == budget


@pytest.mark.parametrize("text", ["", "s", "-1", "inf", "two"])
def test_other_budgets_are_refused(text):
    with pytest.raises(EspalierError, match="--budget"):
        read_budget(text)


def test_no_verdict_follows_from_paths_that_were_cut_nor_from_few_problems():
    def of(outcomes: list[float], name: str = "vote") -> Forecast:
        return replace(forecast(name, 0.5, 4), accuracy=float(np.mean(outcomes)), outcomes=np.array(outcomes))

    none = of([0.0] * 200, "one")
    flat = [none, of([0.0] * 200)]
    cut = CutPaths({Unanswered.MAX_TOKENS: 46}, 48)
    for searches in (flat, [none, of([1.0] * 200)]):
        advice = recommend(searches, none, searches, FOUND, cut=cut)
        assert (advice.search, advice.withheld) == (None, True)
        assert "46 of 48 paths were cut: 46 cut by --max-tokens; raise --max-tokens" in advice.reasons[0]
    assert not recommend(flat, none, flat, FOUND, cut=CutPaths({Unanswered.MAX_STEPS: 4}, 48)).withheld

    few = [of([0.0] * 3, "one"), of([0.0, 0.0, 0.95])]
    advice = recommend(few, few[0], few, FOUND)
    assert (advice.search, advice.withheld) == (None, True)
    assert advice.reasons == (
        "3 problems are too few to tell, take 20 or more: the best is +31.7 points (+0.0 to +95.0) over one path",
    )
    sure = [of([0.0] * 3, "one"), of([1.0] * 3)]
    assert recommend(sure, sure[0], sure, FOUND).withheld, "an interval of three problems that agree is no interval"
    wide = [of([0.0, 1.0] * 15, "one"), of([0.0, 1.0] * 12 + [1.0, 0.0, 1.0, 0.0, 1.0, 1.0])]
    advice = recommend(wide, wide[0], wide, FOUND)
    assert advice.withheld
    assert "30 problems are too few to tell, about " in advice.reasons[0]
    plain = [of([0.0, 1.0] * 100, "one"), of([0.0, 1.0] * 99 + [1.0, 0.0])]
    assert "search will not help" in recommend(plain, plain[0], plain, FOUND).reasons[0]
