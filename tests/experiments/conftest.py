"""A grader for all tests of a session, and the command line called in this process."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from espalier.search.grading.math_verify import DEFAULT_MEMORY_BYTES, Grader


@pytest.fixture(autouse=True)
def no_helpers(one_thread: None) -> None:
    """Every test of this folder computes on one thread."""


class Ran(NamedTuple):
    """What a command left: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    """One grader; its child takes most of a second to start."""
    with Grader() as grader:
        yield grader


class _OpenGrader:
    """A grader that stays open when a command is done with it."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grader, name)

    def __enter__(self) -> "_OpenGrader":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def espalier(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], grader: Grader) -> Callable[..., Ran]:
    """Calls the command line; whatever it lets out but SystemExit fails the test.

    Commands that grade as usual share the session's grader, whose child need not start with each of them.
    """
    from espalier.experiments.cli import main as cli
    from espalier.experiments.runs import graders

    make = graders.make_grader

    def make_grader(name: str = graders.DEFAULT, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> Any:
        usual = name == graders.DEFAULT and memory_bytes == DEFAULT_MEMORY_BYTES
        return _OpenGrader(grader) if usual else make(name, memory_bytes)

    monkeypatch.setattr(graders, "make_grader", make_grader)
    for name in [name for name in os.environ if name.startswith("ESPALIER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    logging.getLogger("espalier").setLevel(logging.NOTSET)  # which `serve`, called before in this process, has changed

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["espalier", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        return Ran(code, *capsys.readouterr())

    return call
