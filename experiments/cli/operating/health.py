"""`espalier health`: whether a server accepts searches, and what it says of itself."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval
from rich.console import Console
from typer import Option

from espalier.experiments.cli.options import ConnectionOptions, check_endpoint
from espalier.experiments.cli.runs import EXIT_FAILED
from espalier.experiments.cli.schema_options import Outcome, with_schema
from espalier.search.schema import option, size_text
from espalier.search.service.settings import ServerSettings

if TYPE_CHECKING:
    from espalier.search.client import ServerInfo


_DIGEST_DIGITS = 12


@with_schema
def health(
    endpoint: Annotated[
        str | None,
        Option(callback=check_endpoint, help="HOST:PORT; default: this machine's, on ESPALIER_PORT or 50051."),
    ] = None,
    info: bool = option(False, "Also show what the server serves and holds."),
    timeout: float = option(5.0, "Seconds to wait for an answer.", Interval(ge=0.001)),
    *,
    connection: ConnectionOptions,
) -> Outcome:
    """Ask a server whether it accepts searches.

    Exits with 0 if it does, and with 1 if it does not, cannot be reached, or does not answer in time.
    """
    from espalier.search.client import NO_RETRIES, ServiceError

    endpoint = endpoint or f"127.0.0.1:{os.environ.get('ESPALIER_PORT') or ServerSettings().port}"
    serving, problem = False, "it is loading or draining, or its engine has died"
    with connection.connect(endpoint, NO_RETRIES) as client:
        try:
            serving = client.health(timeout)
        except ServiceError as error:
            problem = str(error)
        found, missing = None, ""
        if serving and info:
            try:
                found = client.server_info(timeout)
            except ServiceError as error:  # it asks for a login, which health does not
                missing = str(error)
    values: dict[str, Any] = {"endpoint": endpoint, "serving": serving} | ({} if serving else {"problem": problem})
    values |= {"info": asdict(found)} if found else {"info_problem": missing} if missing else {}

    def show(_: Console) -> None:
        print(f"{endpoint}: " + ("serving" if serving else f"not serving: {problem}"))
        if found:
            print(*(f"{name:<26}{value}" for name, value in _lines(found)), sep="\n")
        elif missing:
            print(f"it does not say more: {missing}")

    return Outcome(values, show, 0 if serving else EXIT_FAILED)


def _lines(info: "ServerInfo") -> Iterator[tuple[str, object]]:
    yield "version", info.version
    for role, name in sorted(info.model_names.items()):
        yield role, f"{name} ({digest[:_DIGEST_DIGITS]}…)" if (digest := info.models.get(role)) else name
    rest = info.models.keys() - info.model_names.keys()
    yield from ((name, " ".join(info.models[name].split())) for name in sorted(rest))
    yield "KV pool", size_text(info.kv_memory_bytes)
    for role, blocks in info.occupancy.kv_blocks.items():
        yield f"blocks of the {role}", f"{blocks.live} live, {blocks.cached} cached, {blocks.free} free"
    yield "searches", f"{info.occupancy.running} running, {info.occupancy.waiting} waiting for memory"
    yield "calls admitted", f"{info.admitted_calls} of {info.max_searches}"
    yield "calls waiting", f"{info.waiting_calls} of {info.max_queue}"
