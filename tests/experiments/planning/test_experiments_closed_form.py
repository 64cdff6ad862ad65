"""The closed form of a search's KV, against what searches hold."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from fixed_steps import problem_of, write_pair

from espalier.engine.errors import InvalidRequestError
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.experiments.planning.closed_form import PathLengths, TreeShape, blocks_by_round
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.result import Event, StepDone, StopReason
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings

_SEARCHES = 12
"""Searches of a configuration; which paths are kept is random, and the closed form is an expectation."""


def peak_after(orchestrator: Orchestrator, request: SearchRequest, rounds: int) -> int:
    """KV bytes at the peak of a search that is stopped after some rounds; its paths have no end of their own."""

    def stop_in_time(event: Event) -> None:
        if isinstance(event, StepDone) and event.depth == rounds:
            orchestrator.cancel(event.search_id)

    orchestrator.submit(request, stop_in_time)
    while not (ended := orchestrator.step()):
        pass
    assert ended[0].stop_reason == StopReason.CANCELLED
    return ended[0].usage.peak_kv_bytes


def shape(algorithm: AlgorithmName, width: int, expansion: int, rounds: int, merged_share: float = 0.0) -> TreeShape:
    return TreeShape(SearchRequest("-", algorithm, width, expansion), rounds, merged_share)


def check_against_measured(folder: Path, seed: int, algorithm: AlgorithmName = AlgorithmName.BEAM) -> None:
    """Within 5%: KV bytes of both models at the peak, for a random pair, N, M, lengths and block size."""
    draw = random.Random(seed)
    shapes = [(draw.randint(1, 3), draw.choice((1, 2, 4)), draw.choice((8, 16))) for _ in range(2)]
    width, expansion, rounds = draw.randint(1, 8), draw.randint(1, 4), draw.randint(2, 7)
    step, prompt, block = draw.randint(4, 27), draw.randint(3, 90), draw.choice((4, 8, 16))
    generator, verifier = write_pair(folder, seed, step, *shapes)
    runtime = RuntimeSettings(
        str(generator), str(verifier), device="cpu", kv_memory=2**26, block_size=block, system_prompt="", threads=1
    )
    orchestrator = load_orchestrator(runtime)
    problem = problem_of(prompt)
    request = SearchRequest(problem, algorithm, width, expansion, temperature=1.0, merge_duplicates=False)
    measured = [peak_after(orchestrator, replace(request, seed=number), rounds) for number in range(_SEARCHES)]
    bytes_of = {role: stats.block_bytes for role, stats in orchestrator.engine.stats().items()}
    shares = {role: model.config.window_shares for role, model in orchestrator.engine.models.items()}
    orchestrator.close()
    tree = shape(algorithm, width, expansion, rounds)
    lengths = {GENERATOR: PathLengths(prompt + 1, step, pending_tokens=1), VERIFIER: PathLengths(prompt, step)}
    rows = [
        sum(blocks.physical * bytes_of[role] for role, blocks in zip(lengths, both, strict=True))
        for both in zip(
            *(blocks_by_round(tree, its, block, shares[role]) for role, its in lengths.items()), strict=True
        )
    ]
    assert max(rows) == pytest.approx(sum(measured) / len(measured), rel=0.05), (width, expansion, rounds, step)


@pytest.mark.parametrize("seed", range(6))
def test_the_expected_peak_is_within_five_percent_of_the_measured_one(tmp_path: Path, seed: int):
    check_against_measured(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 20))
def test_the_expected_peak_of_more_pairs_is_within_five_percent_of_the_measured_one(tmp_path: Path, seed: int):
    check_against_measured(tmp_path, seed)


def test_subtrees_stay_apart(tmp_path: Path):
    check_against_measured(tmp_path, 2, AlgorithmName.DVTS)


def test_independent_paths_share_the_prompt_alone():
    """Ten prompt tokens in blocks of 4, and three paths to token 10 + 2 * 5, of which the last has no KV."""
    tree = shape(AlgorithmName.MAJORITY, 3, 4, 2)
    (held,) = blocks_by_round(tree, PathLengths(10, 5, pending_tokens=1), 4)
    assert held.physical == 3 + 3 * (5 - 2)
    assert held.logical == 3 + 3 * 5


def test_two_rounds_by_hand():
    """Two paths of four children: a prompt of 5 tokens, steps of 4, blocks of 4."""
    first, second = blocks_by_round(shape(AlgorithmName.BEAM, 2, 2, 2), PathLengths(5, 4, pending_tokens=1), 4)
    assert first.physical == 2 + 4 * 1  # a child: its copy of the prompt's second block, then full
    assert second.physical == 1 + 2 * 2 + 4 * 1
    assert (first.logical, second.logical) == (2 + 4 * 2, 2 * 3 + 4 * 3)


def test_two_rounds_with_a_window_by_hand():
    """The same with a window of 4 tokens: a child at 12 tokens holds blocks after 8, its parent at 9 those after 4."""
    tree, lengths = shape(AlgorithmName.BEAM, 2, 2, 2), PathLengths(5, 4, pending_tokens=1)
    first, second = blocks_by_round(tree, lengths, 4, {4: 1.0})
    assert first.physical == 2 + 4 * 1
    assert second.physical == 0 + 2 * 2 + 4 * 1
    assert second.logical == 2 * 2 + 4 * 1
    mixed = blocks_by_round(tree, lengths, 4, {None: 0.25, 4: 0.75})
    assert mixed[1].physical == 0.25 * (1 + 2 * 2 + 4 * 1) + 0.75 * second.physical


def test_nothing_is_pruned_with_one_child_so_that_ancestors_stay_apart():
    assert shape(AlgorithmName.BEAM, 8, 1, 6).ancestors(6) == pytest.approx([8] * 5)
    pruned = shape(AlgorithmName.BEAM, 8, 4, 6).ancestors(6)
    assert pruned == sorted(pruned)
    assert pruned[0] < 3


def test_two_of_four_children_have_the_same_parent_in_a_third_of_all_cases():
    (above,) = shape(AlgorithmName.BEAM, 2, 2, 2).ancestors(2)
    assert above == pytest.approx(2 - 1 / 3)


def test_one_chain_with_m_1_holds_more_than_several_children_of_few_parents():
    """With many rounds and N of 8: what a researcher sees on the demo pair."""
    lengths = PathLengths(50, 20, pending_tokens=1, varying=True)
    peaks = {
        m: max(held.physical for held in blocks_by_round(shape(AlgorithmName.BEAM, 8, m, 12), lengths, 16))
        for m in (1, 2)
    }
    assert peaks[1] > peaks[2]


def test_merging_siblings_lowers_the_peak():
    lengths = PathLengths(50, 20, pending_tokens=1)
    peaks = [blocks_by_round(shape(AlgorithmName.BEAM, 4, 4, 5, share), lengths, 16)[-1].physical for share in (0, 0.5)]
    assert peaks[1] < 0.7 * peaks[0]


def test_an_algorithm_without_closed_form_is_refused_with_those_that_have_one():
    with pytest.raises(
        InvalidRequestError, match="mcts has no closed form; greedy, chain, majority, best-of-n, beam, dvts have one"
    ):
        blocks_by_round(shape(AlgorithmName.MCTS, 4, 4, 5), PathLengths(5, 4), 4)
