"""The same request and seed give the same tree, scores bit for bit, whatever runs beside it."""

import itertools
from collections.abc import Callable

import pytest
from engine_driver import scripted
from search_runs import ALL, BEAM, BEST_OF_N, Watched, crowd, outcome, outcome_alone, run

from espalier.engine.models.model import Model
from espalier.engine.work import Generate, Work
from espalier.search.request import SearchRequest
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]
MINE = {
    **ALL,
    "wide beam": SearchRequest(**BEAM.to_dict() | {"beam_width": 4, "expansion": 4, "seed": 7}),
    "cool beam with top-p": SearchRequest(**BEAM.to_dict() | {"temperature": 0.6, "top_p": 0.9, "seed": 8}),
}


def run_among(orchestrator: Orchestrator, mine: SearchRequest, others: int, place: int) -> Watched:
    """Run a search with others before and after it; its result comes first."""
    requests = list(crowd(others))
    requests.insert(place, mine)
    watched = run(orchestrator, *requests)
    watched.results.insert(0, watched.results.pop(place))
    return watched


@pytest.mark.parametrize("half", [0, 1])
def test_searches_give_the_same_alone_and_among_31_others(half: int, make_orchestrator: Make):
    mine = dict(list(MINE.items())[half::2])
    watched = run(make_orchestrator(kv_memory_bytes=2**24), *mine.values(), *crowd(32 - len(mine)))
    assert watched.most_running == 32
    for (name, request), result in zip(mine.items(), watched.results, strict=False):
        assert outcome(result) == outcome_alone(request, make_orchestrator), name


def test_searches_give_the_same_in_another_order_of_arrival(make_orchestrator: Make):
    requests = [*MINE.values(), *crowd(9)]
    first = run(make_orchestrator(kv_memory_bytes=2**24), *requests).results
    last = run(make_orchestrator(kv_memory_bytes=2**24), *reversed(requests)).results
    for request, one, other in zip(requests, first, reversed(last), strict=True):
        assert outcome(one) == outcome(other), request


@pytest.mark.parametrize("mine", MINE.values(), ids=MINE.keys())
def test_a_search_that_waited_for_memory_gives_the_same(mine: SearchRequest, make_orchestrator: Make):
    alone = outcome_alone(mine, make_orchestrator)
    watched = run_among(make_orchestrator(kv_memory_bytes=600_000), mine, 6, place=6)
    assert watched.most_running < 7
    assert outcome(watched.results[0]) == alone


SCARCE = [{}, {"prefix_cache": False}, {"max_batch_tokens": 40}]


@pytest.mark.parametrize(
    ("mine", "options"),
    [
        pytest.param(mine, options, id=f"{name}-{options}", marks=() if i % 3 == j else pytest.mark.slow)
        for i, (name, mine) in enumerate(MINE.items())
        for j, options in enumerate(SCARCE)
    ],
)
def test_a_search_that_had_to_give_up_its_memory_gives_the_same(
    mine: SearchRequest, options: dict, make_orchestrator: Make
):
    alone = outcome_alone(mine, make_orchestrator)
    orchestrator = make_orchestrator(kv_memory_bytes=600_000, reserved_share=0.05, **options)
    watched = run_among(orchestrator, mine, 12, place=12)
    assert watched.most_running == 13
    assert sum(stats.preemptions for stats in orchestrator.engine.stats().values()) > 0
    assert outcome(watched.results[0]) == alone


@pytest.mark.parametrize("mine", MINE.values(), ids=MINE.keys())
def test_block_size_and_step_budget_do_not_change_a_search(mine: SearchRequest, make_orchestrator: Make):
    usual = outcome_alone(mine, make_orchestrator)
    for options in ({"block_size": 16}, {"block_size": 1}, {"max_batch_tokens": 5}):
        assert outcome(run(make_orchestrator(**options), mine).only) == usual, options


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_crowded_step_budget_does_not_change_a_search(temperature: float, make_orchestrator: Make):
    """With fewer tokens a step than branches, siblings no longer run side by side."""
    for seed in range(3):
        mine = SearchRequest(**BEAM.to_dict() | {"max_step_tokens": 6, "seed": seed, "temperature": temperature})
        alone = outcome_alone(mine, make_orchestrator)
        watched = run_among(make_orchestrator(max_batch_tokens=8), mine, 3, place=3)
        assert outcome(watched.results[0]) == alone, f"seed {seed}"


def test_which_of_two_siblings_with_the_same_text_stays_does_not_depend_on_the_crowd(
    load_model: Callable[[str], Model], make_orchestrator: Make
):
    """The same text in fewer tokens ends earlier, unless the step budget lets the longer sibling run first."""
    talker = load_model("talker")
    no_text = talker.tokenizer.token_id("<|im_start|>")
    likely = (no_text, *talker.tokenizer.encode("1"), *talker.tokenizer.encode("\n\n"))
    mute = scripted(talker, itertools.repeat(likely))
    for seed in range(4):
        mine = SearchRequest(**BEAM.to_dict() | {"max_step_tokens": 6, "seed": seed})
        alone = run(make_orchestrator(mute, max_batch_tokens=4), mine).only
        assert alone.usage.duplicates > 0
        watched = run_among(make_orchestrator(mute, max_batch_tokens=4), mine, 2, place=2)
        assert outcome(watched.results[0]) == outcome(alone), f"seed {seed}"


def test_running_the_same_request_twice_at_once_gives_twins(make_orchestrator: Make):
    first, second = run(make_orchestrator(), BEAM, BEAM).results
    assert first.search_id != second.search_id
    assert outcome(first) == outcome(second)


@pytest.mark.parametrize("mine", [BEAM, BEST_OF_N], ids=["beam", "best-of-n"])
def test_every_node_draws_from_a_stream_of_its_own(
    mine: SearchRequest, make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    orchestrator, keys = make_orchestrator(), []
    submit = orchestrator.engine.submit

    def note(work: Work) -> None:
        if isinstance(work, Generate):
            keys.extend(sampling.key for sampling in work.samplings)
        submit(work)

    monkeypatch.setattr(orchestrator.engine, "submit", note)
    run(orchestrator, mine)
    assert len(keys) > mine.candidates
    assert len(set(keys)) == len(keys)
