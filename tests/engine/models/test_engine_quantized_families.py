"""Every kind of decoder in every precision, as a generator and as a verifier, against transformers on the same weights.

transformers is given what the quantised weights stand for. int8 by bytes also rounds each product's left side, and so
does the reference.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_driver import read, release
from layer_weights import weights_of
from test_engine_quantization import as_torchao_says
from tiny_models import randomize, train_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from espalier.engine.engine import Engine
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.config import NativeConfig
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import Quantization
from espalier.kernels.cpu import HAS_VNNI
from espalier.kernels.cpu.decoder import CpuLayers
from espalier.kernels.cpu.products.int8_linear import GROUP
from espalier.prm.families import load_verifier

WHOLE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
"""Rows of whole groups: with these, layers in int8 run in one compiled call."""
FILLED_UP: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 56}


def heads(query: int, kv: int, size: int) -> dict[str, Any]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": size}


MIXED: dict[str, Any] = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, WHOLE | heads(4, 4, 16)),
    "llama-tied": (LlamaConfig, WHOLE | heads(8, 1, 8) | {"tie_word_embeddings": True}),
    "llama-biased": (LlamaConfig, WHOLE | heads(4, 2, 24) | {"attention_bias": True}),
    "llama-filled-up": (LlamaConfig, FILLED_UP | heads(5, 1, 8)),
    "llama-biased-filled-up": (LlamaConfig, FILLED_UP | heads(4, 2, 12) | {"attention_bias": True}),
    "mistral": (MistralConfig, WHOLE | heads(4, 1, 32) | {"sliding_window": None}),
    "mistral-window": (MistralConfig, WHOLE | heads(6, 1, 16) | {"sliding_window": 5, "tie_word_embeddings": True}),
    "mistral-filled-up": (MistralConfig, FILLED_UP | heads(7, 1, 8) | {"sliding_window": 3}),
    "qwen2": (Qwen2Config, WHOLE | heads(14, 2, 16)),
    "qwen2-window": (Qwen2Config, WHOLE | heads(4, 2, 8) | MIXED | {"sliding_window": 6, "tie_word_embeddings": True}),
    "qwen2-filled-up": (Qwen2Config, FILLED_UP | heads(3, 1, 8)),
    "qwen3": (Qwen3Config, WHOLE | heads(4, 2, 16)),
    "qwen3-biased": (Qwen3Config, WHOLE | heads(2, 2, 16) | {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-window": (Qwen3Config, WHOLE | heads(10, 2, 16) | MIXED | {"sliding_window": 4}),
    "gemma3": (Gemma3TextConfig, WHOLE | heads(8, 2, 16) | {"sliding_window": 4, "sliding_window_pattern": 2}),
    "gemma3-biased": (Gemma3TextConfig, WHOLE | heads(4, 2, 24) | {"sliding_window": 6, "attention_bias": True}),
    "gemma3-filled-up": (Gemma3TextConfig, FILLED_UP | heads(4, 2, 8) | {"tie_word_embeddings": False}),
    "phi3": (Phi3Config, WHOLE | heads(4, 2, 16) | {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "phi3-filled-up": (Phi3Config, FILLED_UP | heads(5, 1, 8) | {"sliding_window": 5, "tie_word_embeddings": True}),
    "qwen3-filled-up": (Qwen3Config, FILLED_UP | heads(8, 2, 12) | {"tie_word_embeddings": True}),
}
PRECISIONS = {
    "float32": Quantization.NONE,
    "int8": Quantization.INT8,
    "int8-without-vnni": Quantization.INT8,
    "int4": Quantization.INT4,
}
KINDS = {"generator": AutoModelForCausalLM, "verifier": AutoModelForTokenClassification}
CASES = [
    (name, kind)
    for kind, auto in KINDS.items()
    for name, (config, _) in ARCHITECTURES.items()
    if config in auto._model_mapping  # transformers has no token classifier of Gemma 3
]
TEXTS = [9, 17, 30, 4, 80, 81, 200, 7, 31, 31, 12], [5, 17, 31, 4, 80, 99, 200, 7, 31, 33, 12]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of an architecture as a generator or as a verifier; each is written once."""
    root, tokenizer = tmp_path_factory.mktemp("families"), train_tokenizer()
    shared = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_labels": 2,
    }

    @cache
    def write(name: str, kind: str) -> Path:
        make, options = ARCHITECTURES[name]
        folder = root / f"{name}-{kind}"
        randomize(KINDS[kind].from_config(make(**shared | options)), 3).save_pretrained(folder)  # type: ignore[arg-type]
        tokenizer.save_pretrained(folder)
        return folder

    return write


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as int8 keeps them: a scale for each group."""
    groups = F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (torch.round(groups / scales) * scales).flatten(-2)[..., : x.shape[-1]]


def rows_of_shared_values(model: Any) -> int:
    """Rows of a weight that make values, where three or more heads ask for each; else 0."""
    config: Any = model.config
    kv_heads = config.num_key_value_heads
    return kv_heads * model.base_model.layers[0].self_attn.head_dim if 2 * kv_heads < config.num_attention_heads else 0


@torch.inference_mode()
def plain(folder: Path, kind: str, precision: str) -> list[torch.Tensor]:
    """What transformers says of each text with the weights that a precision stands for."""
    model = KINDS[kind].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    how = PRECISIONS[precision]
    for name, module in list(model.named_modules()):
        if how is Quantization.NONE or not isinstance(module, torch.nn.Linear) or name == "score":
            continue
        exact = module.weight.data.clone()
        weight = as_torchao_says(exact, Quantization.INT8 if name == "lm_head" else how)
        if precision == "int8" and name.endswith(("v_proj", "qkv_proj")) and (rows := rows_of_shared_values(model)):
            weight[-rows:] += as_torchao_says(exact[-rows:] - weight[-rows:], Quantization.INT8)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)  # a tied embedding keeps its own
        if precision == "int8" or (HAS_VNNI and precision == "int4" and name == "lm_head"):
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
    logits = [model(torch.tensor([text])).logits[0] for text in TEXTS]
    return logits if kind == "generator" else [torch.softmax(each, -1)[:, 1:] for each in logits]


def load(folder: Path, kind: str, precision: str) -> Model:
    given = Checkpoint(folder, quantization=PRECISIONS[precision])
    if kind == "generator":
        return load_generator(given, torch.float32, "cpu")
    return load_verifier(given, torch.float32, "cpu").model


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_architecture_in_each_precision_equals_transformers_on_the_same_weights(
    name: str,
    precision: str,
    kind: str,
    checkpoint: Callable[[str, str], Path],
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
):
    if precision == "int8" and not HAS_VNNI:
        pytest.skip("this processor has no AVX-512 VNNI")
    if precision == "int8-without-vnni":
        monkeypatch.setattr("espalier.kernels.cpu.backend.HAS_VNNI", False)
    folder = checkpoint(name, kind)
    model = load(folder, kind, precision)
    config, layers = model.config, model.decoder.layers
    in_one_call = precision == "float32" or (precision == "int8" and "filled-up" not in name)
    assert isinstance(layers, CpuLayers) == in_one_call
    assert isinstance(config, NativeConfig)
    last = weights_of(layers, 1)
    there = [bias is not None and bool(bias.any()) for bias in (last.qkv_bias, last.out_bias)]
    assert there == [config.attention_bias, config.out_bias]
    engine = make_engine(model)
    errors = list[float]()
    for text, expected in zip(TEXTS, plain(folder, kind, precision), strict=True):
        sequence = engine.open("generator", text[:3])
        given = torch.from_numpy(read(engine, sequence, text[3:7]))
        given = torch.cat((given, torch.from_numpy(read(engine, sequence, text[7:]))))
        release(engine, sequence)
        errors.append(float(torch.linalg.norm(given - expected[3:]) / torch.linalg.norm(expected[3:])))
    # Where a sum's last bit decides between two bytes, a token is rounded to the other one, and those after it read it.
    assert min(errors) < 1e-5
    assert max(errors) < (2e-2 if precision == "int8" else 1e-5)


def test_the_architectures_have_one_to_eight_query_heads_for_each_of_keys():
    ratios = {options["num_attention_heads"] // options["num_key_value_heads"] for _, options in ARCHITECTURES.values()}  # type: ignore[operator]
    assert ratios == set(range(1, 9))
