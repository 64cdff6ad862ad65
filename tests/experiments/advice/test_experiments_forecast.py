"""Forecasts of searches, beside searches of a world in which the truth is known."""

import random
from dataclasses import replace

import numpy as np
import pytest

from espalier.experiments.advice import forecast
from espalier.experiments.advice.forecast import Basis, Costs, Forecaster
from espalier.experiments.advice.modelled_search import SearchModel, UnpredictableSearchError
from espalier.experiments.advice.recorded import OwnTokens, RecordedStep, RecordedTree, fit_step_states
from espalier.experiments.runs.record import Sample
from espalier.search.algorithms import make_algorithm, vote_of, with_defaults
from espalier.search.common_fields import Aggregation
from espalier.search.request import SearchRequest
from espalier.search.result import Candidate
from espalier.search.tree import Node, Termination
from espalier.search.voting.vote import select

EOS = Termination.EOS
DEPTH = 4
COSTS = Costs(generator_seconds=0.001, verifier_seconds=0.0005)


def request(algorithm: str, n: int = 4, m: int = 4) -> SearchRequest:
    return with_defaults(SearchRequest("-", algorithm=algorithm, beam_width=n, expansion=m))


class World:
    """Problems whose steps are right with rates of their own; scores tell right from wrong steps, but not always."""

    def __init__(self, problems: int, seed: int = 0) -> None:
        draw = random.Random(seed)
        self.rates = [[draw.uniform(0.35, 1.0) for _ in range(DEPTH)] for _ in range(problems)]
        self.draw = random.Random(seed + 1)

    def step(self, problem: int, depth: int, was_right: bool) -> tuple[bool, float]:
        right = was_right and self.draw.random() < self.rates[problem][depth]
        return right, min(0.99, max(0.01, self.draw.gauss(0.6 if right else 0.4, 0.2)))

    def tree(self, problem: int, paths: int) -> RecordedTree:
        root = RecordedStep(None, count=paths)
        steps = [root]
        for _ in range(paths):
            above, right = root, True
            for depth in range(DEPTH):
                right, score = self.step(problem, depth, right)
                end = EOS if depth == DEPTH - 1 else None
                answer = "" if end is None else "gold" if right else f"{self.draw.randrange(1000)}"
                step = RecordedStep(above, score, 10, 1, end, answer, bool(end and right))
                above.children.append(step)
                steps.append(step)
                above = step
        return RecordedTree(tuple(steps), prompt_tokens=20)

    def solves(self, problem: int, asked: SearchRequest) -> bool:
        """Run the search itself."""
        root = Node(0, None, ())
        right, answers = {root: True}, dict[Node, str]()

        def child(parent: Node) -> Node:
            node = Node(len(right), parent, (*parent.path, parent.num_children), draws=(parent.num_children,))
            parent.num_children += 1
            right[node], node.score = self.step(problem, parent.depth, right[parent])
            if node.depth == DEPTH:
                node.termination = EOS
                answers[node] = "gold" if right[node] else f"{self.draw.randrange(1000)}"
            return node

        algorithm = make_algorithm(asked, root)
        while not algorithm.finished():
            told = []
            for expand in algorithm.ask():
                for _ in range(expand.children):
                    node = child(expand.node)
                    while expand.to_end and node.open:
                        node = child(node)
                    told.append(node)
            algorithm.tell(sorted(told, key=lambda node: node.path))
        found = [
            Candidate(node.node_id, answers[node], node.score, node.multiplicity, ())
            for node in algorithm.kept()
            if node.complete
        ]  # fmt: skip
        best = select(found, vote_of(asked)).best
        return best is not None and best.answer == "gold"


@pytest.fixture(autouse=True)
def few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_MODELS", 4)


