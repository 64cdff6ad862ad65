"""A checkpoint's chat template, rendered within limits of time, memory and length."""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Never

from espalier.engine.errors import CheckpointError, TemplateLimitError

MAX_TEMPLATE_CHARACTERS = 2**20
MAX_PROMPT_CHARACTERS = 2**24
MAX_CPU_SECONDS = 2.0
"""Computing that one prompt may take; published templates take a millisecond for a conversation of 128 KiB."""
MAX_MEMORY = 512 * 2**20
"""Memory that rendering may take, in bytes."""
_MAX_WAIT_SECONDS = 60
"""Seconds that an answer may take on a machine that is busy with other things."""
_NOW = "2024-07-26"
"""The present for templates that ask for it (Llama 3.x): a fixed date keeps prompts the same tomorrow."""
_DATE_STRING = "26 Jul 2024"
"""The same, for templates that take it as a variable."""
_PROGRAM = Path(__file__).with_name("worker.py")


class TemplateFailedError(Exception):
    """An error that a template raised, in its own words."""


class ChatTemplate:
    """One template.

    Attributes:
        place: the file, and the field of it, that the template stands in.
        source: its text.
    """

    def __init__(self, source: str, place: str) -> None:
        """Take a template.

        Raises:
            CheckpointError: it is longer than any template.
        """
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise CheckpointError(
                f"{place}: the chat template has {len(source):,} characters, more than {MAX_TEMPLATE_CHARACTERS:,}"
            )
        self.place = place
        self.source = source
        _process.start()

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str | None],
        /,  # a caller's variables may have any name
        **variables: object,
    ) -> str:
        """Render messages.

        Args:
            messages: each with `role` and `content`.
            add_generation_prompt: end with the text that opens the assistant's turn.
            special_tokens: `bos_token` and others, by name; None for those that the tokenizer lacks.
            variables: further variables of the template; JSON's types.

        Raises:
            TemplateLimitError: it takes more time or memory than `MAX_CPU_SECONDS` and `MAX_MEMORY`, or the prompt is
                longer than `MAX_PROMPT_CHARACTERS`.
            CheckpointError: it failed or refused the messages; its cause is the `TemplateFailedError`.
        """
        known = {name: token for name, token in special_tokens.items() if token is not None}
        given = {"date_string": _DATE_STRING, "tools": None, "documents": None, **known, **variables}
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        absent = [name for name, token in special_tokens.items() if token is None]
        asked = {"source": self.source, "now": _NOW, "variables": given, "absent": absent}
        limits = {"seconds": MAX_CPU_SECONDS, "max_characters": MAX_PROMPT_CHARACTERS}
        reply = _process.ask({"request": asked, **limits})
        if "limit" in reply:
            raise TemplateLimitError(f"{self.place}: the chat template is over a limit: {reply['limit']}")
        if "failed" in reply:
            failure = TemplateFailedError(reply["failed"])
            raise CheckpointError(f"{self.place}: the chat template failed: {failure}") from failure
        return reply["text"]


class _RenderingProcess:
    """The process that renders, one for all templates; started when first needed, and again whenever it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process without waiting for it, so that it is ready by the first prompt."""
        with self._lock, suppress(OSError):  # which `ask` tells
            self._started()

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        """The reply to a request; see `worker.answer`.

        Raises:
            TemplateLimitError: there was none for `_MAX_WAIT_SECONDS`.
            CheckpointError: the process cannot be started, or ends whatever it is asked.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            try:
                # What ended for another reason than this request (a signal, a lack of memory) is started once more.
                return self._reply(line) or self._reply(line) or self._failed("ends without an answer")
            except OSError as error:
                return self._failed(f"cannot be started: {error}")

    def close(self) -> None:
        """End the process."""
        if self._running:
            self._running.kill()
            self._running.communicate()
        self._running = None

    def forget(self) -> None:
        """Leave the process to the one that this one was forked from."""
        self.__init__()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._running is None or self._running.poll() is not None:
            self._running = subprocess.Popen(
                [sys.executable, "-P", "-S", str(_PROGRAM), str(MAX_MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        return self._running

    def _reply(self, line: bytes) -> dict[str, str] | None:
        """The reply to a request; None when the process ended without one."""
        process = self._started()
        assert process.stdin
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = json.loads(self._read_line(process))
        except (BrokenPipeError, EOFError):
            process.communicate()
            if process.returncode == -signal.SIGPROF:
                return {"limit": f"more than {MAX_CPU_SECONDS:g} s of computing"}
            return None
        except BaseException:
            self.close()  # a reply that nobody waited for would be taken for the next one
            raise
        if reply.get("limit") == "memory":  # what is left of it may not be enough for the next prompt
            self.close()
            return {"limit": f"more than {MAX_MEMORY // 2**20} MiB of memory"}
        return reply

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytearray:
        assert process.stdout
        line = bytearray()
        wait = select.poll()
        wait.register(process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            if not wait.poll(1000 * _MAX_WAIT_SECONDS):
                raise TemplateLimitError(f"a chat template was not rendered within {_MAX_WAIT_SECONDS} s")
            if not (part := os.read(process.stdout.fileno(), 2**20)):
                raise EOFError
            line += part
        return line

    def _failed(self, why: str) -> Never:
        raise CheckpointError(f"the process that renders chat templates ({sys.executable}, {_PROGRAM.name}) {why}")


_process = _RenderingProcess()
atexit.register(_process.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.forget)
