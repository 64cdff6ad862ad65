"""The contract of a format of quantised weights."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch

from espalier.engine.errors import CheckpointError


class StoredFormat(ABC):
    """A format of quantised weights, in which several tensors of the files, its parts, make up one weight.

    Attributes:
        name: and sizes, as people say them: GPTQ, 4 bits.
        parts: pattern of the names of parts, with a group `weight`, the weight's name without its suffix, and a group
            `part`.
        suffix: of the weight's name.
        marks: parts of which a quantised weight has one; where none of them is, tensors are stored as they are.
    """

    name: str
    parts: re.Pattern[str]
    suffix: str = ".weight"
    marks: frozenset[str]

    def kind(self, weight: str) -> str:
        """The same of one weight, by its name without the suffix; raises ValueError if none is said."""
        return self.name

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """Shape of a weight, `[out, in]` for a linear layer.

        Args:
            shapes: of its parts.
            read: gives a small part that holds the shape.
        """
        return shapes["weight"]

    @abstractmethod
    def expand(self, weight: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Values of a weight in float32, of the shape that `shape` gave."""


def refusal(place: str, found: str, rule: str) -> CheckpointError:
    """An error for a layout that is not read.

    Args:
        place: the configuration's file.
        found: what it says.
        rule: what is read.
    """
    return CheckpointError(
        f"quantization_config of {place}: {found}; {rule}. Else take the checkpoint that it was made from, and have it "
        "quantised as it loads: --generator-quantization or --verifier-quantization"
    )
