"""Small random checkpoints with recurrent layers beside attention: one that talks, and one that scores steps."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import BOXED, edit_tensors
from zoo_models import small_config, write_model

from espalier.engine.models.checkpoint import Checkpoint

KIND = "qwen3_next"
"""transformers has a class of it with a head for each token."""


def write_hybrid_talker(folder: Path) -> Path:
    """A generator whose searches have steps, ends and votes: blank lines, ends and boxed answers are frequent.

    Dimension 0 of the residual stream is a large constant, through which the head adds a bias to chosen tokens.
    """
    write_model(folder, _config())
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["Yes", "No"])  # with which it can be asked about its own steps
    tokenizer.save_pretrained(folder)
    checkpoint = Checkpoint(folder)
    (embedding,) = (name for name in checkpoint.tensors if name.endswith("embed_tokens.weight"))
    embedded = checkpoint.take(embedding, torch.float32, "cpu").clone()
    embedded[:, 0] = 6.0
    head = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(1))
    head[:, 0] = 0.0
    for token, bias in {"ĊĊ": 1.0, "<|im_end|>": 1.1, **dict.fromkeys((*BOXED, "1", "2"), 0.8)}.items():
        head[tokenizer.convert_tokens_to_ids(token), 0] = bias
    edit_tensors(folder / "model.safetensors", {embedding: embedded, "lm_head.weight": head})
    return folder


def write_hybrid_verifier(folder: Path) -> Path:
    """A verifier of the layout that TRL's trainer writes."""
    classes = transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    return write_model(folder, _config(), classes)


def _config() -> Any:
    """Three layers of Gated DeltaNet and one of attention, as models of the kind have them."""
    config = small_config(KIND)
    config.layer_types = ["linear_attention"] * 3 + ["full_attention"]
    return config
