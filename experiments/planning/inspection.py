"""Reports a checkpoint's role, family, memory and prompts from its configuration, tokenizer and tensor names."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from os.path import lexists
from pathlib import Path
from typing import Any

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.chat.turns import TurnEnd, system_prompt_of, turn_ends
from espalier.engine.models.checkpoint import Outline
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.decoder import chosen_quantization
from espalier.engine.models.families import GENERATOR_CLASSES
from espalier.engine.models.hub import HubSettings, locate_with_adapter
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import GGUF, LoadFormat, ModelImpl, Quantization
from espalier.engine.models.quantization import layer_bytes
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.models.weights import named_files, weight_lists
from espalier.engine.models.zoo.description import TransformersConfig
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.prm import families
from espalier.prm.base import PrmFamily, StepPath, special_tokens_in
from espalier.prm.families.eurus import PolicyPairLayers
from espalier.prm.scorers import names_checkpoint
from espalier.prm.scorers.own_path import tokens_of_questions
from espalier.prm.scorers.trunk_head import is_trunk_head, trunk_of
from espalier.search.run import generation_config, generator
from espalier.search.run.load import asks_on_own_paths
from espalier.search.run.settings import RuntimeSettings
from espalier.search.thoughts.marks import find_marks, unknown_thoughts

PROBLEM = "What is 2 + 3 + 4?"
STEPS = ("2 + 3 = 5", "5 + 4 = 9")
"""Problem and steps for which prompts and score positions are shown."""
_BEFORE_A_READ = 12
"""Tokens shown before a score position."""
_SPARE_SHARE = 0.05
"""Share of a device's memory reserved for activations."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint's role, sizes and prompts, as it would be loaded.

    Attributes:
        folder: the checkpoint's folder.
        adapter: the folder of the LoRA adapter that is merged into its weights, or None.
        architecture: the model class in `config.json`.
        role: `generator` or `verifier`.
        match: the family of a verifier, and why it was chosen; None for a generator.
        note: a further hint for the user; may be empty.
        config: the decoder's shape.
        dtype: dtype of weights and KV.
        quantization: how the decoder's weights are kept.
        weight_bytes: bytes of the weights on the device, in their dtype or quantized.
        stored: how the files store the weights; empty where they are not quantised.
        has_weights: whether weight files were found and all their tensors matched; else sizes follow from
            `config.json`.
        kv_bytes_per_token: bytes of KV per token, for all layers.
        state_bytes: bytes of the recurrent state of a path; 0 without recurrent layers.
        prompt: the prompt before the first step, for `PROBLEM`.
        readings: for each of `STEPS`, the end of the text before the score position, and the token there; empty for a
            generator.
        ends: the tokens that end what it generates, with the files that say so; empty if it generates nothing.
        special_tokens: ids of the special tokens in `prompt`, by token, in order.
        special_source: what puts them there.
        bos_token: the one that the tokenizer names, whether the prompt has it or not; None if it names none.
        answering: default sampling parameters without thinking that differ from those of generation_config.json; empty
            where none do.
        sampling: default sampling parameters of a generator; empty for a verifier.
        warnings: contradictions in the checkpoint, and what was decided; what of its sampling is not applied.
        file_bytes: bytes of the weights in their files; 0 without weight files.
        file_kind: the type that most of them are stored in, as the format calls it.
    """

    folder: Path
    adapter: Path | None
    architecture: str
    role: str
    match: families.FamilyMatch | None
    config: DecoderConfig
    dtype: torch.dtype
    quantization: Quantization
    weight_bytes: int
    stored: str
    has_weights: bool
    kv_bytes_per_token: int
    state_bytes: int
    prompt: str
    ends: tuple[TurnEnd, ...]
    special_tokens: dict[str, int]
    special_source: str
    bos_token: str | None
    warnings: tuple[str, ...]
    file_bytes: int
    file_kind: str
    note: str = ""
    readings: tuple[tuple[str, str], ...] = ()
    answering: Mapping[str, float] = field(default_factory=dict)
    sampling: Mapping[str, float] = field(default_factory=dict)


def inspect_checkpoint(
    name: str,
    dtype: torch.dtype,
    quantization: Quantization = Quantization.NONE,
    runtime: RuntimeSettings = RuntimeSettings(),  # noqa: B008 - it is frozen
    as_verifier: bool = False,
    device: str = "cpu",
) -> Inspection:
    """Inspect a checkpoint without reading its weights; only small files are downloaded from the hub.

    Args:
        name: name of the checkpoint; see `locate`.
        dtype: dtype of weights and KV.
        quantization: quantization of the decoder's weights.
        runtime: how to use the hub, and which code is to run the decoder. With a family or a reference of a verifier,
            the checkpoint is one; see `prm.families.identify`.
        as_verifier: refuse what would be loaded as a generator.
        device: kind of device that it is to run on, for `Quantization.AUTO`.

    Raises:
        CheckpointError: the checkpoint could not be loaded, for example because weight files are truncated.
    """
    family, reference = runtime.verifier_family, runtime.verifier_reference
    outline = _outline(name, runtime)
    _ = outline.decoder_config  # whose faults come before those of a family
    other = _outline(reference, runtime) if reference else None
    decide = families.identify if as_verifier or family is not None or other else _choose
    match = decide(outline, family, other is not None)
    if match is None:
        configured, system = outline.files.optional_json("generation_config.json"), system_prompt_of(outline)
        if warning := generation_config.not_applied(configured):
            outline.warn(warning)
        model = load_generator(outline, dtype, "meta")
        tokenizer, marks = model.tokenizer, find_marks(model.tokenizer)
        others, begin = families.families_of(outline.architecture), f"no chat template; {tokenizer.begin_source}"
        warned = "" if marks else unknown_thoughts(tokenizer), generator.no_template(tokenizer)
        of_role = {
            "note": f"also a verifier if --verifier-family names one of {', '.join(others)}" if others else "",
            "prompt": generator.render_turns(tokenizer, system, PROBLEM).text,
            "special_source": begin if tokenizer.chat_template is None else "the chat template",
            "sampling": generation_config.sampling_defaults(configured),
            "warnings": (*outline.warnings, *filter(None, warned)),
        }
        if marks and generator.has_thinking_switch(tokenizer, system):
            of_role["answering"] = generation_config.sampling_for(configured, thinks=False)
    else:
        verifier = families.load_verifier(outline, dtype, "meta", family, other)
        model, tokenizer = verifier.model, verifier.model.tokenizer
        of_role = {
            "prompt": tokenizer.show(verifier.prompt_ids(PROBLEM)),
            "special_source": f"the layout of {match.info.name}",
            "readings": _readings(verifier, tokenizer),
            "warnings": outline.warnings,
        }
    if quantization is Quantization.AUTO:
        quantization = chosen_quantization(model.config, dtype, device == "cpu")
    special, has_weights = special_tokens_in(of_role["prompt"], tokenizer), outline.load_format is not LoadFormat.DUMMY
    return Inspection(
        folder=outline.folder,
        adapter=outline.adapter and outline.adapter.folder,
        architecture=outline.architecture,
        role=GENERATOR if match is None else VERIFIER,
        match=match,
        config=model.config,
        dtype=dtype,
        quantization=quantization,
        weight_bytes=_weight_bytes(model, quantization),
        stored=str(outline.files.stored or ""),
        has_weights=has_weights,
        kv_bytes_per_token=model.config.kv_bytes_per_token(dtype.itemsize),
        state_bytes=model.config.state_bytes,
        ends=tuple(end for end in turn_ends(outline, tokenizer) if end.token_id in model.eos_token_ids),
        special_tokens={token: tokenizer.token_id(token) or 0 for token in special},
        bos_token=tokenizer.special_token("bos_token"),
        file_bytes=outline.nbytes if has_weights else 0,
        file_kind=_usual_kind(outline),
        **of_role,
    )


def _usual_kind(outline: Outline) -> str:
    """The type that most of a checkpoint's bytes are stored in, as its format calls it."""
    sizes = Counter[str]()
    for info in outline.tensors.values():
        sizes[info.kind] += info.nbytes
    return next((kind for kind, _ in sizes.most_common(1)), "")


