"""Reports a checkpoint's role, family, memory and prompts from its configuration, tokenizer and tensor names."""

from dataclasses import dataclass
from pathlib import Path

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Outline
from espalier.engine.models.config import GENERATOR_CLASSES, DecoderConfig, parse_decoder_config
from espalier.engine.models.hub import HubSettings, locate
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.engine.models.quantization import linear_bytes
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.models.weights import GGUF, named_files, weight_lists
from espalier.engine.scheduling.role_policy import GENERATOR, VERIFIER
from espalier.prm.base import PrmFamily, StepPath
from espalier.prm.families import FamilyMatch, families_of, identify, known_classes, load_verifier
from espalier.prm.policy_pair import PolicyPairDecoder
from espalier.prm.scorers import SELF, WITHOUT_WEIGHTS
from espalier.prm.scorers.trunk_head import is_trunk_head, trunk_of
from espalier.search.run.generator import STEP_SYSTEM_PROMPT, render_prompt

PROBLEM = "What is 2 + 3 + 4?"
STEPS = ("2 + 3 = 5", "5 + 4 = 9")
"""Problem and steps for which prompts and score positions are shown."""
_BEFORE_A_READ = 12
"""Tokens shown before a score position."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint would be loaded as.

    Attributes:
        folder: the checkpoint's folder.
        architecture: the model class in `config.json`.
        role: `generator` or `verifier`.
        match: the family of a verifier, and why it was chosen; None for a generator.
        note: a further hint for the user; may be empty.
        config: the decoder's shape.
        dtype: dtype of weights and KV.
        weight_bytes: bytes of the weights on the device, in their dtype or quantized.
        has_weights: whether weight files were found and all their tensors matched; else sizes follow from
            `config.json`.
        kv_bytes_per_token: bytes of KV per token, for all layers.
        prompt: the prompt before the first step, for `PROBLEM`.
        readings: for each of `STEPS`, the end of the text before the score position, and the token there; empty for a
            generator.
    """

    folder: Path
    architecture: str
    role: str
    match: FamilyMatch | None
    note: str
    config: DecoderConfig
    dtype: torch.dtype
    weight_bytes: int
    has_weights: bool
    kv_bytes_per_token: int
    prompt: str
    readings: tuple[tuple[str, str], ...]


def inspect_checkpoint(
    name: str,
    dtype: torch.dtype,
    quantization: Quantization = Quantization.NONE,
    family: str | None = None,
    reference: str = "",
    hub: HubSettings | None = None,
) -> Inspection:
    """Inspect a checkpoint without reading its weights; only small files are downloaded from the hub.

    Args:
        name: name of the checkpoint; see `locate`.
        dtype: dtype of weights and KV.
        quantization: quantization of the decoder's weights.
        family: see `prm.families.identify`; if given, the checkpoint is a verifier.
        reference: the model that an implicit process reward model was trained from.
        hub: how to use the hub.

    Raises:
        CheckpointError: the checkpoint could not be loaded, for example because weight files are truncated.
    """
    outline = _outline(name, hub)
    parse_decoder_config(outline.config)
    other = _outline(reference, hub) if reference else None
    match, note = _choose(outline, family, other is not None)
    if match is None:
        model = load_generator(outline, dtype, "meta")
        system = outline.config.get("system_prompt", STEP_SYSTEM_PROMPT)
        prompt, readings = render_prompt(model.tokenizer, system, PROBLEM), ()
    else:
        verifier = load_verifier(outline, dtype, "meta", family, other)
        model = verifier.model
        prompt, readings = model.tokenizer.show(verifier.prompt_ids(PROBLEM)), _readings(verifier, model.tokenizer)
    c = model.config
    return Inspection(
        folder=outline.folder,
        architecture=outline.architecture,
        role=GENERATOR if match is None else VERIFIER,
        match=match,
        note=note,
        config=c,
        dtype=dtype,
        weight_bytes=_weight_bytes(model, quantization),
        has_weights=outline.load_format is not LoadFormat.DUMMY,
        kv_bytes_per_token=2 * c.num_layers * c.num_kv_heads * c.head_dim * dtype.itemsize,
        prompt=prompt,
        readings=readings,
    )


def verifier_checkpoint(verifier: str, generator: str, hub: HubSettings | None = None) -> str:
    """Which checkpoint's model computes the verifier's KV; empty if scores are read from the generator's own states.

    Raises:
        CheckpointError: the verifier is not found.
    """
    if verifier == SELF:
        return generator
    return "" if verifier in WITHOUT_WEIGHTS or is_trunk_head(_outline(verifier, hub)) else verifier


