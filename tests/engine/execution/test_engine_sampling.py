import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_examples import random_examples
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from espalier.engine.execution.sampling import ROWS_AT_A_TIME, Sampler, SamplingBatch, uniforms
from espalier.engine.work import PathStreams, Sampling, stream_key
from espalier.kernels.backend import choose_backend

DRAWS = 20_000


CPU = torch.device("cpu")
BACKEND = choose_backend(CPU, torch.float32)


def batch(rows: int, first_key: int = 0, **parameters: Any) -> SamplingBatch:
    keys = [stream_key(first_key + i, "problem", (0,)) for i in range(rows)]
    return SamplingBatch([Sampling(**parameters, key=key) for key in keys], np.arange(rows), CPU, BACKEND)


def draw(logits: torch.Tensor, samplings: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token of each row."""
    return samplings.draw(logits, np.zeros(len(logits), dtype=np.int64))


def frequencies(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """How often each token is drawn by many streams from the same logits."""
    drawn, _ = draw(logits.expand(DRAWS, -1), batch(DRAWS, temperature=temperature, top_p=top_p))
    return torch.bincount(drawn, minlength=logits.shape[0]) / DRAWS


def assert_drawn_as(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """Within five standard errors and two draws, each token; impossible ones never."""
    error = (expected * (1 - expected) / DRAWS).sqrt()
    assert ((observed - expected).abs() <= 5 * error + 2 / DRAWS).all(), (observed, expected)
    assert not observed[expected == 0].any()


def random_logits(size: int = 40) -> torch.Tensor:
    return 2 * torch.randn(size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float):
    logits = random_logits()
    assert_drawn_as(frequencies(logits, temperature, 1.0), torch.softmax(logits / temperature, dim=0))


def nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of most likely tokens whose mass reaches top_p, renormalised."""
    probabilities = torch.softmax(logits, dim=0)
    order = probabilities.argsort(descending=True).tolist()
    kept, mass = torch.zeros_like(probabilities), 0.0
    for token in order:
        if mass >= top_p:
            break
        kept[token] = probabilities[token]
        mass += float(probabilities[token])
    return kept / kept.sum()


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_draws_with_top_p_stay_in_the_nucleus_and_follow_its_distribution(top_p: float):
    logits = random_logits()
    assert_drawn_as(frequencies(logits, 1.0, top_p), nucleus(logits, top_p))


def test_temperature_shapes_the_nucleus_before_it_is_cut():
    logits = random_logits()
    assert_drawn_as(frequencies(logits, 2.0, 0.6), nucleus(logits / 2.0, 0.6))


def test_a_tiny_top_p_takes_the_most_likely_token():
    logits = torch.randn(50, 30)
    drawn, _ = draw(logits, batch(50, top_p=1e-6))
    assert torch.equal(drawn, logits.argmax(dim=-1))


def test_temperature_zero_takes_the_most_likely_token_whatever_top_p():
    logits = torch.randn(50, 30)
    for top_p in (1.0, 0.5):
        drawn, _ = draw(logits, batch(50, temperature=0.0, top_p=top_p))
        assert torch.equal(drawn, logits.argmax(dim=-1))


def test_log_probabilities_are_those_of_the_untempered_model():
    logits = torch.randn(50, 30)
    drawn, log_probabilities = draw(logits, batch(50, temperature=0.3, top_p=0.5))
    expected = torch.log_softmax(logits, dim=-1).gather(1, drawn[:, None])[:, 0]
    torch.testing.assert_close(log_probabilities, expected)


@pytest.mark.parametrize(
    ("filters", "warpers"),
    [
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_k": 100}, []),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"top_k": 8, "top_p": 0.7}, [TopKLogitsWarper(8), TopPLogitsWarper(0.7)]),
        (
            {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
            [TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)],
        ),
    ],
)
def test_filters_leave_the_distribution_that_transformers_leave(filters: dict, warpers: list):
    logits = random_logits() / 0.8
    for warper in warpers:
        logits = warper(torch.zeros(1, 0, dtype=torch.long), logits[None])[0]
    drawn, _ = draw((random_logits()).expand(DRAWS, -1), batch(DRAWS, temperature=0.8, **filters))
    assert_drawn_as(torch.bincount(drawn, minlength=40) / DRAWS, torch.softmax(logits, dim=0))


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"min_p": 1.0}])
def test_the_narrowest_filters_take_the_most_likely_token(filters: dict):
    logits = torch.randn(50, 30)
    drawn, _ = draw(logits, batch(50, **filters))
    assert torch.equal(drawn, logits.argmax(dim=-1))


