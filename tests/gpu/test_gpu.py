"""What needs a GPU: kernels at real sizes in bfloat16, recorded steps, whole searches beside the CPU's."""

import dataclasses
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or torch is built without CUDA"),
]
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def no_interpreter() -> None:
    from triton import knobs

    if torch.cuda.is_available() and knobs.runtime.interpret:
        pytest.fail("kernels must be compiled here: run with TRITON_INTERPRET=0")


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, as a share of that of what is expected; nothing that is not a number passes."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(12, 2, 128), (28, 4, 128), (32, 8, 64), (32, 8, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_attention_at_real_sizes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None):
    from paged_batch import dense_attention, paged_problem, share_leading_blocks

    from espalier.kernels.layout import LayerKV
    from espalier.kernels.triton.attention import DevicePlan, attend, rows_of_tiles
    from espalier.kernels.triton.cache import TokenMajorLayout
    from espalier.kernels.triton.plan import Costs, plan_attention

    sequences = [(1100, 1)] * 12 + [(700, 20), (65, 65), (1, 1), (900, 1)]
    problem = paged_problem(
        sequences, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kind=TokenMajorLayout, dtype=dtype
    )
    for sequence in range(1, 12):
        share_leading_blocks(problem, sequence, 0, 32 if sequence % 2 else 64)
    batch = problem.batch
    arrays = [tensor.numpy() for tensor in (batch.query_starts, batch.context_lengths, batch.block_tables)]
    positions = torch.cat([torch.arange(c - n, c) for c, n in sequences]).int()
    expected = dense_attention(problem, head_dim**-0.5, window)
    tables = torch.where(batch.block_tables == 2**31 - 1, 0, batch.block_tables).to(DEVICE)
    layer_kv = LayerKV(*(_moved(x) for x in (problem.layer_kv.keys, problem.layer_kv.values)))
    for costs in (Costs(processors=1), Costs(processors=10**6)):
        plan = plan_attention(*arrays, 16, kv_heads, *rows_of_tiles(heads // kv_heads), costs, window)
        blocks = tables.shape[1]
        sizes = np.array([len(plan.narrow), blocks, len(plan.wide), blocks], np.int32)
        parts = (plan.narrow, plan.wide, sizes, plan.rows, plan.merge_starts, plan.merges)
        moved = (torch.from_numpy(part).to(DEVICE) for part in parts)
        on_device = DevicePlan(*moved, partials=plan.partials, programs=64)
        query = problem.query.to(DEVICE)
        found = attend(query, layer_kv, on_device, positions.to(DEVICE), tables, head_dim**-0.5, window)
        assert error(found, expected) < {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]


def _moved(view: torch.Tensor) -> torch.Tensor:
    """The same view of the same memory on the device."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).to(DEVICE)
    return storage.as_strided(view.shape, view.stride(), view.storage_offset())


@pytest.mark.parametrize("vocabulary", [700, 32_000, 151_936])
def test_filters_and_draws_over_large_vocabularies(vocabulary: int):
    from espalier.kernels import sampling as reference
    from espalier.kernels.sampling import FILTERED
    from espalier.kernels.triton import sampling

    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(32, vocabulary, generator=generator)
    logits[::2] = logits[::2].bfloat16().float()
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.5]).repeat(8)
    draws = torch.rand(64, generator=generator, dtype=torch.float64)
    rows = torch.arange(32).repeat_interleave(2)
    filters = torch.tensor([0, 1, 40, 5000]).repeat_interleave(8), torch.tensor([1.0, 0.9]).repeat(16), torch.zeros(32)
    expected = reference.filter_logits(logits, temperatures, *filters)
    moved = [x.to(DEVICE) for x in (logits, temperatures, *filters)]
    left = sampling.filter_logits(*moved)
    assert ((left.cpu() != FILTERED) != (expected != FILTERED)).sum() <= 4, "but for tokens within rounding of a limit"
    ids, log_probabilities = sampling.draw_tokens(moved[0], left, moved[1], draws.to(DEVICE), rows.to(DEVICE))
    expected_ids, expected_log = reference.draw_tokens(logits, left.cpu(), temperatures, draws, rows)
    same = ids.cpu() == expected_ids
    assert same.sum() >= 62
    assert error(log_probabilities[same.to(DEVICE)], expected_log[same]) < 1e-5


def solve(device: str, problems: int, **settings: object) -> list[SearchResult]:
    from espalier.experiments.demo import generator_path, verifier_path
    from espalier.experiments.evaluation.benchmarks import load_benchmark
    from espalier.search.request import AnswerEquivalence
    from espalier.search.run.load import RuntimeSettings, load_orchestrator

    options: dict[str, Any] = {
        "generator": str(generator_path()),  # by path, as names need an installed package
        "verifier": str(verifier_path()),
        "answer_equivalence": AnswerEquivalence.EXACT_MATCH,
        "kv_memory": 2**29,
    }
    orchestrator = load_orchestrator(RuntimeSettings(device=device, **{**options, **settings}))
    request = SearchRequest("-", beam_width=4, expansion=4)
    order = [
        orchestrator.submit(dataclasses.replace(request, problem=problem.problem))
        for problem in load_benchmark("demo", problems)
    ]
    results: dict[str, SearchResult] = {}
    while orchestrator.busy:
        results |= {result.search_id: result for result in orchestrator.step()}
    orchestrator.engine.check_drained()
    orchestrator.close()
    return [results[search_id] for search_id in order]


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_searches_in_float32_are_the_cpus(launch_ahead: bool):
    found = solve("cuda", 16, dtype="float32", launch_ahead=launch_ahead)
    expected = solve("cpu", 16)
    assert [result.answer for result in found] == [result.answer for result in expected]
    for one, other in zip(found, expected, strict=True):
        assert [(node.path, node.text) for node in one.nodes] == [(node.path, node.text) for node in other.nodes]
        for mine, theirs in zip(one.nodes, other.nodes, strict=True):
            assert mine.score == pytest.approx(theirs.score, abs=1e-3)


def test_searches_in_bfloat16_solve_about_as_many():
    found = solve("cuda", 50, dtype="bfloat16")
    assert sum(result.answer is not None for result in found) >= 48


def test_requests_have_the_same_bits_in_any_company_where_that_is_asked_for():
    alone = [solve("cuda", 1, dtype="bfloat16", batch_invariant=True, max_running=1)[0]]
    among = solve("cuda", 8, dtype="bfloat16", batch_invariant=True)[:1]
    assert [[(n.text, n.score) for n in r.nodes] for r in alone] == [
        [(n.text, n.score) for n in r.nodes] for r in among
    ]


def test_a_thousand_searches_leave_nothing_behind():
    solve("cuda", 50, dtype="bfloat16")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        solve("cuda", 50, dtype="bfloat16")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_a_steady_decode_step_waits_for_the_device_once(launch_ahead: bool):
    from espalier.engine.engine import Engine, EngineSettings
    from espalier.engine.models.checkpoint import Checkpoint
    from espalier.engine.models.model import load_generator
    from espalier.engine.scheduling.role_policy import GENERATOR
    from espalier.engine.work import Generate, Sampling, stream_key
    from espalier.experiments.demo import generator_path

    model = dataclasses.replace(load_generator(Checkpoint(generator_path()), torch.bfloat16, "cuda"), eos_token_ids=())
    engine = Engine({GENERATOR: model}, EngineSettings(2**28, launch_ahead=launch_ahead))
    for row in range(8):
        sequence = engine.open(GENERATOR, [3 + row] * 20)
        sampling = Sampling(temperature=1.0, key=stream_key(0, str(row), (0,)))
        engine.submit(Generate(None, sequence, (sampling,), 60, "", in_place=True))
    for _ in range(10):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")  # an event's wait is none that it knows: the one small read
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not installed")
def test_no_kernel_reads_or_writes_outside_of_its_memory():
    from espalier.experiments.demo import generator_path, verifier_path

    paths = ["--generator", str(generator_path()), "--verifier", str(verifier_path())]
    command = [sys.executable, "-m", "espalier.experiments.cli.main", "solve", *paths, "--device", "cuda", "-N", "2"]
    subprocess.run(["compute-sanitizer", "--error-exitcode", "9", *command], check=True, capture_output=True)
