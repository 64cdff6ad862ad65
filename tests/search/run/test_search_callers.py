"""Searches of several callers at once share the models' time by caller, whatever each of them asks for."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from search_runs import BEAM, BEST_OF_N, outcome, run

from espalier.search.request import SubmitOptions
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]
LARGE = replace(BEST_OF_N, beam_width=48, max_steps=8, merge_duplicates=False)
SMALL = replace(BEAM, beam_width=2, expansion=2, max_steps=8, merge_duplicates=False)


@pytest.mark.parametrize("large", [3, 6])
def test_a_small_search_does_not_wait_for_anothers_large_ones(make_orchestrator: Make, large: int):
    computed: dict[str, int] = {}
    for caller in ("one", "two"):
        orchestrator = make_orchestrator("talker", kv_memory_bytes=2**26)
        asked = {}
        for seed in range(large):
            request = replace(LARGE, seed=seed)
            asked[orchestrator.submit(request, options=SubmitOptions(caller="one"))] = request
        small = orchestrator.submit(SMALL, options=SubmitOptions(caller=caller))
        asked[small] = SMALL
        ended = orchestrator.step()
        assert orchestrator.engine.sharing.contended == (caller == "two")
        while not any(result.search_id == small for result in ended):
            ended += orchestrator.step()
        computed[caller] = sum(stats.computed_tokens for stats in orchestrator.engine.stats().values())
        while orchestrator.busy:
            ended += orchestrator.step()
        for result in ended:
            assert outcome(result) == outcome(
                run(make_orchestrator("talker", kv_memory_bytes=2**26), asked[result.search_id]).only
            )
        assert not orchestrator.engine.sharing.contended
    assert computed["two"] < 0.6 * computed["one"]


def test_a_cancelled_search_takes_no_share_any_more(make_orchestrator: Make):
    orchestrator = make_orchestrator()
    ids = [orchestrator.submit(BEAM, options=SubmitOptions(caller=name)) for name in ("one", "two")]
    orchestrator.step()
    assert orchestrator.engine.sharing.contended
    orchestrator.cancel(ids[0])
    orchestrator.step()
    assert not orchestrator.engine.sharing.contended
    while orchestrator.busy:
        orchestrator.step()
