"""Identifies callers by bearer token, client certificate or host, and counts what they take.

The callers file is TOML, with one table for each caller; `espalier token NAME` adds one:

    [alice]
    token_sha256 = "9f86d0..."     # of the token that alice sends; without it, only a client certificate named alice
    max_searches = 4               # running and waiting at once; default: no limit of her own
    tokens_per_minute = 100000     # sampled by the generator and read by the verifier; default: no limit
    max_priority = 10              # default: the server's --max-priority
    may_reload = true              # may have weights reloaded from --reload-folder; default: no

It is read again when it changes; whoever has no table any more is locked out, also with a certificate. Tokens are
random, so a plain hash of them cannot be reversed.
"""

import hmac
import logging
import os
import re
import secrets
import stat
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar

from annotated_types import Interval

from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.search.request import MAX_PRIORITY
from espalier.search.schema import from_values, option, optional, violations
from espalier.search.service.access.watched_files import WatchedFiles
from espalier.search.service.errors import QuotaError, UnauthenticatedError

log = logging.getLogger("espalier.service")

_DIGEST = re.compile(r"[0-9a-f]{64}")
_OF_NOTHING = sha256(b"").hexdigest()


class CallersFileError(EspalierError):
    """The callers file cannot be read, or is invalid."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a call, and its limits.

    Attributes:
        name: the caller's name in the callers file or its certificate, or its host.
        login: whether it has proven to be that; a host alone may be several people.
        max_searches: calls that it may have in progress; None for no limit.
        tokens_per_minute: tokens that its searches may sample and score; None for no limit.
        max_priority: highest priority that it may ask for; None for the server's.
        may_reload: whether it may have weights reloaded, if it is a login.
    """

    name: str
    login: bool = False
    max_searches: int | None = None
    tokens_per_minute: int | None = None
    max_priority: int | None = None
    may_reload: bool = False


@dataclass(frozen=True, slots=True)
class CallerEntry:
    """One table of the callers file."""

    help_panel: ClassVar = "Limits"

    token_sha256: str | None = optional("SHA-256 of the caller's token, in hexadecimal.")
    max_searches: int | None = optional("Calls in progress at once.", Interval(ge=1))
    tokens_per_minute: int | None = optional("Tokens sampled and scored a minute.", Interval(ge=1))
    max_priority: int | None = optional("Highest priority it may ask for.", Interval(ge=-MAX_PRIORITY, le=MAX_PRIORITY))
    may_reload: bool = option(False, "It may have weights reloaded from the server's --reload-folder.")


def _host_of(address: str) -> str:
    """Return the host that callers of an address are told apart by: an IPv4 address also where it comes as IPv6."""
    try:
        mapped = getattr(ip_address(address), "ipv4_mapped", None)
    except ValueError:
        return address
    return str(mapped) if mapped else address


class Callers:
    """Tells who a call comes from, and refuses those who do not say where somebody must.

    Attributes:
        login_required: whether calls need a login.
    """

    def __init__(self, file: Path | None, certificates: bool = False) -> None:
        """Read the callers file.

        Args:
            file: the callers file; None for none.
            certificates: whether clients show certificates, which are logins too.

        Raises:
            CallersFileError: it cannot be read, or is invalid.
        """
        self.login_required = file is not None or certificates
        self._file = file
        read_before = "the callers read before stay"
        self._entries = WatchedFiles([file], partial(read_callers, file), read_before) if file else None

    def identify(self, authorization: str | None, host: str, certificate_name: str | None = None) -> Caller:
        """Return the caller of a call.

        Args:
            authorization: the call's `authorization` header or metadata.
            host: the address that it comes from, without the port.
            certificate_name: common name of the client's verified certificate.

        Raises:
            UnauthenticatedError: a login is needed and there is none, or it is no caller's.
        """
        if not self.login_required:
            return Caller(_host_of(host))
        if self._entries and self._entries.refresh():
            log.info("read %s again: %d callers", self._file, len(self._entries.value))
        entries = self._entries.value if self._entries else None
        if authorization is not None and entries is not None:
            return _of_token(authorization, entries)
        if certificate_name:
            return _of_certificate(certificate_name, entries)
        raise UnauthenticatedError("this server needs a login: send `authorization: Bearer TOKEN`")


