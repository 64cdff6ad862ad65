"""Ids of calls, which callers may choose and logs on both sides carry."""

import re
import uuid

REQUEST_ID = "x-request-id"
"""HTTP header and gRPC metadata that carry the id; the server sends it back."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(given: str | None) -> str:
    """Return the caller's id of a call if it is printable ASCII of at most 128 characters, else a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
