"""LoRA adapters in PEFT's layout are merged into weights as they load, for generators and verifiers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import read, release
from plain import plain_logits
from safetensors.torch import load_file, save_file

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.hub import locate_with_adapter
from espalier.engine.models.model import load_generator
from espalier.engine.models.options import ModelImpl

RANK, ALPHA = 4, 6
Q, UP, EMBEDDING = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.embed_tokens"


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], base: str = "", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": base, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told | config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def low_rank(weight: torch.Tensor, rank: int = RANK, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rank, weight.shape[1], generator=random), torch.randn(weight.shape[0], rank, generator=random)


def of_module(module: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}


def weight_of(base: Path, adapter: Path, module: str) -> torch.Tensor:
    name = f"{module}.weight"
    return Checkpoint(base, adapter=adapter).take(name, torch.float32, "cpu")


@pytest.fixture
def base(copy_of: Callable[[str], Path]) -> Path:
    return copy_of("qwen2-untied")


@pytest.fixture
def weights(base: Path) -> dict[str, torch.Tensor]:
    return load_file(base / "model.safetensors")


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / RANK**0.5),
        ({"alpha_pattern": {"q_proj": 10}}, 10 / RANK),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 10}}, ALPHA / RANK),
        ({"r": 9, "rank_pattern": {r".*\.q_proj": RANK}}, ALPHA / RANK),
    ],
)
def test_a_product_of_low_rank_is_added_at_its_scale(
    config: dict[str, Any], scale: float, base: Path, weights: dict[str, torch.Tensor], tmp_path: Path
):
    a, b = low_rank(weights[f"{Q}.weight"])
    adapter = write_adapter(tmp_path / "adapter", of_module(Q, a, b), **config)
    expected = weights[f"{Q}.weight"] + scale * (b @ a)
    torch.testing.assert_close(weight_of(base, adapter, Q), expected)
    assert torch.equal(weight_of(base, adapter, UP), weights[f"{UP}.weight"])


def test_rows_have_the_length_that_a_magnitude_says(base: Path, weights: dict[str, torch.Tensor], tmp_path: Path):
    weight = weights[f"{UP}.weight"]
    a, b = low_rank(weight)
    magnitude = torch.rand(len(weight)) + 1
    tensors = of_module(UP, a, b) | {f"base_model.model.{UP}.lora_magnitude_vector": magnitude}
    found = weight_of(base, write_adapter(tmp_path / "adapter", tensors, use_dora=True), UP)
    summed = weight + ALPHA / RANK * (b @ a)
    torch.testing.assert_close(
        found, magnitude[:, None] * summed / torch.linalg.vector_norm(summed, dim=1, keepdim=True)
    )


def test_an_embedding_has_its_own_names(base: Path, weights: dict[str, torch.Tensor], tmp_path: Path):
    weight = weights[f"{EMBEDDING}.weight"]
    b, a = low_rank(weight)[0].T, low_rank(weight)[1].T
    prefix = f"base_model.model.{EMBEDDING}.lora_embedding"
    adapter = write_adapter(tmp_path / "adapter", {f"{prefix}_A": a, f"{prefix}_B": b})
    torch.testing.assert_close(weight_of(base, adapter, EMBEDDING), weight + ALPHA / RANK * (b @ a).T)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[f"base_model.model.{EMBEDDING}.base_layer.weight"] = 2 * weight  # PEFT stores it, too
    whole = write_adapter(tmp_path / "whole", tensors)
    torch.testing.assert_close(weight_of(base, whole, EMBEDDING), 2 * weight + ALPHA / RANK * (b @ a).T)


def test_a_generator_runs_with_its_adapter_and_has_a_digest_of_its_own(
    base: Path, weights: dict[str, torch.Tensor], tmp_path: Path
):
    a, b = low_rank(weights[f"{Q}.weight"])
    adapter = write_adapter(tmp_path / "adapter", of_module(Q, a, b), base=str(base))
    assert locate_with_adapter(str(adapter)) == (base, adapter)
    assert locate_with_adapter(f"{base}+{adapter}") == (base, adapter)
    assert locate_with_adapter(str(base)) == (base, None)
    adapted = load_generator(Checkpoint(base, adapter=adapter), torch.float32, "cpu")
    plain = load_generator(Checkpoint(base), torch.float32, "cpu")
    assert adapted.digest != plain.digest
    merged = weights[f"{Q}.weight"] + ALPHA / RANK * (b @ a)
    save_file(weights | {f"{Q}.weight": merged}, base / "model.safetensors")
    whole = load_generator(Checkpoint(base), torch.float32, "cpu")
    for one, other in zip(
        adapted.decoder.layers.weights(0).__slots__, whole.decoder.layers.weights(0).__slots__, strict=True
    ):
        assert one == other
        first, second = (getattr(model.decoder.layers.weights(0), one) for model in (adapted, whole))
        assert first is second is None or torch.equal(first, second)


@pytest.mark.parametrize("model_impl", [ModelImpl.NATIVE, ModelImpl.TRANSFORMERS])
def test_logits_are_those_of_the_merged_checkpoint_on_both_paths(
    model_impl: ModelImpl,
    base: Path,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    make_engine: Callable[..., Engine],
):
    changed = {f"{module}.weight": low_rank(weights[f"{module}.weight"], seed=i) for i, module in enumerate((Q, UP))}
    tensors = [of_module(name.removesuffix(".weight"), a, 0.1 * b) for name, (a, b) in changed.items()]
    adapter = write_adapter(tmp_path / "adapter", tensors[0] | tensors[1])
    checkpoint = Checkpoint(base, adapter=adapter, model_impl=model_impl)
    engine, ids = make_engine(load_generator(checkpoint, torch.float32, "cpu")), [5, 80, 33, 7, 120, 9]
    sequence = engine.open("generator", [])
    found = torch.from_numpy(read(engine, sequence, ids))
    release(engine, sequence)
    plain = plain_logits(base, ids)
    merged = {name: weights[name] + ALPHA / RANK * (0.1 * b @ a) for name, (a, b) in changed.items()}
    whole = tmp_path / "merged"
    shutil.copytree(base, whole)
    save_file(weights | merged, whole / "model.safetensors", metadata={"format": "pt"})
    expected = plain_logits(whole, ids)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (found - plain).abs().max() > 1e-2 * plain.abs().max()


def test_a_head_of_the_adapters_own_makes_a_verifier(base: Path, weights: dict[str, torch.Tensor], tmp_path: Path):
    a, b = low_rank(weights[f"{Q}.weight"])
    score = torch.randn(2, weights[f"{Q}.weight"].shape[1])
    tensors = of_module(Q, a, b) | {
        "base_model.model.score.modules_to_save.default.weight": score,
        "base_model.model.score.modules_to_save.default.bias": torch.zeros(2),
    }
    adapter = write_adapter(tmp_path / "adapter", tensors, task_type="TOKEN_CLS")
    checkpoint = Checkpoint(base, adapter=adapter)
    assert checkpoint.architecture == "Qwen2ForTokenClassification"
    assert checkpoint.shape("score.weight") == tuple(score.shape)
    assert torch.equal(checkpoint.take("score.weight", torch.float32, "cpu"), score)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; read is LORA"),
        ({"lora_bias": True}, "lora_bias is True, which is not read"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4 changed the base's weights"),
        ({"r": 5}, "means rank 5 for .*q_proj, its weights have rank 4"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(
    config: dict[str, Any], said: str, base: Path, weights: dict[str, torch.Tensor], tmp_path: Path
):
    adapter = write_adapter(tmp_path / "adapter", of_module(Q, *low_rank(weights[f"{Q}.weight"])), **config)
    with pytest.raises(CheckpointError, match=said):
        weight_of(base, adapter, Q)


def test_an_adapter_of_another_model_is_refused(base: Path, weights: dict[str, torch.Tensor], tmp_path: Path):
    a, b = low_rank(weights[f"{Q}.weight"])
    elsewhere = write_adapter(tmp_path / "one", of_module("model.layers.9.self_attn.q_proj", a, b))
    with pytest.raises(
        CheckpointError, match=r"changes model\.layers\.9\.self_attn\.q_proj\.weight, which .* does not have"
    ):
        Checkpoint(base, adapter=elsewhere)
    wider = write_adapter(tmp_path / "two", of_module(Q, torch.cat([a, a], 1), b))
    with pytest.raises(CheckpointError, match="does not fit"):
        weight_of(base, wider, Q)
    half = write_adapter(tmp_path / "three", dict(list(of_module(Q, a, b).items())[:1]))
    with pytest.raises(CheckpointError, match="lacks 'lora_B'"):
        weight_of(base, half, Q)
    nameless = write_adapter(tmp_path / "four", of_module(Q, a, b))
    with pytest.raises(CheckpointError, match=r"base_model_name_or_path .*BASE\+ADAPTER"):
        locate_with_adapter(str(nameless))