def verifier_checkpoint(runtime: RuntimeSettings) -> str:
    """The checkpoint whose model computes the verifier's KV; empty if scores are read from the generator's own states.

    Raises:
        CheckpointError: the verifier is not found.
    """
    name = runtime.verifier
    return "" if not names_checkpoint(name) or is_trunk_head(_outline(name, runtime)) else name


@lru_cache(1)
def question_tokens(runtime: RuntimeSettings) -> int:
    """Tokens that a generator of `--verifier self` reads for a step on its own path; 0 if it reads paths apart.

    Raises:
        CheckpointError: it is not found, or cannot be asked.
    """
    outline = _outline(runtime.generator, runtime)
    model = load_generator(outline, torch.float32, "meta")
    family = families.verifier_of_generator(outline, model, runtime.verifier_family)
    return tokens_of_questions(family.probes) if asks_on_own_paths(family, model, outline, runtime) else 0


def inspect_trunk_head(name: str, runtime: RuntimeSettings) -> dict[str, Any] | None:
    """Inspect a head on a generator's hidden states, which adds no token and no KV; None if the checkpoint is a model.

    Returns:
        Values for JSON: besides its folder and role, the name and digest of the generator that it was learned for, and
        the number and bytes of its linear layers.

    Raises:
        CheckpointError: it is not found, or does not say whose states it reads.
    """
    outline = _outline(name, runtime)
    if not is_trunk_head(outline):
        return None
    trunk = trunk_of(outline)
    return {
        "folder": outline.folder,
        "architecture": outline.architecture,
        "trunk": trunk["name"],
        "trunk_digest": trunk["digest"],
        "layers": sum(tensor.endswith(".weight") for tensor in outline.tensors),
        "weight_bytes": outline.nbytes,
        "role": VERIFIER,
        "family": "trunk-head",
    }


