"""Weights that libraries stored quantised, packed here by their published layouts, load as what they stand for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layer_weights
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
from espalier.engine.models.stored.floats import Mxfp4
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


def compressed(
    weight: torch.Tensor, bits: int, seed: int, symmetric: bool, act_order: bool = False
) -> tuple[Parts, np.ndarray]:
    values, zeros, scales, means = quantised(weight, bits, seed)
    parts = {
        "weight_packed": tensor(words_of(values, bits)),
        "weight_scale": tensor(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if act_order:
        groups = np.arange(weight.shape[1])[np.random.default_rng(seed).permutation(weight.shape[1])] // GROUP
        parts["weight_g_idx"] = tensor(groups.astype(np.int32))
        means = ((values - zeros[:, groups]) * scales.astype(np.float32)[:, groups]).astype(np.float32)
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


def targeted(target: Any) -> dict[str, Any]:
    config = group_scheme("int", "int-quantized")
    config["config_groups"]["group_0"]["targets"] = [target]
    return config


Pack = Callable[[torch.Tensor, int], tuple[Parts, np.ndarray]]
FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
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
    "compressed int4, act order": (
        group_scheme("int", "pack-quantized", 4, symmetric=False, group_size=GROUP, actorder="group"),
        lambda w, i: compressed(w, 4, i, symmetric=False, act_order=True),
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
def stored(copy_of: Callable[[str], Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Two copies of a tiny checkpoint: one in a quantised layout, and one with the weights that it stands for."""

    def write(name: str, config: Any = None, packs: Callable[[str], Pack | None] | None = None) -> tuple[Path, Path]:
        """Pack all layers as `name` says, or each by one of `packs` where that is given."""
        config, of_all = (config, None) if config else FORMATS[name]
        packs = packs or (lambda key: of_all if key.endswith("_proj.weight") else None)
        plain = copy_of("qwen2-untied")
        packed = plain.with_name("packed")
        tensors, means = {}, {}
        for index, (key, weight) in enumerate(sorted(load_file(plain / "model.safetensors").items())):
            if pack := packs(key):
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
        found += layer_weights.tensors_of(layer_weights.weights_of(layers, index))
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_stored_weight_is_what_it_stands_for(name: str, stored: Callable[[str], tuple[Path, Path]]):
    packed, plain = map(weights_of, stored(name))
    assert len(packed) == len(plain) > 8
    for one, other in zip(packed, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def group_of(scheme: dict[str, Any], *targets: str) -> dict[str, Any]:
    return {**scheme["config_groups"]["group_0"], "format": scheme["format"], "targets": [*targets]}


@pytest.mark.parametrize("form", ["pack-quantized", "mixed-precision"])
def test_each_layer_has_the_scheme_that_targets_it(form: str, stored: Callable[..., tuple[Path, Path]]):
    """The name of a layer goes before a pattern, and that before its class, in whatever order the groups stand."""
    int4, int8, fp8 = (FORMATS[f"compressed {kind}"] for kind in ("int4, zeros", "int8", "fp8"))
    whole, pattern, head = "model.layers.1.mlp.down_proj", "re:.*down_proj", "re:.*lm_head$"
    groups = [group_of(int4[0], "Linear"), group_of(fp8[0], pattern, head), group_of(int8[0], whole)]
    no_weights = {"targets": ["re:.*"], "weights": None, "input_activations": {"num_bits": 8}}
    config = int4[0] | {"format": form, "config_groups": {f"group_{i}": g for i, g in enumerate([no_weights, *groups])}}

    def pack(key: str) -> Pack | None:
        if key == f"{whole}.weight":
            return int8[1]
        if key.endswith(("down_proj.weight", "lm_head.weight")):
            return fp8[1]
        return int4[1] if key.endswith("_proj.weight") else None

    packed, plain = stored("", config, pack)
    form = Checkpoint(packed).files.stored
    assert form
    assert form.name == "compressed-tensors, int of 4 bits, float of 8 bits, int of 8 bits"
    for name in Checkpoint(plain).tensors:
        one, other = (Checkpoint(folder).take(name, torch.float32, "cpu") for folder in (packed, plain))
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    named = {"config_groups": {"a": group_of(int4[0], "re:.*up_proj"), "b": group_of(fp8[0], "lm_head")}}
    document = json.loads((packed / "config.json").read_text())
    document["quantization_config"] |= named
    (packed / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*: no group of quantization_config has it among"):
        Checkpoint(packed)


def test_a_stored_weight_is_quantised_again_where_that_is_asked_for(stored: Callable[[str], tuple[Path, Path]]):
    packed, plain = (weights_of(folder, Quantization.INT8) for folder in stored("awq"))
    assert str(packed[2:]) == str(plain[2:])


def test_a_checkpoint_says_how_its_weights_are_stored_before_one_is_read(stored: Callable[[str], tuple[Path, Path]]):
    packed, plain = (Outline(folder) for folder in stored("awq"))
    assert packed.files.stored
    assert packed.files.stored.name == "AWQ, 4 bits"
    assert plain.files.stored is None
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
    form = Mxfp4()
    parts = {"blocks": tensor(blocks.astype(np.uint8)), "scales": tensor(scales.astype(np.uint8))}
    shape = form.shape({name: tuple(part.shape) for name, part in parts.items()}, parts.__getitem__)
    found = form.expand("", parts, shape)
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
            means[name] = Mxfp4().expand("", parts, tuple(weight.shape))
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
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "no scheme of weights"),
        ({"quant_method": "gptq", "bits": 3.5}, "bits in .* must be an integer, is 3.5"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size in .* must be a whole number from 1 on"),
        ({"quant_method": "gptq", "group_size": -2}, "group_size"),
        ({"quant_method": "awq", "group_size": "128"}, "group_size"),
        ({"quant_method": "awq", "group_size": 128.0}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, True]}, "weight_block_size"),
        (group_scheme("int", "pack-quantized", 4, group_size=0), "group_size"),
        (group_scheme("int", "pack-quantized", 3.5), "int of 3.5 bits"),  # type: ignore[arg-type]
        (group_scheme("int", "pack-quantized", True), "int of True bits"),
        (group_scheme(["int"], "pack-quantized", 4), "int.* of 4 bits"),  # type: ignore[arg-type]
        (group_scheme("float", "float-quantized", block_structure=[0, 128]), "block_structure"),
        (group_scheme("float", "float-quantized", block_structure="128"), "block_structure"),
        (group_scheme("int", "mixed-precision"), "format mixed-precision"),
        (group_scheme("int", ["int-quantized"]), "format .*int-quantized"),  # type: ignore[arg-type]
        (targeted("re:("), "targets of a group .* must be a list of patterns"),
        (targeted(7), "targets of a group .* must be a list of patterns"),
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