def _of_token(authorization: str, entries: Mapping[str, CallerEntry]) -> Caller:
    kind, _, token = authorization.partition(" ")
    digest = sha256(token.strip().encode(errors="replace")).hexdigest()
    found = None
    for name, entry in entries.items():  # all of them, so that time does not tell which one was close
        if hmac.compare_digest(digest, entry.token_sha256 or "") and kind.lower() == "bearer":
            found = _caller(name, entry)
    if found is None:
        raise UnauthenticatedError("the token is unknown to this server")
    return found


def _of_certificate(name: str, entries: Mapping[str, CallerEntry] | None) -> Caller:
    if not name.isprintable():
        raise UnauthenticatedError("the name in your certificate has control characters")
    entry = CallerEntry() if entries is None else entries.get(name)
    if entry is None:
        raise UnauthenticatedError("the name in your certificate is unknown to this server")
    return _caller(name, entry)


def _caller(name: str, entry: CallerEntry) -> Caller:
    return Caller(name, True, entry.max_searches, entry.tokens_per_minute, entry.max_priority, entry.may_reload)


def read_callers(file: Path) -> dict[str, CallerEntry]:
    """Read a callers file.

    Raises:
        CallersFileError: it cannot be read, or is invalid.
    """
    try:
        tables: Mapping[str, Any] = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CallersFileError(f"--callers {file}: cannot be read: {error}") from error
    return {name: _entry(file, name, table) for name, table in tables.items()}


def _entry(file: Path, name: str, table: Any) -> CallerEntry:
    if not isinstance(table, dict):
        raise CallersFileError(f"--callers {file}: {name} is no table; write [{name}] above its settings")
    try:
        entry = from_values(CallerEntry, table)
    except InvalidRequestError as error:
        wrong = "; ".join(f"{each.field} {each.description}" for each in error.violations)
        raise CallersFileError(f"--callers {file}: [{name}]: {wrong}") from None
    if not name.isprintable():
        raise CallersFileError(f"--callers {file}: [{name!r}]: a name must not have control characters")
    if entry.token_sha256 is not None and not _DIGEST.fullmatch(entry.token_sha256):
        raise CallersFileError(f"--callers {file}: [{name}]: token_sha256 must be 64 digits 0-9, a-f")
    if entry.token_sha256 == _OF_NOTHING:
        raise CallersFileError(
            f"--callers {file}: [{name}]: token_sha256 is the hash of an empty token; `espalier token {name} "
            "--replace` makes one"
        )
    return entry


# ---- new callers

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_TOKEN_PREFIX = "espalier_"
"""Begins every token, so that tools that look for secrets in files can find them."""


def add_caller(file: Path, name: str, limits: CallerEntry, replace_existing: bool = False) -> str:
    """Add a caller with a new token to a callers file, which is created if it does not exist.

    The file holds the token's hash only. It is replaced in one step, so that a running server never reads half of it;
    its comments and other callers stay as they are. A new file is readable by its owner alone; an existing one keeps
    its owner and group, and whether the group may read it.

    Args:
        file: the callers file.
        name: the caller's name; letters, digits and `_.@-`, at most 64.
        limits: the caller's limits; its token is set here.
        replace_existing: whether the caller may exist; its token and limits are then replaced.

    Returns:
        The token.

    Raises:
        InvalidRequestError: a limit is out of range.
        CallersFileError: the name is taken or invalid, or the file cannot be read, written, or is invalid.
    """
    if not _NAME.fullmatch(name):
        raise CallersFileError(f"{name!r} is no name of a caller: use letters, digits and _.@-, at most 64")
    if wrong := violations(limits):
        raise InvalidRequestError(wrong)
    file = file.resolve()  # a link stays a link
    token = _TOKEN_PREFIX + secrets.token_urlsafe(32)
    try:
        with _locked(file.parent):
            document = _document(file)
            if name in document and not replace_existing:
                raise CallersFileError(f"--callers {file}: {name} exists; give another name, or --replace")
            entry = replace(limits, token_sha256=sha256(token.encode()).hexdigest())
            document[name] = {key: value for key, value in asdict(entry).items() if value not in (None, False)}
            _write(file, document.as_string())
    except OSError as error:
        raise CallersFileError(f"--callers {file}: cannot be written: {error}") from error
    return token


