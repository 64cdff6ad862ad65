"""Weights kept once they are int8: the next load gives the same model from an entry, and whatever is wrong with one."""

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import read, release
from layer_weights import weights_of
from tiny_models import edit_json, randomize

from espalier.engine.engine import Engine
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.load_cache import LoadCache, open_cache
from espalier.engine.models.model import Model, load_generator, load_trunk
from espalier.engine.models.options import Quantization
from espalier.kernels.cpu import HAS_VNNI
from espalier.kernels.linear import Kept, Linear

pytestmark = pytest.mark.skipif(not HAS_VNNI, reason="int8 is kept where bytes are multiplied")


@pytest.fixture
def folder(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint whose layers run in one call in int8: widths of whole groups, and values that four heads share."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(shutil.copytree(tiny_checkpoints["qwen2-untied"], tmp_path / "wide"))
    shape: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    }
    edit_json(folder / "config.json", shape)
    randomize(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), 7).save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> LoadCache:
    return LoadCache(tmp_path / "kept", least_bytes=0)


def opened(folder: Path, cache: LoadCache | None, how: Quantization = Quantization.INT8) -> Checkpoint:
    return Checkpoint(folder, quantization=how, load_cache=cache)


def load(folder: Path, cache: LoadCache | None, how: Quantization = Quantization.INT8) -> Model:
    return load_generator(opened(folder, cache, how), torch.float32, "cpu")


@pytest.fixture
def logits(make_engine: Callable[..., Engine]) -> Callable[[Model], torch.Tensor]:
    def logits_of(model: Model) -> torch.Tensor:
        engine = make_engine(model)
        sequence = engine.open("generator", [])
        values = read(engine, sequence, [9, 17, 30, 4, 80, 81])
        release(engine, sequence)
        return torch.from_numpy(values)

    return logits_of


def test_the_second_load_reads_no_weights_and_gives_the_same_model(
    folder: Path, cache: LoadCache, logits: Callable[[Model], torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    without, first = load(folder, None), load(folder, cache)
    assert len(cache.entries()) == 2  # the decoder and the head

    def refuse(self: Checkpoint, name: str, out: torch.Tensor) -> None:
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(Checkpoint, "take_into", refuse)
    again = load(folder, cache)
    with pytest.raises(AssertionError, match="is read"):
        load(folder, None)
    assert torch.equal(logits(again), logits(without))
    assert torch.equal(logits(first), logits(without))
    assert (again.digest, again.weight_bytes) == (without.digest, without.weight_bytes)
    layers = weights_of(again.decoder.layers, 1), weights_of(without.decoder.layers, 1)
    assert all(torch.equal(getattr(layers[0].qkv, name), getattr(layers[1].qkv, name)) for name in ("values", "scales"))
    assert layers[0].qkv.refined == layers[1].qkv.refined == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_an_entry_says_which_tensors_it_was_made_of_and_what_was_odd_about_them(folder: Path, cache: LoadCache):
    given = list[tuple[frozenset[str], tuple[str, ...]]]()
    for _ in range(2):
        checkpoint = opened(folder, cache)
        if not given:
            checkpoint.warn("the embedding is odd")
        load_trunk(checkpoint, torch.float32, "cpu")
        given.append((checkpoint.used, checkpoint.warnings))
    assert given[0] == given[1]
    assert given[0][0] == opened(folder, None).tensors.keys() - {"lm_head.weight"}


def test_other_weights_and_other_kinds_of_them_have_entries_of_their_own(
    folder: Path, cache: LoadCache, logits: Callable[[Model], torch.Tensor]
):
    load(folder, cache)
    load(folder, cache, Quantization.NONE)
    assert len(cache.entries()) == 2
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-200:] = bytes(200)
    (folder / "model.safetensors").write_bytes(data)
    changed = load(folder, cache)
    assert len(cache.entries()) == 4
    assert torch.equal(logits(changed), logits(load(folder, None)))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4097)


def cut_to_its_beginning(path: Path) -> None:
    os.truncate(path, 28)