def paths_that_fit(inspections: list[Inspection], memory_bytes: int, path_tokens: int) -> tuple[int, int]:
    """Compute what fits into a device's memory besides the weights.

    Args:
        inspections: models on the same device.
        memory_bytes: memory of the device.
        path_tokens: tokens of one path, including the prompt.

    Returns:
        Bytes left for KV, and how many paths fit if they share nothing; both 0 if the weights do not fit.
    """
    left = int(memory_bytes * (1 - _SPARE_SHARE)) - sum(i.weight_bytes for i in inspections)
    per_path = sum(path_tokens * i.kv_bytes_per_token + i.state_bytes for i in inspections)
    return (left, left // per_path) if left > 0 else (0, 0)


def _outline(name: str, runtime: RuntimeSettings) -> Outline:
    folder, adapter = locate_with_adapter(name, LoadFormat.DUMMY, HubSettings(runtime.offline, runtime.cache_dir))
    form = LoadFormat.AUTO if _has_weights(folder) else LoadFormat.DUMMY
    return Outline(folder, form, adapter=adapter, model_impl=ModelImpl(runtime.model_impl))


def _has_weights(folder: Path) -> bool:
    """Return true if any weight file exists; for a hub model that was never loaded, there is at most an index."""
    if folder.suffix == GGUF:
        return True
    lists = (folder / name for name in weight_lists(LoadFormat.AUTO))
    return any(lexists(shard) for found in lists if lexists(found) for shard in named_files(found))


def _choose(outline: Outline, family: str | None, has_reference: bool) -> families.FamilyMatch | None:
    """The family of a checkpoint that may be a generator; None for one that is."""
    if outline.has_language_head:
        return None
    try:
        return families.identify(outline, family, has_reference)
    except CheckpointError as unknown:
        what = f"is a {outline.architecture or 'model without architecture'}"
        known = f"generators are {', '.join(GENERATOR_CLASSES)}; verifiers {', '.join(families.known_classes())}"
        raise CheckpointError(f"{outline.folder} {what}; {known}; others need --verifier-family") from unknown


def _readings(family: PrmFamily, tokenizer: TextTokenizer) -> tuple[tuple[str, str], ...]:
    shown = []
    for end in range(len(STEPS) if family.info.whole_answers else 1, len(STEPS) + 1):
        reading = family.full_path(StepPath(PROBLEM, STEPS[:end]))
        at = reading.score_positions[-1]
        before = reading.token_ids[max(0, at - _BEFORE_A_READ) : at]
        shown.append((tokenizer.show(list(before)), tokenizer.show([reading.token_ids[at]])))
    return tuple(shown)


def _weight_bytes(model: Model, quantization: Quantization) -> int:
    if quantization is Quantization.NONE:
        return model.weight_bytes
    decoder = model.decoder
    if isinstance(decoder.config, TransformersConfig):
        return decoder.config.weight_bytes(decoder.dtype, quantization)
    layers = decoder.layers
    decoders = (layers.first, layers.second) if isinstance(layers, PolicyPairLayers) else (decoder,)
    width, total = decoder.dtype.itemsize, model.weight_bytes
    for c in (part.config for part in decoders):
        total += c.num_layers * (layer_bytes(c, width, quantization) - layer_bytes(c, width, Quantization.NONE))
    return total
