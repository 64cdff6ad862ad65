"""Models that do not fit into memory are refused with the numbers, before anything is read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import edit_json

from espalier.engine.errors import CheckpointError
from espalier.engine.memory.model_memory import free_memory, model_bytes
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.search.run import load
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings

MEMINFO = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  600 kB\n"


@pytest.fixture
def system(tmp_path: Path) -> Callable[..., int | None]:
    """Asks what is free on a system whose files say this."""

    def ask(meminfo: str = MEMINFO, **container: str) -> int | None:
        (tmp_path / "meminfo").write_text(meminfo)
        for name, said in container.items():
            (tmp_path / f"memory.{name}").write_text(said)
        return free_memory(tmp_path / "meminfo", tmp_path)

    return ask


def test_what_is_free_is_what_the_system_calls_available(system: Callable[..., int | None]):
    assert system() == 600 * 1024
    assert system(max="max\n", current="5\n") == 600 * 1024
    assert system("MemTotal: 9 kB\n") is None
    assert free_memory(Path("/nowhere")) is None


def test_a_container_may_have_less_and_its_cached_files_are_free(system: Callable[..., int | None]):
    assert system(max="300000\n", current="100000\n") == 200_000
    assert system(max="300000\n", current="250000\n", stat="anon 1\ninactive_file 150000\n") == 200_000
    assert system(max="1000\n", current="2000\n", stat="") == 0
    assert system(max="900000000\n", current="0\n") == 600 * 1024


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen2-untied", "llama3-rope", "qwen3"])
def test_the_bytes_told_before_are_those_of_the_loaded_model(name: str, load_model: Callable[[str], Model]):
    model = load_model(name)
    said = model_bytes(model.config, torch.float32, Quantization.NONE, generates=True)
    assert said == pytest.approx(model.weight_bytes, rel=0.02)


def test_quantised_weights_are_counted_as_they_are_kept(tiny_checkpoints: dict[str, Path]):
    checkpoint = Checkpoint(tiny_checkpoints["qwen2-untied"], quantization=Quantization.INT8)
    model = load_generator(checkpoint, torch.float32, "cpu")
    said = model_bytes(model.config, torch.float32, Quantization.INT8, generates=True)
    assert said == pytest.approx(model.weight_bytes, rel=0.25)  # panels are filled up, and scales are finer


def test_models_that_do_not_fit_are_refused_with_the_numbers(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    folder = copy_of("qwen2-untied")
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    edit_json(folder / "config.json", sizes | {"num_key_value_heads": 8, "vocab_size": 128_256})
    monkeypatch.setattr(load, "free_memory", lambda: 24 * 2**30)
    settings = RuntimeSettings(
        str(folder), "", load_format=LoadFormat.DUMMY, device="cpu", generator_quantization=Quantization.NONE
    )
    with pytest.raises(
        CheckpointError, match=r"take 262\.8 GiB .*\(--generator 262\.8 GiB\), and 24\.0 GiB are free; .*--generator-q"
    ):
        load_orchestrator(settings)


def test_models_that_fit_are_loaded(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    pair = RuntimeSettings(str(tiny_checkpoints["talker"]), str(tiny_checkpoints["classifier"]), device="cpu")
    monkeypatch.setattr(load, "free_memory", lambda: 2**20)
    load_orchestrator(pair).close()
    monkeypatch.setattr(load, "free_memory", lambda: 2**17)
    with pytest.raises(CheckpointError, match=r"--generator .* and --verifier "):
        load_orchestrator(pair)