TWICE_THE_GROUP = {"group_size": 2 * GROUP}
NEGATIVE, BEYOND = (lambda t: t - 1), (lambda t: t + 1)
LIES: dict[str, tuple[str, dict[str, Any], str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a group before the first": ("gptq, act order", {}, "g_idx", NEGATIVE),
    "a group behind the last": ("gptq, act order", {}, "g_idx", BEYOND),
    "too few of the groups' places": ("gptq, act order", {}, "g_idx", lambda t: t[1:]),
    "a larger group size": ("gptq", TWICE_THE_GROUP, "scales", lambda t: t),
    "no group size": ("gptq", {"group_size": None}, "scales", lambda t: t),
    "a larger group size of AWQ": ("awq", TWICE_THE_GROUP, "scales", lambda t: t),
    "fewer outputs": ("gptq", {}, "qweight", lambda t: t[:, :-1]),
    "fewer inputs": ("awq", {}, "qweight", lambda t: t[:-GROUP]),
    "no inputs": ("awq", {}, "qweight", lambda t: t[:0]),
    "a scale that is no number": ("gptq", {}, "scales", lambda t: t * torch.nan),
    "a packed group before the first": ("compressed int4, act order", {}, "weight_g_idx", NEGATIVE),
    "a packed group behind the last": ("compressed int4, act order", {}, "weight_g_idx", BEYOND),
    "half of the scales": ("compressed int4", {}, "weight_scale", lambda t: t[:, ::2]),
    "one scale of groups": ("compressed int4", {}, "weight_scale", lambda t: t[:, :1]),
    "a scale of all": ("compressed int4", {}, "weight_scale", lambda t: t[:1, :1]),
    "scales that are no numbers": ("compressed int4", {}, "weight_scale", lambda t: t * torch.inf),
    "a shape of more inputs": ("compressed int4", {}, "weight_shape", lambda t: t * torch.tensor([1, 2])),
    "a shape of fewer outputs": ("compressed int4", {}, "weight_shape", lambda t: t - torch.tensor([1, 0])),
    "a negative shape": ("compressed int4", {}, "weight_shape", lambda t: -t),
    "an empty shape": ("compressed int4", {}, "weight_shape", lambda t: t[:0]),
    "a shape of fractions": ("compressed int4", {}, "weight_shape", lambda t: t / 3),
    "floats for words": ("compressed int4", {}, "weight_packed", lambda t: t.float()),
    "fewer blocks": ("fp8", {}, "weight_scale_inv", lambda t: t[:1, :1].repeat(2, 1)),
    "no blocks": ("fp8", {}, "weight_scale_inv", lambda t: t[:0]),
    "a factor for no output": ("bitsandbytes int8", {}, "SCB", lambda t: t[:0]),
    "half of the values": ("bitsandbytes nf4", {}, "weight", lambda t: t[: len(t) // 2]),
    "a table of two": ("bitsandbytes nf4", {}, "weight.quant_map", lambda t: t[:2]),
    "half of the factors": ("bitsandbytes nf4", {}, "weight.absmax", lambda t: t[: len(t) // 2]),
}


@pytest.mark.parametrize("lie", LIES)
def test_parts_that_contradict_each_other_are_told_by_the_weights_name(
    lie: str, stored: Callable[..., tuple[Path, Path]]
):
    name, changes, part, change = LIES[lie]
    file, layer = (packed := stored(name)[0]) / "model.safetensors", "model.layers.0.mlp.up_proj"
    document = json.loads((packed / "config.json").read_text())
    document["quantization_config"] |= changes
    (packed / "config.json").write_text(json.dumps(document))
    tensors = load_file(file)
    save_file(tensors | {f"{layer}.{part}": change(tensors[f"{layer}.{part}"]).contiguous()}, file)
    with pytest.raises(CheckpointError, match=r"layers\.0\.\w+\.\w+_proj\.weight"):
        weights_of(packed)
