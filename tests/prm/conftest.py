"""Checkpoints of every family, and verifiers over them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import write_families

from espalier.engine.engine import Engine
from espalier.engine.models.checkpoint import Checkpoint
from espalier.prm.base import PrmFamily
from espalier.prm.families import load_verifier
from espalier.prm.verifier import Verifier


@pytest.fixture(autouse=True)
def no_helpers(one_thread: None) -> None:
    """Every test of this folder computes on one thread."""


@pytest.fixture(scope="session")
def family_folders(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small random checkpoints by family; read-only."""
    return write_families(tmp_path_factory.mktemp("families"), tiny_checkpoints)


@pytest.fixture(scope="session")
def load_family(family_folders: dict[str, Path]) -> Callable[[str], PrmFamily]:
    """Loads a family's tiny checkpoint by name, each once."""

    @cache
    def load(name: str) -> PrmFamily:
        reference = Checkpoint(family_folders["eurus-reference"]) if name == "eurus-prm" else None
        family = "token-classifier" if name == "chat-classifier" else name
        return load_verifier(Checkpoint(family_folders[name]), torch.float32, "cpu", family, reference)

    return load


@pytest.fixture
def verifier_of(
    load_family: Callable[[str], PrmFamily], make_engine: Callable[..., Engine]
) -> Callable[..., tuple[Engine, Verifier]]:
    """An engine and a verifier of a named family, or of a given one."""

    def make(family: str | PrmFamily, full_rescore: bool = False, **options: Any) -> tuple[Engine, Verifier]:
        family = load_family(family) if isinstance(family, str) else family
        engine = make_engine("qwen2-tied", family.model, **{"kv_memory_bytes": 2**23, **options})
        return engine, Verifier(family, full_rescore)

    return make
