"""Whole searches on a GPU beside the CPU's; needs all that Espalier imports."""

import dataclasses
import gc
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult


def solve(device: str, problems: int, **settings: object) -> list[SearchResult]:
    from espalier.experiments.demo import generator_path, verifier_path
    from espalier.experiments.runs.benchmarks import load_benchmark
    from espalier.search.request import AnswerEquivalence
    from espalier.search.run.load import load_orchestrator
    from espalier.search.run.settings import RuntimeSettings

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
    orchestrator.engine.close()
    return [results[search_id] for search_id in order]


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_searches_in_float32_are_the_cpus(launch_ahead: bool):
    found = solve("cuda", 16, dtype="float32", launch_ahead=launch_ahead)
    expected = solve("cpu", 16)
    assert [result.answer for result in found] == [result.answer for result in expected]
    for one, other in zip(found, expected, strict=True):
        # Nodes stand in the order in which they were finished, which differs where steps are launched ahead.
        mine_in_order, theirs_in_order = (sorted(result.nodes, key=lambda node: node.path) for result in (one, other))
        assert [(n.path, n.text) for n in mine_in_order] == [(n.path, n.text) for n in theirs_in_order]
        for mine, theirs in zip(mine_in_order, theirs_in_order, strict=True):
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
    allocated = []
    for searches in (1, 20):
        for _ in range(searches):
            solve("cuda", 50, dtype="bfloat16")
        gc.collect()  # models refer to what refers to them
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] <= allocated[0] + 2**20


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_a_steady_decode_step_waits_for_the_device_once(launch_ahead: bool):
    from espalier.engine.engine import Engine, EngineSettings
    from espalier.engine.models.checkpoint import Checkpoint
    from espalier.engine.models.model import load_generator
    from espalier.engine.roles import GENERATOR
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
