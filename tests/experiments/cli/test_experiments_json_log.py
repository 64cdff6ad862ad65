"""With --log-format json, standard error is lines of JSON, whoever writes there."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.experiments.cli.operating.json_log import stderr_as_json


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leaves the root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]


def test_whatever_is_written_is_json(capfd):
    with stderr_as_json():
        os.write(2, b"E0000 handshake failed\n")  # as a library in C does
        with open(2, "w", closefd=False) as stream:
            print("plain", file=stream)
        subprocess.run([sys.executable, "-S", "-c", "import sys; sys.stderr.write('of a child\\n')"], check=True)
        os.write(2, b'{"a": 1}\n[1]\n\xff and half a line')
    lines = written(capfd)
    assert {"a": 1} in lines
    text = "\n".join(line["message"] for line in lines if "message" in line)
    for said in ("E0000 handshake failed", "plain", "of a child", "[1]", "\\xff and half a line"):
        assert said in text
    assert all(line["logger"] == "stderr" and line["time"] > 0 for line in lines if "message" in line)
    os.write(2, b"plain again\n")
    assert capfd.readouterr().err == "plain again\n"


def test_the_log_has_level_logger_and_traceback(capfd):
    with stderr_as_json():
        logging.getLogger("espalier.service").warning("is reachable from %s", "everywhere")
        logging.getLogger("espalier.access").warning("%s", json.dumps({"method": "Solve"}))
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("other").exception("it failed")
    first, call, failed = written(capfd)
    assert (first["level"], first["logger"]) == ("WARNING", "espalier.service")
    assert first["message"] == "is reachable from everywhere"
    assert call == {"method": "Solve"}
    assert failed["exception"].startswith("Traceback")
    assert failed["exception"].endswith("ValueError: boom")


def test_lines_that_are_written_at_once_are_one_message(capfd):
    with stderr_as_json():
        os.write(2, b"Traceback:\n  one\n  two\n")
    assert [line["message"] for line in written(capfd)] == ["Traceback:\n  one\n  two"]


def test_it_ends_early_before_a_hard_exit(capfd):
    with stderr_as_json() as end:
        os.write(2, b"last words")
        end()
        assert [line["message"] for line in written(capfd)] == ["last words"]


def test_an_error_of_serve_is_json_too():
    command = [Path(sys.executable).with_name("espalier"), "serve", "--log-format", "json", "--callers", "no-such.toml"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = [json.loads(line) for line in ran.stderr.splitlines()]
    assert line["message"].startswith("error: --callers no-such.toml: cannot be read")
