"""What the orchestrator makes of an algorithm's wishes: looking ahead, merging, giving up."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_driver import scripted
from search_runs import BEAM, LOOKAHEAD

from espalier.engine.model import Model
from espalier.engine.work import Generate, Work
from espalier.search.node import Termination
from espalier.search.orchestrator import Orchestrator
from espalier.search.request import SearchRequest
from espalier.search.result import CandidateDone, Event
from espalier.search.running import RunningSearch

Make = Callable[..., Orchestrator]


def test_a_look_ahead_takes_the_likeliest_tokens(make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch):
    orchestrator, temperatures = make_orchestrator(), []
    submit = orchestrator.engine.submit

    def note(work: Work) -> None:
        if isinstance(work, Generate):
            temperatures.extend(sampling.temperature for sampling in work.samplings)
        submit(work)

    monkeypatch.setattr(orchestrator.engine, "submit", note)
    search, _ = watched_search(orchestrator, replace(LOOKAHEAD, temperature=0.7))
    assert set(temperatures) == {0.0, 0.7}
    assert temperatures.count(0.0) == sum(node.rollout for node in search._nodes) > 6


@pytest.mark.parametrize("cancel_after", [None, *range(16)])
def test_what_was_only_looked_at_is_never_an_answer(
    cancel_after: int | None, load_model: Callable[[str], Model], make_orchestrator: Make
):
    """Every look ahead comes to an answer, and so does every step sampled after it."""
    talker = load_model("talker")
    (one,), (two,), (end,) = (talker.tokenizer.encode(text) for text in ("1", "2", "\n\n"))
    (box,) = talker.tokenizer.encode("\\boxed{1}")
    model = scripted(talker, [(one, two), end, box, end, box, end, *[end] * 20])
    request = replace(LOOKAHEAD, lookahead_steps=1)
    search, told = watched_search(make_orchestrator(model, "classifier"), request, cancel_after)
    assert search.result is not None
    answers = {candidate.node_id for candidate in search.result.candidates}
    rollouts = {node.node_id for node in search._nodes if node.rollout}
    assert not rollouts & (answers | told)
    if cancel_after is None:
        assert len(rollouts) == 2
        assert all("\\boxed" in node.text for node in search._nodes if node.rollout)
        assert search.result.answer == "1"
        assert answers


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
    search, _ = orchestrator._running[search_id]
    for step in range(10_000):
        if not orchestrator.busy:
            return search, told
        if step == cancel_after:
            orchestrator.cancel(search_id)
        orchestrator.step()
    raise AssertionError("the search does not end")


def test_steps_that_are_equal_are_one_node_that_knows_which_samples_it_is(make_orchestrator: Make):
    """Of siblings asked for together, every sample is of exactly one node that stays; its path is the lowest of its."""
    for temperature in (0.4, 1.0):
        search, _ = watched_search(make_orchestrator(), replace(BEAM, temperature=temperature))
        for parent in {node.parent for node in search._nodes if node.parent}:
            children = [n for n in search._nodes if n.parent is parent and n.termination is not Termination.DUPLICATE]
            assert sorted(draw for node in children for draw in node.draws) == list(range(parent.num_children))
            assert all(node.path[-1] == node.draws[0] == min(node.draws) for node in children)
