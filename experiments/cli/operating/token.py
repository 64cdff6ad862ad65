"""`espalier token`: adds a caller to the callers file, and prints the caller's token once."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from espalier.experiments.cli.schema_options import Fields, with_schema
from espalier.search.service.access.callers import CallerEntry


@with_schema
def token(
    name: Annotated[str, Argument(help="The caller's name, as logs and metrics show it.")],
    callers: Annotated[
        Path, Option(envvar="ESPALIER_CALLERS", help="The callers file of `espalier serve`; created if it is missing.")
    ],
    replace: Annotated[bool, Option("--replace", help="Give an existing caller a new token and these limits.")] = False,
    *,
    limits: Annotated[CallerEntry, Fields(without=["token_sha256"])],
) -> None:
    """Add a caller to the callers file, and print a new token for it.

    The file keeps the token's hash only, so this is the one time that the token is shown. A running server reads the
    file again by itself.
    """
    from espalier.search.service.access.callers import add_caller

    made = add_caller(callers, name, limits, replace)
    print(made)
    print(f"added {name} to {callers}; the token is not shown again", file=sys.stderr)
