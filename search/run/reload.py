"""Other weights for the generator that runs, read beside it while it goes on; refused unless all else is the same."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.models.chat.turns import system_prompt_of
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.checkpoint.adapter import is_adapter
from espalier.engine.models.model import Model, load_generator
from espalier.engine.roles import GENERATOR
from espalier.search.run.generation_config import sampling_defaults
from espalier.search.run.generator import Generator


def load_weights(
    engine: Engine,
    generator: Generator,
    open_checkpoint: Callable[[str], Checkpoint],
    own_system_prompt: bool,
    folder: str,
) -> Model:
    """Load a checkpoint that is to take the generator's place; may be called on any thread.

    Args:
        engine: runs the generator.
        generator: renders its prompts.
        open_checkpoint: opens a folder as the generator's was opened, with the same quantisation.
        own_system_prompt: whether the system prompt is the checkpoint's own.
        folder: of the checkpoint.

    Returns:
        The model, with the tokenizer of the present one.

    Raises:
        CheckpointError: it cannot be loaded, there is no memory for it beside the present one, it differs in more than
            its weights, or the verifier reads the generator's weights.
    """
    old = generator.model
    shared = [role for role, model in engine.models.items() if role != GENERATOR and model.decoder is old.decoder]
    if old.other_heads or shared:
        raise CheckpointError(
            "--verifier is self or a trunk head, which reads the generator's own weights, so they cannot be exchanged "
            "alone; start the server again"
        )
    if is_adapter(Path(folder)):  # whose base may be anywhere
        raise CheckpointError(f"{folder} is an adapter; merge it into its base first")
    checkpoint = open_checkpoint(folder)
    config = checkpoint.decoder_config
    differing = [f.name for f in fields(config) if getattr(config, f.name) != getattr(old.config, f.name, None)]
    _require_nothing(folder, f"its configuration: {', '.join(differing)}" if differing else "")
    try:
        model = load_generator(checkpoint, old.decoder.dtype, old.decoder.device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CheckpointError(f"there is no memory for {folder} beside the weights that are replaced") from error
    _require_nothing(folder, _differs(model, generator, checkpoint, own_system_prompt))
    return replace(model, tokenizer=old.tokenizer)


def _differs(model: Model, generator: Generator, checkpoint: Checkpoint, own_system_prompt: bool) -> str:
    """The first setting other than its weights in which a checkpoint differs; empty if there is none."""
    old, mine, theirs = generator.model, generator.model.tokenizer, model.tokenizer
    if any(getattr(mine, part) != getattr(theirs, part) for part in ("vocabulary", "begin", "control_tokens")):
        return "its tokenizer"
    if mine.chat_template != theirs.chat_template:
        return "its chat template"
    if old.eos_token_ids != model.eos_token_ids:
        return f"the tokens that end a generation, {model.eos_token_ids} for {old.eos_token_ids}"
    if own_system_prompt and system_prompt_of(checkpoint) != generator.system_prompt:
        return "its system prompt"
    for name, value in sampling_defaults(checkpoint.files.optional_json("generation_config.json")).items():
        if value != (before := getattr(generator.defaults, name)):
            return f"{name} of generation_config.json, {value:g} for {before:g}"
    return ""


def _require_nothing(folder: str, what: str) -> None:
    """Raise CheckpointError if anything but the weights differs."""
    if what:
        differs = "differs from the generator in more than its weights"
        raise CheckpointError(f"{folder} {differs}: {what}; start a new server")
