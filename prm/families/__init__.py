"""Process-reward-model families, one small file each, and the choice among them.

A family is chosen by the class that `config.json` names and then by configuration and tensors, never by a repository's
name; `--verifier-family` overrules that. Where a class may as well be a generator's, only the flag chooses: several
families and any generator share a base model's vocabulary, and scores read in another family's layout mean nothing.
A user's own family is a spec file (`prm.families.spec`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from espalier.engine.errors import CheckpointError, NoEmbeddingError, name_tokens
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.options import LoadFormat
from espalier.engine.scheduling.role_policy import VERIFIER
from espalier.prm.base import FamilyInfo, PrmFamily, StepPath
from espalier.prm.families import eurus, outcome, qwen_math, rlhflow, thinkprm, token_classifier, universal
from espalier.prm.families.detect import fits, rope_theta
from espalier.prm.families.from_spec import info_of, load_from_spec
from espalier.prm.families.spec import DetectionTable, FamilySpec, read_spec

Load = Callable[[Checkpoint, torch.dtype, torch.device | str], PrmFamily]
Detect = Callable[[Checkpoint], str | None]
"""Why a checkpoint of the family's class is one of the family's; None where nothing says so."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A family that can be chosen.

    Attributes:
        load: None for a family of two models, which `load_verifier` loads by itself.
    """

    info: FamilyInfo
    detect: Detect
    load: Load | None


@dataclass(frozen=True, slots=True)
class FamilyMatch:
    """The family of a checkpoint, and why it is that one, in words for a user."""

    entry: Entry
    reason: str

    @property
    def info(self) -> FamilyInfo:
        """What the family is."""
        return self.entry.info


@cache
def entries() -> tuple[Entry, ...]:
    """Every family that comes with Espalier, in the order they are asked in."""
    return (
        Entry(qwen_math.INFO, qwen_math.detect, qwen_math.load),
        _shipped("reasonflux-prm"),
        _shipped("skywork-o1-open-prm"),
        Entry(rlhflow.INFO, _by_flag_only, rlhflow.load),
        _shipped("versaprm"),
        _shipped("math-shepherd"),
        Entry(token_classifier.INFO, token_classifier.detect, token_classifier.load),
        Entry(token_classifier.PURE_INFO, _by_flag_only, token_classifier.load_pure),
        Entry(outcome.INFO, outcome.detect, outcome.load),
        Entry(universal.INFO, _by_flag_only, universal.load),
        Entry(eurus.INFO, _by_flag_only, None),
        Entry(thinkprm.INFO, _by_flag_only, thinkprm.load),
    )


def identify(checkpoint: Checkpoint, family: str | None = None, reference: bool = False) -> FamilyMatch:
    """The family of a checkpoint; no weights are read.

    Args:
        checkpoint: the verifier's.
        family: the name of a family, or a spec file ending in `.toml`; None goes by the checkpoint.
        reference: whether a reference model is given too, which only the family of two models takes.

    Raises:
        CheckpointError: when no family fits or the class alone does not tell, listing what to choose from.
        FamilySpecError: for a spec file that is wrong.
    """
    if family is not None:
        return _named(family)
    if reference:
        return FamilyMatch(_entry(eurus.INFO.name), "a reference model is given")
    for entry in entries():
        if fits(checkpoint.architecture, entry.info.architectures) and (reason := entry.detect(checkpoint)):
            return FamilyMatch(entry, reason)
    raise CheckpointError(_unknown(checkpoint))


def families_of(architecture: str) -> tuple[str, ...]:
    """Names of the families whose checkpoints may name this class, whatever else they hold."""
    return tuple(entry.info.name for entry in entries() if fits(architecture, entry.info.architectures))


def known_classes() -> tuple[str, ...]:
    """Classes that make a checkpoint a verifier without a flag; `*` stands for any beginning."""
    known = (entry.info.architectures for entry in entries() if entry.detect is not _by_flag_only)
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
        checkpoint: the verifier's.
        dtype: of weights and KV.
        device: where they go.
        family: see `identify`.
        reference: the model an implicit PRM was trained from; None for every other family.

    Raises:
        CheckpointError: when no family fits, a tensor or token is missing, or a reference is given to a family that
            has none.
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


def _require_layout_embedded(checkpoint: Checkpoint, family: PrmFamily) -> None:
    """Raise CheckpointError when the model has no embedding for what the family puts around problems and steps."""
    first, second = (StepPath("2", ("2",) * count) for count in (1, 2))
    try:
        for ids in (family.prompt_ids(first.problem), family.read(first).token_ids, family.read(second).token_ids):
            family.model.require_embedded(VERIFIER, ids)
    except NoEmbeddingError as error:
        raise CheckpointError(
            f"{checkpoint.folder} has no embedding for {name_tokens(error.tokens)}, which {family.name} reads with "
            "every step; is tokenizer.json the one that belongs to these weights?"
        ) from None


def _named(family: str) -> FamilyMatch:
    if family.endswith(".toml"):
        return FamilyMatch(_from_spec(read_spec(Path(family).expanduser())), f"--verifier-family {family}")
    return FamilyMatch(_entry(family), f"--verifier-family {family}")


def _entry(name: str) -> Entry:
    for entry in entries():
        if entry.info.name == name:
            return entry
    known = ", ".join(entry.info.name for entry in entries())
    raise CheckpointError(f"--verifier-family {name!r} is none of {known}, and no spec file ending in .toml")


def _shipped(name: str) -> Entry:
    return _from_spec(read_spec(Path(__file__).with_name(f"{name}.toml")))


def _from_spec(spec: FamilySpec) -> Entry:
    detect = partial(_spec_detection, spec) if spec.detection != DetectionTable() else _by_flag_only
    return Entry(info_of(spec), detect, partial(load_from_spec, spec))


def _spec_detection(spec: FamilySpec, checkpoint: Checkpoint) -> str | None:
    theta = spec.detection.rope_theta
    if theta is not None and rope_theta(checkpoint) != theta:
        return None
    tensors = spec.detection.tensors if checkpoint.load_format is not LoadFormat.DUMMY else ()
    if any(name not in checkpoint for name in tensors):
        return None
    said = [f"tensor {name}" for name in tensors]
    said += [] if theta is None else [f"rotary base {theta:,.0f}"]
    return ", ".join(["its architecture", *said])


def _by_flag_only(checkpoint: Checkpoint) -> str | None:
    return None


def _unknown(checkpoint: Checkpoint) -> str:
    """What to say of a checkpoint that no family claims."""
    name = checkpoint.architecture
    if name.endswith("ForCausalLM"):
        found = ", ".join(families_of(name))
        whose = (
            f"the class of generators and of the verifiers {found}; nothing in it says which"
            if found
            else "a generator"
        )
        return (
            f"{checkpoint.folder} is a {name}, {whose}. Name a verifier's family with --verifier-family, or describe "
            "it in a spec file and give that; give a generator to --generator"
        )
    named = ", ".join(entry.info.name for entry in entries() if entry.detect is _by_flag_only)
    return (
        f"{checkpoint.folder} is a {name or 'model without architecture'}; verifiers known by their class are "
        f"{', '.join(known_classes())}. Name another's family with --verifier-family ({named}), or describe it in an "
        "spec file and give that"
    )
