import logging

import pytest
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2

from espalier.engine.errors import (
    CheckpointError,
    InvalidRequestError,
    NoEmbeddingError,
    PoolExhaustedError,
    PoolTooSmallError,
    RequestTooLargeError,
    Violation,
)
from espalier.search.service.errors import (
    BusyError,
    MessageTooLargeError,
    NotAllowedError,
    NotReadyError,
    QuotaError,
    SearchTimeoutError,
    UnauthenticatedError,
    cut,
    failure_of,
    in_fields,
)
from espalier.search.service.grpc_api.servicer import status_of
from espalier.search.service.settings import ServerSettings, SettingsError


def details(status, kind: type[Message]) -> list:
    found = []
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            found.append(message)
    return found


@pytest.mark.parametrize(
    ("error", "code", "retry"),
    [
        (InvalidRequestError([Violation("seed", "is bad")]), code_pb2.INVALID_ARGUMENT, False),
        (NoEmbeddingError("generator", {333: "[PAD]"}), code_pb2.INVALID_ARGUMENT, False),
        (RequestTooLargeError("too large"), code_pb2.INVALID_ARGUMENT, False),
        (PoolTooSmallError(2, 1), code_pb2.INVALID_ARGUMENT, False),
        (BusyError("busy"), code_pb2.RESOURCE_EXHAUSTED, True),
        (PoolExhaustedError("no block"), code_pb2.RESOURCE_EXHAUSTED, True),
        (QuotaError("too much", 2.5), code_pb2.RESOURCE_EXHAUSTED, True),
        (UnauthenticatedError("who?"), code_pb2.UNAUTHENTICATED, False),
        (NotAllowedError("not you"), code_pb2.PERMISSION_DENIED, False),
        (MessageTooLargeError("too large"), code_pb2.INVALID_ARGUMENT, False),
        (NotReadyError("loading"), code_pb2.UNAVAILABLE, True),
        (SearchTimeoutError("slow"), code_pb2.DEADLINE_EXCEEDED, False),
    ],
)
def test_a_typed_error_has_its_code_and_says_whether_to_retry(error, code, retry):
    status = status_of(failure_of(error))

    assert status.code == code
    assert status.message == in_fields(str(error))
    assert bool(details(status, error_details_pb2.RetryInfo)) == retry


def test_an_invalid_request_lists_every_violation():
    violations = [Violation("beam_width", "must be 1"), Violation("seed", "must be 2")]

    (bad_request,) = details(status_of(failure_of(InvalidRequestError(violations))), error_details_pb2.BadRequest)

    assert [(v.field, v.description) for v in bad_request.field_violations] == [
        ("beam_width", "must be 1"),
        ("seed", "must be 2"),
    ]


def test_a_request_too_large_names_the_request_and_the_numbers():
    (bad_request,) = details(status_of(failure_of(PoolTooSmallError(2**30, 2**20))), error_details_pb2.BadRequest)

    (violation,) = bad_request.field_violations
    assert violation.field == "request"
    assert "1024.0 MiB" in violation.description


@pytest.mark.parametrize(
    "error", [ValueError("secret"), CheckpointError("/secret/folder is missing"), KeyError("secret")]
)
def test_an_unexpected_error_leaves_an_id_for_the_client_and_its_text_for_the_log(error, caplog):
    with caplog.at_level(logging.ERROR, "espalier.service"):
        status = status_of(failure_of(error))

    assert status.code == code_pb2.INTERNAL
    text, name = status.message.split("id=")
    assert text == "internal error, "
    assert name in caplog.text
    assert b"secret" not in status.SerializeToString()


def test_error_metadata_stays_far_below_what_grpc_carries():
    violations = [Violation(f"field{i}", "é" * 10_000) for i in range(1000)]

    status = status_of(failure_of(InvalidRequestError(violations)))

    assert len(status.message.encode()) <= 1024
    # 16 KiB is the limit, base64 takes a third more, and the text travels a second time.
    assert len(status.SerializeToString()) * 4 / 3 + 3 * 1024 < 16 * 1024


@pytest.mark.parametrize(("text", "limit"), [("abc", 3), ("abcdef", 5), ("ééééé", 6), ("\ud800" * 9, 8), ("", 3)])
def test_cut_text_fits_its_limit_and_is_valid(text, limit):
    assert len(cut(text, limit).encode(errors="replace")) <= limit


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_flag(host):
    assert ServerSettings(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_an_address_others_can_reach_needs_the_flag(host):
    with pytest.raises(SettingsError, match="--insecure-bind"):
        ServerSettings(host=host)

    assert ServerSettings(host=host, insecure_bind=True).host == host


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", 70000), ("port", -1), ("max_searches", 0), ("max_queue", -1), ("drain_seconds", float("nan"))],
)
def test_a_setting_out_of_range_names_its_flag_and_value(field, value):
    with pytest.raises(SettingsError, match=f"--{field.replace('_', '-')}.*{value}"):
        ServerSettings(**{field: value})


def test_an_ipv6_address_is_written_in_brackets():
    assert ServerSettings(host="::1").address(80) == "[::1]:80"