def test_searches_that_were_not_run_are_forecast_within_what_the_samples_tell():
    problems = 100
    world = World(problems)
    forecaster = Forecaster([world.tree(i, 16) for i in range(problems)], COSTS)
    errors = []
    for asked in (request("beam"), request("dvts"), request("best-of-n", 24)):
        found = forecaster.forecast(asked)
        truth = sum(world.solves(i, asked) for i in range(problems)) / problems
        assert found.basis is Basis.PREDICTED
        assert found.low <= truth <= found.high
        assert found.seconds == pytest.approx(0.001 * found.generator_tokens + 0.0005 * found.verifier_tokens)
        errors.append(abs(found.accuracy - truth))
    assert sum(errors) / 3 < 0.05, errors  # the standard error of one run of 100 problems is 0.04


def test_a_run_of_one_step_by_step_search_corrects_the_forecasts_of_the_others():
    forecaster = Forecaster([replace(World(1, i).tree(0, 8), problem_id=str(i)) for i in range(12)], COSTS)
    asked = [request("best-of-n", 16), request("beam", 1), request("beam", 2), request("beam"), request("lookahead", 2)]
    one = forecaster.step_by_step(asked)
    assert one is not None
    assert one == request("beam", 2), "as many candidates as recorded paths, and no greedy steps"
    assert forecaster.step_by_step(asked[-2:]) == request("beam"), "more than recorded paths, where there is no other"
    assert forecaster.step_by_step(asked[:1]) is None
    before, apart = forecaster.forecast(request("beam")), forecaster.forecast(request("best-of-n", 16))
    own = forecaster.forecast(one)
    usage = {"generator_tokens": 2 * own.generator_tokens, "verifier_tokens": 7}
    found = {str(i): Sample(str(i), None, "1", "1", i < 3, "", 0.5, "finished", "", {}, usage) for i in range(12)}
    forecaster.correct(one, found)
    errors = np.array([i < 3 for i in range(12)]) - own.outcomes
    known = forecast._MODEL_ERROR**2 / (forecast._MODEL_ERROR**2 + errors.var() / 12)
    after = forecaster.forecast(request("beam"))
    assert after.accuracy == pytest.approx(before.accuracy + known * errors.mean())
    assert after.accuracy < before.accuracy
    assert after.outcomes.mean() == pytest.approx(after.accuracy), "by which searches are compared"
    assert after.low < after.accuracy < after.high
    assert (after.generator_tokens, after.verifier_tokens) == pytest.approx(
        (2 * before.generator_tokens, 2 * before.verifier_tokens)
    )
    assert forecaster.forecast(request("best-of-n", 16)).accuracy == apart.accuracy


def test_a_verifier_that_ranks_badly_is_forecast_to_help_less():
    world = World(40)
    trees = [world.tree(i, 8) for i in range(40)]
    good = Forecaster(trees, COSTS).forecast(request("beam")).accuracy
    for tree in trees:
        for step in tree.steps[1:]:
            step.score = world.draw.random()
    forecaster = Forecaster(trees, COSTS)
    blind = forecaster.forecast(request("beam")).accuracy
    assert blind < good - 0.1
    assert forecaster.path_rank(Aggregation.LAST) == pytest.approx(0.5, abs=0.1)


def test_votes_over_recorded_paths_need_no_model():
    trees = [World(1, seed).tree(0, 8) for seed in range(12)]
    forecaster = Forecaster(trees, COSTS)
    one = forecaster.forecast(request("majority", 1))
    assert one.basis is Basis.RECORDED
    share = sum(tree.right for tree in trees) / sum(tree.paths for tree in trees)
    assert one.accuracy == pytest.approx(share, abs=0.08)
    assert one.generator_tokens == 20 + 10 * DEPTH
    assert forecaster.pass_at()[1] == pytest.approx(share)
    whole = forecaster.forecast(request("majority", 8))
    assert set(whole.outcomes) <= {0.0, 1.0}  # all paths: nothing is drawn


