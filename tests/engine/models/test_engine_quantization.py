"""Quantised weights: how large they are, how far off, and that a row still does not depend on its company."""

import builtins
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engine_driver import drain, generate, read, release
from layer_weights import weights_of
from tiny_models import edit_json

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.memory.model_memory import model_bytes
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.decoder import chosen_quantization
from espalier.engine.models.families import parse_decoder_config
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import LoadFormat, ModelImpl, Quantization
from espalier.engine.models.quantization import linear_bytes, make_quantizer, stored_bytes
from espalier.engine.work import Generate, Generated, Sampling
from espalier.kernels.backend import choose_backend
from espalier.kernels.cpu import HAS_VNNI
from espalier.kernels.cpu.decoder import CpuLayers
from espalier.kernels.cpu.products.int8_linear import Int8Weight
from espalier.kernels.cpu.products.linear import CpuLinear
from espalier.kernels.layers import TorchLayers
from espalier.kernels.linear import Linear
from espalier.prm.families import load_verifier

INT8, INT4 = Quantization.INT8, Quantization.INT4
VNNI = pytest.mark.skipif(not HAS_VNNI, reason="this processor has no AVX-512 VNNI")


@pytest.fixture(params=[pytest.param(True, marks=VNNI), False], ids=["bytes", "float32"], autouse=True)
def of_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether int8 is multiplied as bytes; else in float32, as on processors without VNNI."""
    monkeypatch.setattr("espalier.kernels.cpu.backend.HAS_VNNI", request.param)
    return request.param


SHAPES = [(32, 64), (48, 338), (256, 768), (768, 256), (1000, 50), (320, 2)]
"""Inputs and outputs."""


def quantized(weight: torch.Tensor, how: Quantization) -> torch.Tensor:
    backend = choose_backend(weight.device, weight.dtype)
    return make_quantizer(how, backend, weight.dtype, weight.device)(weight, 0)


def random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def as_torchao_says(weight: torch.Tensor, how: Quantization) -> torch.Tensor:
    """The weight that torchao's own dequantisation gives back."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
    from torchao.quantization.quant_primitives import MappingType

    group = next(g for g in (64, 32, 16, 8, 4, 2, 1) if weight.shape[1] % g == 0)
    int4 = IntxWeightOnlyConfig(torch.int4, PerGroup(group), MappingType.ASYMMETRIC)  # pyright: ignore[reportAttributeAccessIssue]
    linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(linear, Int8WeightOnlyConfig() if how is INT8 else int4)
    return linear.weight.data.dequantize()


@pytest.mark.parametrize("how", [INT8, INT4])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 64, 65])
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_the_product_has_the_bits_of_our_own_with_what_torchao_dequantises(
    width: int, out: int, rows: int, how: Quantization, of_bytes: bool
):
    if of_bytes and how is INT8:
        pytest.skip("rounds its left side; see tests/kernels/test_kernels_int8.py")
    x, weight, bias = random((rows, width), (out, width), (out,))
    expected = CpuLinear(as_torchao_says(weight, how), bias)(x)
    assert torch.equal(F.linear(x, quantized(weight, how), bias), expected)


def test_bytes_of_odd_rows_are_those_of_torchao(of_bytes: bool):
    if of_bytes:
        pytest.skip("bytes lie in panels")
    rows = torch.stack((torch.zeros(48), torch.full((48,), 1e-9), torch.full((48,), 3e38), *random((29, 48))[0]))
    back = F.linear(torch.eye(48), quantized(rows, INT8)).T
    assert torch.equal(back, as_torchao_says(rows, INT8))


@pytest.mark.parametrize("how", [INT8, INT4])
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_a_row_has_the_same_bits_in_any_company(width: int, out: int, how: Quantization):
    x, weight = random((131, width), (out, width))
    kept = quantized(weight, how)
    together = F.linear(x, kept)
    for rows in (1, 2, 3, 5, 8, 13, 31, 64, 65, 100):
        assert torch.equal(F.linear(x[:rows], kept), together[:rows]), f"the first {rows} rows"
    for row in (0, 17, 66, 130):
        assert torch.equal(F.linear(x[row : row + 1], kept)[0], together[row]), f"row {row}"


