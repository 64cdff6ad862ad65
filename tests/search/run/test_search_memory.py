import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.prm.limits import PathLimits
from espalier.search.algorithms import memory_estimate
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.resolve import worst_case_blocks

BEAM = SearchRequest("1+1?", AlgorithmName.BEAM, beam_width=2, expansion=3)
LIMITS = PathLimits(prompt_tokens=10, path_tokens=20, step_tokens=6)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (AlgorithmName.BEAM, 3 + 2 * (5 + 1) + 6 * (2 + 1)),
        (AlgorithmName.BEST_OF_N, 3 + 2 * (5 + 1) + 1),
        (AlgorithmName.MAJORITY, 3 + 2 * (5 + 1) + 1),
        (AlgorithmName.GREEDY, 3 + 1 * (5 + 1)),
        (AlgorithmName.DVTS, 3 + 2 * (5 + 1) + 6 * (2 + 1)),
        (AlgorithmName.REBASE, 3 + 6 * (5 + 1) + 6 * (2 + 1)),
        (AlgorithmName.AUTO, 3 + 6 * (5 + 1) + 6 * (2 + 1)),
        (AlgorithmName.PARTICLE, 3 + 2 * (5 + 1) + 2 * (2 + 1)),
        (AlgorithmName.LOOKAHEAD, 3 + 2 * (5 + 1) + 2 * 6 * (2 + 1)),
        (AlgorithmName.MCTS, 3 + 32 * 3 * (2 + 1)),
    ],
)
def test_the_worst_case_by_hand(algorithm: AlgorithmName, expected: int):
    assert worst_case_blocks(memory_estimate(dataclasses.replace(BEAM, algorithm=algorithm)), LIMITS, 4) == expected


def test_a_step_is_no_longer_than_its_path():
    short = PathLimits(10, 20, 600)
    assert worst_case_blocks(memory_estimate(BEAM), short, 4) == 3 + 2 * (5 + 1) + 6 * (5 + 1)


def widest_moments(request: SearchRequest) -> list[tuple[int, int, int]]:
    """Whole paths, single steps and other blocks that a search holds at once, each path sharing only the prompt."""
    n, m = request.beam_width, request.expansion
    match request.algorithm:
        case AlgorithmName.BEAM | AlgorithmName.DVTS:
            return [(n, n * m, 0)]
        case AlgorithmName.LOOKAHEAD:
            return [(n, n * m * (1 + (request.lookahead_steps or 1)), 0)]
        case AlgorithmName.REBASE | AlgorithmName.AUTO:
            return [(n * m, n * m, 0)]
        case AlgorithmName.PARTICLE:
            return [(n, n, n * request.max_steps if (request.iterations or 1) > 1 else 0)]
        case AlgorithmName.MCTS:
            return [(0, m * (request.simulations or 32), 0), (1, 0, 0)]
        case AlgorithmName.GREEDY | AlgorithmName.CHAIN:
            return [(1, 0, 0)]
        case AlgorithmName.ADAPTIVE:
            return [(min(n, m), 0, min(n, m) - 1)]
        case _:
            return [(n, 0, n - 1)]


@given(
    st.sampled_from(list(AlgorithmName)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_the_worst_case_covers_sequences_that_share_nothing_but_the_prompt(
    algorithm: AlgorithmName, width: int, expansion: int, times: int, prompt: int, path: int, step: int, block: int
):
    """Tokens laid out one sequence after another, each beginning inside the prompt's last block."""
    request = SearchRequest("1+1?", algorithm, width, expansion, lookahead_steps=times, simulations=times)
    request = dataclasses.replace(request, iterations=times, max_steps=5)
    step = min(step, path)

    def blocks(start: int, tokens: int) -> int:
        """Blocks that `tokens` from position `start` on touch."""
        return (start + tokens - 1) // block - start // block + 1

    one_step = max(blocks(prompt + done, step) for done in range(path - step + 1))
    for paths, steps, others in widest_moments(request):
        held = blocks(0, prompt) + paths * blocks(prompt, path) + steps * one_step + others
        assert worst_case_blocks(memory_estimate(request), PathLimits(prompt, path, step), block) >= held
