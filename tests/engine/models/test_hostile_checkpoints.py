"""Every hostile checkpoint ends in an error that names its file and field, in a warning, or in the good one's text."""

import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_driver import generate, release
from gguf_files import write_gguf
from hostile_changes import Hostile
from hostile_checkpoints import CASES
from hostile_gguf import CASES as GGUF_CASES
from hostile_gguf import HostileGguf, Parts, take_apart, write

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.errors import CheckpointError
from espalier.engine.models.chat import template
from espalier.engine.models.chat.turns import system_prompt_of
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.engine.work import Sampling
from espalier.experiments.planning.inspection import inspect_checkpoint
from espalier.prm.families import load_verifier
from espalier.search.run.generator import Generator

SECONDS = 20
"""Beyond this a case hangs."""
MEMORY = 2 * 2**30
"""Address space that a case may take."""


@contextmanager
def within_limits() -> Iterator[None]:
    """Fail, and not hang or fill the memory, where a case takes too much of either."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, hard))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(scope="module", autouse=True)
def hurried() -> Iterator[None]:
    """Templates are stopped after a part of their time."""
    patch = pytest.MonkeyPatch()
    patch.setattr(template, "MAX_CPU_SECONDS", 0.2)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def texts(tiny_checkpoints: dict[str, Path]) -> Callable[[Path], str]:
    def text(folder: Path) -> str:
        """What a generator's first greedy tokens say after its prompt, as ids."""
        checkpoint = Checkpoint(folder)
        engine = Engine({"generator": load_generator(checkpoint, torch.float32, "cpu")}, EngineSettings(2**21, 4))
        settings = checkpoint.files.optional_json("generation_config.json")
        ids = Generator(engine, system_prompt_of(checkpoint), settings).prompt_ids("2+2?")
        sequence = engine.open("generator", ids)
        (done,) = generate(engine, sequence, Sampling(temperature=0.0), tokens=8, in_place=True, delimiter="")
        release(engine, sequence)
        return f"{ids} {done.token_ids} {done.text}"

    return text


def use(case: Hostile, folder: Path, text: Callable[[Path], str]) -> str | None:
    """Load a checkpoint as what it is, and use it."""
    if case.base == "qwen2-tied":
        return text(folder)
    load_verifier(Checkpoint(folder), torch.float32, "cpu").prompt_ids("2+2?")
    return None


def complaint(act: Callable[[], object]) -> str:
    """The text of the error that ends `act`."""
    with within_limits(), pytest.raises(CheckpointError) as raised:
        act()
    return str(raised.value)


def judge(case: Hostile | HostileGguf, said: list[str]) -> None:
    """Check what errors or warnings say: all that the case names; nothing, where it is harmless."""
    if case.outcome == "same":
        assert not any(said)
    for each in said:
        assert all(part in each for part in case.named), each


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits are Linux's")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_hostile_checkpoint_is_named_or_harmless(
    case: Hostile,
    tiny_checkpoints: dict[str, Path],
    texts: Callable[[Path], str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    folder = Path(shutil.copytree(tiny_checkpoints[case.base], tmp_path / "hostile"))
    case.damage(folder)
    if case.outcome == "refused":
        said = [complaint(lambda: use(case, folder, texts))]
        if not case.values:
            said.append(complaint(lambda: inspect_checkpoint(str(folder), torch.float32)))
    else:
        with within_limits():
            text, warnings = use(case, folder, texts), inspect_checkpoint(str(folder), torch.float32).warnings
        said = [caplog.text, *([] if case.values else ["\n".join(warnings)])]
        assert case.outcome == "warned" or text == texts(tiny_checkpoints[case.base])
    judge(case, said)


@pytest.fixture(scope="module")
def good_gguf(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_checkpoints["qwen2-tied"], tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture
def parts(good_gguf: Path) -> Parts:
    return take_apart(good_gguf)


def test_a_gguf_file_put_together_again_is_the_same(parts: Parts, good_gguf: Path, tmp_path: Path):
    write(parts, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == good_gguf.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits are Linux's")
@pytest.mark.parametrize("case", GGUF_CASES, ids=[case.name for case in GGUF_CASES])
def test_a_hostile_gguf_file_is_named_or_harmless(
    case: HostileGguf,
    parts: Parts,
    good_gguf: Path,
    texts: Callable[[Path], str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    case.damage(parts)
    write(parts, file := tmp_path / "model.gguf")
    if case.outcome == "refused":
        judge(case, [complaint(lambda: texts(file))])
        return
    with within_limits():
        assert texts(file) == texts(good_gguf)
    judge(case, [caplog.text])


def test_there_are_enough_of_them():
    assert len(CASES) >= 134
    assert len(GGUF_CASES) >= 54
    assert all(len({case.name for case in cases}) == len(cases) for cases in (CASES, GGUF_CASES))
