import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import layer_weights
import pytest
import torch
from engine_driver import generate, release
from safetensors.torch import load_file, save_file
from tiny_models import edit_tensors
from weight_formats import FORMATS, rewrite

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.checkpoint import files as files_module
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import LoadFormat
from espalier.engine.models.weights import open_weight_file
from espalier.engine.work import Sampling
from espalier.kernels.linear import Linear
from espalier.prm.families import load_verifier


@pytest.fixture
def copy_of(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint that a test may damage, its weights in a given format."""

    def copy(name: str = "qwen2-untied", form: str = "safetensors") -> Path:
        folder = Path(shutil.copytree(tiny_checkpoints[name], tmp_path / f"{name}-{form}"))
        rewrite(folder, form)
        return folder

    return copy


def load(folder: Path, load_format: LoadFormat = LoadFormat.AUTO, dtype: torch.dtype = torch.float32) -> Model:
    return load_generator(Checkpoint(folder, load_format), dtype, "cpu")


def tensors_of(model: Model) -> list[torch.Tensor]:
    decoder, head = model.decoder, model.head
    assert isinstance(head, Linear)
    found = [decoder.embedding, decoder.layers.outer.norm, head.weight]
    for index in range(len(decoder.layers)):
        found += layer_weights.tensors_of(layer_weights.weights_of(decoder.layers, index))
    return found


def greedy_ids(engine: Engine) -> tuple[int, ...]:
    sequence = engine.open("generator", [9, 17, 30, 4])
    (done,) = generate(engine, sequence, Sampling(temperature=0.0), tokens=12, in_place=True, delimiter="")
    release(engine, sequence)
    return tuple(done.token_ids)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_bits_and_the_same_greedy_text(
    form: str,
    copy_of: Callable[..., Path],
    load_model: Callable[[str], Model],
    make_engine: Callable[..., Engine],
):
    model, plain = load(copy_of(form=form)), load_model("qwen2-untied")
    for mine, theirs in zip(tensors_of(model), tensors_of(plain), strict=True):
        assert torch.equal(mine, theirs)
    assert greedy_ids(make_engine(model)) == greedy_ids(make_engine(plain))


@pytest.mark.parametrize("form", FORMATS)
def test_a_prefix_on_the_trunk_or_none_makes_no_difference(form: str, copy_of: Callable[..., Path]):
    folder = copy_of()
    file = folder / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    rewrite(folder, form)
    for mine, theirs in zip(tensors_of(load(folder)), tensors_of(load(copy_of("qwen2-untied", "bin"))), strict=True):
        assert torch.equal(mine, theirs)


def test_weights_are_converted_as_torch_converts_them(copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("espalier.kernels.cpu.backend.run_in_one_call", lambda layer: False)  # as they were given
    for mine, theirs in zip(
        tensors_of(load(copy_of(form="sharded-bin"), dtype=torch.bfloat16)),
        tensors_of(load(copy_of(), dtype=torch.float32)),
        strict=True,
    ):
        assert torch.equal(mine, theirs.to(torch.bfloat16))


def test_safetensors_are_taken_before_bin_unless_told_otherwise(copy_of: Callable[..., Path]):
    folder = copy_of()
    torch.save({"other": torch.zeros(2)}, folder / "pytorch_model.bin")
    assert "other" not in Checkpoint(folder)
    assert "other" in Checkpoint(folder, LoadFormat.BIN)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors, and no index"):
        Checkpoint(folder, LoadFormat.SAFETENSORS)
    assert "other" in Checkpoint(folder)


@pytest.mark.parametrize("form", FORMATS)
def test_the_bytes_reported_sum_to_what_is_stored(form: str, copy_of: Callable[..., Path]):
    folder, seen = copy_of("qwen2-tied", form), []
    checkpoint = Checkpoint(folder, on_bytes=seen.append)
    load_generator(checkpoint, torch.float32, "cpu")
    held = [t for name in {i.file for i in checkpoint.tensors.values()} for t in _read_all(name)]
    assert sum(seen) == checkpoint.nbytes == sum(t.nbytes for t in held)
    assert len(seen) == len(held)


def _read_all(path: Path) -> list[torch.Tensor]:
    return list((torch.load(path) if path.suffix == ".bin" else load_file(path)).values())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_tensors_size_is_known_before_it_is_read(dtype: torch.dtype, tmp_path: Path):
    tensor = torch.zeros(3, 5).to(dtype)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    info = open_weight_file(tmp_path / "x.safetensors").tensors["x"]
    assert (info.shape, info.nbytes) == ((3, 5), tensor.nbytes)


def test_no_more_than_two_shards_are_open_and_none_after_loading(
    copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    most, opened = 0, []

    def counting(path: Path):
        nonlocal most
        most = max(most, len(checkpoint.files._open) + 1 if opened else 1)
        opened.append(path)
        return open_weight_file(path)

    folder = copy_of(form="sharded-safetensors")
    checkpoint = Checkpoint(folder)
    monkeypatch.setattr(files_module, "open_weight_file", counting)
    checkpoint.files._open.clear()
    load_generator(checkpoint, torch.float32, "cpu")
    assert most == 2
    assert not checkpoint.files._open


def test_a_single_file_is_opened_once(copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    opened = []
    monkeypatch.setattr(files_module, "open_weight_file", lambda p: opened.append(p) or open_weight_file(p))
    load(copy_of())
    assert len(opened) == 1


_LOAD_AND_MEASURE = """
import os, sys
from pathlib import Path
import torch
from espalier.engine.models.checkpoint import Checkpoint
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
into = torch.empty(4_000_000)
for folder in sys.argv[1:]:
    checkpoint = Checkpoint(Path(folder))
    before, most = resident(), 0
    for name in sorted(checkpoint.tensors):
        checkpoint.take_into(name, into)
        most = max(most, resident())  # the file a tensor came from is still open
    print(most - before)
    del checkpoint
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measured as Linux tells it")
def test_the_host_holds_about_two_shards_at_most(tmp_path: Path):
    folders = [tmp_path / ending for ending in ("safetensors", "bin")]
    for folder in folders:
        folder.mkdir()
        ending, stem = folder.name, "model" if folder.name == "safetensors" else "pytorch_model"
        names = [f"{stem}-{i:05}-of-00006.{ending}" for i in range(1, 7)]
        for i, name in enumerate(names):
            shard = {f"t{i}": torch.full((4_000_000,), float(i))}  # 16 MB
            save_file(shard, folder / name) if ending == "safetensors" else torch.save(shard, folder / name)
        index = {"weight_map": {f"t{i}": name for i, name in enumerate(names)}}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text("{}")
    command = [sys.executable, "-c", _LOAD_AND_MEASURE, *map(str, folders)]
    grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(grown) == 2
    assert all(int(size) < 3.5 * 16_000_000 for size in grown)  # two shards and `into`; all six would be 96 MB


# What is wrong with a file is said before anything is loaded.


@pytest.mark.parametrize("kept", [0, 1, 3, 100, 5_000, 20_000])
@pytest.mark.parametrize("form", ["bin", "old-bin", "sharded-bin", "sharded-safetensors"])
def test_a_truncated_weight_file_is_named(form: str, kept: int, copy_of: Callable[..., Path]):
    folder = copy_of(form=form)
    file = max(folder.glob("pytorch_model*.bin" if "bin" in form else "model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=rf"{file.name} (is damaged or cut short; download it again|asks for)"):
        Checkpoint(folder)


class _Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_that_asks_for_code_is_refused_and_not_run(archive: bool, copy_of: Callable[..., Path]):
    folder = copy_of(form="bin")
    file, target = folder / "pytorch_model.bin", folder / "made-by-the-payload"
    held = {**torch.load(file), "x": _Payload(target)}
    torch.save(held, file, _use_new_zipfile_serialization=archive)
    with pytest.raises(CheckpointError, match=r"asks for (posix|nt)\.mkdir, and loading it could run code"):
        Checkpoint(folder)
    assert not target.exists()
    torch.load(file, weights_only=False)
    assert target.exists()  # the payload does work


@pytest.mark.parametrize("held", [[1, 2], {"state": {"x": torch.zeros(2)}}, {}, {"x": 3}])
def test_a_bin_that_is_no_table_of_tensors_is_refused(held: object, copy_of: Callable[..., Path]):
    folder = copy_of(form="bin")
    torch.save(held, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not a plain table of tensors"):
        Checkpoint(folder)


@pytest.mark.parametrize("content", [b"hello, this is no weight file", b"\x80\x02}q\x00X"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_file_that_is_something_else_is_named(name: str, content: bytes, copy_of: Callable[..., Path]):
    folder = copy_of()
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged or cut short"):
        Checkpoint(folder)


@pytest.mark.parametrize("form", ["sharded-bin", "sharded-safetensors"])
def test_a_missing_shard_is_named(form: str, copy_of: Callable[..., Path]):
    folder = copy_of(form=form)
    file = min(folder.glob("*-00002-of-00003.*"))
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"has no {file.name}; is the download complete\?"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "is not an index of shards: no weight_map"),
        ([], "holds no JSON object"),
        ({"weight_map": ["x"]}, "is not an index of shards: no weight_map"),
        ({"weight_map": {}}, "is not an index of shards: its weight_map is empty"),
        ({"weight_map": {"x": "../x.bin"}}, "names '../x.bin', which is not a file beside it"),
    ],
)
def test_an_index_that_is_none_or_leads_elsewhere_is_refused(index: object, message: str, copy_of: Callable[..., Path]):
    folder = copy_of()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("lm_head.weight", (338, 47)),
        ("model.embed_tokens.weight", (48, 338)),
        ("model.norm.weight", (47,)),
        ("model.layers.1.self_attn.v_proj.weight", (48, 24)),
        ("model.layers.1.self_attn.q_proj.bias", (1, 48)),
        ("model.layers.2.mlp.down_proj.weight", (80, 48)),
    ],
)
def test_every_tensor_of_another_shape_is_named_with_both_shapes(
    name: str, wrong: tuple[int, ...], copy_of: Callable[..., Path]
):
    folder = copy_of()
    edit_tensors(folder / "model.safetensors", {name: torch.zeros(wrong)})
    sizes = r"\(" + ", ".join(map(str, wrong)) + r",?\)"
    with pytest.raises(CheckpointError, match=rf"{name} has shape {sizes}, config\.json means \("):
        load(folder)


def test_rotary_buffers_of_old_checkpoints_are_no_surprise_and_not_used(
    copy_of: Callable[..., Path], load_model: Callable[[str], Model], make_engine: Callable[..., Engine]
):
    folder = copy_of("llama3-rope")
    edit_tensors(
        folder / "model.safetensors",
        {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in range(2)},
    )
    model, plain = load(folder), load_model("llama3-rope")
    for mine, theirs in zip(tensors_of(model), tensors_of(plain), strict=True):
        assert torch.equal(mine, theirs)
    assert greedy_ids(make_engine(model)) == greedy_ids(make_engine(plain))


def test_a_missing_tokenizer_is_named_before_any_tensor_is_read(copy_of: Callable[..., Path]):
    folder, read = copy_of(), []
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_generator(Checkpoint(folder, on_bytes=read.append), torch.float32, "cpu")
    assert not read


# Dummy weights: the shapes of config.json, and nothing else.


@pytest.fixture
def without_weights(copy_of: Callable[..., Path]) -> Callable[[str], Path]:
    def strip(name: str) -> Path:
        folder = copy_of(name)
        (folder / "model.safetensors").unlink()
        return folder

    return strip


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen2-untied", "llama3-rope"])
def test_dummy_weights_have_the_shapes_of_the_real_ones(
    name: str, without_weights: Callable[[str], Path], load_model: Callable[[str], Model]
):
    dummy, real = load(without_weights(name), LoadFormat.DUMMY), load_model(name)
    assert [t.shape for t in tensors_of(dummy)] == [t.shape for t in tensors_of(real)]


def test_dummy_weights_are_the_same_each_time_and_differ_from_tensor_to_tensor(
    without_weights: Callable[[str], Path],
):
    folder = without_weights("qwen2-untied")
    first, second = (load(folder, LoadFormat.DUMMY) for _ in range(2))
    for one, other in zip(tensors_of(first), tensors_of(second), strict=True):
        assert torch.equal(one, other)
    layers = [layer_weights.weights_of(first.decoder.layers, index) for index in range(2)]
    assert not torch.equal(layers[0].qkv, layers[1].qkv)
    assert not torch.equal(*layers[0].gate_up.chunk(2))
    gate_up = layers[0].gate_up
    assert 0.015 < float(gate_up[gate_up != 0].std()) < 0.025
    assert torch.equal(layers[0].norms[1], torch.ones(48))
    assert first.digest == second.digest


def test_a_model_with_dummy_weights_generates(
    without_weights: Callable[[str], Path], make_engine: Callable[..., Engine]
):
    assert len(greedy_ids(make_engine(load(without_weights("qwen2-untied"), LoadFormat.DUMMY)))) == 12


@pytest.mark.parametrize("name", ["math-prm", "classifier"])
def test_a_verifier_with_dummy_weights_scores(name: str, without_weights: Callable[[str], Path]):
    family = load_verifier(Checkpoint(without_weights(name), LoadFormat.DUMMY), torch.float32, "cpu")
    scores = family.model.head(torch.randn(3, 40))
    assert scores.shape == (3, 1)
    assert bool(((scores > 0) & (scores < 1)).all())
