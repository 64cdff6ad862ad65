"""The decoder families that native code runs, by the `model_type` of their configurations."""

from collections.abc import Mapping
from typing import Any

from espalier.engine.errors import CheckpointError
from espalier.engine.models.config import Fields, NativeConfig, NotNativeError
from espalier.engine.models.families.base import Family
from espalier.engine.models.families.gemma import GEMMA3
from espalier.engine.models.families.llama import LLAMA, MISTRAL
from espalier.engine.models.families.phi import PHI3
from espalier.engine.models.families.qwen import QWEN2, QWEN3
from espalier.engine.models.options import ModelImpl
from espalier.engine.models.text_files import shown

FAMILIES: dict[str, Family] = {f.model_type: f for f in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, PHI3)}
"""Every family, by its `model_type`."""
_WITH_IMAGES = {family.with_images: family for family in FAMILIES.values() if family.with_images}
"""Families by the `model_type` of checkpoints whose text half they are."""
GENERATOR_CLASSES = tuple(family.generator_class for family in FAMILIES.values())
"""Class names that a generator's `config.json` may give."""


def family_of(model_type: object) -> Family | None:
    """The family that runs checkpoints of a `model_type`, or the text half of them."""
    return (FAMILIES | _WITH_IMAGES).get(model_type) if isinstance(model_type, str) else None


def parse_decoder_config(raw: Mapping[str, Any], place: str = "config.json") -> NativeConfig:
    """Read a decoder's specification; accepts the spellings of transformers 4 and 5.

    Args:
        raw: the configuration.
        place: where it stands, for errors.

    Raises:
        NotNativeError: for what native code has not, though it knows the family.
        CheckpointError: for an unknown model type, a missing key, or a value that means nothing.
    """
    if (family := family_of(model_type := raw.get("model_type", ""))) is None:
        raise CheckpointError(
            f"{place}: model type {shown(model_type)} is not supported; {', '.join(FAMILIES)} are: generators of the "
            f"classes {', '.join(GENERATOR_CLASSES)}, and reward models over them"
        )
    fields = Fields(raw, place)
    try:
        return family.read(fields if family.model_type == model_type else fields.inner("text_config"))
    except KeyError as missing:
        raise CheckpointError(f"{place} lacks {missing}") from missing


def impl_of(config: Mapping[str, Any], asked: ModelImpl = ModelImpl.AUTO) -> ModelImpl:
    """The code that runs a decoder with this `config.json`: what is asked for, or native code where that can."""
    if asked is not ModelImpl.AUTO:
        return asked
    kind = config.get("model_type", "")
    if isinstance(kind, str) and kind and family_of(kind) is None:
        return ModelImpl.TRANSFORMERS
    try:
        parse_decoder_config(config)
    except NotNativeError:
        return ModelImpl.TRANSFORMERS
    except CheckpointError:  # which is raised again where the decoder is loaded, with the file's name
        pass
    return ModelImpl.NATIVE
