"""The program of the process that renders chat templates: a line of JSON for each request, and one for each answer.

A template comes from whoever made the checkpoint, and Jinja's sandbox bounds neither time nor memory: nested loops,
`'a' * 10**10`, a macro that calls itself, lists that hold one another. A process of its own has limits that no
expression gets around: CPU seconds for each prompt, beyond which the system ends it, and memory.

It imports nothing but Jinja and the standard library: it starts in about 60 ms and answers in about 60 us.
"""

import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
from jinja2.ext import Extension
from jinja2.parser import Parser

MAX_REASON = 1000
"""Characters of an error that are passed on."""


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` around what the assistant says, for training: rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """Read the block; see `Extension`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class AbsentToken(jinja2.Undefined):
    """A special token that the tokenizer lacks: not defined, empty as text, and nothing when added to text."""

    __slots__ = ()

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__


class PlainNamespace(jinja2.utils.Namespace):
    """`namespace()` without names that begin with an underscore, which lead to Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *rest = args
        for name in (held := dict(*rest, **attributes)):
            _require_plain(name)
        jinja2.utils.Namespace.__init__(self, held)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain(name)
        super().__setitem__(name, value)


def _require_plain(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set the name {name!r}")


class PlainDict:
    """`dict()` without the type's own attributes."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        """`dict()`."""
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """`dict.fromkeys`."""
        return dict.fromkeys(*args)


def refuse(message: str) -> None:
    """`raise_exception()` of templates."""
    raise jinja2.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, which unlike Jinja's own escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def compiled(source: str, now: str) -> jinja2.Template:
    """A template with the tags, filters and functions that transformers 5 gives it.

    Args:
        source: the template.
        now: what `strftime_now` takes for the present time, in ISO's format.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": datetime.fromisoformat(now).strftime,
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return environment.from_string(source)


def render(source: str, now: str, variables: dict[str, Any], absent: list[str]) -> str:
    """The prompt.

    Args:
        source: the template.
        now: see `compiled`.
        variables: of the template, by name.
        absent: names of special tokens that the tokenizer lacks.
    """
    missing = {name: AbsentToken(name=name) for name in absent}
    return compiled(source, now).render(missing | variables)


def answer(request: dict[str, Any], seconds: float, max_characters: int) -> dict[str, str]:
    """Render one request: `text`, or `failed` with the reason, or `limit` with the one that was reached."""
    _limit_time(seconds)
    try:
        text = render(**request)
    except MemoryError:
        return {"limit": "memory"}  # the one who asked knows how much
    except jinja2.TemplateSyntaxError as error:
        return {"failed": f"line {error.lineno}: {error.message}"[:MAX_REASON]}
    except jinja2.TemplateError as error:
        return {"failed": str(error)[:MAX_REASON]}
    except Exception as error:  # whatever an expression of the template raises
        return {"failed": f"{type(error).__name__}: {error}"[:MAX_REASON]}
    finally:
        _limit_time(0)
    return {"text": text} if len(text) <= max_characters else {"limit": f"more than {max_characters:,} characters"}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        replies.write(json.dumps(answer(**json.loads(line))).encode() + b"\n")
        replies.flush()


def _limit_time(seconds: float) -> None:
    """Have the system end this process after so many seconds of computing; 0 for never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(more: int) -> None:
    """Limit this process's memory to `more` bytes beyond what it has, where the system can."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more if most < 0 else min(mapped + more, most), most))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_memory(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)
