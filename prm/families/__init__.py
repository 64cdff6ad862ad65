"""Process-reward-model families, one file each, and the choice among them by a checkpoint's own configuration."""

import torch

from espalier.engine.checkpoint import Checkpoint
from espalier.engine.errors import CheckpointError
from espalier.prm.base import PrmFamily
from espalier.prm.families import qwen_math, token_classifier

_BY_ARCHITECTURE = {
    "Qwen2ForProcessRewardModel": qwen_math.load,
    "Qwen2ForTokenClassification": token_classifier.load,
    "LlamaForTokenClassification": token_classifier.load,
}


def load_verifier(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> PrmFamily:
    """Load a process reward model of a supported family.

    Raises:
        CheckpointError: when the architecture is none of the supported ones, or a tensor is missing.
    """
    load = _BY_ARCHITECTURE.get(checkpoint.architecture)
    if load is None:
        raise CheckpointError(
            f"{checkpoint.folder} is a {checkpoint.architecture or 'model without architecture'}; supported process "
            f"reward models are of the classes {', '.join(_BY_ARCHITECTURE)}"
        )
    return load(checkpoint, dtype, device)