@pytest.mark.parametrize("filters", [{}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"temperature": 0.0}])
def test_banned_tokens_are_never_drawn_and_the_filters_count_what_is_left(filters: dict):
    logits = torch.randn(50, 30)
    best = logits.topk(3).indices
    keys = [Sampling(**filters, key=i, banned=tuple(best[i, :2].tolist())) for i in range(50)]
    # Rows without banned tokens draw as they would alone, and so does the same row for a draw without.
    samplings, rows = [x for key in keys for x in (key, replace(key, banned=()))], np.arange(50).repeat(2)
    drawn, log_probabilities = SamplingBatch(samplings, rows, CPU, BACKEND).draw(logits, np.zeros(100, dtype=np.int64))
    free, free_log = draw(logits, SamplingBatch(samplings[1::2], np.arange(50), CPU, BACKEND))
    assert torch.equal(drawn[1::2], free)
    assert torch.equal(log_probabilities[1::2], free_log)
    assert not (drawn[::2, None] == best[:, :2]).any()
    if filters:
        assert torch.equal(drawn[::2], best[:, 2])
    expected = torch.log_softmax(logits, dim=-1).gather(1, drawn[::2, None])[:, 0]
    torch.testing.assert_close(log_probabilities[::2], expected)


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((2000, 10), float("-inf"))
    logits[:, 3], logits[:, 7] = 0.0, 0.0
    for top_p in (1.0, 0.99):
        drawn, _ = draw(logits, batch(2000, top_p=top_p))
        assert set(drawn.tolist()) == {3, 7}


@random_examples(50)
@given(st.data())
def test_a_draw_does_not_depend_on_the_batch_it_is_in(data: st.DataObject):
    rows = 12
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    temperatures = data.draw(st.lists(st.sampled_from([0.0, 0.7, 1.0]), min_size=rows, max_size=rows))
    top_ps = data.draw(st.lists(st.sampled_from([0.5, 0.9, 1.0]), min_size=rows, max_size=rows))
    top_ks = data.draw(st.lists(st.sampled_from([0, 3, 20]), min_size=rows, max_size=rows))
    min_ps = data.draw(st.lists(st.sampled_from([0.0, 0.1]), min_size=rows, max_size=rows))
    parameters = zip(temperatures, top_ks, top_ps, min_ps, range(rows), strict=True)
    samplings = [Sampling(t, k, p, m, 977 * key) for t, k, p, m, key in parameters]
    positions = np.arange(rows) % 5
    drawn, log_probabilities = SamplingBatch(samplings, np.arange(rows), CPU, BACKEND).draw(logits, positions)
    chosen = data.draw(st.permutations(range(rows)).map(lambda p: p[: 1 + p[0]]))
    part = SamplingBatch([samplings[i] for i in chosen], np.arange(len(chosen)), CPU, BACKEND)
    again, again_log = part.draw(logits[chosen], positions[chosen])
    assert torch.equal(again, drawn[chosen])
    assert torch.equal(again_log, log_probabilities[chosen])
    of_one = SamplingBatch(samplings, np.zeros(rows, dtype=np.int64), CPU, BACKEND)
    alike = SamplingBatch(samplings, np.arange(rows), CPU, BACKEND).draw(logits[:1].expand(rows, -1), positions)
    assert all(map(torch.equal, of_one.draw(logits[:1], positions), alike))


