"""Weights as a backend has prepared them, in a form that a file can hold."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Kept(NamedTuple):
    """Tensors, and all else that is needed to use them again.

    Attributes:
        tensors: on the host, by name.
        facts: numbers, texts and lists of them, as JSON holds them.
    """

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]
