from collections.abc import Callable

import pytest
from engine_driver import scripted
from search_runs import BEAM, BEST_OF_N, run

from espalier.engine.models.model import Model
from espalier.search.request import SearchRequest
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.tree import is_degenerate


@pytest.mark.parametrize("blank", ["", " ", "\n\n", " \t\n\n"])
def test_a_blank_step_is_degenerate(blank: str):
    assert is_degenerate([blank])
    assert is_degenerate(["1+1=2\n\n", blank])


def test_the_same_step_three_times_in_a_row_is_degenerate_and_twice_is_not():
    assert not is_degenerate(["a\n\n"])
    assert not is_degenerate(["a\n\n", "a\n\n"])
    assert is_degenerate(["a\n\n", "a\n\n", "a\n\n"])
    assert is_degenerate(["b\n\n", "a\n\n", "a \n\n", "a"])
    assert not is_degenerate(["a\n\n", "b\n\n", "a\n\n", "a\n\n"])
    assert not is_degenerate(["a b\n\n", "a b\n\n", "ab\n\n"])


@pytest.mark.parametrize("mine", [BEAM, BEST_OF_N], ids=["beam", "best-of-n"])
def test_a_generator_that_repeats_itself_is_stopped_and_never_votes(
    mine: SearchRequest, load_model: Callable[[str], Model], make_orchestrator: Callable[..., Orchestrator]
):
    talker = load_model("talker")
    delimiter = talker.tokenizer.encode("\n\n")
    (one,) = talker.tokenizer.encode("1")
    orchestrator = make_orchestrator(scripted(talker, [one, *delimiter] * 20), "classifier")
    result = run(orchestrator, mine).only
    nodes = {node.depth: node for node in result.nodes if node.termination != "duplicate"}
    assert nodes[3].termination == "degenerate"
    assert nodes[3].score is None
    assert max(nodes) == 3
    assert result.candidates == ()
    assert result.answer == ""