def write_another(path: Path) -> None:
    path.write_bytes(b"somebody else's")


def write_no_directory(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-22, os.SEEK_END)
        file.write(b"\xff" * 16)


def take_the_others(path: Path) -> None:
    other = next(each for each in path.parent.glob("*.weights") if each != path)
    shutil.copy(other, path)


@pytest.mark.parametrize("damage", [cut, cut_to_its_beginning, write_another, write_no_directory, take_the_others])
def test_an_entry_that_is_not_whole_or_not_its_own_is_written_anew(
    damage: Callable[[Path], None], folder: Path, cache: LoadCache, logits: Callable[[Model], torch.Tensor]
):
    expected = logits(load(folder, cache))
    before = {path: path.read_bytes() for path, _ in cache.entries()}
    decoder = max(before, key=lambda path: len(before[path]))
    damage(decoder)
    assert torch.equal(logits(load(folder, cache)), expected)
    assert {path: path.read_bytes() for path, _ in cache.entries()} == before


def test_a_folder_that_cannot_be_written_is_a_line_of_the_log(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.INFO, "espalier.engine"):
        load(folder, LoadCache(tmp_path / "file" / "kept", least_bytes=0))
    assert f"weights are not kept in {tmp_path / 'file' / 'kept'}" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_the_least_recently_used_entries_make_room(tmp_path: Path):
    cache = LoadCache(tmp_path, max_bytes=4 * 40_000, least_bytes=0)
    for number, name in enumerate("abc"):
        cache.write(name, Kept({"x": torch.full((8192,), float(number))}, {}))
        os.utime(tmp_path / f"{name}.weights", (number, number))
    unfinished = tmp_path / "unfinished-x.weights"
    unfinished.write_text("a process that ended")
    os.utime(unfinished, (-1, -1))
    assert cache.read("a")  # which makes it the latest
    cache.write("d", Kept({"x": torch.zeros(3 * 8192)}, {}))
    assert {path.stem for path, _ in cache.entries()} == {"a", "d"}
    assert not unfinished.exists()
    cache.write("larger than all", Kept({"x": torch.zeros(5 * 10_000)}, {}))
    assert {path.stem for path, _ in cache.entries()} == {"a", "d"}


def test_what_a_process_does_to_a_mapped_tensor_reaches_no_other(tmp_path: Path):
    cache = LoadCache(tmp_path, least_bytes=0)
    cache.write("x", Kept({"x": torch.ones(3), "none": torch.empty(2, 0)}, {"layers": 2}))
    one, other = cache.read("x"), cache.read("x")
    assert one
    assert other
    one.tensors["x"][0] = 5
    (tmp_path / "x.weights").unlink()
    assert other.tensors["x"].tolist() == [1, 1, 1]
    assert (other.tensors["none"].shape, other.facts) == ((2, 0), {"layers": 2})


def test_several_may_write_and_read_one_entry_at_once(tmp_path: Path):
    cache, wrong = LoadCache(tmp_path, least_bytes=0), list[object]()
    kept = Kept({"x": torch.arange(5000, dtype=torch.float32)}, {})

    def work() -> None:
        for _ in range(20):
            cache.write("x", kept)
            if not (found := cache.read("x")) or not torch.equal(found.tensors["x"], kept.tensors["x"]):
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [path.name for path in tmp_path.iterdir()] == ["x.weights"]


def test_small_models_are_loaded_as_fast_without(folder: Path, tmp_path: Path):
    load(folder, LoadCache(tmp_path / "kept"))
    assert not (tmp_path / "kept").exists()


def test_a_folder_is_named_or_the_users_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    auto, named = open_cache("auto"), open_cache("there")
    assert auto
    assert named
    assert (auto.folder, named.folder) == (tmp_path / "espalier" / "weights", Path("there"))
    assert open_cache("none") is None


def test_the_head_that_is_kept_is_one_product(folder: Path, cache: LoadCache):
    for _ in range(2):
        head = load(folder, cache).head
        assert isinstance(head, Linear)
        assert head.nbytes < 343 * 64 * 2
