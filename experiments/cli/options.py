"""Options shared by several commands: the problems of a benchmark, the connection to a server; and their parsers."""

import logging
import os
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from annotated_types import Interval

from espalier.engine.errors import EspalierError, nearest_of_each
from espalier.experiments.runs.benchmark_files import BenchmarkError
from espalier.experiments.runs.benchmarks import FIELDS, Problem, load_benchmark
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import declared, option, optional

if TYPE_CHECKING:
    from espalier.search.client import RetryPolicy, SearchClient

TOKEN_VARIABLE = "ESPALIER_TOKEN"
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
        what = f"{text!r} is not a list of different positive numbers; write 1,2,4"
        raise typer.BadParameter(what, param_hint=option)
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
        "demo; a .jsonl, .json, .csv, .tsv or .parquet file; a folder of such files or of save_to_disk; or a Hugging "
        "Face id. Behind a folder or id, :SPLIT or :CONFIGURATION/SPLIT, as in openai/gsm8k:main/test.",
    )
    field_map: str | None = optional(
        "Names of the file's fields if not recognized, like problem=Question,answer=Answer; also id, level and "
        "subject. A dot leads into a field, as in answer=reward_model.ground_truth.",
    )
    grader: str = option(
        "math-verify",
        "How answers are graded: math-verify, exact, choice (a letter), numeric or numeric:TOLERANCE, expression "
        "(the gold answer is a Python expression of `answer`), or MODULE:FUNCTION of yours.",
    )
    limit: int | None = optional("Only the first of those chosen; in eval-prm, of each subset.", Interval(ge=1))
    sample_ids: str | None = optional("Only these problems: ids, like a,b.")
    levels: str | None = optional("Only problems of these levels, like 1,2.")
    subjects: str | None = optional("Only problems of these subjects, like Algebra,Geometry.")
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
            what = f"{self.field_map!r} is not a list of {', '.join(f'{what}=NAME' for what in FIELDS)}"
            how = "write problem=Q,answer=A, or problem=A+B for two fields together"
            raise typer.BadParameter(f"{what}; {how}", param_hint="--field-map")
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


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Login and TLS of a connection to a server, as the command line says them."""

    help_panel: ClassVar = "Connection"
    env_prefix: ClassVar = "ESPALIER_"

    token_file: Path | None = optional(
        f"File with the token that `espalier token` printed; default: the token in {TOKEN_VARIABLE}. There is no "
        "option for the token itself, as others on the machine could read it.",
    )
    insecure_token: bool = option(False, "Send the token to another machine even without TLS.")
    tls: bool = option(False, "Connect with TLS, and trust the system's authorities; the options below do so too.")
    tls_ca: Path | None = optional("Certificates of the authorities to trust instead of the system's, PEM.")
    tls_server_name: str | None = optional("Name in the server's certificate, where it is not the endpoint's host.")
    client_certificate: Path | None = optional("Certificate to show to the server, PEM; a login too.")
    client_key: Path | None = optional("Private key of --client-certificate, PEM.")

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
    parameters = [each for each in context.command.params if each.name in idle.difference(of_both)]
    sources = [context.get_parameter_source(str(each.name)) for each in parameters]
    given = [each.opts[0] for each, of in zip(parameters, sources, strict=True) if of and of.name == "COMMANDLINE"]
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
    typer.Option(callback=output_file([".json"]), help="Write a Chrome trace of engine steps, for ui.perfetto.dev."),
]

Epochs = Annotated[
    int, typer.Option(min=1, help="Searches of each problem; epoch e has --seed plus e. More may be asked for later.")
]
Trees = Annotated[bool, typer.Option("--trees", help="Keep each search's tree in trees.jsonl of its run folder.")]
