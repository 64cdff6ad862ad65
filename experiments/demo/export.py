"""Stage `export`: writes the pair as Hugging Face checkpoints, in bfloat16."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen2ForCausalLM, Qwen2ForTokenClassification

from espalier.experiments.demo import benchmark_path
from espalier.experiments.demo.problems import DELIMITER
from espalier.experiments.demo.tokenizer import save_tokenizer
from espalier.experiments.demo.train_generator import LOGIT_SCALE

TEMPERATURE = 1.0
"""Sampling temperature the pair is trained, judged and shipped for."""
PRM = {"family": "token-classifier", "prompt": "chat", "step_separator": DELIMITER, "score": "p1"}
"""How the verifier is read, in its own `config.json`."""
STAGES = ("problems", "generator", "sample", "verifier", "evaluate", "export")


def rounded(model: Any) -> Any:
    """Returns a float32 copy of a model whose weights went through bfloat16: what a loaded export computes with.

    Only the parameters are rounded. The rotary frequencies are buffers and no part of a checkpoint.
    """
    duplicate = copy.deepcopy(model).eval()
    for parameter in duplicate.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    return duplicate


def _edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _export(model: Any, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(str(directory))
    save_tokenizer(tokenizer, directory)
    _edit(directory / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")


def export_generator(model: Qwen2ForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the generator with its tokenizer and sampling defaults."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        top_p=1.0,
        top_k=0,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    _export(model, tokenizer, directory)
    _edit(directory / "config.json", system_prompt="")  # it was taught without one


def export_verifier(model: Qwen2ForTokenClassification, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the verifier with its tokenizer and the way it is read."""
    _export(model, tokenizer, directory)
    _edit(directory / "config.json", prm=PRM)


def digests(directory: Path) -> dict[str, str]:
    """Returns the sha256 of every file in a directory."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def write_summary(work_dir: Path, seed: int, out: Path) -> None:
    """Writes `training.json`: commands, seed, schedules, tokens, minutes, final losses, gate figures and digests."""
    stages = {}
    for stage in ("generator-base", "generator-extension", "verifier-equations", "verifier-steps"):
        path = work_dir / f"{stage}.json"
        if path.exists():
            progress = json.loads(path.read_text(encoding="utf-8"))
            stages[stage] = {
                "steps": progress["step"],
                "tokens": progress["tokens"],
                "minutes": round(progress["seconds"] / 60, 1),
                "final loss": round(progress["loss"], 4),
                "final accuracy at labelled positions": round(progress["accuracy"], 4),
                "schedule": progress["schedule"],
            }
    figures_path = work_dir / "figures.json"
    samples_path = work_dir / "samples.jsonl"
    summary = {
        "commands": [f"python -m espalier.experiments.demo {stage}" for stage in STAGES],
        "seed": seed,
        "temperature": TEMPERATURE,
        "logit scale": LOGIT_SCALE,
        "hardware": "2 CPU cores, float32",
        "sampled solutions": len(samples_path.read_text(encoding="utf-8").splitlines()) if samples_path.exists() else 0,
        "stages": stages,
        "figures": json.loads(figures_path.read_text(encoding="utf-8")) if figures_path.exists() else None,
        "sha256": {
            "benchmark.jsonl": hashlib.sha256(benchmark_path().read_bytes()).hexdigest(),
            **{
                f"{name}/{file}": digest
                for name in ("generator", "verifier")
                for file, digest in digests(out / name).items()
            },
        },
    }
    (out / "training.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
