"""Options shared by several commands that no dataclass declares, and parsers of option values."""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from annotated_types import Interval

from espalier.engine.errors import EspalierError, nearest_of_each
from espalier.experiments.runs.benchmark_files import BenchmarkError
from espalier.experiments.runs.benchmarks import FIELDS, Problem, load_benchmark
from espalier.search.schema import option

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


@dataclass(frozen=True, slots=True)
class Selection:
    """A benchmark, how its answers are graded, and a choice of its problems; what is None chooses all."""

    help_panel: ClassVar = "Problems"

    benchmark: str = option(
        "demo",
        "demo; a file of problems with their answers: .jsonl, .json, .csv, .tsv or .parquet; a folder of such "
        "files or of save_to_disk; or a Hugging Face id like openai/gsm8k. Behind a folder or id, :SPLIT or "
        ":CONFIGURATION/SPLIT, as in openai/gsm8k:main/test.",
    )
    field_map: str | None = option(
        None,
        "Names of the file's fields if not recognized, like problem=Question,answer=Answer; also id, level and "
        "subject. A dot leads into a field, as in answer=reward_model.ground_truth.",
    )
    grader: str = option(
        "math-verify",
        "How answers are graded: math-verify, exact, choice (a letter), numeric or numeric:TOLERANCE, expression "
        "(the gold answer is a Python expression of `answer`), or MODULE:FUNCTION of yours.",
    )
    limit: int | None = option(
        None, "Only the first problems, of those that other options leave; of eval-prm, of each subset.", Interval(ge=1)
    )
    sample_ids: str | None = option(None, "Only these problems: ids, like a,b.")
    levels: str | None = option(None, "Only problems of these levels, like 1,2.")
    subjects: str | None = option(None, "Only problems of these subjects, like Algebra,Geometry.")
    shuffle: bool = option(False, "Take them in random order; with --limit, a random part.")
    shuffle_seed: int = option(0, "Seed of --shuffle.")

    @property
    def fields(self) -> dict[str, str]:
        """The value of `--field-map` by the fields of a problem.

        Raises:
            typer.BadParameter: the text has another format.
        """
        pairs = [part.partition("=") for part in self.field_map.split(",")] if self.field_map is not None else []
        known = {what.strip(): name.strip() for what, _, name in pairs if what.strip() in FIELDS and name.strip()}
        if len(known) != len(pairs):
            raise typer.BadParameter(
                f"{self.field_map!r} is not a list of {', '.join(f'{what}=NAME' for what in FIELDS)}; write "
                "problem=Q,answer=A, or problem=A+B for two fields together",
                param_hint="--field-map",
            )
        return known

    def load(self, offline: bool) -> list[Problem]:
        """All problems of the benchmark; see `load_benchmark`."""
        return load_benchmark(
            self.benchmark, None, self.fields, offline, lambda what: print(f"notice: {what}", file=sys.stderr)
        )

    def of(self, problems: Sequence[Problem]) -> list[Problem]:
        """The chosen problems; subjects are compared ignoring case.

        Raises:
            typer.BadParameter: an option has another format.
            BenchmarkError: the benchmark has no problem of an id, level or subject, or none that fits all.
        """
        levels = parse_int_list(self.levels, "--levels") if self.levels is not None else []
        subjects = [subject.lower() for subject in parse_list(self.subjects, "--subjects")]
        choices: list[tuple[str, list[Any], Callable[[Problem], Any]]] = [
            ("--sample-ids", parse_list(self.sample_ids, "--sample-ids"), lambda problem: problem.unique_id),
            ("--levels", levels, lambda problem: problem.level),
            ("--subjects", subjects, lambda problem: (problem.subject or "").lower()),
        ]
        chosen = list(problems)
        for flag, wanted, value_of in choices:
            there = list(dict.fromkeys(filter(None, map(value_of, problems)))) if wanted else []
            if unknown := [str(one) for one in wanted if one not in there]:
                shown = ", ".join(map(str, there[:8])) + (", …" if len(there) > 8 else "")
                near = nearest_of_each(unknown, list(map(str, there)))
                raise BenchmarkError(f"{flag}: the benchmark has no {near}; it has {shown or 'none'}")
            chosen = [problem for problem in chosen if not wanted or value_of(problem) in wanted]
        if not chosen:
            raise BenchmarkError("no problem has one of the --sample-ids, --levels and --subjects at the same time")
        if self.shuffle:
            random.Random(self.shuffle_seed).shuffle(chosen)
        return chosen[: self.limit]


FileCallback = Callable[[typer.Context, typer.CallbackParam, Path | None], Path | None]


def output_file(suffixes: Sequence[str] = (), makes_folder: bool = False) -> FileCallback:
    """Return a callback for an option that names an output file: it fails if the file is not writable.

    Args:
        suffixes: allowed suffixes; empty for any.
        makes_folder: whether a missing folder is created.
    """

    def check(context: typer.Context, parameter: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is None or context.resilient_parsing:
            return path
        if suffixes and path.suffix.lower() not in suffixes:
            known = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
            raise OptionError(f"{parameter.opts[0]}: {str(path)!r} must end in {known}")
        try:  # as only opening it shows whether it is writable; it stays unchanged
            if makes_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            fresh = not path.exists()
            if fresh or path.is_file() or path.is_dir():  # not a pipe, whose reader would see the end of the file
                path.open("ab").close()
            if fresh:
                path.resolve().unlink()  # the target of a dangling link, not the link
        except OSError as error:
            missing = isinstance(error, FileNotFoundError) and not path.parent.is_dir()
            why = f"there is no folder {str(path.parent)!r}" if missing else error.strerror
            raise OptionError(f"{parameter.opts[0]}: cannot write {str(path)!r}: {why}") from None
        return path

    return check


InFlight = Annotated[
    int, typer.Option(envvar="ESPALIER_IN_FLIGHT", min=1, help="Problems searched at once.", rich_help_panel="Models")
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

Epochs = Annotated[
    int, typer.Option(min=1, help="Searches of each problem; epoch e has --seed plus e. More may be asked for later.")
]
Trees = Annotated[bool, typer.Option("--trees", help="Keep each search's tree in trees.jsonl of its run folder.")]
