"""Searches that do not merge equal samples: each is decoded and scored by itself."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from search_runs import ALL, BEAM, crowd, outcome, run

from espalier.search.request import SearchRequest
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]


def unmerged(request: SearchRequest, **fields: object) -> SearchRequest:
    return replace(request, merge_duplicates=False, **fields)


@pytest.mark.parametrize("name", ALL)
def test_no_node_stands_for_several_samples(make_orchestrator: Make, name: str):
    orchestrator = make_orchestrator()
    result = run(orchestrator, unmerged(ALL[name], temperature=0.3)).only
    assert result.usage.duplicates == 0
    if "particle" not in name:  # there it is how often a node was drawn to go on
        assert {node.multiplicity for node in result.nodes} == {1}
    assert not any(node.termination == "duplicate" for node in result.nodes)
    assert result.usage.nodes == len(result.nodes) - 1
    orchestrator.engine.check_drained()


def test_samples_that_are_alike_are_decoded_each(make_orchestrator: Make):
    request = replace(BEAM, temperature=0.0)
    merged, apart = (run(make_orchestrator(), r).only for r in (request, unmerged(request)))
    texts = [{node.text: node.score for node in result.nodes} for result in (merged, apart)]
    assert texts[0] == texts[1]
    assert apart.answer == merged.answer
    assert apart.usage.generated_tokens == merged.usage.generated_tokens
    steps = merged.nodes[1:]
    assert len(apart.nodes) - len(merged.nodes) == 8 * len(steps) > 0
    more = apart.usage.generator_tokens - merged.usage.generator_tokens
    # The last token of a step is read by its children alone.
    assert more == 8 * sum(step.tokens - 1 for step in steps) + 2 * (len(steps) - 1)


def test_they_are_the_same_alone_and_in_company(make_orchestrator: Make):
    request = unmerged(BEAM)
    alone = outcome(run(make_orchestrator(), request).only)
    assert outcome(run(make_orchestrator(), *crowd(5), request, *crowd(3)).results[5]) == alone
