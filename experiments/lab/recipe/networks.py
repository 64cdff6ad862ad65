"""The language models' network, of transformers' own Qwen2 modules, and the folder of the exported pair."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from espalier.experiments.demo.problems import DELIMITER
from espalier.experiments.lab.recipe.tokenizer import CHAT_TEMPLATE, MAX_LENGTH, save_tokenizer

GENERATOR_LAYERS, TRUNK_LAYERS = 3, 5
"""Decoder layers of the generator, and of the language model that the verifier grows on."""


def generator_config(vocab_size: int, end_id: int, pad_id: int, layers: int) -> Qwen2Config:
    """Returns the shape of a language model; with five layers, about 4 million parameters."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )


def new_generator(config: Qwen2Config, seed: int) -> Qwen2ForCausalLM:
    """Returns a freshly initialised language model."""
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    return Qwen2ForCausalLM(config)


TEMPERATURE = 1.0
"""Sampling temperature the pair is trained, judged and shipped for."""
PRM = {"family": "token-classifier", "prompt": "chat", "step_separator": DELIMITER, "score": "p1"}
"""The verifier's layout and score positions, in its own `config.json`."""
GENERATOR, VERIFIER = "generator", "verifier"
"""Folders of the two checkpoints in a pair's folder."""


def _edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _export(model: Any, tokenizer: Tokenizer, directory: Path, chat_template: str = CHAT_TEMPLATE) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(str(directory))
    save_tokenizer(tokenizer, directory, chat_template, model.config.max_position_embeddings)
    _edit(directory / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")


def export_generator(
    model: Qwen2ForCausalLM,
    tokenizer: Tokenizer,
    folder: Path,
    chat_template: str = CHAT_TEMPLATE,
    temperature: float = TEMPERATURE,
) -> None:
    """Writes a generator with its tokenizer and sampling defaults."""
    exported = copy.deepcopy(model)
    exported.generation_config = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    _export(exported, tokenizer, folder, chat_template)
    _edit(folder / "config.json", system_prompt="")  # it was taught without one


def export_verifier(model: Qwen2ForTokenClassification, tokenizer: Tokenizer, pair: Path) -> None:
    """Writes the verifier with its tokenizer and the way it is read."""
    _export(model, tokenizer, pair / VERIFIER)
    _edit(pair / VERIFIER / "config.json", prm=PRM)


def load_exported_generator(pair: Path) -> Qwen2ForCausalLM:
    """Returns the generator of a pair's folder in float32."""
    return Qwen2ForCausalLM.from_pretrained(str(pair / GENERATOR), dtype=torch.float32).eval()


def load_exported_tokenizer(pair: Path) -> Tokenizer:
    """Returns the tokenizer of a pair's folder."""
    return Tokenizer.from_file(str(pair / GENERATOR / "tokenizer.json"))
