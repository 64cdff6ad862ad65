"""The backend of Triton's kernels under their interpreter: a decoder's layers, and a whole search."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_steps import LAYERS, OF_ALL_KINDS, make_step, random_layer, random_outer

from espalier.engine.models import decoder
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.kernels.layers import DecoderSpec
from espalier.kernels.torch_backend import TorchBackend
from espalier.kernels.triton.backend import TritonBackend
from espalier.kernels.triton.cache import TokenMajorLayout
from espalier.kernels.triton.plan import Costs
from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings

SEQUENCES = [(19, 19), (7, 1), (65, 1), (33, 5), (1, 1)]
FEW = Costs(processors=8)
"""The interpreter takes half a minute for the programs of an H100's processors, most of which have nothing to do."""


SHAPES = [(4, 2, 12, True), (3, 1, 10, False)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "head_norms", "batch_invariant", "windows"),
    [
        pytest.param(*shape, batch_invariant, windows, marks=() if (i + j + k) % 2 else pytest.mark.slow)
        for i, shape in enumerate(SHAPES)
        for j, batch_invariant in enumerate([False, True])
        for k, windows in enumerate([(), (4, None, 33)])
    ],
    ids=str,
)
def test_layers_equal_the_reference(heads, kv_heads, head_dim, head_norms: bool, batch_invariant: bool, windows):
    hidden, inner, shape = 40, 50, DecoderSpec(heads, kv_heads, head_dim, 1e-6, windows)
    step = make_step(SEQUENCES, shape, TokenMajorLayout)
    again = step.batch  # the first token is only computed again
    step.batch = dataclasses.replace(
        again,
        write_slabs=again.write_slabs[1:],
        write_slots=again.write_slots[1:],
        write_offsets=again.write_offsets[1:],
        write_rows=torch.arange(1, len(step.positions)),
    )
    one, other = (
        backend.prepare_layers(
            LAYERS,
            lambda i: random_layer(i, hidden, inner, shape, True, head_norms, head_norms),
            shape,
            random_outer(hidden, shape),
        )
        for backend in (TritonBackend(FEW, batch_invariant=batch_invariant), TorchBackend())
    )
    (output, kv_pool), (expected, expected_kv_pool) = step.run(one), step.run(other)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv_pool, expected_kv_pool, rtol=1e-4, atol=1e-4)
    assert not torch.equal(kv_pool, step.kv_pool.view(torch.float32)), "keys and values were written"


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize("post_norms", [True, False])
def test_layers_that_differ_equal_the_reference(post_norms: bool):
    step = make_step(SEQUENCES, OF_ALL_KINDS, TokenMajorLayout)
    one, other = (
        backend.prepare_layers(
            LAYERS,
            lambda i: random_layer(i, 40, 50, OF_ALL_KINDS, True, True, True, post_norms),
            OF_ALL_KINDS,
            random_outer(40, OF_ALL_KINDS),
        )
        for backend in (TritonBackend(FEW), TorchBackend())
    )
    for layers in (one, other):
        layers.tap([1])
        layers.tap_raw(2)
    (output, kv_pool), (expected, expected_kv_pool) = step.run(one), step.run(other)
    assert output.shape[1] == 3 * 40, "last states, those that enter layer 1, and as they are those that enter layer 2"
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv_pool, expected_kv_pool, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("products_row_by_row")
def test_a_sequence_has_the_same_bits_alone_and_beside_others_where_that_is_asked_for():
    hidden, inner, shape = 40, 50, DecoderSpec(3, 1, 10, 1e-5)
    backend = TritonBackend(FEW, batch_invariant=True)
    assert backend.rows_are_independent
    assert not TritonBackend().rows_are_independent
    layers = backend.prepare_layers(
        LAYERS, lambda i: random_layer(i, hidden, inner, shape, False), shape, random_outer(hidden, shape)
    )
    step = make_step(SEQUENCES, shape, TokenMajorLayout)
    together, _ = step.run(layers)
    for s in range(len(SEQUENCES)):
        rows = slice(int(step.batch.query_starts[s]), int(step.batch.query_starts[s + 1]))
        assert torch.equal(step.only(s).run(layers)[0], together[rows]), f"sequence {s}"


def solve(request: SearchRequest, **options: Any) -> SearchResult:
    orchestrator = load_orchestrator(RuntimeSettings(kv_memory=2**28, **options))
    orchestrator.submit(request)
    while orchestrator.busy:
        for result in orchestrator.step():
            orchestrator.close()
            assert isinstance(result, SearchResult)
            return result
    raise AssertionError("no result")


def test_a_search_is_the_same_as_on_the_backend_for_cpus(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    """With steps whose tokens are filled in on the device, too."""
    pair = {
        role: str(tiny_checkpoints[name]) for role, name in {"generator": "talker", "verifier": "classifier"}.items()
    }
    request = SearchRequest(problem="38+47?", beam_width=1, expansion=2, max_steps=2, max_step_tokens=3, seed=3)
    compare(request, monkeypatch, launch_ahead=True, **pair)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(8))
def test_beam_searches_of_the_benchmark_are_the_same_as_on_the_backend_for_cpus(
    index: int, monkeypatch: pytest.MonkeyPatch
):
    compare(SearchRequest(problem=load_benchmark("demo")[index].problem), monkeypatch)


def compare(request: SearchRequest, monkeypatch: pytest.MonkeyPatch, launch_ahead: bool = False, **models: str) -> None:
    """Answers, texts and scores on both backends."""
    expected = solve(request, **models)
    monkeypatch.setattr(decoder, "choose_backend", lambda *_: TritonBackend(FEW))
    found = solve(request, launch_ahead=launch_ahead, **models)
    assert found.nodes
    assert found.answer == expected.answer
    assert [(node.path, node.text) for node in found.nodes] == [(node.path, node.text) for node in expected.nodes]
    for one, other in zip(found.nodes, expected.nodes, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-4)
