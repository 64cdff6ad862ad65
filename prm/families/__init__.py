"""Families of process reward models, one file each, and their detection.

The family of a checkpoint is detected from the class in `config.json`, then from its configuration and tensors, never
from a repository's name; `--verifier-family` overrides it. If the class may also be a generator's, the flag is
required: several families and any generator share a base model's vocabulary, and scores read in the wrong layout are
meaningless. Users can add families as spec files (`prm.families.spec`).
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier.engine.errors import CheckpointError, NoEmbeddingError, name_tokens, nearest
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.roles import VERIFIER
from espalier.prm.base import FamilyInfo, PrmFamily, StepPath
from espalier.prm.families import eurus
from espalier.prm.families.asked import AskedFamily, Judge, YesNo
from espalier.prm.families.likelihood import Likelihood, LikelihoodRatio
from espalier.prm.families.outcome import OutcomeModel
from espalier.prm.families.rlhflow import RlhFlow
from espalier.prm.families.spec import family_of, read_spec
from espalier.prm.families.thinkprm import ThinkPrm
from espalier.prm.families.token_classifier import Pure, TokenClassifier
from espalier.prm.families.trunk_evidence import learned_in
from espalier.prm.families.universal import UniversalPrm
from espalier.prm.families.value_guided import ValueGuided


class FamilyMatch(NamedTuple):
    """A family, and the user-readable reason for which it was chosen."""

    family: type[PrmFamily]
    reason: str

    @property
    def info(self) -> FamilyInfo:
        """Description of the family."""
        return self.family.info


@cache
def shipped() -> tuple[type[PrmFamily], ...]:
    """All families that come with Espalier, in order of detection."""
    specs = ("qwen2.5-math-prm", "reasonflux-prm", "skywork-o1-open-prm", "versaprm", "math-shepherd")
    read = (family_of(read_spec(Path(__file__).with_name(f"{name}.toml"))) for name in specs)
    qwen, reason_flux, skywork, versa, shepherd = read
    of_labels = qwen, reason_flux, skywork, RlhFlow, versa, shepherd, TokenClassifier, Pure, OutcomeModel
    return (*of_labels, ValueGuided, UniversalPrm, eurus.EurusPrm, ThinkPrm, YesNo, Judge, Likelihood, LikelihoodRatio)


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
        return FamilyMatch(eurus.EurusPrm, "a reference model is given")
    for known in shipped():
        if known.detect and known.info.fits(checkpoint.architecture) and (reason := known.detect(checkpoint)):
            return FamilyMatch(known, reason)
    raise CheckpointError(_unknown(checkpoint))


def families_of(architecture: str) -> tuple[str, ...]:
    """Names of the families whose checkpoints may have this class."""
    return tuple(family.info.name for family in shipped() if family.info.fits(architecture))


def known_classes() -> tuple[str, ...]:
    """Classes whose checkpoints are detected as verifiers without a flag; a leading `*` matches any prefix."""
    known = (family.info.architectures for family in shipped() if family.detect)
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
    kind = identify(checkpoint, family, reference is not None).family
    if kind is eurus.EurusPrm:
        loaded: PrmFamily = eurus.load(checkpoint, reference, dtype, device)
    elif reference is not None:
        raise CheckpointError(f"{kind.info.name} has no reference model; leave out --verifier-reference")
    else:
        loaded = kind.load(checkpoint, dtype, device)
    _require_layout_embedded(checkpoint, loaded)
    return loaded


def verifier_of_generator(checkpoint: Checkpoint, generator: Model, family: str | None = None) -> AskedFamily[Any]:
    """A generator that is asked about its own steps, on the same weights, with a KV of its own.

    Args:
        checkpoint: the generator's.
        generator: its model.
        family: name of a family that asks; None for `yes-no`.

    Raises:
        CheckpointError: it cannot be asked, or the family asks nothing.
    """
    family_of_generator = asking(family).of_generator(checkpoint, generator)
    _require_layout_embedded(checkpoint, family_of_generator)
    return family_of_generator


def asking(name: str | None) -> type[AskedFamily[Any]]:
    """A family that can ask a generator about its own steps, on the same weights; `yes-no` without a name.

    Raises:
        CheckpointError: the family asks nothing.
    """
    if issubclass(family := _named(name or YesNo.info.name), AskedFamily):
        return family
    known = ", ".join(each.info.name for each in shipped() if issubclass(each, AskedFamily))
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


def _given(family: str) -> type[PrmFamily]:
    """A verifier family, as `--verifier-family` names it."""
    path = Path(family).expanduser()
    if family.endswith(".toml"):
        return family_of(read_spec(path))
    return learned_in(path) if path.is_dir() else _named(family)


def _named(name: str) -> type[PrmFamily]:
    known = {family.info.name: family for family in shipped()}
    if name in known:
        return known[name]
    raise CheckpointError(
        f"--verifier-family {name!r} is none of {', '.join(known)}, no folder, and no spec file ending in .toml"
        + nearest(name, known)
    )


def _unknown(checkpoint: Checkpoint) -> str:
    """The error message for a checkpoint whose family cannot be detected."""
    name = checkpoint.architecture
    if name.endswith("ForCausalLM"):
        return (
            f"{checkpoint.folder} is a {name}, the class of generators and of the verifiers "
            f"{', '.join(families_of(name))}; nothing in it says which. Give a generator to --generator, a verifier "
            f"with its --verifier-family ({YesNo.info.name} asks any instruction-tuned model) or a spec file"
        )
    named = ", ".join(family.info.name for family in shipped() if not family.detect)
    return (
        f"{checkpoint.folder} is a {name or 'model without architecture'}; verifiers known by their class are "
        f"{', '.join(known_classes())}. Name another family with --verifier-family ({named}), or describe it in a "
        "spec file and give that"
    )