def test_no_score_breaks_a_majoritys_ties_which_a_run_without_a_verifier_has_not():
    root = RecordedStep(None, count=2)
    wrong = RecordedStep(root, 0.1, 10, 1, EOS, "1", right=False)
    right = RecordedStep(root, 0.9, 10, 1, EOS, "gold", right=True)
    root.children += [wrong, right]
    forecaster = Forecaster([RecordedTree((root, wrong, right), prompt_tokens=20)], COSTS)
    assert forecaster.forecast(request("majority", 2)).accuracy == 0
    assert forecaster.forecast(request("best-of-n", 2)).accuracy == 1
    models = [SearchModel(forecaster.trees, seed) for seed in range(20)]
    one, two, scored = (
        [model.search(0, asked).right for model in models]
        for asked in (request("majority", 1), request("majority", 2), request("best-of-n", 2))
    )
    assert one == two != scored, "of two the earlier"


def test_the_first_wrong_step_is_found_by_its_score_and_the_end():
    def path(*scores: float, right: bool) -> RecordedTree:
        steps = [RecordedStep(None, count=1)]
        for score in scores:
            step = RecordedStep(steps[-1], score, 5)
            steps[-1].children.append(step)
            steps.append(step)
        steps[-1].end, steps[-1].answer, steps[-1].right = EOS, "a", right
        return RecordedTree(tuple(steps))

    good = [path(0.9, 0.8 + i / 100, 0.9, right=True) for i in range(8)]
    bad = [path(0.9, 0.1 + i / 100, 0.17 - i / 100, right=False) for i in range(8)]
    fit_step_states([*good, *bad])
    assert all(step.stays_right > 0.9 for tree in good for step in tree.steps)
    assert all(tree.steps[1].stays_right > 0.8 > 0.1 > tree.steps[2].stays_right for tree in bad)


def test_recorded_siblings_are_drawn_again_and_equal_ones_are_merged():
    root = RecordedStep(None, count=8)
    only = RecordedStep(root, 0.9, 7, 8, EOS, "gold", True)
    root.children.append(only)
    trees = [RecordedTree((root, only), 3)]
    fit_step_states(trees)
    assert SearchModel(trees, 0).search(0, request("best-of-n", 16)).tokens == 7  # one path, 16 times


def test_tokens_that_siblings_begin_with_alike_count_once():
    root = RecordedStep(None, count=3)
    texts = ("So 12", "So 13", "So 13, it is", "No")
    root.children += [RecordedStep(root, 0.9, 10, 1, EOS, "gold", True, text=text) for text in texts]
    own = OwnTokens([RecordedTree((root, *root.children), 3)])
    shares = [own.of(root.children[0], before) / 10 for before in range(6)]
    assert shares == pytest.approx([1.0, 1 / 5, 1 / 5, 1 / 5, 1 / 5, 1 / 5]), "more siblings never share less"
    assert own.of_all(root.children[:2]) == pytest.approx(12)
    assert own.of_all(root.children[:1]) == 10


def test_searches_with_many_siblings_compute_fewer_tokens_than_paths_apart():
    world = World(12)
    trees = [world.tree(i, 8) for i in range(12)]
    for tree in trees:
        for number, step in enumerate(tree.steps[1:]):
            step.text = f"12345678{number:02}"  # nine of ten characters are those of a sibling before
    forecaster = Forecaster(trees, COSTS)
    beam, paths = forecaster.forecast(request("beam", 2, 4)), forecaster.forecast(request("majority", 8))
    assert paths.generator_tokens == pytest.approx(20 + 10 + 7 * 1 + 8 * 10 * (DEPTH - 1), rel=0.01)
    steps = beam.verifier_tokens - 20
    assert beam.generator_tokens - 20 < 0.5 * steps


def test_greedy_steps_are_not_forecast():
    forecaster = Forecaster([World(1).tree(0, 4)], COSTS)
    with pytest.raises(UnpredictableSearchError, match="greedy"):
        forecaster.forecast(replace(request("lookahead"), lookahead_steps=1))


def test_siblings_and_useful_width_are_measured():
    world = World(80)
    forecaster = Forecaster([world.tree(i, 8) for i in range(80)], COSTS)
    rank, pairs = forecaster.sibling_rank(Aggregation.LAST)
    assert rank is not None
    assert rank > 0.52
    assert pairs > 100
    assert forecaster.useful_width(request("best-of-n")) >= 2
