"""Slots are shared equally among callers, and among the connections of one; who gives way loses nothing."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_runs import ALL, BEAM, BEST_OF_N, GREEDY, check_reserved, outcome, outcome_alone, waiting_in

from espalier.search.fairness import Account
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]
LONG = replace(BEST_OF_N, beam_width=4, max_steps=20, max_step_tokens=20, max_tokens=150, temperature=2.0)
TINY = replace(GREEDY, problem="Tiny: 1+1?")


def submit(orchestrator: Orchestrator, request: SearchRequest, caller: str, connection: str = "") -> str:
    return orchestrator.submit(request, options=SubmitOptions(caller=caller, connection=connection))


def running(orchestrator: Orchestrator) -> Counter[str]:
    return Counter("/".join(filter(None, search.account)) for search in orchestrator._queue.running)


def preemptions(orchestrator: Orchestrator) -> int:
    return sum(stats.preemptions for stats in orchestrator.engine.stats().values())


def finish(orchestrator: Orchestrator) -> dict[str, tuple]:
    """Run all searches to their ends; outcomes by id, in order of end."""
    ended = {}
    while orchestrator.busy:
        ended |= {result.search_id: outcome(result) for result in orchestrator.step()}
        check_reserved(orchestrator.engine)
    orchestrator.engine.check_drained()
    return ended


@pytest.mark.parametrize(
    "options", [{}, {"launch_ahead": True}, {"kv_memory_bytes": 2**20}, {"reserved_share": 0.25}], ids=str
)
def test_tiny_searches_of_one_caller_end_before_the_long_ones_that_held_every_slot(
    options: dict, make_orchestrator: Make
):
    orchestrator = make_orchestrator(**{"max_running": 4, "kv_memory_bytes": 2**26, **options})
    longs = {submit(orchestrator, request := replace(LONG, seed=i), "long"): request for i in range(9)}
    for _ in range(4):
        assert orchestrator.step() == []
    tinies = {submit(orchestrator, request := replace(TINY, seed=i), "tiny"): request for i in range(5)}
    assert orchestrator.step() == []
    if "kv_memory_bytes" not in options:
        assert running(orchestrator) == {"long": 2, "tiny": 2}
    ended = finish(orchestrator)
    order = list(ended)
    assert max(map(order.index, tinies)) < 5 + 4, "they wait for fewer long ones than there are slots"
    for search_id, request in (longs | tinies).items():
        assert ended[search_id] == outcome_alone(request, make_orchestrator)


def test_the_newest_searches_give_way_and_go_on_first(make_orchestrator: Make):
    orchestrator = make_orchestrator(max_running=4, kv_memory_bytes=2**26)
    longs = [submit(orchestrator, replace(LONG, seed=i), "long") for i in range(6)]
    orchestrator.step()
    submit(orchestrator, TINY, "tiny")
    orchestrator.step()
    assert [search.search_id for search in waiting_in(orchestrator)] == longs[3:]
    assert [search.suspended for search in waiting_in(orchestrator)] == [True, False, False]
    assert preemptions(orchestrator) > 0
    ended = list(finish(orchestrator))
    assert len(ended) == 7


def test_three_callers_get_a_third_each_and_what_one_does_not_want_the_others_get(make_orchestrator: Make):
    orchestrator, counts = make_orchestrator(max_running=6, kv_memory_bytes=2**26), list[Counter[str]]()
    for caller, searches in (("one", 8), ("two", 8), ("three", 1), ("four", 8)):
        for i in range(searches):
            submit(orchestrator, replace(LONG, seed=i), caller)
        orchestrator.step()
        counts.append(running(orchestrator))
    assert counts[0] == {"one": 6}
    assert counts[1] == {"one": 3, "two": 3}
    assert sorted(counts[2].values()) == [1, 2, 3]
    assert counts[2]["three"] == 1
    assert counts[3]["three"] == 1
    assert sorted(counts[3].values()) == [1, 1, 2, 2]
    orchestrator.close()


def test_connections_of_one_caller_share_what_it_gets(make_orchestrator: Make):
    orchestrator = make_orchestrator(max_running=8, kv_memory_bytes=2**26)
    for connection in ("5000", "5001"):
        for i in range(9):
            submit(orchestrator, replace(LONG, seed=i), "a host", connection)
        orchestrator.step()
    assert running(orchestrator) == {"a host/5000": 4, "a host/5001": 4}
    for i in range(9):
        submit(orchestrator, replace(LONG, seed=i), "another host", "6000")
    orchestrator.step()
    assert running(orchestrator) == {"a host/5000": 2, "a host/5001": 2, "another host/6000": 4}
    orchestrator.close()


def test_searches_of_one_caller_keep_their_slots(make_orchestrator: Make):
    orchestrator = make_orchestrator(max_running=2, kv_memory_bytes=2**26)
    for i in range(6):
        submit(orchestrator, replace(BEAM, seed=i), "one")
    finish(orchestrator)
    assert preemptions(orchestrator) == 0


def test_where_callers_are_more_than_slots_searches_take_turns(
    make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    orchestrator, now = make_orchestrator(max_running=2, kv_memory_bytes=2**26), [0.0]
    monkeypatch.setattr(orchestrator._queue, "_clock", lambda: now[0])
    asked = {submit(orchestrator, request := replace(LONG, seed=i), f"caller {i}"): request for i in range(4)}
    turns = []
    for _ in range(4):
        orchestrator.step()
        orchestrator.step()
        turns.append(set(running(orchestrator)))
        now[0] += 5.0
    first, second = {"caller 0", "caller 1"}, {"caller 2", "caller 3"}
    assert turns == [first, second, first, second]
    submit(orchestrator, TINY, "tiny")
    orchestrator.step()
    assert "tiny" in running(orchestrator), "a new one waits only for a search that has had its turn"
    ended = finish(orchestrator)
    for search_id, request in asked.items():
        assert ended[search_id] == outcome_alone(request, make_orchestrator)


def test_those_of_a_higher_priority_give_way_to_nobody_below(make_orchestrator: Make):
    orchestrator = make_orchestrator(max_running=2, kv_memory_bytes=2**26)
    for i in range(3):
        orchestrator.submit(replace(LONG, seed=i), options=SubmitOptions(1, caller="urgent"))
    orchestrator.step()
    submit(orchestrator, TINY, "patient")
    orchestrator.step()
    assert running(orchestrator) == {"urgent": 2}
    orchestrator.close()


def test_memory_that_one_caller_fills_is_shared_too(make_orchestrator: Make):
    orchestrator = make_orchestrator(kv_memory_bytes=1_200_000)
    for i in range(9):
        submit(orchestrator, replace(BEAM, seed=i), "large")
    orchestrator.step()
    assert 1 < orchestrator.running < 9
    submit(orchestrator, TINY, "tiny")
    orchestrator.step()
    assert running(orchestrator)["tiny"] == 1
    finish(orchestrator)


accounts = st.sampled_from([Account("one"), Account("two"), Account("host", "1"), Account("host", "2")])
arrivals = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(list(ALL)), accounts, st.integers(0, 1)), min_size=2, max_size=8
)


@pytest.mark.parametrize("examples", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_whoever_comes_when_all_results_are_those_of_lone_runs(examples: int, make_orchestrator: Make):
    @settings(max_examples=examples)
    @given(arrivals, st.integers(1, 4), st.sampled_from([600_000, 2**22]), st.booleans())
    def check(arrivals: list[tuple[int, str, Account, int]], slots: int, memory: int, launch_ahead: bool) -> None:
        orchestrator = make_orchestrator(max_running=slots, kv_memory_bytes=memory, launch_ahead=launch_ahead)
        orchestrator._queue._clock = map(float, range(0, 10**9, 2)).__next__  # turns end after a few looks at the clock
        ids, ended, step = dict[str, str](), dict[str, tuple](), 0
        while len(ended) < len(arrivals):
            for when, name, account, priority in arrivals:
                if when == step:
                    ids[orchestrator.submit(ALL[name], options=SubmitOptions(priority, *account))] = name
            ended |= {result.search_id: outcome(result) for result in orchestrator.step()}
            check_reserved(orchestrator.engine)
            step += 1
            assert step < 20_000, "it does not end"
        orchestrator.engine.check_drained()
        assert not orchestrator._queue._last_start
        for search_id, name in ids.items():
            assert ended[search_id] == outcome_alone(ALL[name], make_orchestrator)

    check()
