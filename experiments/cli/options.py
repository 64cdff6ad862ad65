"""Options shared by several commands that no dataclass declares, and parsers of option values."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from annotated_types import Interval

from espalier.engine.errors import EspalierError, nearest_of_each
from espalier.experiments.runs.benchmark_files import BenchmarkError
from espalier.experiments.runs.benchmarks import FIELDS, Problem
from espalier.search.schema import Option

PLOT_SUFFIXES = (".svg", ".png", ".pdf")
"""File formats of plots."""


class OptionError(EspalierError):
    """The value of an option is invalid; the message names the option."""


def parse_int_list(text: str, option: str | None = None) -> list[int]:
    """Parse positive whole numbers like `1,2,4`, the value of `option`.

    Raises:
        typer.BadParameter: the text has another format.
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


def parse_list(text: str | None, option: str) -> list[str]:
    """Parse words like `a,b`, the value of `option`; none for None.

    Raises:
        typer.BadParameter: a word is empty.
    """
    words = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(words):
        raise typer.BadParameter(f"{text!r} is not a list like a,b", param_hint=option)
    return words


def parse_field_map(text: str | None) -> dict[str, str]:
    """Parse the value of `--field-map`, such as `problem=Question,answer=Answer`.

    Raises:
        typer.BadParameter: the text has another format.
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


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice of a benchmark's problems; what is None chooses all."""

    help_panel: ClassVar = "Problems"

    limit: Annotated[
        int | None,
        Interval(ge=1),
        Option("Only the first problems, of those that other options leave; of eval-prm, of each subset."),
    ] = None
    sample_ids: Annotated[str | None, Option("Only these problems: ids, like a,b.")] = None
    levels: Annotated[str | None, Option("Only problems of these levels, like 1,2.")] = None
    subjects: Annotated[str | None, Option("Only problems of these subjects, like Algebra,Geometry.")] = None
    shuffle: Annotated[bool, Option("Take them in random order; with --limit, a random part.")] = False
    shuffle_seed: Annotated[int, Option("Seed of --shuffle.")] = 0

    def of(self, problems: Sequence[Problem]) -> list[Problem]:
        """The chosen problems; subjects are compared ignoring case.

        Raises:
            typer.BadParameter: an option has another format.
            BenchmarkError: the benchmark has no problem of an id, level or subject, or none that fits all.
        """
        ids = parse_list(self.sample_ids, "--sample-ids")
        levels = parse_int_list(self.levels, "--levels") if self.levels is not None else []
        subjects = [subject.lower() for subject in parse_list(self.subjects, "--subjects")]
        _require("--sample-ids", ids, (p.unique_id for p in problems))
        _require("--levels", levels, (p.level for p in problems if p.level is not None))
        _require("--subjects", subjects, (p.subject.lower() for p in problems if p.subject))
        chosen = [
            p
            for p in problems
            if (not ids or p.unique_id in ids)
            and (not levels or p.level in levels)
            and (not subjects or (p.subject or "").lower() in subjects)
        ]
        if not chosen:
            raise BenchmarkError("no problem has one of the --sample-ids, --levels and --subjects at the same time")
        if self.shuffle:
            random.Random(self.shuffle_seed).shuffle(chosen)
        return chosen[: self.limit]


def _require(flag: str, wanted: Sequence[object], there: Iterable[object]) -> None:
    found = list(dict.fromkeys(there)) if wanted else []
    if unknown := [str(one) for one in wanted if one not in found]:
        shown = ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
        near = nearest_of_each(unknown, list(map(str, found)))
        raise BenchmarkError(f"{flag}: the benchmark has no {near}; it has {shown or 'none'}")


FileCallback = Callable[[typer.Context, typer.CallbackParam, Path | None], Path | None]


def output_file(suffixes: Sequence[str] = (), makes_folder: bool = False) -> FileCallback:
    """Return a callback for an option that names an output file: it fails if the file is not writable.

    Args:
        suffixes: allowed suffixes; empty for any.
        makes_folder: whether a missing folder is created.
    """

    def check(context: typer.Context, parameter: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is not None and not context.resilient_parsing:
            if suffixes and path.suffix.lower() not in suffixes:
                known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}" if suffixes[1:] else suffixes[0]
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
    """Open `path` for writing and leave it unchanged, as only that shows whether it is writable."""
    if makes_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    if fresh or path.is_file() or path.is_dir():  # not a pipe, whose reader would see the end of the file
        with path.open("ab"):
            pass
    if fresh:
        path.resolve().unlink()  # the target of a dangling link, not the link


def refuse(context: typer.Context, names: set[str], why: str) -> None:
    """Refuse options that have no effect.

    Values from the environment may be meant for other commands and are ignored.

    Raises:
        OptionError: names every such option on the command line, and says why.
    """
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names
        and (source := context.get_parameter_source(parameter.name))
        and source.name == "COMMANDLINE"
    ]
    if given:
        raise OptionError(f"{', '.join(given)}: {why}")


def check_endpoint(text: str | None) -> str | None:
    """Callback of an option that names a server: fails unless it is HOST:PORT."""
    if text is not None:
        from espalier.search.client.connection import host_of

        if host_of(text) is None:
            raise OptionError(f"--endpoint must be HOST:PORT, is {text!r}")
    return text


InFlight = Annotated[
    int,
    typer.Option(envvar="ESPALIER_IN_FLIGHT", min=1, help="Problems searched at once.", rich_help_panel="Models"),
]
Endpoint = Annotated[
    str | None,
    typer.Option(callback=check_endpoint, help="HOST:PORT of an `espalier serve`; default: search in this process."),
]
Trace = Annotated[
    Path | None,
    typer.Option(callback=output_file(), help="Write the tree and all decisions to this .json; see `espalier replay`."),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        callback=output_file([".json"]),
        help="Write a Chrome trace of all engine steps to this .json; open it in ui.perfetto.dev.",
    ),
]

Benchmark = Annotated[
    str,
    typer.Option(
        help="demo; a file of problems with their answers: .jsonl, .json, .csv, .tsv or .parquet; a folder of such "
        "files or of save_to_disk; or a Hugging Face id like openai/gsm8k. Behind a folder or id, :SPLIT or "
        ":CONFIGURATION/SPLIT, as in openai/gsm8k:main/test.",
    ),
]
GraderName = Annotated[
    str,
    typer.Option(
        help="How answers are graded: math-verify, exact, choice (a letter), numeric or numeric:TOLERANCE, expression "
        "(the gold answer is a Python expression of `answer`), or MODULE:FUNCTION of yours.",
    ),
]
Epochs = Annotated[
    int,
    typer.Option(min=1, help="Searches of each problem; epoch e has --seed plus e. More may be asked for later."),
]
Trees = Annotated[bool, typer.Option("--trees", help="Keep each search's tree in trees.jsonl of its run folder.")]
FieldMap = Annotated[
    str | None,
    typer.Option(
        help="Names of the file's fields if not recognized, like problem=Question,answer=Answer; also id, level and "
        "subject. A dot leads into a field, as in answer=reward_model.ground_truth.",
        show_default=False,
    ),
]
