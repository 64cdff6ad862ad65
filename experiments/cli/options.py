"""Options that several commands share, each with its environment variable."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from espalier.engine.errors import EspalierError
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.experiments.evaluation.benchmarks import FIELDS
from espalier.search.request import GroupingName

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


PLOT_SUFFIXES = (".svg", ".png", ".pdf")
"""What a plot may be written as; the help of every `--plot` names them."""

_LARGEST_PORT = 65535

_LEAST_GRADER_MEMORY = 64 * 2**20
"""Below some 16 MiB sympy cannot even read an answer, and every one would count as different."""


class OptionError(EspalierError):
    """The value of an option is refused; the text names the option."""


def parse_grader_memory(text: str) -> int:
    """Bytes for one process that compares answers.

    Raises:
        typer.BadParameter: for what is no size, or too small to compare anything in.
    """
    size = parse_bytes(text, "--grader-memory")
    if size is None or size < _LEAST_GRADER_MEMORY:
        raise typer.BadParameter(
            f"{text!r} is too little to compare answers in; give at least 64M", param_hint="--grader-memory"
        )
    return size


def parse_bytes(text: str | None, option: str = "--kv-memory") -> int | None:
    """Bytes from `512M`, `1.5GiB`, `2GB` (units are powers of 1024), the value of `option`; None for None.

    Raises:
        typer.BadParameter: for anything else.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size; write 512M or 4G", param_hint=option)
    return int(float(match[1]) * _UNITS[match[2].upper()])


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


def _check_threads(count: int | None) -> int | None:
    """Each thread is started at once and has a stack of its own, so that a slip of the finger could take all memory."""
    processors = os.cpu_count() or 1
    most = max(64, 4 * processors)
    if count is not None and count > most:
        raise OptionError(f"--threads must be at most {most} with {processors} processors, is {count}")
    return count


def _env(name: str) -> str:
    return f"ESPALIER_{name}"


Generator = Annotated[
    str,
    typer.Option(
        envvar=_env("GENERATOR"),
        help="Folder, Hugging Face id (org/name, or org/name@revision) or demo-generator.",
        rich_help_panel="Models",
    ),
]
Verifier = Annotated[
    str,
    typer.Option(
        envvar=_env("VERIFIER"),
        help="Process reward model: as --generator, or demo-verifier; '' for none.",
        rich_help_panel="Models",
    ),
]
GeneratorRevision = Annotated[
    str | None,
    typer.Option(
        envvar=_env("GENERATOR_REVISION"),
        help="Branch, tag or commit of a Hugging Face id; the same as ID@REVISION.",
        rich_help_panel="Models",
        show_default=False,
    ),
]
VerifierRevision = Annotated[
    str | None,
    typer.Option(
        envvar=_env("VERIFIER_REVISION"),
        help="The same of the verifier.",
        rich_help_panel="Models",
        show_default=False,
    ),
]
VerifierFamily = Annotated[
    str | None,
    typer.Option(
        envvar=_env("VERIFIER_FAMILY"),
        help="Family of the process reward model, by name (the README lists them) or an adapter file ending in .toml; "
        "a *ForCausalLM needs one; default: told from the checkpoint.",
        rich_help_panel="Models",
        show_default=False,
    ),
]
VerifierReference = Annotated[
    str,
    typer.Option(
        envvar=_env("VERIFIER_REFERENCE"),
        help="eurus-prm: the model that the verifier was trained from.",
        rich_help_panel="Models",
        show_default=False,
    ),
]
VerifyIncremental = Annotated[
    bool,
    typer.Option(
        "--verify-incremental",
        envvar=_env("VERIFY_INCREMENTAL"),
        help="Compute every score again from the whole text and end with an error where it differs; slow.",
        rich_help_panel="Models",
    ),
]
Device = Annotated[
    str, typer.Option(envvar=_env("DEVICE"), help="auto, cpu, cuda or cuda:N.", rich_help_panel="Models")
]
Dtype = Annotated[
    str,
    typer.Option(envvar=_env("DTYPE"), help="auto, float32, bfloat16 or float16.", rich_help_panel="Models"),
]
LoadFormatOption = Annotated[
    LoadFormat,
    typer.Option(
        "--load-format",
        envvar=_env("LOAD_FORMAT"),
        help="Weight files to read: safetensors, else bin, or one of them; dummy reads none and makes random weights, "
        "for tests of speed.",
        rich_help_panel="Models",
    ),
]
GeneratorQuantization = Annotated[
    Quantization,
    typer.Option(
        envvar=_env("GENERATOR_QUANTIZATION"),
        help="How the generator's weights are kept: int8 takes a half, int4 some 30% of what bfloat16 does. Needs "
        "espalier\\[quantization].",  # a backslash, or rich takes it for markup
        rich_help_panel="Models",
    ),
]
VerifierQuantization = Annotated[
    Quantization,
    typer.Option(
        envvar=_env("VERIFIER_QUANTIZATION"), help="The same of the verifier's weights.", rich_help_panel="Models"
    ),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        envvar=_env("OFFLINE"),
        help="Take Hugging Face ids from the cache, as HF_HUB_OFFLINE=1 does.",
        rich_help_panel="Models",
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        envvar=_env("CACHE_DIR"),
        help="Where downloads are kept; default: HF_HUB_CACHE, else ~/.cache/huggingface/hub.",
        rich_help_panel="Models",
        show_default=False,
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        envvar=_env("KV_MEMORY"),
        help="KV pool that both models share, like 512M or 4G; default: 4G or a quarter of memory, 80% of a free GPU.",
        rich_help_panel="Models",
        show_default=False,
    ),
]
ReservedShare = Annotated[
    float,
    typer.Option(
        envvar=_env("RESERVED_SHARE"),
        min=0.0,
        max=1.0,
        help="Share of the KV memory a search may need at worst that is set aside when it starts. With less, more run "
        "at once; the last ones give theirs up when it runs out, and compute it again. With 1 none ever has to.",
        rich_help_panel="Models",
    ),
]
LaunchAhead = Annotated[
    bool,
    typer.Option(
        "--launch-ahead",
        envvar=_env("LAUNCH_AHEAD"),
        help="Launch one model's batch before the results of the other's are taken in, for a GPU to go on meanwhile. "
        "Answers are the same; on a CPU nothing is gained.",
        rich_help_panel="Models",
    ),
]
SystemPrompt = Annotated[
    str | None,
    typer.Option(
        envvar=_env("SYSTEM_PROMPT"),
        help="Generator's system message; default: the checkpoint's own, else one that asks for steps.",
        rich_help_panel="Models",
        show_default=False,
    ),
]
InFlight = Annotated[
    int,
    typer.Option(envvar=_env("IN_FLIGHT"), min=1, help="Problems searched at once.", rich_help_panel="Models"),
]
Threads = Annotated[
    int | None,
    typer.Option(
        envvar=_env("THREADS"),
        min=1,
        callback=_check_threads,
        help="CPU threads; default: all cores.",
        rich_help_panel="Models",
    ),
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
Grouping = Annotated[
    GroupingName,
    typer.Option(
        envvar=_env("GROUPING"),
        help="What tells equal answers from others in the vote; math-verify also finds 2\\sqrt{2} in \\sqrt{8}.",
        rich_help_panel="Search",
    ),
]
GraderMemory = Annotated[
    str,
    typer.Option(
        envvar=_env("GRADER_MEMORY"),
        help="What a process that compares answers with math-verify may take, like 512M; one that wants more gives up.",
        rich_help_panel="Search",
    ),
]
