"""Which worker gets a search, on plain data."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from espalier.experiments.executors import routing
from espalier.experiments.executors.routing import RecentProblems, Search, WorkerState, choose_worker
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.request import AlgorithmName, SearchRequest, SubmitOptions

PROBLEM = (
    "A farm has 85 buttons in stock. (a) Then 27 are sold. (b) It makes 94 more. How many buttons does it have now?"
)
SHORT = {"max_steps": 1, "max_step_tokens": 1}


def search(
    problem: str = PROBLEM, beam_width: int = 1, salt: bytes = b"", deaths: Iterable[int] = (), **fields
) -> Search:
    request = SearchRequest(problem, AlgorithmName.BEAM, beam_width, 1, **fields)
    return Search(f"{problem[:4]}-{id(request)}", request, SubmitOptions(salt=salt), None, 0, 0.0, [*deaths])


def workers(count: int) -> list[WorkerState]:
    return [WorkerState(number, up=True) for number in range(count)]


def chosen(what: Search, among: list[WorkerState], most: int = 8) -> int | None:
    worker = choose_worker(what, among, most)
    return None if worker is None else worker.number


def test_the_worker_with_the_fewest_tokens_gets_a_search_not_the_one_with_the_fewest_searches():
    two = workers(2)
    two[0].give(search("one wide search", beam_width=64))
    for name in ("a", "b", "c"):
        two[1].give(search(name))
    assert two[0].tokens > two[1].tokens
    assert chosen(search("another"), two) == 1


def test_searches_of_different_sizes_are_spread_by_their_tokens():
    three = workers(3)
    widths = [64, 1, 1, 32, 2, 4, 16, 8, 8, 1, 2, 32, 64, 4, 16] * 4
    for number, width in enumerate(widths):
        given = choose_worker(search(f"problem {number}", width), three, 100)
        assert given
        given.give(search(f"problem {number}", width))
    loads = sorted(worker.tokens for worker in three)
    assert loads[2] - loads[0] <= search(beam_width=64).request.estimated_tokens
    assert sum(len(worker.running) for worker in three) == len(widths)


def test_searches_of_a_smaller_priority_do_not_fill_a_worker_for_those_of_a_larger_one():
    (one,) = workers(1)
    for number in range(2):
        one.give(search(f"low {number}"))
    high = replace(search("high"), options=SubmitOptions(priority=1))
    assert chosen(search("low"), [one], most=2) is None
    assert chosen(high, [one], most=2) == 0
    one.give(high)
    one.give(replace(search("higher"), options=SubmitOptions(priority=2)))
    assert chosen(replace(search("highest"), options=SubmitOptions(priority=3)), [one], most=2) is None, "twice as many"


def test_searches_of_one_caller_do_not_fill_a_worker_for_those_of_another():
    (one,) = workers(1)
    many, few = (
        lambda name, caller=caller: replace(search(name), options=SubmitOptions(caller=caller)) for caller in "ab"
    )
    for number in range(4):
        one.give(many(f"many {number}"))
    assert chosen(many("one more"), [one], most=4) is None
    for number in range(2):
        assert chosen(few("few"), [one], most=4) == 0
        one.give(few(f"few {number}"))
    assert chosen(few("few"), [one], most=4) is None, "half of four"


def test_a_conversation_goes_to_the_worker_that_has_its_beginning():
    two = workers(2)
    history = (ChatMessage(ChatRole.USER, PROBLEM), ChatMessage(ChatRole.ASSISTANT, "It has 152. " * 20))
    two[1].give(search("And twice that?", history=history))
    two[1].running.clear()
    two[0].give(search("And twice that?"))
    two[0].running.clear()
    longer = (*history, ChatMessage(ChatRole.USER, "And twice that?"), ChatMessage(ChatRole.ASSISTANT, "304"))
    assert chosen(search("And thrice?", history=longer), two) == 1


def test_a_full_worker_and_one_that_is_down_get_nothing():
    two = workers(2)
    two[0].up = False
    two[1].give(search())
    assert chosen(search(), two, most=2) == 1
    assert chosen(search(), two, most=1) is None


def test_a_suspect_waits_for_an_empty_worker_and_then_has_it_alone():
    two, suspect = workers(2), search(deaths=[0, 1, 0])
    two[0].give(search("one"))
    two[1].give(search("other"))
    assert suspect.suspect
    assert chosen(suspect, two) is None
    two[1].running.clear()
    assert chosen(suspect, two) == 1
    two[1].give(suspect)
    assert chosen(search(), two) == 0
    two[0].up = False
    assert chosen(search(), two) is None


def test_a_search_goes_to_another_worker_than_the_one_that_died_with_it():
    two = workers(2)
    two[1].give(search("load", beam_width=64))
    assert chosen(search(), two) == 0
    assert chosen(search(deaths=[0]), two) == 1
    assert chosen(search(deaths=[0, 1]), two) == 0


@pytest.mark.parametrize("fields", [{"seed": 7}, {"temperature": 0.5}], ids=str)
def test_the_same_problem_goes_where_its_prompt_is_cached_with_any_seed(fields):
    three = workers(3)
    three[2].give(search())
    three[2].running.clear()
    assert chosen(search(**fields), three) == 2
    assert chosen(search("Tom has 38 coins."), three) == 0


def test_a_cached_prompt_outweighs_no_more_load_than_it_saves():
    two = workers(2)
    two[1].recent.add(b"", PROBLEM)
    saved = two[1].recent.saved_tokens(b"", PROBLEM)
    assert saved == len(PROBLEM) // 2
    two[1].give(search("a little", max_tokens=saved - 1, **SHORT | {"max_step_tokens": 2048}))
    assert two[1].tokens == saved - 1
    assert chosen(search(), two) == 1
    two[1].give(search("a little more", **SHORT))
    two[1].give(search("and more", **SHORT))
    assert chosen(search(), two) == 0


def test_what_a_worker_computed_for_another_salt_or_before_it_died_is_worth_nothing():
    two = workers(2)
    two[1].give(search(salt=b"one caller"))
    two[1].running.clear()
    assert chosen(search(salt=b"one caller"), two) == 1
    assert chosen(search(salt=b"another"), two) == 0
    two[1].lose()
    two[1].up = True
    assert chosen(search(salt=b"one caller"), two) == 0


def test_a_common_beginning_counts_as_far_as_it_goes():
    recent, examples = RecentProblems(), "Worked example: 1 + 1 = 2. " * 40
    recent.add(b"", examples + "What is 3 + 4?")
    saved = recent.saved_tokens(b"", examples + "What is 8 + 9?")
    assert len(examples) // 2 - 64 < saved <= len(examples + "What is ") // 2
    assert recent.saved_tokens(b"", "What is 3 + 4?") == 0
    assert recent.saved_tokens(b"", "x" + examples) == 0


def test_the_memory_of_problems_is_bounded_and_keeps_the_latest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routing, "_MAX_PIECES", 10)
    recent = RecentProblems()
    for number in range(50):
        recent.add(b"", f"problem {number}")
        assert len(recent._pieces) <= 10
    assert recent.saved_tokens(b"", "problem 49")
    assert not recent.saved_tokens(b"", "problem 0")
    recent.add(b"", "problem 40")  # used again, and so kept
    for number in range(50, 59):
        recent.add(b"", f"problem {number}")
    assert recent.saved_tokens(b"", "problem 40")
    assert not recent.saved_tokens(b"", "problem 49")
