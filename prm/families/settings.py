"""Settings of a family that the `prm` object of `config.json` may change."""

import json
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.text_files import shown

Settings = TypeVar("Settings")


def read_settings(checkpoint: Checkpoint, kind: type[Settings], rule: str) -> Settings:
    """Settings as the `prm` object says; what it leaves out has its default.

    Args:
        checkpoint: whose `config.json` is read.
        kind: a dataclass whose annotations say which values are right.
        rule: the same in words, for errors, which also name the key and its value.

    Raises:
        CheckpointError: a value is not as `rule` says.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(checkpoint.files.object("prm")), strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        key, value = ".".join(map(str, ("prm", *wrong["loc"]))), shown(wrong["input"])
        raise CheckpointError(
            f"{checkpoint.folder}: {key} in config.json is {value}; the prm object there has {rule}"
        ) from None
