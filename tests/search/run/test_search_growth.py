"""What the orchestrator makes of an algorithm's wishes: looking ahead, merging, giving up."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_driver import scripted
from search_runs import ALL, BEAM, LOOKAHEAD

from espalier.engine.models.model import Model
from espalier.engine.work import Generate, Work
from espalier.search.algorithms.base import Expand
from espalier.search.growth import search as running
from espalier.search.growth.search import RunningSearch
from espalier.search.request import SearchRequest
from espalier.search.result import CandidateDone, Event, StepDone
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.tree import Node, Termination

Make = Callable[..., Orchestrator]


def test_a_look_ahead_takes_the_likeliest_tokens(make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch):
    orchestrator, temperatures = make_orchestrator(), []
    submit = orchestrator.engine.submit

    def note(work: Work) -> None:
        if isinstance(work, Generate):
            temperatures.extend(sampling.temperature for sampling in work.samplings)
        submit(work)

    monkeypatch.setattr(orchestrator.engine, "submit", note)
    search, _ = watched_search(orchestrator, replace(LOOKAHEAD, temperature=0.7, seed=3))
    assert set(temperatures) == {0.0, 0.7}
    assert temperatures.count(0.0) == sum(node.rollout for node in search._tree.nodes) > 6


def test_what_was_only_looked_at_is_never_an_answer_whenever_the_search_is_cut_short(
    load_model: Callable[[str], Model], make_orchestrator: Make
):
    """Every look ahead comes to an answer, and few tokens a step pull their scores apart."""
    talker = load_model("talker")
    (one,), (two,), (end,) = (talker.tokenizer.encode(text) for text in ("1", "2", "\n\n"))
    (box,) = talker.tokenizer.encode("\\boxed{1}")
    answered = 0
    for cancel_after in range(18, 34):
        model = scripted(talker, [(one, two), end, box, end, box, end, *[end] * 20])
        orchestrator = make_orchestrator(model, "classifier", max_batch_tokens=3)
        search, told = watched_search(orchestrator, replace(LOOKAHEAD, lookahead_steps=1), cancel_after)
        assert search.result is not None
        answers = {candidate.node_id for candidate in search.result.candidates}
        rollouts = [node for node in search._tree.nodes if node.rollout]
        assert all("\\boxed" in node.text for node in rollouts)
        assert not {node.node_id for node in rollouts} & (answers | told)
        answered += bool(answers)
    assert 0 < answered < 16


def watched_search(
    orchestrator: Orchestrator, request: SearchRequest, cancel_after: int | None = None
) -> tuple[RunningSearch, set[int]]:
    """A search run to its end, or cancelled after some steps, and the ids of nodes that it called candidates."""
    told: set[int] = set()

    def watch(event: Event) -> None:
        if isinstance(event, CandidateDone):
            told.add(event.candidate.node_id)

    search_id = orchestrator.submit(request, watch)
    orchestrator.step()
    search = orchestrator._searches[search_id]
    assert search is not None
    for step in range(10_000):
        if not orchestrator.busy:
            return search, told
        if step == cancel_after:
            orchestrator.cancel(search_id)
        orchestrator.step()
    raise AssertionError("the search does not end")


def test_steps_that_are_equal_are_one_node_that_knows_which_samples_it_is(
    load_model: Callable[[str], Model], make_orchestrator: Make
):
    """Of siblings asked for together, every sample is of exactly one node that stays; its path is the lowest of its."""
    talker = load_model("talker")
    no_text = talker.tokenizer.token_id("<|im_start|>")  # so that equal texts are of different tokens
    likely = (no_text, *talker.tokenizer.encode("1"), *talker.tokenizer.encode("\n\n"))
    model, merged = scripted(talker, itertools.repeat(likely)), 0
    for seed in range(3):
        request = replace(BEAM, max_step_tokens=6, seed=seed)
        search, _ = watched_search(make_orchestrator(model, "classifier", max_batch_tokens=4), request)
        merged += sum(node.termination is Termination.DUPLICATE for node in search._tree.nodes)
        for parent in {node.parent for node in search._tree.nodes if node.parent}:
            siblings = [node for node in search._tree.nodes if node.parent is parent]
            children = [node for node in siblings if node.termination is not Termination.DUPLICATE]
            assert sorted(draw for node in children for draw in node.draws) == list(range(parent.num_children))
            assert all(node.path[-1] == node.draws[0] == min(node.draws) for node in children)
    assert merged > 3


@pytest.mark.parametrize("mine", ALL.values(), ids=ALL.keys())
def test_only_what_the_algorithm_keeps_stays_in_memory(mine: SearchRequest, make_orchestrator: Make):
    orchestrator = make_orchestrator()

    def watch(event: Event) -> None:
        if isinstance(event, StepDone):
            search = orchestrator._searches[event.search_id]
            assert search is not None
            open_ones = {node for node in search._algorithm.kept() if node.open}
            assert set(search._tree._branches) == open_ones
            sequences = sum(branch.sequence is not None for branch in search._tree._branches.values())
            assert sum(stats.live_sequences for stats in orchestrator.engine.stats().values()) == sequences

    orchestrator.submit(mine, watch)
    while orchestrator.busy:
        orchestrator.step()


class _TwiceToTheEnd:
    """Two first steps; from each two paths to the end, and then from the first of them one more."""

    def __init__(self, root: Node) -> None:
        self._asks = [[Expand(root, 2)]]
        self._first: list[Node] = []
        self._leaves: list[Node] = []

    def ask(self) -> list[Expand]:
        return self._asks.pop(0)

    def tell(self, nodes: list[Node]) -> None:
        if self._first:
            self._leaves += nodes
        else:
            self._first = [node for node in nodes if node.open]
            self._asks = [[Expand(n, 2, to_end=True) for n in self._first], [Expand(self._first[0], 1, to_end=True)]]

    def finished(self) -> bool:
        return not self._asks

    def kept(self) -> list[Node]:
        return [*self._first, *(leaf for leaf in self._leaves if leaf.complete)]


def test_paths_may_go_on_from_a_kept_node_and_again_in_a_later_round(
    load_model: Callable[[str], Model], make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(running, "make_algorithm", lambda _, root: _TwiceToTheEnd(root))
    talker = load_model("talker")
    ids = [talker.tokenizer.encode(text)[0] for text in ("1", "2", "3", "4", "5")]
    (box,), (end,) = talker.tokenizer.encode("\\boxed{1}"), talker.tokenizer.encode("\n\n")
    script = [tuple(ids), end] * 3 + [box, end] + [tuple(ids), end] + [box, end]
    orchestrator = make_orchestrator(scripted(talker, script), "classifier")
    search, _ = watched_search(orchestrator, replace(BEAM, max_step_tokens=4))
    assert search.result is not None
    assert sum(candidate.multiplicity for candidate in search.result.candidates) == 5
    for candidate in search.result.candidates:
        assert all(step.score is not None for step in candidate.steps)
