"""Merging of siblings: what stands for both is as the one of the lower path was sampled, whichever came first."""

import pytest

from espalier.engine.work import PathStreams
from espalier.search.growth.policies import Branch, Merging
from espalier.search.run.running import UsageMeter
from espalier.search.tree import Node, Termination


@pytest.mark.parametrize("first", [0, 1])
def test_the_lower_path_gives_streams_and_tokens_whichever_came_first(first: int):
    root, streams = Node(0, None, ()), PathStreams(0, "?")
    both = [Branch(Node(i + 1, root, (i,), "same", 3 + i, draws=(i,)), False, streams.child(i)) for i in range(2)]
    expected = both[0].streams
    kept, merged = both[first], both[1 - first]
    merging = Merging(lambda _: None, UsageMeter())
    merging.begin_round(2)
    assert [merging.merges(kept), merging.merges(merged)] == [False, True]
    assert kept.streams is expected
    assert (kept.node.path, kept.node.num_tokens, kept.node.draws, kept.node.multiplicity) == ((0,), 3, (0, 1), 2)
    assert merged.node.termination is Termination.DUPLICATE