def _document(file: Path) -> Any:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    if not file.exists():
        return tomlkit.document()
    read_callers(file)  # says what is wrong with it as the server would
    try:
        return tomlkit.parse(file.read_text(encoding="utf-8"))
    except TOMLKitError as error:
        raise CallersFileError(f"--callers {file}: cannot be read: {error}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change a file in `folder`."""
    import fcntl  # not on Windows, where clients run, too

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(file: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # readable by this user only
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if file.exists():
                old = file.stat()
                os.fchown(handle, old.st_uid, old.st_gid)
                os.fchmod(handle, 0o600 | old.st_mode & stat.S_IRGRP)
            os.fsync(handle)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# ---- prompts and quotas of callers


class Salts:
    """Gives out prefix-cache salts, by which cached prompts are shared or kept apart.

    The salt of a caller is the HMAC of its name under a key private to the process. Callers do not share cached
    prefixes, so response times and usage reveal nothing about the prompts of others.
    """

    def __init__(self, share_by_host: bool = False) -> None:
        """Create salts; those of callers known only by their host differ for every call unless `share_by_host`."""
        self._key = secrets.token_bytes(32)
        self._share_by_host = share_by_host

    def of(self, caller: Caller) -> bytes:
        """Return the salt for a call of `caller`, 32 bytes."""
        if not caller.login and not self._share_by_host:
            return secrets.token_bytes(32)
        kind = b"login" if caller.login else b"host"
        return hmac.digest(self._key, kind + caller.name.encode(), "sha256")


@dataclass(slots=True)
class _Account:
    """Tokens that a caller may still take, as of a time; negative when its last search took more."""

    tokens: float
    at: float


class Quotas:
    """Counts the calls in progress and the tokens of each caller that has limits.

    A minute's tokens may be taken at once, and come back evenly. What a search takes is known at its end, so a call is
    refused while its caller's earlier searches have taken more than came back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: Counter[str] = Counter()
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def call(self, caller: Caller) -> Iterator[None]:
        """Count a call in progress.

        Raises:
            QuotaError: the caller has used up its calls or its tokens.
        """
        if caller.max_searches is not None and self._calls[caller.name] >= caller.max_searches:
            raise QuotaError(f"{caller.name} may have {caller.max_searches} searches in progress, and has them", 1.0)
        if caller.tokens_per_minute is not None and (owed := -self._account(caller).tokens) >= 0:
            seconds = 60 * (owed + 1) / caller.tokens_per_minute
            raise QuotaError(
                f"{caller.name} may take {caller.tokens_per_minute} tokens a minute, and has taken them", seconds
            )
        self._calls[caller.name] += 1
        try:
            yield
        finally:
            self._calls[caller.name] -= 1
            self._calls += Counter()  # drops those with none

    def take(self, caller: Caller, tokens: int) -> None:
        """Charge the tokens of a search that has ended."""
        if caller.tokens_per_minute is not None:
            self._account(caller).tokens -= tokens

    def _account(self, caller: Caller) -> _Account:
        assert caller.tokens_per_minute is not None
        now, most = self._clock(), float(caller.tokens_per_minute)
        account = self._accounts.setdefault(caller.name, _Account(most, now))
        account.tokens = min(most, account.tokens + (now - account.at) / 60 * most)
        account.at = now
        return account
