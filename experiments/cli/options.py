"""Options that several commands share and no dataclass declares, and how the text of options is read."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from espalier.engine.errors import EspalierError
from espalier.experiments.evaluation.benchmarks import FIELDS

PLOT_SUFFIXES = (".svg", ".png", ".pdf")
"""What a plot may be written as; the help of every `--plot` names them."""

_LARGEST_PORT = 65535


class OptionError(EspalierError):
    """The value of an option is refused; the text names the option."""


def parse_int_list(text: str, option: str | None = None) -> list[int]:
    """Positive whole numbers from `1,2,4`, the value of `option`.

    Raises:
        typer.BadParameter: for anything else.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or len(set(numbers)) != len(numbers):
        raise typer.BadParameter(
            f"{text!r} is not a list of different positive numbers; write 1,2,4", param_hint=option
        )
    return numbers


def parse_field_map(text: str | None) -> dict[str, str]:
    """Names of a benchmark's fields from `problem=Question,answer=Answer`, the value of `--field-map`.

    Raises:
        typer.BadParameter: for anything else.
    """
    pairs = [part.partition("=") for part in (text or "").split(",")] if text is not None else []
    known = {what.strip(): name.strip() for what, _, name in pairs if what.strip() in FIELDS and name.strip()}
    if len(known) != len(pairs):
        raise typer.BadParameter(
            f"{text!r} is not a list of {', '.join(f'{what}=NAME' for what in FIELDS)}; write problem=Q,answer=A, or "
            "problem=A+B for two fields together",
            param_hint="--field-map",
        )
    return known


FileCallback = Callable[[typer.Context, typer.CallbackParam, Path | None], Path | None]


def output_file(suffixes: Sequence[str] = (), makes_folder: bool = False) -> FileCallback:
    """The callback of an option for a file to write: what could not be written ends the command before its work.

    Args:
        suffixes: what the name must end in; empty for anything.
        makes_folder: whether the file's folder is made where there is none.
    """

    def check(context: typer.Context, parameter: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is not None and not context.resilient_parsing:
            if suffixes and path.suffix.lower() not in suffixes:
                known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
                raise OptionError(f"{parameter.opts[0]}: {str(path)!r} must end in {known}")
            try:
                _try_to_write(path, makes_folder)
            except OSError as error:
                missing = isinstance(error, FileNotFoundError) and not path.parent.is_dir()
                why = f"there is no folder {str(path.parent)!r}" if missing else error.strerror
                raise OptionError(f"{parameter.opts[0]}: cannot write {str(path)!r}: {why}") from None
        return path

    return check


def _try_to_write(path: Path, makes_folder: bool) -> None:
    """Open `path` for writing and leave it as it was; only that tells, as root may be refused too."""
    if makes_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    if fresh or path.is_file() or path.is_dir():  # the other end of a pipe would take this for the whole file
        with path.open("ab"):
            pass
    if fresh:
        path.resolve().unlink()  # what a dangling link names, not the link


def _check_endpoint(text: str | None) -> str | None:
    match = re.fullmatch(r"(?:\[[^\s\[\]]+\]|[^\s:/\[\]]+):(\d{1,5})", text or "", re.ASCII)
    if text is not None and not (match and 1 <= int(match[1]) <= _LARGEST_PORT):
        raise OptionError(f"--endpoint must be HOST:PORT, is {text!r}")
    return text


InFlight = Annotated[
    int,
    typer.Option(envvar="ESPALIER_IN_FLIGHT", min=1, help="Problems searched at once.", rich_help_panel="Models"),
]
Endpoint = Annotated[
    str | None,
    typer.Option(callback=_check_endpoint, help="HOST:PORT of an `espalier serve`; default: solve in this process."),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        callback=output_file(), help="Write the whole tree and every choice to this .json; see `espalier replay`."
    ),
]

Benchmark = Annotated[
    str,
    typer.Option(help="demo, or a file of JSON objects, one a line or in an array, each a problem and its answer."),
]
FieldMap = Annotated[
    str | None,
    typer.Option(
        help="The file's own names where they are not understood, like problem=Question,answer=Answer; also id, level.",
        show_default=False,
    ),
]
