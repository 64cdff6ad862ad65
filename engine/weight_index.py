"""Which files a checkpoint is made of: weights, in one file or the shards that an index names, and small ones."""

import json
from collections.abc import Iterator
from pathlib import Path

from espalier.engine.errors import CheckpointError
from espalier.engine.load_settings import LoadFormat

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configuration, tokenizer, chat template, and the indices that say which weights there are."""
_INDEX = ".index.json"
_STEMS = {LoadFormat.SAFETENSORS: "model.safetensors", LoadFormat.BIN: "pytorch_model.bin"}


def small_files(folder: Path) -> list[Path]:
    """The files of a folder that tell what its weights mean, in order of name."""
    return sorted(file for pattern in SMALL_FILES for file in folder.glob(pattern) if file.is_file())


def weight_lists(load_format: LoadFormat) -> Iterator[str]:
    """File names that may say which weights there are, in the order of preference: an index, or a file on its own."""
    for form, stem in _STEMS.items():
        if load_format in (LoadFormat.AUTO, form):
            yield stem + _INDEX
            yield stem


def weight_files(folder: Path, load_format: LoadFormat) -> list[Path]:
    """The weight files of a folder, in order of name; whether all shards are there is not checked.

    Raises:
        CheckpointError: when there are none, or an index is broken.
    """
    for name in weight_lists(load_format):
        if (found := folder / name).is_file():
            return named_files(found)
    wanted = " and no ".join(stem for form, stem in _STEMS.items() if load_format in (LoadFormat.AUTO, form))
    raise CheckpointError(f"{folder} has no {wanted}, and no index of shards; is the download complete?")


def named_files(found: Path) -> list[Path]:
    """The shards that an index names, or the file itself when it is no index.

    Raises:
        CheckpointError: when the index is broken, or names a file outside of its folder.
    """
    if not found.name.endswith(_INDEX):
        return [found]
    try:
        weight_map = json.loads(found.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{found} is not an index of shards: no weight_map can be read from it") from error
    if not names:
        raise CheckpointError(f"{found} is not an index of shards: its weight_map is empty")
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{found} names {outside[0]!r}, which is not a file beside it")
    return [found.with_name(name) for name in names]
