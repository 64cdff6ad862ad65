"""Searches with drafts are the same as without, bit for bit: texts, scores, trees, answers, and what they cost."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, cycle, islice

import pytest
from scripted_drafts import FixedLength
from search_runs import ADAPTIVE, ALL, BEAM, BEST_OF_N, DVTS, MCTS, crowd, outcome, outcome_alone, run

from espalier.engine.roles import GENERATOR
from espalier.engine.scheduling.running_samples import RunningRequest
from espalier.engine.work import Generated
from espalier.search.request import SearchRequest
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]
COSTS = ("generator_tokens", "verifier_tokens", "generated_tokens", "generator_saved_tokens", "nodes", "duplicates")


class RememberingDrafter:
    """Proposes what the same searches said before, but for every fifth token."""

    def __init__(self, orchestrator: Orchestrator, paths: dict[tuple[int, ...], list[int]]) -> None:
        self.table = orchestrator.engine.schedulers[GENERATOR].table
        self.paths = paths  # by the key of a step's sampling
        self.calls = count()

    def propose(self, branches: Sequence[RunningRequest], most: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = []
        for branch in branches:
            said = self.paths.get(branch.work.samplings[branch.indices[0]].key, [])
            draft = said[self.table.lengths[branch.row] - branch.start :]
            drafts.append([5 if next(self.calls) % 5 == 0 else token for token in draft])
        return drafts

    def learn(self, finished: Sequence[Generated]) -> None:
        for one in finished:
            for index in one.indices:
                self.paths[one.work.samplings[index].key] = one.token_ids


def drafting(make_orchestrator: Make, paths: dict | None = None, **options: object) -> Orchestrator:
    """Drafts of always the same length, from `paths` if given."""
    orchestrator = make_orchestrator(**options)
    speculation, length = orchestrator.engine.schedulers[GENERATOR].speculation, options["draft_tokens"]
    speculation.lengths, speculation.length = FixedLength(length), length
    if paths is not None:
        speculation.drafter = RememberingDrafter(orchestrator, paths)
    return orchestrator


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_a_search_with_drafts_is_the_same_and_costs_the_same(request_: SearchRequest, make_orchestrator: Make):
    plain = run(make_orchestrator(), request_).only
    paths: dict = {}
    run(drafting(make_orchestrator, paths, draft_tokens=1), request_)
    orchestrator = drafting(make_orchestrator, paths, draft_tokens=4)
    drafted = run(orchestrator, request_).only
    assert outcome(drafted) == outcome(plain)
    assert [getattr(drafted.usage, each) for each in COSTS] == [getattr(plain.usage, each) for each in COSTS]
    stats = orchestrator.engine.stats()[GENERATOR]
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


HOW = [
    {"draft_tokens": 1},
    {"draft_tokens": 7, "launch_ahead": True},
    {"draft_tokens": 3, "kv_memory_bytes": 600_000, "reserved_share": 0.05},
    {"draft_tokens": 16, "kv_memory_bytes": 600_000, "reserved_share": 0.05, "max_batch_tokens": 40},
    {"draft_tokens": 2, "kv_memory_bytes": 600_000, "reserved_share": 0.05, "launch_ahead": True, "block_size": 1},
]


def searches(number: int) -> list[SearchRequest]:
    """So many by five algorithms, of several temperatures and problems."""
    kinds = cycle([BEAM, BEST_OF_N, DVTS, MCTS, ADAPTIVE])
    made = [
        replace(kind, seed=seed, temperature=(1.0, 0.3)[seed % 2]) for seed, kind in enumerate(islice(kinds, number))
    ]
    return [replace(each, problem=other.problem) for each, other in zip(made, crowd(number), strict=True)]


@pytest.mark.parametrize("drafter", ["suffixes", "remembering", "draft model"])
@pytest.mark.parametrize("number", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_searches_among_others_are_the_same_with_drafts_of_any_length(
    number: int, drafter: str, make_orchestrator: Make
):
    requests, paths = searches(number), {}
    expected = [outcome_alone(request, make_orchestrator) for request in requests]
    accepted = preempted = 0
    for how in HOW:
        of = {"draft": "talker"} if drafter == "draft model" else {}
        orchestrator = drafting(make_orchestrator, paths if drafter == "remembering" else None, **how, **of)
        for request, result, alone in zip(requests, run(orchestrator, *requests).results, expected, strict=True):
            assert outcome(result) == alone, (how, request)
        stats = orchestrator.engine.stats()
        accepted += stats[GENERATOR].accepted_tokens
        preempted += sum(of.preemptions for of in stats.values())
    assert accepted > 0
    assert preempted > 0
