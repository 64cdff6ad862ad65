"""Weights that libraries stored quantised, packed here by their published layouts, load as what they stand for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import read, release
from plain import plain_logits
from safetensors.torch import load_file, save_file
from zoo_models import write_checkpoint

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint, Outline
from espalier.engine.models.model import load_generator
from espalier.engine.models.options import Quantization
from espalier.engine.models.stored.mxfp4 import Mxfp4
from espalier.engine.models.zoo.small import Sizes

Parts = dict[str, torch.Tensor]
GROUP = 16


# ---- packers, a value at a time, as the formats' pages describe them


def words_of(values: np.ndarray, bits: int) -> np.ndarray:
    """Words of 32 bits along the last dimension, the lowest bits first."""
    count = 32 // bits
    padded = np.zeros((len(values), -(-values.shape[1] // count) * count), np.uint64)
    padded[:, : values.shape[1]] = values
    words = np.zeros((len(values), padded.shape[1] // count), np.uint64)
    for column in range(padded.shape[1]):
        words[:, column // count] |= padded[:, column] << np.uint64(column % count * bits)
    return words.astype(np.uint32).view(np.int32)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def quantised(weight: torch.Tensor, bits: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Random values `[out, in]`, zeros and scales `[out, groups]`, and the weight that they stand for."""
    random, (outputs, inputs) = np.random.default_rng(seed), weight.shape
    values = random.integers(0, 2**bits, (outputs, inputs))
    zeros = random.integers(0, 2**bits, (outputs, inputs // GROUP))
    scales = random.uniform(0.002, 0.01, zeros.shape).astype(np.float16)
    spread = [np.repeat(each, GROUP, axis=1) for each in (zeros, scales.astype(np.float32))]
    return values, zeros, scales, ((values - spread[0]) * spread[1]).astype(np.float32)


def gptq(
    weight: torch.Tensor, bits: int, seed: int, act_order: bool = False, offset: int = 1
) -> tuple[Parts, np.ndarray]:
    values, zeros, scales, means = quantised(weight, bits, seed)
    parts = {
        "qweight": tensor(words_of(values, bits).T),
        "qzeros": tensor(words_of((zeros.T - offset) % 2**bits, bits)),
        "scales": tensor(scales.T),
    }
    if act_order:
        order = np.random.default_rng(seed).permutation(weight.shape[1])
        groups = np.arange(weight.shape[1])[order] // GROUP
        parts["g_idx"] = tensor(groups.astype(np.int32))
        means = ((values - zeros[:, groups]) * scales.astype(np.float32)[:, groups]).astype(np.float32)
    return parts, means


def awq(weight: torch.Tensor, seed: int) -> tuple[Parts, np.ndarray]:
    values, zeros, scales, means = quantised(weight, 4, seed)

    def packed(rows: np.ndarray) -> torch.Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        shuffled = rows.reshape(len(rows), -1, 8)[:, :, order].reshape(rows.shape)
        return tensor(words_of(shuffled, 4))

    return {"qweight": packed(values.T), "qzeros": packed(zeros.T), "scales": tensor(scales.T)}, means


def fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[Parts, np.ndarray]:
    rows, columns = block
    scales = torch.rand(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) + 0.5
    spread = scales.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scales}, (stored.float() * spread).numpy()


def fp8_of_outputs(weight: torch.Tensor) -> tuple[Parts, np.ndarray]:
    scales = torch.rand(len(weight), 1) + 0.5
    stored = (weight / scales).to(torch.float8_e4m3fn)
    parts = {"weight": stored, "weight_scale": scales, "input_scale": torch.ones(1)}
    return parts, (stored.float() * scales).numpy()


def compressed(weight: torch.Tensor, bits: int, seed: int, symmetric: bool) -> tuple[Parts, np.ndarray]:
    values, zeros, scales, means = quantised(weight, bits, seed)
    parts = {
        "weight_packed": tensor(words_of(values, bits)),
        "weight_scale": tensor(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if symmetric:
        spread = np.repeat(scales.astype(np.float32), GROUP, axis=1)
        return parts, ((values - 2 ** (bits - 1)) * spread).astype(np.float32)
    return parts | {"weight_zero_point": tensor(words_of(zeros.T, bits).T)}, means


def int8_of_outputs(weight: torch.Tensor, seed: int) -> tuple[Parts, np.ndarray]:
    values = np.random.default_rng(seed).integers(-128, 128, tuple(weight.shape)).astype(np.int8)
    scales = np.random.default_rng(seed + 1).uniform(0.0001, 0.001, (len(weight), 1)).astype(np.float32)
    return {"weight": tensor(values), "weight_scale": tensor(scales)}, values.astype(np.float32) * scales


def nf4(weight: torch.Tensor, seed: int, nested: bool) -> tuple[Parts, np.ndarray]:
    random = np.random.default_rng(seed)
    table = np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
    codes = random.integers(0, 16, weight.numel())
    size = 64
    blocks = -(-len(codes) // size)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "dtype": "float16", "shape": list(weight.shape)}
    parts = {
        "weight": tensor(((codes[::2] << 4) | codes[1::2]).astype(np.uint8)[:, None]),
        "weight.quant_map": tensor(table),
    }
    if nested:
        factors, tops = random.integers(0, 256, blocks), random.uniform(0.01, 0.1, -(-blocks // 8)).astype(np.float32)
        of_factors = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.125}
        parts |= {
            "weight.absmax": tensor(factors.astype(np.uint8)),
            "weight.nested_absmax": tensor(tops),
            "weight.nested_quant_map": tensor(of_factors),
        }
        absmax = of_factors[factors] * np.repeat(tops, 8)[:blocks] + np.float32(0.125)
    else:
        absmax = random.uniform(0.01, 0.1, blocks).astype(np.float32)
        parts["weight.absmax"] = tensor(absmax)
    text = json.dumps(state).encode()
    parts["weight.quant_state.bitsandbytes__nf4"] = tensor(np.frombuffer(text, np.uint8).copy())
    return parts, (table[codes] * np.repeat(absmax, size)[: len(codes)]).reshape(tuple(weight.shape)).astype(np.float32)


def llm_int8(weight: torch.Tensor, seed: int) -> tuple[Parts, np.ndarray]:
    parts, _ = int8_of_outputs(weight, seed)
    tops = np.random.default_rng(seed).uniform(0.01, 0.1, len(weight)).astype(np.float32)
    means = parts["weight"].numpy().astype(np.float32) * (tops / np.float32(127))[:, None]
    return {"weight": parts["weight"], "SCB": tensor(tops)}, means


def group_scheme(kind: str, form: str, bits: int = 8, **more: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": kind, **more}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": scheme}}}


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, int], tuple[Parts, np.ndarray]]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, lambda w, i: gptq(w, 4, i)),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, lambda w, i: gptq(w, 8, i)),
    "gptq, 2 bits": ({"quant_method": "gptq", "bits": 2, "group_size": GROUP}, lambda w, i: gptq(w, 2, i)),
    "gptq, act order": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        lambda w, i: gptq(w, 4, i, act_order=True),
    ),
    "gptq_v2": (
        {"quant_method": "gptq", "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda w, i: gptq(w, 4, i, offset=0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [24, 40]}, lambda w, _: fp8(w, (24, 40))),
    "fp8, 128": ({"quant_method": "fp8"}, lambda w, _: fp8(w, (128, 128))),
    "fp8, outputs": ({"quant_method": "fp8"}, lambda w, _: fp8_of_outputs(w)),
    "compressed int4": (
        group_scheme("int", "pack-quantized", 4, symmetric=True, group_size=GROUP),
        lambda w, i: compressed(w, 4, i, symmetric=True),
    ),
    "compressed int4, zeros": (
        group_scheme("int", "pack-quantized", 4, symmetric=False, group_size=GROUP),
        lambda w, i: compressed(w, 4, i, symmetric=False),
    ),
    "compressed int8": (group_scheme("int", "int-quantized"), int8_of_outputs),
    "compressed fp8": (group_scheme("float", "float-quantized"), lambda w, _: fp8_of_outputs(w)),
    "bitsandbytes nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda w, i: nf4(w, i, nested=False)),
    "bitsandbytes nf4, nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda w, i: nf4(w, i, nested=True),
    ),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
}


