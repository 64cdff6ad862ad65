"""LoRA adapters in PEFT's layout are merged into weights as they load, for generators and verifiers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import ALPHA, RANK, low_rank, of_module, write_adapter
from engine_driver import read, release
from layer_weights import weights_of
from plain import plain_logits
from safetensors.torch import load_file, save_file
from zoo_models import write_checkpoint

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.hub import locate_with_adapter
from espalier.engine.models.model import load_generator
from espalier.engine.models.options import ModelImpl

Q, UP, EMBEDDING = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.embed_tokens"


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
    summed = 2 * weight + ALPHA / RANK * (b @ a).T
    torch.testing.assert_close(weight_of(base, whole, EMBEDDING), summed)
    tensors[f"base_model.model.{EMBEDDING}.lora_magnitude_vector"] = lengths = torch.rand(weight.shape[1]) + 1
    columns = lengths * summed / torch.linalg.vector_norm(summed, dim=0)
    torch.testing.assert_close(
        weight_of(base, write_adapter(tmp_path / "dora", tensors, use_dora=True), EMBEDDING), columns
    )
    with pytest.raises(CheckpointError, match=r"lora_magnitude_vector of .* is not used by adapter_config.json"):
        weight_of(base, write_adapter(tmp_path / "unsaid", tensors), EMBEDDING)


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
    for first, second in zip(*(weights_of(model.decoder.layers, 0) for model in (adapted, whole)), strict=True):
        assert torch.equal(first, second)


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


def test_a_weight_of_inputs_by_outputs_is_changed_across(tmp_path: Path, make_engine: Callable[..., Engine]):
    """PEFT decides by the module whether to transpose, whatever `fan_in_fan_out` says."""
    base, name, ids = write_checkpoint(tmp_path / "gpt2", "gpt2"), "transformer.h.0.attn.c_proj", [5, 80, 33, 7]
    stored = load_file(base / "model.safetensors")
    a, b = low_rank(stored[f"{name}.weight"].T)
    adapter = write_adapter(tmp_path / "adapter", of_module(name, a, 0.1 * b), fan_in_fan_out=False)
    engine = make_engine(load_generator(Checkpoint(base, adapter=adapter), torch.float32, "cpu"))
    sequence = engine.open("generator", [])
    found = torch.from_numpy(read(engine, sequence, ids))
    release(engine, sequence)
    merged = {f"{name}.weight": stored[f"{name}.weight"] + ALPHA / RANK * (0.1 * b @ a).T}
    save_file(stored | merged, base / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(found, plain_logits(base, ids), rtol=0, atol=1e-4)


def test_tokens_that_only_the_adapters_tokenizer_has_are_told(
    base: Path, weights: dict[str, torch.Tensor], tmp_path: Path
):
    adapter = write_adapter(tmp_path / "adapter", of_module(Q, *low_rank(weights[f"{Q}.weight"])))
    shutil.copy(base / "tokenizer.json", adapter)
    assert not Checkpoint(base, adapter=adapter).warnings
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][0], id=900, content="<plan>"))
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    (said,) = Checkpoint(base, adapter=adapter).warnings
    assert "has tokens that" in said
    assert "<plan>" in said


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
        ({"r": 0}, "means rank 0 for"),
        ({"r": -4}, "means rank -4 for"),
        ({"r": 10**30}, "means rank 10+ for"),
        ({"r": 4.0}, "means rank 4.0 for"),
        ({"r": "4"}, "means rank '4' for"),
        ({"lora_alpha": "16"}, r"lora_alpha of .*q_proj in .*adapter_config.json must be a finite number, is '16'"),
        ({"lora_alpha": None}, "must be a finite number, is None"),
        ({"lora_alpha": True}, "must be a finite number, is True"),
        ({"lora_alpha": 10**400}, "must be a finite number"),
        ({"alpha_pattern": {"q_proj": [1]}}, r"must be a finite number, is \[1\]"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern in .* must be an object"),
        ({"rank_pattern": {"q_proj": "4"}}, "means rank '4'"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern in .* has '\\(', which is no pattern"),
        ({"modules_to_save": "lm_head"}, "modules_to_save in .* must be a list of names"),
        ({"modules_to_save": [3]}, "modules_to_save in .* must be a list of names"),
        ({"use_dora": True}, "lacks 'lora_magnitude_vector'"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is .* which is not read"),
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
    resized = {"base_model.model.lm_head.weight": torch.zeros(340, a.shape[1])}
    with pytest.raises(CheckpointError, match=r"adapter_model.*lm_head.weight has shape \(340, .*resized when it was"):
        Checkpoint(base, adapter=write_adapter(tmp_path / "resized", resized, modules_to_save=["lm_head"]))
    strange = write_adapter(
        tmp_path / "strange", of_module(Q, a, b) | {f"base_model.model.{Q}.lora_diag": a[0].clone()}
    )
    with pytest.raises(CheckpointError, match=r"strange/adapter_model.safetensors holds 1 tensors .*lora_diag"):
        load_generator(Checkpoint(base, adapter=strange), torch.float32, "cpu")
    damaged = write_adapter(tmp_path / "damaged", of_module(Q, a, b * torch.nan))
    with pytest.raises(CheckpointError, match=r"damaged/adapter_model.safetensors: what is added to .* is not finite"):
        weight_of(base, damaged, Q)
    half = write_adapter(tmp_path / "three", dict(list(of_module(Q, a, b).items())[:1]))
    with pytest.raises(CheckpointError, match="lacks 'lora_B'"):
        weight_of(base, half, Q)
    nameless = write_adapter(tmp_path / "four", of_module(Q, a, b))
    with pytest.raises(CheckpointError, match=r"base_model_name_or_path .*BASE\+ADAPTER"):
        locate_with_adapter(str(nameless))
