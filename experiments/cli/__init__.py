"""The command line."""

import sys


def run() -> None:
    """Entry point: run a command; a package that is not installed, as beside a client alone, is one line and exit 1."""
    try:
        from espalier.experiments.cli.main import main

        main()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "espalier"):
            raise
        sys.exit(
            f"error: the package of {package!r} is not installed. A client's commands (solve --endpoint, health) need "
            "typer besides the client's packages: pip install typer. All others need what Espalier depends on: "
            "pip install espalier-search"
        )
