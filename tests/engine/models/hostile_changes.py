"""Ways to damage a checkpoint's folder: `Change`s, which hostile cases are made of."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, edit_tensors

Change = Callable[[Path], object]
Outcome = Literal["refused", "warned", "same"]


@dataclass(frozen=True, slots=True)
class Hostile:
    """One case; see the module.

    Attributes:
        values: whether it shows only when tensors are read, which an inspection does not do.
    """

    name: str
    damage: Change
    named: tuple[str, ...] = ()
    outcome: Outcome = "refused"
    base: str = "qwen2-tied"
    values: bool = False


CONFIG, GENERATION, TOKENIZER, SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
TEMPLATE, WEIGHTS, INDEX, BIN = (
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def set_fields(file: str, **fields: Any) -> Change:
    """Sets fields of a JSON file; None stays None."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def without(file: str, name: str) -> Change:
    return lambda folder: edit_json(folder / file, {name: None})


def edited(file: str, edit: Callable[[dict[str, Any]], object]) -> Change:
    """Edits a JSON file's object in place."""

    def change(folder: Path) -> None:
        read = json.loads((folder / file).read_text())
        edit(read)
        (folder / file).write_text(json.dumps(read))

    return change


def written(file: str, content: str | bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


def inserted(file: str, text: str) -> Change:
    """Puts text after a JSON file's first brace."""
    return lambda folder: (folder / file).write_text((folder / file).read_text().replace("{", "{" + text, 1))


def tensors(**changes: Any) -> Change:
    """Replaces tensors; a callable takes the one that was."""

    def change(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        new = {name.replace("__", "."): value for name, value in changes.items()}
        edit_tensors(folder / WEIGHTS, {k: v(held[k]) if callable(v) else v for k, v in new.items()})

    return change


def named_tensor(name: str, value: Any) -> Change:
    return tensors(**{name.replace(".", "__"): value})


def in_turn(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The tensor with one value exchanged."""

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[3] = value
        return changed

    return fill


def header_edited(edit: Callable[[dict[str, Any]], object]) -> Change:
    """Edits the JSON header of the safetensors file, whose data stay."""

    def change(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        edit(header)
        new = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])

    return change


def as_bin(make: Callable[[dict[str, torch.Tensor]], Any], **options: Any) -> Change:
    """The weights as a `.bin` that holds what `make` makes of them."""

    def change(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        torch.save(make(held), folder / BIN, **options)

    return change


def sharded(weight_map: Any = None, both: tuple[str, ...] = ()) -> Change:
    """Two shards and an index; `both` are in each of them."""

    def change(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        names = sorted(held)
        shards = {f"model-{i + 1:05}-of-00002.safetensors": {*names[i::2], *both} for i in range(2)}
        for shard, part in shards.items():
            save_file({name: held[name] for name in part}, folder / shard, metadata={"format": "pt"})
        found = {name: shard for shard, part in shards.items() for name in part}
        (folder / INDEX).write_text(json.dumps({"weight_map": found if weight_map is None else weight_map}))

    return change


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def linked(file: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(target)

    return change


def made_folder(file: str) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).mkdir()

    return change


def fifo(file: str) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return change