def test_many_draws_are_made_in_portions_of_rows_and_are_the_same():
    """Rows with several draws, alike and not, lie on both sides of each cut."""
    generator = torch.Generator().manual_seed(5)
    hidden, head = torch.randn(700, 8, generator=generator), torch.randn(8, 50, generator=generator)
    rows = np.sort(np.concatenate([np.arange(700), np.full(300, 250), np.full(3, 255), np.full(40, 511)]))
    samplings = [Sampling(temperature=0.5 + i % 3 / 4, top_k=i % 2 * 7, key=977 * i) for i in range(len(rows))]
    positions = np.arange(len(rows)) % 5
    asked: list[int] = []

    def logits_of(some: torch.Tensor) -> torch.Tensor:
        asked.append(len(some))
        return (some[:, :, None] * head).sum(1)  # the same bits in any batch

    found = Sampler(samplings, rows, CPU, BACKEND).draw(logits_of, hidden, positions)
    assert len(asked) > 3
    assert max(asked) <= ROWS_AT_A_TIME
    expected = SamplingBatch(samplings, rows, CPU, BACKEND).draw(logits_of(hidden), positions)
    assert all(map(torch.equal, found, expected))


def test_sampling_leaves_the_logits_as_they_were():
    logits = torch.randn(6, 30)
    before = logits.clone()
    draw(logits, batch(6, temperature=0.5, top_p=0.5))
    assert torch.equal(logits, before)


def test_uniforms_are_splitmix64():
    # Reference outputs of Vigna's splitmix64.c for seed 1234567
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    draws = uniforms(np.full(4, 1234567, dtype=np.uint64), np.arange(4))
    assert draws.tolist() == [(x >> 11) * 2.0**-53 for x in reference]


def test_uniforms_fill_the_unit_interval_evenly_over_keys_and_over_positions():
    keys = np.array([stream_key(0, "problem", (i,)) for i in range(10_000)], dtype=np.uint64)
    for draws in (uniforms(keys, np.zeros(10_000, dtype=int)), uniforms(keys[:1].repeat(10_000), np.arange(10_000))):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts = np.histogram(draws, bins=20, range=(0, 1))[0]
        assert ((counts - 500) ** 2 / 500).sum() < 50  # chi-squared, 19 degrees of freedom: p < 1e-4


def test_streams_differ_by_seed_problem_and_path():
    keys = {
        stream_key(seed, problem, path)
        for seed in (0, 1, 11)
        for problem in ("a", "b", "1\x1fa")
        for path in ((), (0,), (1,), (1, 1), (11,), (1, 1, 1), (0, 0))
    }
    assert len(keys) == 3 * 3 * 7
    assert all(0 <= key < 2**64 for key in keys)


def test_a_stream_is_the_same_in_every_process():
    assert stream_key(7, "How many coins?", (3, 0, 1)) == 16760227590797784031


def test_the_stream_of_a_step_is_found_without_reading_its_path_again(monkeypatch: pytest.MonkeyPatch):
    read = 0

    class Counting:
        def __init__(self, data: bytes = b""):
            self.hash = sha256()
            self.update(data)

        def update(self, data: bytes) -> None:
            nonlocal read
            read += len(data)
            self.hash.update(data)

        def copy(self) -> "Counting":
            copied = Counting()
            copied.hash = self.hash.copy()
            return copied

        def digest(self) -> bytes:
            return self.hash.digest()

    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", Counting)
    streams, path = PathStreams(7, "problem"), (3,) * 1000
    for index in path:
        streams = streams.child(index)
    read = 0
    key = streams.child(5).key
    assert read == len(b".5") + len(b"\x1fproblem")
    assert key == stream_key(7, "problem", (*path, 5))