@pytest.fixture
def stored(copy_of: Callable[[str], Path], tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Two copies of a tiny checkpoint: one in a quantised layout, and one with the weights that it stands for."""

    def write(name: str) -> tuple[Path, Path]:
        config, pack = FORMATS[name]
        plain = copy_of("qwen2-untied")
        packed = plain.with_name("packed")
        tensors, means = {}, {}
        for index, (key, weight) in enumerate(sorted(load_file(plain / "model.safetensors").items())):
            if key.endswith("_proj.weight"):
                parts, expected = pack(weight, index)
                stem = key.removesuffix("weight")
                tensors |= {stem + part: value.contiguous() for part, value in parts.items()}
                means[key] = torch.from_numpy(expected).contiguous()
            else:
                tensors[key] = means[key] = weight
        packed.mkdir()
        for file in plain.iterdir():
            if file.name not in ("model.safetensors", "config.json"):
                (packed / file.name).write_bytes(file.read_bytes())
        document = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
        (packed / "config.json").write_text(json.dumps(document))
        save_file(tensors, packed / "model.safetensors")
        save_file(means, plain / "model.safetensors")
        return packed, plain

    return write


def weights_of(folder: Path, quantization: Quantization = Quantization.NONE) -> list[torch.Tensor]:
    layers = load_generator(Checkpoint(folder, quantization=quantization), torch.float32, "cpu").decoder.layers
    found = list[torch.Tensor]()
    for index in range(len(layers)):
        layer = layers.weights(index)
        found += [value for name in layer.__slots__ if isinstance(value := getattr(layer, name), torch.Tensor)]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_stored_weight_is_what_it_stands_for(name: str, stored: Callable[[str], tuple[Path, Path]]):
    packed, plain = map(weights_of, stored(name))
    assert len(packed) == len(plain) > 8
    for one, other in zip(packed, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_a_stored_weight_is_quantised_again_where_that_is_asked_for(stored: Callable[[str], tuple[Path, Path]]):
    packed, plain = (weights_of(folder, Quantization.INT8) for folder in stored("awq"))
    assert str(packed[2:]) == str(plain[2:])


def test_a_checkpoint_says_how_its_weights_are_stored_before_one_is_read(stored: Callable[[str], tuple[Path, Path]]):
    packed, plain = (Outline(folder) for folder in stored("awq"))
    assert str(packed.stored) == "AWQ, 4 bits"
    assert plain.stored is None
    assert packed.tensors["model.layers.0.mlp.up_proj.weight"].kind == "AWQ, 4 bits"
    assert packed.nbytes < plain.nbytes


def test_blocks_of_floats_of_four_bits_are_what_they_stand_for():
    random = np.random.default_rng(1)
    blocks, scales = random.integers(0, 256, (2, 3, 4, 16)), random.integers(120, 130, (2, 3, 4))
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    expected = np.zeros((2, 4 * 32, 3), np.float32)
    for expert, output, group, byte in np.ndindex(blocks.shape):
        for half, code in enumerate(
            (blocks[expert, output, group, byte] % 16, blocks[expert, output, group, byte] // 16)
        ):
            scale = 2.0 ** (scales[expert, output, group] - 127)
            expected[expert, group * 32 + 2 * byte + half, output] = values[code] * scale
    form = Mxfp4({"quant_method": "mxfp4"}, "config.json")
    parts = {"blocks": tensor(blocks.astype(np.uint8)), "scales": tensor(scales.astype(np.uint8))}
    shape = form.shape({name: tuple(part.shape) for name, part in parts.items()}, parts.__getitem__)
    found = form.expand(parts, shape)
    assert tuple(found.shape) == shape
    np.testing.assert_array_equal(found.numpy(), expected)


def test_zero_biases_that_gptq_writes_are_left_out(stored: Callable[[str], tuple[Path, Path]]):
    packed, _ = stored("gptq")
    file = packed / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj"
    bias = torch.zeros(tensors[f"{name}.scales"].shape[1])
    save_file(tensors | {f"{name}.bias": bias}, file)
    weights_of(packed)
    save_file(tensors | {f"{name}.bias": bias + 1}, file)
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.0\.mlp\.up_proj\.bias"):
        weights_of(packed)


def rewritten(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint with other weights, said to be stored in a layout."""
    copy = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-stored")))
    document = json.loads((copy / "config.json").read_text()) | {"quantization_config": config}
    (copy / "config.json").write_text(json.dumps(document))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, copy / "model.safetensors")
    return copy