@pytest.mark.parametrize(("how", "most"), [(INT8, 0.015), (INT4, 0.12)])
def test_the_product_is_near_that_of_the_weight(how: Quantization, most: float):
    x, weight = random((64, 256), (768, 256))
    exact = x @ weight.T
    error = torch.linalg.norm(F.linear(x, quantized(weight, how)) - exact) / torch.linalg.norm(exact)
    assert 0 < error < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [INT8, INT4])
def test_bytes_are_counted_as_they_are_held(how: Quantization, dtype: torch.dtype):
    if how is INT4 and dtype == torch.bfloat16:
        pytest.skip("a GPU's")
    (weight,) = random((768, 256))
    kept = quantized(weight.to(dtype), how)
    share = stored_bytes(kept) / (weight.numel() * 4)
    assert share == pytest.approx({INT8: 1 / 4, INT4: 1 / 8}[how], rel=0.2)  # and scales
    if dtype == torch.float32:
        assert stored_bytes(kept) == pytest.approx(linear_bytes(768, 256, 4, how), rel=0.005)  # zeros or none
    assert stored_bytes(weight) == linear_bytes(768, 256, 4, Quantization.NONE)


# Whole models.


@pytest.fixture
def wide(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint large enough that scales weigh little: shapes alone, with dummy weights."""
    import json

    folder = Path(shutil.copytree(tiny_checkpoints["qwen2-untied"], tmp_path / "wide"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    return folder


def load(folder: Path, how: Quantization, load_format: LoadFormat = LoadFormat.AUTO) -> Model:
    return load_generator(Checkpoint(folder, load_format, how), torch.float32, "cpu")


def layer_bytes(model: Model) -> int:
    return model.decoder.weight_bytes - model.decoder.embedding.nbytes


@pytest.mark.parametrize(("how", "share"), [(INT8, 1 / 4), (INT4, 1 / 8)])
def test_the_layers_of_a_quantised_model_take_their_share(how: Quantization, share: float, wide: Path):
    full, small = load(wide, Quantization.NONE, LoadFormat.DUMMY), load(wide, how, LoadFormat.DUMMY)
    assert layer_bytes(small) / layer_bytes(full) == pytest.approx(share, rel=0.2)
    assert small.weight_bytes < full.weight_bytes
    parameters = 3 * (256 * 512 + 256 * 256 + 3 * 256 * 768 + 512 + 2 * 256) + 256 + 2 * 343 * 256
    assert full.weight_bytes == pytest.approx(4 * parameters, rel=0.05)


@pytest.mark.parametrize("impl", [ModelImpl.NATIVE, ModelImpl.TRANSFORMERS])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_estimates_count_the_second_bytes_of_values(kv_heads: int, impl: ModelImpl, of_bytes: bool, wide: Path):
    if not of_bytes:
        pytest.skip("of bytes alone")
    edit_json(wide / "config.json", {"num_key_value_heads": kv_heads})
    checkpoint = Checkpoint(wide, LoadFormat.DUMMY, INT8, model_impl=impl)
    counted = model_bytes(checkpoint.decoder_config, torch.float32, INT8, generates=True)
    second_bytes = 3 * 2 * 32 * 256  # of two heads that four queries each ask for
    assert abs(load_generator(checkpoint, torch.float32, "cpu").weight_bytes - counted) < second_bytes / 2


@pytest.mark.parametrize("how", [INT8, INT4])
def test_one_layer_at_a_time_is_held_as_it_is_stored(how: Quantization, wide: Path, monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    from espalier.engine.models import decoder

    make = make_quantizer

    def noting(*given: object):
        quantize = make(*given)  # pyright: ignore[reportArgumentType]
        return lambda weight, refined: events.append("quantised") or quantize(weight, refined)

    take = Checkpoint.take_into
    monkeypatch.setattr(decoder, "make_quantizer", noting)
    monkeypatch.setattr(Checkpoint, "take_into", lambda self, name, out: events.append(name) or take(self, name, out))
    load(wide, how, LoadFormat.DUMMY)
    for layer in range(1, 3):
        first = next(i for i, event in enumerate(events) if f"layers.{layer}." in event)
        assert events[:first].count("quantised") == 4 * layer


@pytest.mark.parametrize("how", [INT8, INT4])
def test_a_request_gives_the_same_alone_and_in_company(
    how: Quantization, tiny_checkpoints: dict[str, Path], make_engine: Callable[..., Engine]
):
    model = load(tiny_checkpoints["talker"], how)
    sampling = Sampling(temperature=1.0)
    alone = make_engine(model)
    sequence = alone.open("generator", [9, 17, 30, 4])
    (first,) = generate(alone, sequence, sampling, tokens=12, in_place=True)
    release(alone, sequence)
    crowd = make_engine(model)
    sequences = [crowd.open("generator", ids) for ids in ([9, 17, 30, 4], *([5 + i] * (3 + i) for i in range(12)))]
    for i, each in enumerate(sequences):
        crowd.submit(Generate(i, each, (sampling,), 12, in_place=True))
    (again,) = [d for d in drain(crowd) if isinstance(d, Generated) and d.work.owner == 0]
    release(crowd, *sequences)
    assert (again.token_ids, again.log_probability) == (first.token_ids, first.log_probability)


@pytest.mark.parametrize("how", [INT8, INT4])
def test_a_quantised_model_is_near_the_one_it_was_made_from_and_has_another_digest(
    how: Quantization, tiny_checkpoints: dict[str, Path], make_engine: Callable[..., Engine], load_model
):
    small, full = load(tiny_checkpoints["qwen2-untied"], how), load_model("qwen2-untied")
    logits = []
    for model in (small, full):
        engine = make_engine(model)
        sequence = engine.open("generator", [])
        logits.append(torch.from_numpy(read(engine, sequence, [9, 17, 30, 4, 80, 81])))
        release(engine, sequence)
    similarity = F.cosine_similarity(*logits).min()
    assert {INT8: 0.995, INT4: 0.5}[how] < similarity < 1.0
    assert small.digest != full.digest
    assert len(small.digest) == 64


def test_layers_of_bytes_run_in_one_call_and_agree_with_those_that_run_operation_by_operation(
    of_bytes: bool, wide: Path, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    if not of_bytes:
        pytest.skip("of bytes alone")
    given = []
    for taken in (CpuLayers, TorchLayers):
        if taken is TorchLayers:
            monkeypatch.setattr("espalier.kernels.cpu.backend.run_in_one_call", lambda layer: False)
        model = load(wide, INT8, LoadFormat.DUMMY)
        assert isinstance(model.decoder.layers, taken)
        engine = make_engine(model)
        sequence = engine.open("generator", [])
        given.append(torch.from_numpy(read(engine, sequence, list(range(3, 140)))))
        release(engine, sequence)
    assert F.cosine_similarity(*given).min() > 0.9999
    loaded = load(wide, INT8, LoadFormat.DUMMY).decoder.layers
    first = weights_of(loaded, 0)
    assert isinstance(first.gate_up, Int8Weight)
    assert first.gate_up.shape == (2 * 768, 256)
    x = torch.randn(3, 256)
    assert torch.equal(F.linear(x, first.qkv), F.linear(x, weights_of(model.decoder.layers, 0).qkv))


@pytest.mark.parametrize("how", [INT8, INT4])
def test_the_head_of_a_generator_is_kept_in_int8(how: Quantization, wide: Path):
    small, full = load(wide, how, LoadFormat.DUMMY), load(wide, Quantization.NONE, LoadFormat.DUMMY)
    assert isinstance(small.head, Linear)
    assert isinstance(full.head, Linear)
    assert small.head.nbytes / full.head.nbytes == pytest.approx(1 / 4, rel=0.2)
    x = torch.randn(4, 256)
    assert F.cosine_similarity(small.head(x), full.head(x)).min() > 0.999


@pytest.mark.parametrize("name", ["math-prm", "classifier"])
def test_a_verifier_can_be_quantised(name: str, tiny_checkpoints: dict[str, Path], load_model):
    family = load_verifier(Checkpoint(tiny_checkpoints[name], quantization=INT8), torch.float32, "cpu")
    assert family.model.weight_bytes < load_model(name).weight_bytes
    hidden = torch.randn(3, 40)
    assert torch.equal(family.model.head(hidden), load_model(name).head(hidden))  # heads stay as they are


# What it is for, on paper.

QWEN_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
PRM_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


def trunk_bytes(config: DecoderConfig, how: Quantization) -> int:
    """Embedding and products of a bfloat16 decoder; norms and biases are little."""
    c, hidden = config, config.hidden_size
    rows = ((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, hidden), (hidden, c.num_heads * c.head_dim)
    rows += (2 * c.intermediate_size, hidden), (hidden, c.intermediate_size)
    return c.num_layers * sum(linear_bytes(*shape, 2, how) for shape in rows) + 2 * c.vocab_size * hidden


@pytest.mark.parametrize(("how", "most"), [(Quantization.NONE, 17.3e9), (INT8, 9.5e9), (INT4, 6.6e9)])
def test_a_generator_of_1_5b_and_a_verifier_of_7b_fit_a_card_of_24_gb(how: Quantization, most: float):
    both = sum(trunk_bytes(parse_decoder_config(raw), how) for raw in (QWEN_1_5B, PRM_7B))
    assert 0.95 * most < both < most
    left = 24e9 - 1.5e9 - both  # CUDA's own memory and a step's buffers
    assert left / (28_672 + 57_344) > 60_000  # tokens of both models' KV


# What cannot be had.


def test_without_torchao_the_error_names_the_extra(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    imported = builtins.__import__

    def without(name: str, *rest: object, **named: object):
        if name.startswith("torchao"):
            raise ImportError(name)
        return imported(name, *rest, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        CheckpointError, match=r"int4 weights need torchao: pip install 'espalier-search\[quantization\]'"
    ):
        load(tiny_checkpoints["talker"], INT4)
    load(tiny_checkpoints["talker"], INT8)  # a CPU rounds to bytes without it


def test_int4_in_a_dtype_without_a_product_for_it_is_refused_with_those_that_have_one():
    with pytest.raises(CheckpointError, match="int4 weights need --dtype bfloat16 on a GPU or float32 on a CPU; this"):
        quantized(torch.zeros(48, 64, dtype=torch.bfloat16), INT4)


def test_int8_works_in_bfloat16_by_the_librarys_product():
    x, weight = (t.bfloat16() for t in random((5, 64), (48, 64)))
    exact = x.float() @ weight.float().T
    assert torch.linalg.norm(F.linear(x, quantized(weight, INT8)) - exact) / torch.linalg.norm(exact) < 0.02


@pytest.mark.parametrize("impl", [ModelImpl.NATIVE, ModelImpl.TRANSFORMERS])
def test_weights_of_the_layers_are_counted_without_the_head(tiny_checkpoints: dict[str, Path], impl: ModelImpl):
    checkpoint = Checkpoint(tiny_checkpoints["qwen2-untied"], model_impl=impl)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    products = [info for name, info in checkpoint.tensors.items() if name.split(".")[-2] in names and "weight" in name]
    assert checkpoint.decoder_config.layer_weights == sum(math.prod(info.shape) for info in products)


def test_models_of_half_a_billion_weights_are_large_and_of_a_quarter_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("espalier.kernels.cpu.backend.CpuBackend.keeps_int8", True)
    shared = {"model_type": "qwen2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "vocab_size": 151_936}
    half = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    quarter = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    kinds = [(half, INT8), (quarter, Quantization.NONE)]
    for sizes, expected in kinds:
        config = parse_decoder_config({**shared, **sizes, "num_key_value_heads": 1})
        assert chosen_quantization(config, torch.float32, on_cpu=True) is expected
        assert chosen_quantization(config, torch.bfloat16, on_cpu=True) is Quantization.NONE
        assert chosen_quantization(config, torch.float32, on_cpu=False) is Quantization.NONE
