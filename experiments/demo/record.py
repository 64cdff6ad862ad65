"""`training.json`: how the pair in a folder was made and what it reaches."""

import hashlib
import json
from pathlib import Path

from espalier.experiments.demo import benchmark_path
from espalier.experiments.demo.export import GENERATOR, TEMPERATURE, VERIFIER
from espalier.experiments.demo.samples import read_samples, samples_path

COMMANDS = ("problems", "generator", "sample", "trunk", "verifier", "evaluate")


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
    summary = {
        "commands": [f"python -m espalier.experiments.demo {command}" for command in COMMANDS],
        "seed": seed,
        "temperature": TEMPERATURE,
        "hardware": "2 CPU cores, float32",
        "sampled solutions": len(read_samples(samples_path(work_dir))) or before.get("sampled solutions", 0),
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
