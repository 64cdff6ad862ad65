"""A checkpoint's chat template, rendered within limits of time, memory and length; and what it does not take.

What the template takes is rendered as it stands, wherever it stands. Where the template refuses it, or shows nothing of
it, the same is said in a way that templates take:

    messages of the system   those in front as one; those behind the first turn in the message of the user that
                             they stand beside; and where none is taken, all of them so
    calls of tools           an assistant's content as empty or null, arguments as objects or text; the same with ids of
                             nine letters and digits; then as JSON in the content
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
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
            most = f"{MAX_TEMPLATE_CHARACTERS:,}"
            raise CheckpointError(f"{place}: the chat template has {len(source):,} characters, more than {most}")
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


Messages = list[dict[str, Any]]

FOLDED = (
    "The chat template does not take messages of the system where they stand: they were written into the messages of "
    "the user beside them."
)
DROPPED = "The chat template shows no messages of the system."
CALLS_AS_TEXT = (
    "The chat template does not show calls of tools: they were written as JSON into what the assistant said."
)
_NOT_SHOWN = "it does not show what tools return"
_WITHOUT_TOOLS = "write what tools were asked and returned into messages of the assistant and the user"
_MARK = "Zq{}xkw"
"""A text that stands for another one, to find out whether a template shows that."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        text: the prompt.
        warnings: what the template did not take as it stood, whole sentences.
    """

    text: str
    warnings: tuple[str, ...] = ()


def render_conversation(
    render_chat: Callable[..., str],
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    /,
    **variables: Any,
) -> RenderedChat:
    """Render messages by the chat template; see the module.

    Args:
        render_chat: of the tokenizer; see `TextTokenizer.render_chat`.
        messages: each with `role` and `content`; an assistant's may have `tool_calls` as OpenAI's clients send them.
        add_generation_prompt: end with the text that opens the assistant's turn.
        variables: further variables of the template.

    Raises:
        TemplateLimitError: the template takes too much time or memory.
        CheckpointError: the template refuses the messages however they are arranged, or shows no results of tools.
    """

    def render(arranged: Messages) -> str:
        return render_chat(arranged, add_generation_prompt, **variables)

    given = [dict(message) for message in messages]
    with_tools = any(message["role"] == "tool" or message.get("tool_calls") for message in given)
    refused: CheckpointError | None = None
    rendered: RenderedChat | None = None
    for of_system, folded in _arrangements_of_system(given):
        for arranged, as_text in _arrangements_of_calls(of_system):
            try:
                text = render(arranged)
                lost = _lost(arranged, given, text, render)
            except TemplateLimitError:
                raise
            except CheckpointError as error:
                refused = error
                continue
            warnings = (*([FOLDED] if folded else []), *([CALLS_AS_TEXT] if as_text else []))
            if not lost:
                return RenderedChat(text, warnings)
            refused = None  # what the last arrangement lacks is what the template has against all of them
            if lost == {"system"} and rendered is None:  # it may show what the system says in no arrangement
                rendered = RenderedChat(text, (*warnings, DROPPED))
    if rendered:
        return rendered
    if with_tools:
        why = f"{refused.__cause__ if refused else _NOT_SHOWN}; {_WITHOUT_TOOLS}"
        raise CheckpointError(f"the chat template failed: {why}") from TemplateFailedError(why)
    assert refused, "a template that refuses nothing loses what the system says, and that is rendered"
    raise refused


def render_with_system(
    render_chat: Callable[..., str], system_prompt: str, messages: Sequence[Mapping[str, Any]], **switches: bool
) -> str:
    """Render messages through the chat template, behind a system message unless `system_prompt` is empty.

    If the template takes no system message (Mistral, Gemma), the system prompt is put before the first thing that the
    user says; see the module.

    Args:
        render_chat: of the tokenizer; see `TextTokenizer.render_chat`.
        system_prompt: text of the system message.
        messages: with a role and content each; one at least is the user's.
        switches: variables of the template.

    Raises:
        TemplateLimitError: the template takes too much time or memory.
        CheckpointError: the template rejects the messages without a system message too.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return render_conversation(render_chat, [*system, *messages], **switches).text


def leading(messages: Messages) -> Messages:
    """The messages of the system before the first turn."""
    return list(takewhile(lambda message: message["role"] == "system", messages))


