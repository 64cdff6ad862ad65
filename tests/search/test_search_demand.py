import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.search.demand import PathLimits, worst_case_blocks
from espalier.search.request import AlgorithmName, SearchRequest

BEAM = SearchRequest("1+1?", AlgorithmName.BEAM, beam_width=2, expansion=3)
LIMITS = PathLimits(prompt_tokens=10, path_tokens=20, step_tokens=6)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (AlgorithmName.BEAM, 3 + 2 * (5 + 1) + 6 * (2 + 1)),
        (AlgorithmName.BEST_OF_N, 3 + 2 * (5 + 1) + 1),
        (AlgorithmName.MAJORITY, 3 + 2 * (5 + 1) + 1),
        (AlgorithmName.GREEDY, 3 + 1 * (5 + 1)),
    ],
)
def test_the_worst_case_by_hand(algorithm: AlgorithmName, expected: int):
    assert worst_case_blocks(dataclasses.replace(BEAM, algorithm=algorithm), LIMITS, 4) == expected


def test_a_step_is_no_longer_than_its_path():
    short = PathLimits(10, 20, 600)
    assert worst_case_blocks(BEAM, short, 4) == 3 + 2 * (5 + 1) + 6 * (5 + 1)


@given(
    st.sampled_from(list(AlgorithmName)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_the_worst_case_covers_sequences_that_share_nothing_but_the_prompt(
    algorithm: AlgorithmName, width: int, expansion: int, prompt: int, path: int, step: int, block: int
):
    """Tokens laid out one sequence after another, each beginning inside the prompt's last block."""
    request = SearchRequest("1+1?", algorithm, width, expansion)
    step = min(step, path)

    def blocks(start: int, tokens: int) -> int:
        """Blocks that `tokens` from position `start` on touch."""
        return (start + tokens - 1) // block - start // block + 1

    held = blocks(0, prompt)
    if algorithm is AlgorithmName.BEAM:
        held += width * blocks(prompt, path)
        held += request.candidates * max(blocks(prompt + done, step) for done in range(path - step + 1))
    else:
        held += request.candidates * blocks(prompt, path)
    assert worst_case_blocks(request, PathLimits(prompt, path, step), block) >= held
