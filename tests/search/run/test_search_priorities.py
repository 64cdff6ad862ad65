"""Searches of a larger priority take the place of others, which lose nothing by it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_runs import ALL, BEAM, BEST_OF_N, GREEDY, check_reserved, outcome, outcome_alone, waiting_in

from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.result import SearchResult, StopReason
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]
URGENT = replace(BEAM, problem="Urgent: 1+1?", seed=77)
SMALL = 600_000
"""Bytes of a pool that three of the usual searches do not fit."""


def finish(orchestrator: Orchestrator, *arrivals: tuple[int, SearchRequest, int]) -> dict[int, SearchResult]:
    """Run searches, each of which arrives before a given step with a priority; results by arrival, in order of end."""
    ids: dict[str, int] = {}
    ended: dict[int, SearchResult] = {}
    step = 0
    while len(ended) < len(arrivals):
        for i, (when, request, priority) in enumerate(arrivals):
            if when == step:
                options = SubmitOptions(priority, caller=f"caller {i % 3}")
                ids[orchestrator.submit(request, options=options)] = i
        ended |= {ids[result.search_id]: result for result in orchestrator.step()}
        check_reserved(orchestrator.engine)
        if step % 8 == 0:
            orchestrator.engine.check_integrity()
        step += 1
        assert step < 20_000, "it does not end"
    orchestrator.engine.check_drained()
    return ended


def preemptions(orchestrator: Orchestrator) -> int:
    return sum(stats.preemptions for stats in orchestrator.engine.stats().values())


SCARCE = [
    {"max_running": 1},
    {"max_running": 2, "launch_ahead": True},
    {"kv_memory_bytes": SMALL},
    {"kv_memory_bytes": SMALL, "launch_ahead": True, "prefix_cache": False},
    {"kv_memory_bytes": SMALL, "reserved_share": 0.25, "max_running": 2},
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            name, options, id=f"{name}-{options}", marks=() if name == "beam" or i % 5 == j else pytest.mark.slow
        )
        for i, name in enumerate(ALL)
        for j, options in enumerate(SCARCE)
    ],
)
def test_an_urgent_search_comes_between_and_nobody_loses_anything(name: str, options: dict, make_orchestrator: Make):
    lows = [replace(ALL[name], problem=f"{i}+{i}?", seed=i, max_steps=5) for i in range(4)]
    alone = [outcome_alone(request, make_orchestrator) for request in (*lows, URGENT)]
    orchestrator = make_orchestrator(**options)
    ended = finish(orchestrator, *((0, request, 0) for request in lows), (3, URGENT, 5))
    assert [outcome(ended[i]) for i in range(5)] == alone
    if name in ("beam", "best-of-n", "dvts", "particle-gibbs"):  # the others may be over, or leave it room
        assert preemptions(orchestrator) > 0


@pytest.mark.parametrize("options", [{"max_running": 1}, {"max_running": 3}, {"kv_memory_bytes": 2 * SMALL}], ids=str)
def test_an_urgent_search_ends_first_where_long_ones_fill_the_pool_or_all_places(
    options: dict, make_orchestrator: Make
):
    slow = replace(BEST_OF_N, beam_width=9, max_steps=20, max_step_tokens=20, max_tokens=150, temperature=2.0)
    lows = [(0, replace(slow, seed=seed), 0) for seed in range(6)]
    patient = finish(make_orchestrator(**options), *lows, (5, URGENT, 0))
    ended = finish(make_orchestrator(**options), *lows, (5, URGENT, 1))
    places = options.get("max_running", 1)
    assert list(patient).index(6) > len(lows) - places  # those who hold the other places may end after it
    assert list(ended).index(6) < places  # those who keep their places may end before it
    assert {i: outcome(result) for i, result in ended.items()} == {i: outcome(r) for i, r in patient.items()}


def test_searches_of_equal_priority_keep_their_places(make_orchestrator: Make):
    orchestrator = make_orchestrator(max_running=2)
    finish(orchestrator, *((i, replace(BEAM, seed=i), 3) for i in range(6)))
    assert preemptions(orchestrator) == 0


def test_the_last_of_the_smallest_priority_gives_way_and_goes_on_before_those_behind_it(make_orchestrator: Make):
    orchestrator = make_orchestrator(max_running=3)
    long = replace(BEAM, beam_width=2, max_steps=8, max_tokens=90)
    names = {
        orchestrator.submit(replace(long, problem=name), options=SubmitOptions(priority)): name
        for name, priority in (("middle", 1), ("first", 0), ("last", 0), ("waiting", 0))
    }
    orchestrator.step()
    orchestrator.submit(URGENT, options=SubmitOptions(2))
    orchestrator.step()
    assert [names[entry.search_id] for entry in waiting_in(orchestrator)] == ["last", "waiting"]
    orchestrator.submit(URGENT, options=SubmitOptions(2))
    orchestrator.step()
    assert [names[entry.search_id] for entry in waiting_in(orchestrator)] == ["first", "last", "waiting"]
    assert (orchestrator.running, orchestrator.occupancy().waiting) == (3, 3)
    while orchestrator.busy:
        orchestrator.step()


def test_nobody_gives_way_to_one_that_would_not_fit_even_then(make_orchestrator: Make):
    orchestrator = make_orchestrator(kv_memory_bytes=SMALL)
    wide = replace(BEST_OF_N, beam_width=next(width for width in range(2, 12) if takes_half(orchestrator, width)))
    orchestrator.submit(wide, options=SubmitOptions(5))
    orchestrator.submit(replace(GREEDY, max_steps=5))
    orchestrator.step()
    orchestrator.submit(wide, options=SubmitOptions(5))
    orchestrator.step()
    assert (orchestrator.running, preemptions(orchestrator)) == (2, 0)
    orchestrator.submit(replace(GREEDY, problem="of no account"), options=SubmitOptions(-1))
    while orchestrator.busy:
        orchestrator.step()
    assert preemptions(orchestrator) == 0


def takes_half(orchestrator: Orchestrator, width: int) -> bool:
    """Whether two such searches do not fit at once."""
    pools, kv_pool = orchestrator.engine.admission.pools, orchestrator.engine.kv_pool
    blocks = orchestrator.check(replace(BEST_OF_N, beam_width=width)).blocks
    return sum(pools[role].slabs_for(count) for role, count in blocks.items()) > kv_pool.num_slabs / 2


@pytest.mark.parametrize("launch_ahead", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4, 8, 13])
def test_a_search_that_gave_way_can_be_cancelled_and_holds_nothing(
    steps: int, launch_ahead: bool, make_orchestrator: Make
):
    orchestrator = make_orchestrator(max_running=1, launch_ahead=launch_ahead)
    low = orchestrator.submit(replace(BEST_OF_N, max_steps=10, max_tokens=100))
    for _ in range(steps):
        orchestrator.step()
    high = orchestrator.submit(URGENT, options=SubmitOptions(1))
    orchestrator.step()
    orchestrator.cancel(low)
    ended = {result.search_id: result for result in orchestrator.step()}
    assert ended[low].stop_reason is StopReason.CANCELLED
    while orchestrator.busy:
        ended |= {result.search_id: result for result in orchestrator.step()}
    assert outcome(ended[high]) == outcome_alone(URGENT, make_orchestrator)
    orchestrator.engine.check_drained()


def test_a_search_that_gave_way_ends_when_its_time_is_over(make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch):
    orchestrator, now = make_orchestrator(max_running=1), [100.0]
    monkeypatch.setattr(orchestrator, "_clock", lambda: now[0])
    low = orchestrator.submit(replace(BEST_OF_N, time_limit=5.0, max_steps=10, max_tokens=100))
    for _ in range(6):
        assert orchestrator.step() == []
    orchestrator.submit(URGENT, options=SubmitOptions(1))
    orchestrator.step()
    now[0] += 5.0
    (result,) = orchestrator.step()
    assert (result.search_id, result.stop_reason) == (low, StopReason.DEADLINE)
    assert result.nodes[1:], "what it had sampled is in its result"
    orchestrator.close()
    orchestrator.engine.check_drained()


def test_closing_ends_those_that_gave_way_too(make_orchestrator: Make):
    orchestrator = make_orchestrator(max_running=1)
    orchestrator.submit(BEST_OF_N)
    orchestrator.step()
    orchestrator.submit(URGENT, options=SubmitOptions(1))
    orchestrator.step()
    orchestrator.close()
    assert not orchestrator.busy
    orchestrator.engine.check_drained()


arrivals = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(list(ALL)), st.integers(0, 3)), min_size=2, max_size=7
)


@pytest.mark.parametrize("examples", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_whoever_comes_when_and_with_which_priority_all_results_are_those_of_lone_runs(
    examples: int, make_orchestrator: Make
):
    @settings(max_examples=examples)
    @given(
        arrivals, st.integers(1, 3), st.sampled_from([SMALL, 2**22]), st.sampled_from([1.0, 0.25, 0.0]), st.booleans()
    )
    def check(arrivals: list[tuple[int, str, int]], places: int, memory: int, share: float, launch_ahead: bool) -> None:
        orchestrator = make_orchestrator(
            max_running=places, kv_memory_bytes=memory, reserved_share=share, launch_ahead=launch_ahead
        )
        ended = finish(orchestrator, *((when, ALL[name], priority) for when, name, priority in arrivals))
        for i, (_, name, _) in enumerate(arrivals):
            assert outcome(ended[i]) == outcome_alone(ALL[name], make_orchestrator)

    check()
