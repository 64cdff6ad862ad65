"""Decoders with recurrent layers over the engine's pool: states shared by forks, copied, cached, computed again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import drain, generate, read, release
from plain import plain_greedy, plain_logits
from zoo_models import write_checkpoint

from espalier.engine.engine import Engine
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import ModelImpl
from espalier.engine.work import Sampling, Score, Scored

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "olmo_hybrid": {},
    "nemotron_h": {},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "falcon_h1": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm3": {},
    "zamba2": {},
    "mamba2": {},
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {},
}
"""Model types, and fields without which their defaults have layers of one kind alone."""
SAME_BITS = ["qwen3_5_text", "qwen3_next", "nemotron_h", "lfm3", "mamba", "mamba2"]
GREEDY = Sampling(temperature=0.0)


class Made(dict[str, Any]):
    """Values by model type, each made once it is asked for."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make

    def __missing__(self, kind: str) -> Any:
        self[kind] = self._make(kind)
        return self[kind]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("recurrent")
    return Made(lambda kind: write_checkpoint(root / kind, kind, **KINDS[kind]))


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Model]:
    return Made(lambda kind: load(folders[kind]))


def load(folder: Path, **options: Any) -> Model:
    checkpoint = Checkpoint(folder, **{"model_impl": ModelImpl.TRANSFORMERS} | options)
    return load_generator(checkpoint, torch.float32, "cpu")


def some_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, 330, count).tolist()


def assert_logits_equal(logits: np.ndarray, folder: Path, token_ids: list[int], last: int) -> None:
    expected = plain_logits(folder, token_ids)[-last:]
    difference = (torch.from_numpy(logits[-last:]) - expected).abs().max() / expected.abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_forks_and_single_tokens_equal_transformers(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model], folders: dict[str, Path]
):
    engine, ids = make_engine(models[kind], max_batch_tokens=7), some_ids(26)
    assert models[kind].config.state_shapes
    parent = engine.open("generator", ids[:5])
    assert_logits_equal(read(engine, parent, ids[5:]), folders[kind], ids, 21)
    family = [*engine.fork(parent, 2), parent]
    tails = [some_ids(count, seed=count) for count in (1, 5, 9)]
    for sequence, tail in zip(family, tails, strict=True):
        engine.submit(Score("reader", sequence, tuple(tail), tuple(range(len(tail)))))
    by_row = {d.work.sequence.row: d.values for d in drain(engine) if isinstance(d, Scored)}
    for sequence, tail in zip(family, tails, strict=True):
        assert_logits_equal(by_row[sequence.row], folders[kind], ids + tail, len(tail))
    for token in (7, 8):
        tails[0].append(token)
        assert_logits_equal(read(engine, family[0], [token]), folders[kind], ids + tails[0], 1)
    release(engine, *family)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_equals_transformers_token_by_token(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model], folders: dict[str, Path]
):
    engine, ids = make_engine(models[kind]), some_ids(9, seed=3)
    sequence = engine.open("generator", ids)
    (done,) = generate(engine, sequence, GREEDY, tokens=12, delimiter="")
    expected, log_probability = plain_greedy(folders[kind], ids, len(done.token_ids))
    assert done.token_ids == expected
    assert done.log_probability == pytest.approx(log_probability, abs=1e-3)
    (again,) = generate(engine, sequence, GREEDY, tokens=12, delimiter="")
    assert (again.token_ids, again.log_probability) == (done.token_ids, done.log_probability), "from the kept state"
    release(engine, sequence, done.sequence, again.sequence)
