"""The contract of a decoder family."""

from collections.abc import Callable
from dataclasses import dataclass

from espalier.engine.models.config import Fields, NativeConfig


@dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders; nothing else decides by its name.

    Attributes:
        model_type: of its configurations.
        class_prefix: the beginning of its classes' names in transformers.
        with_images: `model_type` of checkpoints with images, whose `text_config` is of this family; empty without.
        read: gives the specification of a decoder by the fields of its `config.json`; a `KeyError` names a missing one.
    """

    model_type: str
    class_prefix: str
    read: Callable[[Fields], NativeConfig]
    with_images: str = ""

    @property
    def generator_class(self) -> str:
        """The class of its generators."""
        return f"{self.class_prefix}ForCausalLM"
