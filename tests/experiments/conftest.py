"""A grader for all tests of a session, and the command line called in this process."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from espalier.search.voting.math_verify import Grader


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


@pytest.fixture
def espalier(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Calls the command line; whatever it lets out but SystemExit fails the test."""
    from espalier.experiments.cli import main as cli

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
