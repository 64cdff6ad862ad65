"""Run folders written by hand."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hand_made import NODES
from run_samples import sample

CONFIG = {"benchmark": "demo", "algorithm": "beam", "beam_width": 2, "expansion": 2, "temperature": 0.8, "seed": 0}


def line(name: str, right: bool, **changes: Any) -> dict[str, Any]:
    return asdict(sample(name, correct=right, wall_seconds=0.25, text="47+25=72\n\n72-24=48\n\n\\boxed{48}")) | changes


def write_run(folder: Path, lines: Sequence[dict[str, Any]], **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    return folder


def run_of(folder: Path, right: Sequence[bool], **config: Any) -> Path:
    """A run whose problems p0, p1, … are solved as `right` says."""
    return write_run(folder, [line(f"p{i}", solved) for i, solved in enumerate(right)], **config)


def write_trees(folder: Path, *names: str) -> None:
    nodes = [asdict(node) for node in NODES]
    for record in nodes:  # the shared nodes give every node its own id along the whole path
        record["path"] = PATHS[record["node_id"]]
    text = "".join(json.dumps({"unique_id": name, "epoch": 0, "nodes": nodes}) + "\n" for name in names)
    (folder / "trees.jsonl").write_text(text)


PATHS = {0: [], 1: [0], 2: [1], 3: [2], 4: [0, 0], 5: [0, 1], 6: [0, 2]} | {10 + i: [0, 3 + i] for i in range(6)}