@dataclass(frozen=True, slots=True)
class HeadInspection:
    """What a head on a generator's hidden states would be loaded as; it adds no token and no KV.

    Attributes:
        folder: the head's folder.
        architecture: the class in `config.json`.
        trunk: name of the generator that it was learned for.
        trunk_digest: digest of that generator.
        layers: number of its linear layers.
        weight_bytes: bytes of its weights.
    """

    folder: Path
    architecture: str
    trunk: str
    trunk_digest: str
    layers: int
    weight_bytes: int


def inspect_trunk_head(name: str, hub: HubSettings | None = None) -> HeadInspection | None:
    """Inspect a head on a generator's hidden states; None if the checkpoint is a model.

    Raises:
        CheckpointError: it is not found, or does not say whose states it reads.
    """
    outline = _outline(name, hub)
    if not is_trunk_head(outline):
        return None
    trunk = trunk_of(outline)
    layers = sum(tensor.endswith(".weight") for tensor in outline.tensors)
    return HeadInspection(outline.folder, outline.architecture, trunk["name"], trunk["digest"], layers, outline.nbytes)


def paths_that_fit(
    inspections: list[Inspection], memory_bytes: int, path_tokens: int, spare_share: float = 0.05
) -> tuple[int, int]:
    """Compute what fits into a device's memory besides the weights.

    Args:
        inspections: models on the same device.
        memory_bytes: memory of the device.
        path_tokens: tokens of one path, including the prompt.
        spare_share: share of the memory reserved for activations.

    Returns:
        Bytes left for KV, and how many paths fit if they share nothing; both 0 if the weights do not fit.
    """
    left = int(memory_bytes * (1 - spare_share)) - sum(i.weight_bytes for i in inspections)
    per_path = path_tokens * sum(i.kv_bytes_per_token for i in inspections)
    return (left, left // per_path) if left > 0 else (0, 0)


def _outline(name: str, hub: HubSettings | None) -> Outline:
    folder = locate(name, LoadFormat.DUMMY, hub)
    return Outline(folder, LoadFormat.AUTO if _has_weights(folder) else LoadFormat.DUMMY)


def _has_weights(folder: Path) -> bool:
    """Whether any weight file exists; for a hub model that was never loaded, there is at most an index."""
    if folder.suffix == GGUF:
        return True
    lists = (folder / name for name in weight_lists(LoadFormat.AUTO))
    return any(shard.is_file() for found in lists if found.is_file() for shard in named_files(found))


def _choose(outline: Outline, family: str | None, has_reference: bool) -> tuple[FamilyMatch | None, str]:
    """The family, None for a generator; and a note on alternatives."""
    name = outline.architecture
    if family is not None or has_reference:
        return identify(outline, family, has_reference), ""
    if name.endswith("ForCausalLM"):
        families = ", ".join(families_of(name))
        return None, f"also a verifier if --verifier-family names one of {families}" if families else ""
    try:
        return identify(outline), ""
    except CheckpointError as unknown:
        raise CheckpointError(
            f"{outline.folder} is a {name or 'model without architecture'}; generators are "
            f"{', '.join(GENERATOR_CLASSES)}; verifiers known by their class are {', '.join(known_classes())}, and any "
            "other needs --verifier-family"
        ) from unknown


def _readings(family: PrmFamily, tokenizer: TextTokenizer) -> tuple[tuple[str, str], ...]:
    if family.info.whole_answers:
        paths = [StepPath(PROBLEM, STEPS)]
    else:
        paths = [StepPath(PROBLEM, STEPS[:end]) for end in range(1, len(STEPS) + 1)]
    shown = []
    for path in paths:
        reading = family.whole(path)
        at = reading.score_positions[-1]
        before = reading.token_ids[max(0, at - _BEFORE_A_READ) : at]
        shown.append((tokenizer.show(list(before)), tokenizer.show([reading.token_ids[at]])))
    return tuple(shown)


def _weight_bytes(model: Model, quantization: Quantization) -> int:
    if quantization is Quantization.NONE:
        return model.weight_bytes
    decoder = model.decoder
    decoders = (decoder.first, decoder.second) if isinstance(decoder, PolicyPairDecoder) else (decoder,)
    saved = 0
    for layers in (part.layers for part in decoders):
        for w in map(layers.weights, range(len(layers))):
            for weight in (w.qkv, w.out, w.gate_up, w.down):
                rows, columns = weight.shape
                saved += weight.nbytes - linear_bytes(rows, columns, decoder.dtype.itemsize, quantization)
    return model.weight_bytes - saved
