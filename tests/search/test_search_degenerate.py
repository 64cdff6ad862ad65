from collections.abc import Callable

import pytest
from engine_driver import scripted
from search_runs import BEAM, BEST_OF_N, run

from espalier.engine.models.model import Model
from espalier.search.growth.endings import is_degenerate
from espalier.search.request import SearchRequest
from espalier.search.run.orchestrator import Orchestrator


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


def rounds_until_noticed(*loop: str, before: tuple[str, ...] = ("Let us begin.\n\n",)) -> int:
    """The round of a loop in which it is noticed; each `{i}` in it is the number of the round. 0 for never."""
    steps = list(before)
    for number in range(1, 13):
        for step in loop:
            steps.append(step.replace("{i}", str(number)))
            if is_degenerate(steps):
                return number
    return 0


CHECK = ("Let me compute 3+4 = 7.\n\n", "Wait, let me check again: 3+4.\n\n")


@pytest.mark.parametrize(
    "loop",
    [
        CHECK,
        (*CHECK, "It is 7 again.\n\n"),
        tuple(f"{letter}.\n\n" for letter in "abcdefghijkl"),
        ("## Step {i}: Check\nThe total is 7.\n\n",),
        ("## Step {i}: Check\n\n", "The total is 7.\n\n"),
        ("**Step {i}.** The total is 7.\n\n", "Step {i}: so the total is 7.\n\n"),
        ("Step {i}: The total is 7.\nStep {i}: Check the total.\n\n",),
        ("### {i}. Check\nThe total is 7.\n\n",),
        ("Attempt #{i}: the total is still 7.\n\n",),
        ("Schritt {i}: Die Summe ist immer noch 7.\n\n",),
        ("步骤{i}：总和是七。\n\n",),
    ],
)
def test_a_loop_of_steps_is_noticed_in_its_third_round_however_they_are_numbered(loop: tuple[str, ...]):
    """The kind of https://github.com/vllm-project/vllm/issues/52673."""
    assert rounds_until_noticed(*loop) == 3


def test_a_loop_numbered_as_a_list_is_noticed_in_its_fifth_round():
    assert rounds_until_noticed("{i}. The total is 7.\n\n") == 5
    assert rounds_until_noticed("({i}) Check it: 3+4.\n\n", "The total is 7.\n\n") == 5


def test_a_loop_within_a_step_is_noticed_at_its_end():
    assert is_degenerate(["So it is 7.\n\n", "".join(CHECK).replace("\n\n", "\n") * 3])
    assert is_degenerate(["The total is 7. Wait, is it? " * 3 + "\n\n"])
    assert not is_degenerate(["The total is 7. Wait, is it? " * 2 + "\n\n"])
    assert not is_degenerate(["The total is 7. Wait, is it? " * 3 + "No, it is 8.\n\n"])


@pytest.mark.parametrize(
    "steps",
    [
        ["(a) 5+1=6\n\n", "(b) 6-1=5\n\n", "(c) 5+1=6\n\n", "(d) 6-1=5\n\n", "(e) 5+1=6\n\n", "(f) 6-1=5\n\n"],
        ["(a) 5+0=5\n\n", "(b) 5+0=5\n\n", "(c) 5+0=5\n\n", "(d) 5+0=5\n\n", "(e) 5+0=5\n\n"],
        ["1. True\n\n", "2. True\n\n", "3. True\n\n", "4. True\n\n", "5. True\n\n"],
        ["(a) The number is even.\n\n", "(b) The number is even.\n\n", "(c) The number is even.\n\n"],
        [f"Day {day}: he eats three apples.\n\n" for day in range(1, 8)],
        [f"Case {case}: there is no solution.\n\n" for case in range(1, 8)],
        [f"Round {number}: nobody is eliminated.\n\n" for number in range(1, 8)],
        [f"Step {step}: add {step} to the total.\n\n" for step in range(1, 8)],
        [f"Step {step}: 2^{step} = {2**step}.\n\n" for step in range(1, 8)],
        [
            "Check a: it is an even number.\n\n",
            "Check b: it is an even number.\n\n",
            "Check c: it is an even number.\n\n",
        ],
        ["\\begin{pmatrix}\n0 & 0 \\\\\n0 & 0 \\\\\n0 & 0 \\\\\n0 & 0\n\\end{pmatrix}\n\n"],
        ["0\n0\n0\n0\n\n"],
        [*CHECK, *CHECK],
        [*CHECK, "So it is 7.\n\n", *CHECK, "So it is seven.\n\n", *CHECK],
    ],
)
def test_what_is_alike_for_a_reason_is_no_loop(steps: list[str]):
    assert not [end for end in range(1, len(steps) + 1) if is_degenerate(steps[:end])]


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
