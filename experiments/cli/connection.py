"""Options of commands that call a server: its address, login and TLS."""

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from espalier.experiments.cli.options import OptionError
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import declared, option

if TYPE_CHECKING:
    from espalier.search.client import RetryPolicy, SearchClient

TOKEN_VARIABLE = "ESPALIER_TOKEN"


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Login and TLS of a connection to a server, as the command line says them."""

    help_panel: ClassVar = "Connection"
    env_prefix: ClassVar = "ESPALIER_"

    token_file: Path | None = option(
        None,
        f"File with the token that `espalier token` printed; default: the token in {TOKEN_VARIABLE}. There is no "
        "option for the token itself, as others on the machine could read it.",
    )
    insecure_token: bool = option(False, "Send the token to another machine even without TLS.")
    tls: bool = option(False, "Connect with TLS, and trust the system's authorities; the options below do so too.")
    tls_ca: Path | None = option(None, "Certificates of the authorities to trust instead of the system's, PEM.")
    tls_server_name: str | None = option(None, "Name in the server's certificate, where it is not the endpoint's host.")
    client_certificate: Path | None = option(
        None, "Certificate to show to a server that asks for one, PEM; a login too."
    )
    client_key: Path | None = option(None, "Private key of --client-certificate, PEM.")

    def connect(self, endpoint: str, retry: "RetryPolicy | None" = None) -> "SearchClient":
        """Return a client of the server at `endpoint`, with the usual retries or others.

        Raises:
            OptionError: the token's file cannot be read.
            ConnectionSettingsError: the token or a file cannot be used.
        """
        from espalier.search.client import RetryPolicy, SearchClient, Tls

        tls = Tls(self.tls_ca, self.client_certificate, self.client_key, self.tls_server_name)
        secured = tls if self.tls or tls != Tls() else False
        retry = retry or RetryPolicy()
        return SearchClient(endpoint, token=self._token(), tls=secured, insecure_token=self.insecure_token, retry=retry)

    def _token(self) -> str | None:
        if self.token_file is None:
            return os.environ.get(TOKEN_VARIABLE) or None
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--token-file: cannot read {str(self.token_file)!r}: {error}") from None
        if not token:
            raise OptionError(f"--token-file: {str(self.token_file)!r} is empty")
        return token


def check_endpoint(text: str | None) -> str | None:
    """Callback of an option that names a server: fails unless it is HOST:PORT."""
    if text is not None:
        from espalier.search.client.connection import host_of

        if host_of(text) is None:
            raise OptionError(f"--endpoint must be HOST:PORT, is {text!r}")
    return text


Endpoint = Annotated[
    str | None,
    typer.Option(callback=check_endpoint, help="HOST:PORT of an `espalier serve`; default: search in this process."),
]


def check_place(context: typer.Context, endpoint: str | None, what: str, of_both: Collection[str] = ()) -> None:
    """Refuse options that have no effect on searches or other work (`what`) of a server, or of this process.

    Those `of_both` have one in both places. Values from the environment may be meant for other commands.

    Raises:
        OptionError: names every such option on the command line, and says why.
    """
    if endpoint:
        idle = {field.name for field in declared(RuntimeSettings)} | {"trace", "profile"}
        why = f"only for {what} in this process; leave out --endpoint"
    else:
        idle = {field.name for field in declared(ConnectionOptions)} | {"timeout", "priority"}
        why = f"only for a server's {what}; give --endpoint"
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in idle.difference(of_both)
        and (source := context.get_parameter_source(parameter.name))
        and source.name == "COMMANDLINE"
    ]
    if given:
        raise OptionError(f"{', '.join(given)}: {why}")


@contextmanager
def retries_shown() -> Iterator[None]:
    """Show on standard error what a client waits for before it tries again."""
    log, handler = logging.getLogger("espalier.client"), logging.StreamHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
