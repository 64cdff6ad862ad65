"""The pair's folder: two Hugging Face checkpoints in bfloat16, and `training.json`, the record of their making."""

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

TEMPERATURE = 1.0
"""Sampling temperature the pair is trained, judged and shipped for."""
PRM = {"family": "token-classifier", "prompt": "chat", "step_separator": DELIMITER, "score": "p1"}
"""How the verifier is read, in its own `config.json`."""
LOGIT_SCALE = 0.77
"""The dial of the single-sample accuracy: folded into the exported generator's last norm.

At temperature 1 it then samples as the trained one does at 1.3: slips become more frequent and more varied. Greedy
decoding does not change.
"""
COMMANDS = ("problems", "generator", "sample", "verifier", "evaluate")
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
    """Writes the generator, `LOGIT_SCALE` folded in, with its tokenizer and sampling defaults."""
    calibrated = copy.deepcopy(model)
    calibrated.model.norm.weight.data.mul_(LOGIT_SCALE)
    calibrated.generation_config = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        top_p=1.0,
        top_k=0,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    _export(calibrated, tokenizer, pair / GENERATOR)
    _edit(pair / GENERATOR / "config.json", system_prompt="")  # it was taught without one


def export_verifier(model: Qwen2ForTokenClassification, tokenizer: Tokenizer, pair: Path) -> None:
    """Writes the verifier with its tokenizer and the way it is read."""
    _export(model, tokenizer, pair / VERIFIER)
    _edit(pair / VERIFIER / "config.json", prm=PRM)


def load_exported_generator(pair: Path) -> Qwen2ForCausalLM:
    """Returns the generator of a pair's folder in float32: what is sampled from and what the verifier grows on."""
    return Qwen2ForCausalLM.from_pretrained(str(pair / GENERATOR), dtype=torch.float32).eval()


def load_exported_tokenizer(pair: Path) -> Tokenizer:
    """Returns the tokenizer of a pair's folder."""
    return Tokenizer.from_file(str(pair / GENERATOR / "tokenizer.json"))


def digests(directory: Path) -> dict[str, str]:
    """Returns the sha256 of every file in a directory."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def write_summary(work_dir: Path, seed: int, pair: Path) -> None:
    """Writes `training.json`: commands, seed, schedules, tokens, minutes, final losses, gate figures and digests.

    What was not done in this work directory keeps the record it has.
    """
    path = pair / "training.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stages = before.get("stages", {})
    if (work_dir / "verifier-layers.json").exists():
        stages = {name: stage for name, stage in stages.items() if not name.startswith("verifier-")}
    for progress_path in sorted(work_dir.glob("*-*.json")):
        progress = json.loads(progress_path.read_text(encoding="utf-8"))
        stages[progress_path.stem] = {
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
        "commands": [f"python -m espalier.experiments.demo {command}" for command in COMMANDS],
        "seed": seed,
        "temperature": TEMPERATURE,
        "logit scale": LOGIT_SCALE,
        "hardware": "2 CPU cores, float32",
        "sampled solutions": len(samples_path.read_text(encoding="utf-8").splitlines())
        if samples_path.exists()
        else before.get("sampled solutions", 0),
        "stages": stages,
        "figures": json.loads(figures_path.read_text(encoding="utf-8"))
        if figures_path.exists()
        else before.get("figures"),
        "sha256": {
            "benchmark.jsonl": hashlib.sha256(benchmark_path().read_bytes()).hexdigest(),
            **{
                f"{name}/{file}": digest
                for name in (GENERATOR, VERIFIER)
                for file, digest in digests(pair / name).items()
            },
        },
    }
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
