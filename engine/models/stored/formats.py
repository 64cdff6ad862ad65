"""The layout in which a checkpoint stores quantised weights, by its `quantization_config`."""

from collections.abc import Callable, Mapping
from typing import Any

from espalier.engine.models.stored.base import StoredFormat, refusal
from espalier.engine.models.stored.bitsandbytes import BitsAndBytes
from espalier.engine.models.stored.compressed_tensors import CompressedTensors
from espalier.engine.models.stored.float8 import Float8
from espalier.engine.models.stored.integers import Awq, Gptq
from espalier.engine.models.stored.mxfp4 import Mxfp4
from espalier.engine.models.text_files import shown

_METHODS: dict[str, Callable[[Mapping[str, Any], str], StoredFormat]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Float8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}


def stored_format(config: Mapping[str, Any], place: str) -> StoredFormat | None:
    """The layout of a checkpoint's weights; None where they are not quantised.

    Args:
        config: `config.json`.
        place: the file, for errors.

    Raises:
        CheckpointError: the layout is not one of those that are read.
    """
    if (stored := config.get("quantization_config")) is None:
        return None
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    if not isinstance(stored, dict) or not isinstance(method, str) or method not in _METHODS:
        raise refusal(place, f"the weights are quantised by {shown(method)}", f"read are {', '.join(_METHODS)}")
    return _METHODS[method](stored, place)
