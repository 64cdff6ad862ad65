"""Searches over generators and verifiers with recurrent states, which a tree forks at its nodes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hybrids import write_hybrid_talker, write_hybrid_verifier
from search_runs import BEAM, DVTS, MCTS, outcome, run

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import SequenceTable
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.prm.base import PrmFamily
from espalier.prm.families import load_verifier
from espalier.prm.verifier import Verifier
from espalier.search.request import SearchRequest
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]
ROLES = ("generator", "verifier")


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, PrmFamily]:
    root = tmp_path_factory.mktemp("hybrids")
    generator = load_generator(Checkpoint(write_hybrid_talker(root / "generator")), torch.float32, "cpu")
    return generator, load_verifier(Checkpoint(write_hybrid_verifier(root / "verifier")), torch.float32, "cpu")


@pytest.fixture
def search_with(hybrids: tuple[Model, PrmFamily], make_engine: Callable[..., Engine]) -> Make:
    def make(**options: object) -> Orchestrator:
        generator, family = hybrids
        engine = make_engine(generator, family.model, **{"kv_memory_bytes": 2**24, **options})
        return Orchestrator(engine, Generator(engine, "", {"temperature": 1.0, "top_p": 1.0}), Verifier(family))

    return make


def texts_with_states(table: SequenceTable) -> set[tuple[int, ...]]:
    """The computed tokens of live sequences: of leaves, and of nodes that may still be forked."""
    rows = [sequence.row for owner in table.owners() for sequence in table.of_owner(owner)]
    return {tuple(table.tokens[row, : table.computed[row]].tolist()) for row in rows} - {()}


@pytest.mark.parametrize("request_", [BEAM, DVTS, MCTS], ids=["beam", "dvts", "mcts"])
def test_each_token_of_a_tree_is_computed_once_and_each_leaf_and_fork_point_holds_a_state(
    request_: SearchRequest, search_with: Make
):
    orchestrator = search_with()
    tables = {role: orchestrator.engine.schedulers[role].table for role in ROLES}
    orchestrator.submit(request_)
    most, result = 0, None
    while orchestrator.busy:
        for result in orchestrator.step():
            assert result.stop_reason == "finished"
        for role, table in tables.items():
            live = table.pools[-1].live_blocks
            assert table.pools[-1].name == f"{role}/states"
            assert live <= len(texts_with_states(table)), "forks that have not gone on share a state"
            most = max(most, live)
    assert result is not None
    usage = result.usage
    assert usage.generator_tokens == usage.generator_tree_tokens > 200
    assert usage.verifier_tokens == usage.verifier_tree_tokens > 200
    assert most > request_.expansion
    assert [table.pools[-1].live_blocks for table in tables.values()] == [0, 0]


def test_results_are_the_same_alone_and_in_company_in_a_pool_so_small_that_searches_are_preempted(
    search_with: Make, hybrids: tuple[Model, PrmFamily]
):
    requests = [replace(request, seed=seed) for request in (BEAM, DVTS, MCTS) for seed in (1, 2)]
    alone = [outcome(run(search_with(), request).only) for request in requests]
    ample = search_with()
    slab = max(hybrids[0].config.state_bytes, hybrids[1].model.config.state_bytes)
    blocks = ample.check(MCTS).blocks
    slabs = sum(
        -(-count // (slab // ample.engine.admission.pools[name].layout.block_bytes)) for name, count in blocks.items()
    )
    scarce = search_with(kv_memory_bytes=int(slabs * slab), slab_bytes=slab, reserved_share=0.1)
    assert [outcome(result) for result in run(scarce, *requests).results] == alone
    assert sum(stats.preemptions for stats in scarce.engine.stats().values()) > 0
    assert len({repr(each) for each in alone}) == len(requests)
