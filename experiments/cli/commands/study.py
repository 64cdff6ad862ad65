"""`espalier study`."""

import typer

app = typer.Typer(help="Measure how searches behave.", no_args_is_help=True)


@app.callback()
def _study() -> None:
    """Measure how searches behave."""
