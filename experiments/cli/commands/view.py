"""`espalier view`."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from espalier.experiments.cli import options as opt

_MAX_TRACES = 2


def view_command(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE...", help="One trace of `espalier solve --trace`, or two to see side by side."),
    ],
    html: Annotated[
        Path | None,
        typer.Option(callback=opt.output_file([".html"]), help="The page; default: the first trace's name with .html."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one HTML page that shows a recorded search tree, round by round."""
    from espalier.experiments.runs.files import write_whole
    from espalier.search.service.page.files import standalone_page
    from espalier.search.trace import read_trace

    if len(traces) > _MAX_TRACES:
        raise opt.OptionError(f"TRACE: the page shows {_MAX_TRACES} searches at most, {len(traces)} are given")
    html = html or traces[0].with_suffix(".html")
    if html.resolve() in [file.resolve() for file in traces]:
        raise opt.OptionError(f"--html: {str(html)!r} is a trace; name another file")
    write_whole(html, standalone_page([read_trace(file) for file in traces]))
    typer.echo(f"page  {html}")
    if show and not webbrowser.open(html.resolve().as_uri()):
        typer.echo("warning: no browser was found to open it", err=True)
