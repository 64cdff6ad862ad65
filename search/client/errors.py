"""Errors of the clients, the conversion of failed calls to them, and when such a call is tried again."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from espalier.engine.errors import EspalierError, InvalidRequestError, MisuseError, Violation


class ConnectionSettingsError(EspalierError):
    """The endpoint, token, certificates or request id given to a client cannot be used."""


class ServiceError(EspalierError):
    """The server refused the call, failed, or could not be reached; the message says which and what to do.

    Attributes:
        code: name of the gRPC status code, such as `UNAVAILABLE`.
        retry_seconds: delay after which the server suggests a retry; None without a suggestion.
        request_id: id of the call, which the server's log carries too; empty without one.
    """

    def __init__(self, code: str, text: str, retry_seconds: float | None = None, request_id: str = "") -> None:
        self.code = code
        self.retry_seconds = retry_seconds
        self.request_id = request_id
        super().__init__(text)


_FAILED_WRITE = "Internal error from Core"
"""gRPC's words for a write to a call that has ended; it then forgets the server's status, even one that has come."""


def cancelled(request_id: str = "") -> ServiceError:
    """Return the error of a call that was cancelled on this side."""
    return ServiceError("CANCELLED", "the search was cancelled", request_id=request_id)


def typed_error(error: Exception, endpoint: str, request_id: str = "") -> EspalierError:
    """Convert what a call raised: an `RpcError`, or the ValueError of a message that this version cannot read."""
    if isinstance(error, ValueError):
        text = f"the server at {endpoint} speaks a newer espalier.v1: {error}"
        return ServiceError("UNKNOWN", text, request_id=request_id)
    call: Any = error  # gRPC's errors are calls: they have a code, details and metadata
    violations, retry_seconds, from_server = _details(call)
    if violations:
        return InvalidRequestError(violations)
    code: grpc.StatusCode = call.code()
    text = _text(code, call.details() or "", endpoint, from_server)
    if code is grpc.StatusCode.INTERNAL and call.details() == _FAILED_WRITE:
        code, text = grpc.StatusCode.UNAVAILABLE, f"the server at {endpoint} ended the call while it was written to"
    return ServiceError(code.name, text, retry_seconds, request_id)


def _text(code: grpc.StatusCode, details: str, endpoint: str, from_server: bool) -> str:
    match code:
        case grpc.StatusCode.UNAVAILABLE if not from_server:
            return _unreachable(details, endpoint)
        case grpc.StatusCode.DEADLINE_EXCEEDED if not from_server:
            return f"no result from {endpoint} within the timeout; allow more time or ask for a smaller search"
        case grpc.StatusCode.CANCELLED:
            return "the search was cancelled"
        case grpc.StatusCode.UNIMPLEMENTED if not from_server:
            return f"the server at {endpoint} does not offer espalier.v1; is it an Espalier server?"
    return details or f"the call failed with {code.name}"


def _unreachable(details: str, endpoint: str) -> str:
    """Explain a failed connection by gRPC's text; it has no codes for them."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return (
            f"the certificate of the server at {endpoint} is by no authority that is trusted here; give a file with "
            "its authority (--tls-ca)"
        )
    if "Hostname Verification" in details:
        return f"the certificate of the server at {endpoint} is for another name; give that name (--tls-server-name)"
    if "failed to connect" in details and ("handshake failed" in details or "Socket closed" in details):
        return (
            f"the server at {endpoint} ends each connection: either one of the two sides uses TLS and the other does "
            "not, or the server asks for a client's certificate (--client-certificate) by an authority that it trusts"
        )
    if "failed to connect" in details:
        return f"no server at {endpoint}; start one with: espalier serve"
    if "resolving" in details or "DNS" in details or "name resol" in details.lower():
        return f"cannot reach the server at {endpoint}: no address is known for that name"
    return f"lost the connection to the server at {endpoint}"


def _details(call: Any) -> tuple[list[Violation], float | None, bool]:
    """Read a failed call's status: its violations, its retry delay in seconds, and whether the server set details."""
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # details that contradict the status do not come from our server
        status = None
    if status is None:
        return [], None, False
    violations: list[Violation] = []
    retry_seconds = None
    for packed in status.details:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if packed.Unpack(bad_request):
            violations += [Violation(v.field, v.description) for v in bad_request.field_violations]
        elif packed.Unpack(retry_info):
            retry_seconds = retry_info.retry_delay.ToNanoseconds() / 1e9
    return violations, retry_seconds, True


# ---- retries


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Policy of retries.

    A search changes nothing on the server, and the same request with the same seed gives the same answer, so trying it
    again is safe. What is wrong with a request (INVALID_ARGUMENT) stays wrong and is never tried again.

    Attributes:
        attempts: of one call, the first included.
        first_delay: seconds before the second attempt; doubles with each further one.
        largest_delay: limit of that, in seconds; a server may ask for more.
        jitter: share of a delay by which it may be longer, at random, so that clients do not come back all at once.
        codes: names of the gRPC status codes that are tried again.
        codes_with_delay: those that are tried again only if the server says when (RetryInfo).

    Raises:
        MisuseError: a value is out of range, or a code would never succeed.
    """

    attempts: int = 4
    first_delay: float = 0.2
    largest_delay: float = 10.0
    jitter: float = 0.5
    codes: frozenset[str] = frozenset({"UNAVAILABLE"})
    codes_with_delay: frozenset[str] = frozenset({"RESOURCE_EXHAUSTED"})

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise MisuseError(f"attempts must be at least 1, is {self.attempts}")
        for name in ("first_delay", "largest_delay", "jitter"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise MisuseError(f"{name} must be at least 0, is {value}")
        if "INVALID_ARGUMENT" in self.codes | self.codes_with_delay:
            raise MisuseError("INVALID_ARGUMENT is never tried again: the same request is refused again")

    def delay(self, attempt: int, error: EspalierError) -> float | None:
        """Return the seconds to wait after a failed attempt, counted from 1, without jitter; None to give up."""
        if attempt >= self.attempts or not isinstance(error, ServiceError):
            return None
        asked = error.retry_seconds
        if error.code not in self.codes and (error.code not in self.codes_with_delay or asked is None):
            return None
        return max(min(self.largest_delay, self.first_delay * 2.0 ** min(attempt - 1, 64)), asked or 0.0)


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(attempts=1)


class Attempts:
    """The attempts of one call, which share its deadline."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout: float | None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Start the deadline: `timeout` seconds from now, or none."""
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self._end = None if timeout is None else clock() + timeout
        self._before: EspalierError | None = None
        self.failed = 0

    def left(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    def delay_after(self, error: EspalierError) -> float:
        """Count a failed attempt, and return the seconds to wait before the next one.

        Raises:
            EspalierError: `error`, if there is no next attempt or it would begin after the deadline. Its cause is the
                error of the attempt before.
        """
        self.failed += 1
        delay, left = self._policy.delay(self.failed, error), self.left()
        if delay is not None:
            delay *= 1 + self._policy.jitter * self._draw()
            if left is None or delay < left:
                self._before = error
                return delay
        raise error from self._before
