"""Families of process reward models, one file each, and their detection.

The family of a checkpoint is detected from the class in `config.json`, then from its configuration and tensors, never
from a repository's name; `--verifier-family` overrides it. If the class may also be a generator's, the flag is
required: several families and any generator share a base model's vocabulary, and scores read in the wrong layout are
meaningless. Users can add families as spec files (`prm.families.spec`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from espalier.engine.errors import CheckpointError, NoEmbeddingError, name_tokens, nearest
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.options import LoadFormat
from espalier.engine.roles import VERIFIER
from espalier.prm.base import Detect, FamilyInfo, PrmFamily, StepPath
from espalier.prm.families import eurus, trunk_evidence
from espalier.prm.families.asked import AskedFamily, Judge, YesNo
from espalier.prm.families.likelihood import Likelihood, LikelihoodRatio
from espalier.prm.families.outcome import OutcomeModel
from espalier.prm.families.rlhflow import RlhFlow
from espalier.prm.families.spec import DetectionTable, FamilySpec, info_of, load_from_spec, read_spec
from espalier.prm.families.thinkprm import ThinkPrm
from espalier.prm.families.token_classifier import Pure, TokenClassifier
from espalier.prm.families.universal import UniversalPrm
from espalier.prm.families.value_guided import ValueGuided

Load = Callable[[Checkpoint, torch.dtype, torch.device | str], PrmFamily]


@dataclass(frozen=True, slots=True)
class Entry:
    """One family.

    Attributes:
        info: description of the family.
        load: loads a checkpoint; None for the family with a reference model, which `load_verifier` loads itself.
        detect: see `PrmFamily`.
        asks: the family's class where it can also ask a generator about its own steps, on the same weights.
    """

    info: FamilyInfo
    load: Load | None
    detect: Detect | None = None
    asks: type[AskedFamily[Any]] | None = None

    def fits(self, architecture: str) -> bool:
        """Return whether checkpoints of the family may have this class."""
        return any(
            architecture.endswith(pattern[1:]) if pattern.startswith("*") else architecture == pattern
            for pattern in self.info.architectures
        )


@dataclass(frozen=True, slots=True)
class FamilyMatch:
    """A family, and the user-readable reason for which it was chosen."""

    entry: Entry
    reason: str

    @property
    def info(self) -> FamilyInfo:
        """Description of the family."""
        return self.entry.info


@cache
def entries() -> tuple[Entry, ...]:
    """All families that come with Espalier, in order of detection."""
    return (
        _shipped("qwen2.5-math-prm"),
        _shipped("reasonflux-prm"),
        _shipped("skywork-o1-open-prm"),
        _of(RlhFlow),
        _shipped("versaprm"),
        _shipped("math-shepherd"),
        *map(_of, (TokenClassifier, Pure, OutcomeModel, ValueGuided, UniversalPrm)),
        Entry(eurus.EurusPrm.info, None),
        *map(_of, (ThinkPrm, YesNo, Judge, Likelihood, LikelihoodRatio)),
    )


def _of(family: type[PrmFamily]) -> Entry:
    asks = family if issubclass(family, AskedFamily) else None
    return Entry(family.info, family.load, family.detect, asks)


def identify(checkpoint: Checkpoint, family: str | None = None, reference: bool = False) -> FamilyMatch:
    """Find the family of a checkpoint, without reading weights.

    Args:
        checkpoint: the verifier's checkpoint.
        family: a family's name, a spec file ending in `.toml`, or a folder that `learn-verifier --trunk` made; None
            detects the family.
        reference: whether a reference model is also given, which implies the family that has one.

    Raises:
        CheckpointError: no family fits, or the class is ambiguous; lists the candidates.
        FamilySpecError: the spec file is invalid.
    """
    if family is not None:
        return FamilyMatch(_given(family), f"--verifier-family {family}")
    if reference:
        return FamilyMatch(_entry(eurus.EurusPrm.info.name), "a reference model is given")
    for entry in entries():
        detected = entry.detect if entry.fits(checkpoint.architecture) else None
        if detected and (reason := detected(checkpoint)):
            return FamilyMatch(entry, reason)
    raise CheckpointError(_unknown(checkpoint))


def families_of(architecture: str) -> tuple[str, ...]:
    """Names of the families whose checkpoints may have this class."""
    return tuple(entry.info.name for entry in entries() if entry.fits(architecture))


def known_classes() -> tuple[str, ...]:
    """Classes whose checkpoints are detected as verifiers without a flag; a leading `*` matches any prefix."""
    known = (entry.info.architectures for entry in entries() if entry.detect)
    return tuple(dict.fromkeys(name for names in known for name in names))


def load_verifier(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    family: str | None = None,
    reference: Checkpoint | None = None,
) -> PrmFamily:
    """Load a process reward model.

    Args:
        checkpoint: the verifier's checkpoint.
        dtype: dtype of weights and KV.
        device: device to load onto.
        family: see `identify`.
        reference: the model that an implicit PRM was trained from; None for all other families.

    Raises:
        CheckpointError: no family fits, a tensor or token is missing, or a reference is given to a family without one.
        FamilySpecError: the spec file is invalid.
    """
    entry = identify(checkpoint, family, reference is not None).entry
    if entry.load is None:
        loaded: PrmFamily = eurus.load(checkpoint, reference, dtype, device)
    elif reference is not None:
        raise CheckpointError(f"{entry.info.name} has no reference model; leave out --verifier-reference")
    else:
        loaded = entry.load(checkpoint, dtype, device)
    _require_layout_embedded(checkpoint, loaded)
    return loaded


def require_askable(checkpoint: Checkpoint, family: str | None = None) -> None:
    """Check, without reading weights, that a generator can be asked about its own steps; see `verifier_of_generator`.

    Raises:
        CheckpointError: it cannot, or the family asks nothing.
    """
    _asking(family).require_askable(checkpoint)


def verifier_of_generator(checkpoint: Checkpoint, generator: Model, family: str | None = None) -> AskedFamily[Any]:
    """A generator that is asked about its own steps, on the same weights, with a KV of its own.

    Args:
        checkpoint: the generator's.
        generator: its model.
        family: name of a family that asks; None for `yes-no`.

    Raises:
        CheckpointError: it cannot be asked, or the family asks nothing.
    """
    family_of_generator = _asking(family).of_generator(checkpoint, generator)
    _require_layout_embedded(checkpoint, family_of_generator)
    return family_of_generator


def _asking(name: str | None) -> type[AskedFamily[Any]]:
    """The class of a family that can ask a generator about its own steps."""
    if asks := _entry(name or YesNo.info.name).asks:
        return asks
    known = ", ".join(entry.info.name for entry in entries() if entry.asks)
    raise CheckpointError(f"--verifier-family {name} needs a model of its own; --verifier self takes {known}")


def _require_layout_embedded(checkpoint: Checkpoint, family: PrmFamily) -> None:
    """Raise CheckpointError if the model has no embedding for a token that the family adds to problems or steps."""
    first, second = (StepPath("2", ("2",) * count) for count in (1, 2))
    try:
        for ids in (family.prompt_ids(first.problem), family.read(first).token_ids, family.read(second).token_ids):
            family.model.require_embedded(VERIFIER, ids)
    except NoEmbeddingError as error:
        raise CheckpointError(
            f"{checkpoint.folder} has no embedding for {name_tokens(error.tokens)}, which {family.name} adds to "
            "every path; is tokenizer.json the one that belongs to these weights?"
        ) from None


def _given(family: str) -> Entry:
    """A verifier family, as `--verifier-family` names it."""
    path = Path(family).expanduser()
    if family.endswith(".toml"):
        return _from_spec(read_spec(path))
    if path.is_dir():
        return Entry(trunk_evidence.TrunkEvidence.info, partial(trunk_evidence.load, path))
    return _entry(family)


def _entry(name: str) -> Entry:
    for entry in entries():
        if entry.info.name == name:
            return entry
    known = [entry.info.name for entry in entries()]
    raise CheckpointError(
        f"--verifier-family {name!r} is none of {', '.join(known)}, no folder, and no spec file ending in .toml"
        + nearest(name, known)
    )


def _shipped(name: str) -> Entry:
    return _from_spec(read_spec(Path(__file__).with_name(f"{name}.toml")))


def _from_spec(spec: FamilySpec) -> Entry:
    detect = partial(_spec_detection, spec) if spec.detection != DetectionTable() else None
    return Entry(info_of(spec), partial(load_from_spec, spec), detect)


def _spec_detection(spec: FamilySpec, checkpoint: Checkpoint) -> str | None:
    theta = spec.detection.rope_theta
    if theta is not None and checkpoint.decoder_config.rope_theta != theta:
        return None
    tensors = spec.detection.tensors if checkpoint.load_format is not LoadFormat.DUMMY else ()
    if any(name not in checkpoint for name in tensors):
        return None
    said = [f"tensor {name}" for name in tensors]
    said += [] if theta is None else [f"rotary base {theta:,.0f}"]
    return ", ".join(["its architecture", *said])


def _unknown(checkpoint: Checkpoint) -> str:
    """The error message for a checkpoint whose family cannot be detected."""
    name = checkpoint.architecture
    if name.endswith("ForCausalLM"):
        return (
            f"{checkpoint.folder} is a {name}, the class of generators and of the verifiers "
            f"{', '.join(families_of(name))}; nothing in it says which. Give a generator to --generator, a verifier "
            f"with its --verifier-family ({YesNo.info.name} asks any instruction-tuned model) or a spec file"
        )
    named = ", ".join(entry.info.name for entry in entries() if not entry.detect)
    return (
        f"{checkpoint.folder} is a {name or 'model without architecture'}; verifiers known by their class are "
        f"{', '.join(known_classes())}. Name another family with --verifier-family ({named}), or describe it in a "
        "spec file and give that"
    )
