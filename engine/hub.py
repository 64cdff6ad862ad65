"""Where a checkpoint is: a folder, a registered name, or the Hugging Face hub and its cache."""

import re
from importlib.metadata import entry_points
from pathlib import Path

from espalier.engine.errors import CheckpointError

_ENTRY_POINTS = "espalier.checkpoints"


def locate(name: str) -> Path:
    """The folder of a checkpoint.

    Args:
        name: a folder, a name registered under the entry-point group `espalier.checkpoints`, or a Hugging Face hub id,
            which is downloaded once into the hub's own cache.

    Raises:
        CheckpointError: when it is none of these.
    """
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    for entry in entry_points(group=_ENTRY_POINTS, name=name):
        return entry.load()()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        known = ", ".join(sorted(entry_points(group=_ENTRY_POINTS).names))
        raise CheckpointError(
            f"no checkpoint {name!r}: not a folder, not a hub id like org/name, and not one of {known}"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds, none of them ours
        raise CheckpointError(f"could not download {name!r} from the Hugging Face hub: {error}") from error
