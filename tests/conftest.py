"""Fixtures for every layer; heavy imports wait until a test asks for them."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from random_examples import register_profiles

if TYPE_CHECKING:
    from espalier.engine.engine import Engine
    from espalier.engine.models.model import Model
    from espalier.prm.base import PrmFamily
    from espalier.search.run.orchestrator import Orchestrator
    from espalier.search.voting.equivalence import MathVerify

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for GPUs run here too; read when triton is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's own; an engine's compiled parts share theirs, as everywhere

register_profiles()  # others in every run with `--hypothesis-profile=default`


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests on Ray first: no other worker takes any of what one begins with, so that one cluster serves all."""
    items.sort(key=lambda item: item.path.name != "test_experiments_ray.py")


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small random checkpoints, by name; see `tiny_models`. Read-only: copy one to damage it."""
    from tiny_models import write_all

    return write_all(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def copy_of(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies a tiny checkpoint's folder, by name, to be changed or damaged."""

    def copy(name: str) -> Path:
        return shutil.copytree(tiny_checkpoints[name], tmp_path / name, dirs_exist_ok=True)

    return copy


@pytest.fixture(scope="session")
def load_model(tiny_checkpoints: dict[str, Path]) -> Callable[[str], "Model"]:
    """Loads a tiny generator, or the model of a tiny verifier, by name; each once."""
    from functools import cache

    import torch

    from espalier.engine.models.checkpoint import Checkpoint
    from espalier.engine.models.model import load_generator
    from espalier.prm.families import load_verifier

    @cache
    def load(name: str) -> "Model":
        checkpoint = Checkpoint(tiny_checkpoints[name])
        if checkpoint.architecture.endswith("ForCausalLM"):
            return load_generator(checkpoint, torch.float32, "cpu")
        return load_verifier(checkpoint, torch.float32, "cpu").model

    return load


@pytest.fixture
def make_engine(load_model: Callable[[str], "Model"]) -> Iterator[Callable[..., "Engine"]]:
    """Makes engines of named or given models; after the test each of them must be consistent and hold nothing."""
    from espalier.engine.engine import Engine, EngineSettings

    made: list[Engine] = []

    def make(
        generator: "str | Model" = "qwen2-untied", verifier: "str | Model | None" = None, **options: Any
    ) -> "Engine":
        models = {"generator": load_model(generator) if isinstance(generator, str) else generator}
        if verifier is not None:
            models["verifier"] = load_model(verifier) if isinstance(verifier, str) else verifier
        if draft := options.pop("draft", None):
            models["draft"] = load_model(draft) if isinstance(draft, str) else draft
        policy = options.pop("role_policy", None)
        settings = EngineSettings(**{"kv_memory_bytes": 2**21, "block_size": 4, **options})
        made.append(Engine(models, settings, policy))
        return made[-1]

    yield make
    for engine in made:
        engine.check_drained()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread: tiny models are done before a helper comes. Tests of kernels and of the engine use all."""
    from espalier.kernels.cpu import threads

    before = threads.num_threads()
    threads.set_threads(1)
    yield
    threads.set_threads(before)


@pytest.fixture(scope="session")
def family_of(tiny_checkpoints: dict[str, Path]) -> Callable[[str | Path], "PrmFamily"]:
    """Loads a tiny verifier by name or folder; those with a name once."""
    from functools import cache

    import torch

    from espalier.engine.models.checkpoint import Checkpoint
    from espalier.prm.families import load_verifier

    def load(folder: Path) -> "PrmFamily":
        return load_verifier(Checkpoint(folder), torch.float32, "cpu")

    named = cache(lambda name: load(tiny_checkpoints[name]))
    return lambda verifier: named(verifier) if isinstance(verifier, str) else load(verifier)


@pytest.fixture
def make_orchestrator(
    make_engine: Callable[..., "Engine"], family_of: "Callable[[str | Path], PrmFamily]"
) -> Callable[..., "Orchestrator"]:
    """Makes orchestrators over tiny checkpoints; after the test their engines must hold nothing."""
    from espalier.prm.verifier import Verifier
    from espalier.search.run.generator import Generator
    from espalier.search.run.orchestrator import Orchestrator

    def make(
        generator: "str | Model" = "talker",
        verifier: str | Path | None = "classifier",
        max_running: int = 64,
        equivalence: "MathVerify | None" = None,
        **options: Any,
    ) -> "Orchestrator":
        family = family_of(verifier) if verifier else None
        engine = make_engine(generator, family.model if family else None, **options)
        talker = Generator(engine, "", {"temperature": 1.0, "top_p": 1.0})
        scorer = Verifier(family) if family else None
        return Orchestrator(engine, talker, scorer, max_running=max_running, equivalence=equivalence)

    return make