def logits(engine: Engine) -> torch.Tensor:
    sequence = engine.open("generator", [])
    values = torch.from_numpy(read(engine, sequence, list(range(5, 17))))
    release(engine, sequence)
    return values


def test_a_decoder_of_transformers_runs_on_stored_weights(make_engine: Callable[..., Engine], tmp_path: Path):
    folder = write_checkpoint(tmp_path / "olmo2", "olmo2")
    tensors, means = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = means[name] = weight
        if name.endswith("_proj.weight"):
            parts, expected = fp8(weight, (24, 40))
            means[name] = torch.from_numpy(expected)
            tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    stored = rewritten(folder, FORMATS["fp8"][0], tensors)
    save_file({name: mean.contiguous() for name, mean in means.items()}, folder / "model.safetensors", {"format": "pt"})
    found = logits(make_engine(load_generator(Checkpoint(stored), torch.float32, "cpu")))
    torch.testing.assert_close(found, plain_logits(folder, list(range(5, 17))), rtol=1e-4, atol=1e-4)


def test_experts_in_blocks_of_four_bits_run(make_engine: Callable[..., Engine], tmp_path: Path):
    folder = write_checkpoint(tmp_path / "gpt_oss", "gpt_oss", sizes=Sizes(inner=64))
    random = np.random.default_rng(0)
    tensors, means = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = means[name] = weight
        if name.endswith(("gate_up_proj", "down_proj")):  # [experts, in, out]
            experts, inputs, outputs = weight.shape
            parts = {
                "blocks": tensor(random.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)),
                "scales": tensor(random.integers(122, 125, (experts, outputs, inputs // 32)).astype(np.uint8)),
            }
            del tensors[name]
            tensors |= {f"{name}_{part}": value for part, value in parts.items()}
            means[name] = Mxfp4({}, "").expand(parts, tuple(weight.shape))
    assert len(tensors) > len(means)
    stored = rewritten(folder, {"quant_method": "mxfp4"}, tensors)
    save_file({name: mean.contiguous() for name, mean in means.items()}, folder / "model.safetensors", {"format": "pt"})
    found = logits(make_engine(load_generator(Checkpoint(stored), torch.float32, "cpu")))
    torch.testing.assert_close(found, plain_logits(folder, list(range(5, 17))), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "hqq"}, "quantised by 'hqq'; read are awq, .*gptq"),
        ({"bits": 4}, "quantised by None"),
        ("yes", "quantised by 'yes'"),
        ({"quant_method": ["gptq"]}, r"quantised by \['gptq'\]"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits; read are 2, 4 and 8"),
        ({"quant_method": "gptq", "bits": 0}, "GPTQ with 0 bits"),
        ({"quant_method": "gptq", "bits": "4"}, "bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ's version gemv"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        (group_scheme("float", "nvfp4-pack-quantized", 4), "format nvfp4-pack-quantized"),
        (group_scheme("float", "float-quantized", 4), "float of 4 bits"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "no one scheme"),
    ],
)
def test_a_layout_that_is_not_read_is_refused_by_name(config: Any, said: str, copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-untied")
    document = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(folder)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_part_that_is_missing_or_too_small_is_named(part: str, stored: Callable[[str], tuple[Path, Path]]):
    packed, _ = stored("gptq")
    file, name = packed / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(file)
    short = tensors[f"{name}.{part}"][:1, :1].contiguous()
    for changed in (
        {key: t for key, t in tensors.items() if key != f"{name}.{part}"},
        tensors | {f"{name}.{part}": short},
    ):
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=r"mlp\.up_proj"):
            weights_of(packed)
