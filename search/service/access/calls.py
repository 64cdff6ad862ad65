"""One call from its arrival to its answer, and the log of them."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from espalier.search.fairness import Account
from espalier.search.service.access.callers import Caller
from espalier.search.service.settings import LogFormat

if TYPE_CHECKING:
    from espalier.search.run.executor import AnyResult  # clients read this module and need no model

log = logging.getLogger("espalier.access")

REQUEST_ID = "x-request-id"
"""HTTP header and gRPC metadata that carry the caller's id of a call; the server sends it back."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_REFUSALS_A_SECOND = 10
"""Lines a second about calls that never became a search; a flood of them must not fill a disk."""


@dataclass(slots=True)
class Call:
    """Record of one call, filled in as it goes on.

    Attributes:
        method: what is called, such as `SolveProblem` or `POST /v1/chat/completions`.
        request_id: the caller's own id of the call, else a new one; it is echoed.
        traceparent: the caller's place in a trace, as W3C Trace Context writes it; None without one.
        connection: that it came over, by the address and port of its other end.
        caller: None until identified.
        code: the google.rpc code that it ended with.
        reason: why it failed; see `errors.Failure`. None if it did not.
        result: the search's result; None without one.
        started: monotonic time of its arrival, in seconds.
        seconds: how long it took.
        span: of a trace, if there is one; for `observability.tracing` alone.
    """

    method: str
    request_id: str
    traceparent: str | None = None
    connection: str = ""
    caller: Caller | None = None
    code: str = "OK"
    reason: str | None = None
    result: "AnyResult | None" = None
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    span: Any = None

    @property
    def account(self) -> Account:
        """The account that shares are counted for: the caller's login, or without one its host and the connection."""
        assert self.caller is not None
        return Account(self.caller.name, "" if self.caller.login else self.connection)

    def fail(self, code: str, reason: str) -> None:
        """Record how it failed; see `errors.Failure`."""
        self.code, self.reason = code, reason


@contextmanager
def recorded(call: Call, on_end: Callable[[Call], None] | None) -> Iterator[None]:
    """Record that a call is cancelled if it is, and its end, and tell `on_end` of that."""
    try:
        yield
    except asyncio.CancelledError:
        call.code = "CANCELLED"
        raise
    finally:
        call.seconds = time.monotonic() - call.started
        if on_end:
            on_end(call)


def request_id_of(given: str | None) -> str:
    """Return the caller's id of a call if it is printable ASCII of at most 128 characters, else a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class AccessLog:
    """Writes one line for each call, without any text of problems or answers; an `Observer`."""

    def __init__(self, form: LogFormat, clock: Callable[[], float] = time.monotonic) -> None:
        self._form = form
        self._clock = clock
        self._second = -1
        self._refused = 0
        self._left_out = 0

    def call_ended(self, call: Call) -> None:
        """Write the line of a call that is over."""
        if call.result is None and call.code not in ("OK", "CANCELLED") and self._floods():
            self._left_out += 1
            return
        fields = _fields(call)
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        if self._form is LogFormat.JSON:
            log.info("%s", json.dumps({"time": time.time(), **fields}))
        else:
            fields["caller"] = _one_word(fields["caller"])
            log.info("%s", " ".join(f"{name}={value}" for name, value in fields.items()))

    def search_ended(self, call: Call, search: object) -> None:
        """Write nothing: the line of the call tells of its search."""

    def _floods(self) -> bool:
        second = int(self._clock())
        if second != self._second:
            self._second, self._refused = second, 0
        self._refused += 1
        return self._refused > _REFUSALS_A_SECOND


def _one_word(name: str | None) -> str | None:
    """A name from outside as it stands if it cannot be taken for more than itself, else in quotes and escaped."""
    plain = name is None or (name.isprintable() and not set(name) & {" ", '"', "="})
    return name if plain else json.dumps(name)


def _fields(call: Call) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": call.request_id,
        "caller": call.caller.name if call.caller else None,
        "method": call.method,
        "code": call.code,
        "seconds": round(call.seconds, 4),
    }
    if (result := call.result) is not None:
        usage = result.usage
        fields |= {
            "search_id": result.search_id,
            "algorithm": str(result.configuration.algorithm),
            "stop_reason": str(result.stop_reason),
            "queue_seconds": round(usage.queue_seconds, 4),
            "search_seconds": round(usage.seconds, 4),
            "generated_tokens": usage.generated_tokens,
            "verifier_tokens": usage.verifier_tokens,
        }
    return fields