def folded(messages: Messages, keep: int = 0) -> Messages:
    """Write messages of the system, but for the first `keep`, into those of the user beside them.

    Each goes before the message of the user that follows it, and behind an earlier one where none follows directly.
    """
    arranged, waiting = list[dict[str, Any]](), list[str]()
    for message in messages[keep:]:
        users = [each for each in arranged if each["role"] == "user"]
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user":
            arranged.append({**message, "content": _joined([*waiting, message["content"]])})
            waiting = []
        else:
            if users and waiting:
                users[-1]["content"], waiting = _joined([users[-1]["content"], *waiting]), []
            arranged.append(message)
    users = [each for each in arranged if each["role"] == "user"]
    if waiting and users:
        users[-1]["content"] = _joined([users[-1]["content"], *waiting])
    elif waiting:
        arranged.append({"role": "user", "content": _joined(waiting)})
    return [*messages[:keep], *arranged]


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, texts))


def _arrangements_of_system(messages: Messages) -> Iterator[tuple[Messages, bool]]:
    """Ways to say what the system says, and whether it is written into messages of the user."""
    yield messages, False
    front = leading(messages)
    joined = [{**front[0], "content": _joined([each["content"] for each in front])}] if front else []
    behind = [*joined, *messages[len(front) :]]
    if front and (len(front) > 1 or len(folded(behind, 1)) < len(behind)):
        yield folded(behind, keep=1), len(folded(behind, 1)) < len(behind)
    if any(message["role"] == "system" for message in messages):
        yield folded(messages), True


def _arrangements_of_calls(messages: Messages) -> Iterator[tuple[Messages, bool]]:
    """Ways to say what tools were called, and whether as text."""
    if not any(message.get("tool_calls") for message in messages):
        yield messages, False
        return
    for of_calls in (messages, _with_short_ids(messages)):
        for read in (_as_object, _as_text):
            for empty in ("", None):
                yield [_with_calls(message, read, empty) for message in of_calls], False
    yield [_calls_as_content(message) for message in messages], True


def _with_short_ids(messages: Messages) -> Messages:
    """Messages with ids of nine letters and digits, as some templates ask for; results have those of their calls."""
    ids = [call.get("id") for message in messages for call in message.get("tool_calls") or ()]
    short = {given: f"call{number:05d}" for number, given in enumerate(dict.fromkeys(ids))}
    changed = list[dict[str, Any]]()
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{**call, "id": short[call.get("id")]} for call in calls]}
        elif message.get("tool_call_id") in short:
            message = {**message, "tool_call_id": short[message["tool_call_id"]]}
        changed.append(message)
    return changed


def _with_calls(message: dict[str, Any], read: Callable[[Any], Any], empty: str | None) -> dict[str, Any]:
    if not (calls := message.get("tool_calls")):
        return message
    calls = [{**call, "function": {**call["function"], "arguments": read(_arguments(call))}} for call in calls]
    return {**message, "content": message["content"] or empty, "tool_calls": calls}


def _calls_as_content(message: dict[str, Any]) -> dict[str, Any]:
    if not (calls := message.get("tool_calls")):
        return message
    told = [{"name": call["function"]["name"], "arguments": _as_object(_arguments(call))} for call in calls]
    content = "\n".join([message["content"] or "", *(json.dumps(call, ensure_ascii=False) for call in told)])
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content.strip()}


def _arguments(call: Mapping[str, Any]) -> Any:
    return call["function"].get("arguments") or {}


def _as_object(arguments: Any) -> Any:
    """Arguments as templates that write them by `tojson` take them; text that is no object stays text."""
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _lost(messages: Messages, given: Messages, text: str, render: Callable[[Messages], str]) -> set[str]:
    """Parts that a rendered text does not show: `system` and `tool` for what they say, `call` for a tool's call.

    Messages of the user that are not `given` say what the system does. A text that stands in the prompt as often as in
    the messages is shown. What a template has changed, and names of tools, which may stand elsewhere, are looked for by
    marks in their places.
    """
    said = "\0".join(message["content"] or "" for message in messages)

    def unseen(content: str) -> bool:
        return bool(content) and text.count(content) < said.count(content)

    marked, marks = [dict(message) for message in messages], dict[str, str]()
    for message in marked:
        role = "system" if message["role"] == "user" and message not in given else message["role"]
        if role in ("system", "tool") and unseen((message["content"] or "").strip()):
            marks[mark := _MARK.format(len(marks))] = role
            message["content"] = mark
        calls = list[dict[str, Any]]()
        for call in message.get("tool_calls") or ():
            marks[mark := _MARK.format(len(marks))] = "call"
            calls.append({**call, "function": {**call["function"], "name": mark}})
        if calls:
            message["tool_calls"] = calls
    try:
        shown = render(marked) if marks else ""
    except TemplateLimitError:
        raise
    except CheckpointError:  # it looks into what it shows
        return set()
    return {what for mark, what in marks.items() if mark not in shown}
