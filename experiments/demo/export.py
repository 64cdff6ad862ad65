"""The pair's folder: two Hugging Face checkpoints in bfloat16."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen2ForCausalLM, Qwen2ForTokenClassification

from espalier.experiments.demo.problems import DELIMITER
from espalier.experiments.demo.tokenizer import save_tokenizer

TEMPERATURE = 1.0
"""Sampling temperature the pair is trained, judged and shipped for."""
PRM = {"family": "token-classifier", "prompt": "chat", "step_separator": DELIMITER, "score": "p1"}
"""How the verifier is read, in its own `config.json`."""
GENERATOR, VERIFIER = "generator", "verifier"
"""Folders of the two checkpoints in a pair's folder."""


def _edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _export(model: Any, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(str(directory))
    save_tokenizer(tokenizer, directory)
    _edit(directory / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")


def export_generator(model: Qwen2ForCausalLM, tokenizer: Tokenizer, pair: Path) -> None:
    """Writes the generator with its tokenizer and sampling defaults."""
    exported = copy.deepcopy(model)
    exported.generation_config = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        top_p=1.0,
        top_k=0,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    _export(exported, tokenizer, pair / GENERATOR)
    _edit(pair / GENERATOR / "config.json", system_prompt="")  # it was taught without one


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
