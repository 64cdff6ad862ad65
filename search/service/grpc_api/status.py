"""Translates failures to gRPC statuses with google.rpc details."""

from typing import Any

from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from espalier.engine.errors import Violation
from espalier.search.service.errors import Failure, cut

# Error metadata above 16 KiB would itself fail with RESOURCE_EXHAUSTED, so every part is limited.
VIOLATION_BYTES = 256
MAX_VIOLATIONS = 32


def status_of(failure: Failure) -> status_pb2.Status:
    """Return the status that a client sees."""
    status = status_pb2.Status(code=code_pb2.Code.Value(failure.code), message=failure.text)
    if failure.violations:
        fields = map(_field, failure.violations[:MAX_VIOLATIONS])
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=fields))
    if failure.retry_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(failure.retry_seconds * 1000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


async def abort(context: Any, failure: Failure, *metadata: tuple[str, str]) -> None:
    """End a call with the status of `failure`."""
    status: Any = rpc_status.to_status(status_of(failure))
    await context.abort(status.code, status.details, (*status.trailing_metadata, *metadata))


def _field(violation: Violation) -> error_details_pb2.BadRequest.FieldViolation:
    description = cut(violation.description, VIOLATION_BYTES)
    return error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=description)
