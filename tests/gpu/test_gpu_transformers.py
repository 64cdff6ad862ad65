"""Decoders by transformers' code: replayed steps beside launched ones, and both beside the CPU's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import error

zoo_models = pytest.importorskip("zoo_models", exc_type=ImportError)

from espalier.engine.engine import Engine, EngineSettings  # noqa: E402
from espalier.engine.models.checkpoint import Checkpoint  # noqa: E402
from espalier.engine.models.model import Model, load_generator  # noqa: E402
from espalier.engine.models.options import ModelImpl  # noqa: E402
from espalier.engine.work import Generate, Generated, Sampling, Score, Scored  # noqa: E402
from espalier.kernels.triton import recording  # noqa: E402

KINDS = ["llama", "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba", "mamba2", "qwen3_next"]


@pytest.fixture(params=KINDS)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Model]:
    folder = zoo_models.write_checkpoint(tmp_path / request.param, request.param)
    checkpoint = Checkpoint(folder, model_impl=ModelImpl.TRANSFORMERS)
    return lambda device: load_generator(checkpoint, torch.float32, device)


def values(model: Model, monkeypatch: pytest.MonkeyPatch, *, recorded: bool) -> tuple[torch.Tensor, list[Any]]:
    """Logits of a prompt, and greedy continuations of three with their log-probabilities."""
    if not recorded:
        monkeypatch.setattr(model.decoder.layers, "warm_up", lambda *_: None)
    engine = Engine({"generator": model}, EngineSettings(2**24, block_size=4))
    prompts = [list(range(4, 4 + length)) for length in (3, 9, 6)]
    sequences = [engine.open("generator", prompt[:2]) for prompt in prompts]
    engine.submit(Score("reader", sequences[1], tuple(prompts[1][2:]), tuple(range(7))))
    (scored,) = (done for done in run(engine) if isinstance(done, Scored))
    for index, sequence in enumerate(sequences):
        engine.submit(Generate(str(index), sequence, (Sampling(temperature=0.0),), 8, ""))
    done = [each for each in run(engine) if isinstance(each, Generated)]
    drawn = sorted((str(each.work.owner), list(each.token_ids), list(each.log_probabilities)) for each in done)
    engine.close()
    return torch.from_numpy(scored.values), drawn


def run(engine: Engine) -> list[Any]:
    done: list[Any] = []
    while engine.busy:
        done += engine.step()
    return done


def test_logits_are_those_of_the_cpu_and_replays_those_of_launches(
    load: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(recording, "LADDER", (1, 2, 4))
    caplog.set_level("INFO")
    torch.backends.cuda.matmul.allow_tf32 = False
    (expected, _), (found, replayed), (_, launched) = (
        values(load(device), monkeypatch, recorded=recorded)
        for device, recorded in (("cpu", False), ("cuda", True), ("cuda", False))
    )
    assert "kernel by kernel" not in caplog.text, "steps are recorded"
    assert error(found, expected) < 1e-4
    assert replayed == launched
