"""The `espalier` command. Heavy imports stay inside the commands, so that `espalier --help` is fast."""

import io
import json
import logging
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from espalier.engine.errors import EspalierError, FatalError, InvalidRequestError, NumericalError
from espalier.engine.interrupts import lasting_interrupts
from espalier.experiments.cli import options as opt
from espalier.experiments.cli.commands.advise import advise_command
from espalier.experiments.cli.commands.doctor import doctor
from espalier.experiments.cli.commands.eval_prm import eval_prm_command
from espalier.experiments.cli.commands.evaluate import evaluate_command
from espalier.experiments.cli.commands.learn_verifier import learn_verifier_command
from espalier.experiments.cli.commands.models import app as models_app
from espalier.experiments.cli.commands.plan import plan_command
from espalier.experiments.cli.commands.report import report_command
from espalier.experiments.cli.commands.rollouts import rollouts_command
from espalier.experiments.cli.commands.sweep import sweep_command
from espalier.experiments.cli.commands.view import view_command
from espalier.experiments.cli.connection import ConnectionOptions, retries_shown
from espalier.experiments.cli.help import CommandLine
from espalier.experiments.cli.operating.health import health
from espalier.experiments.cli.operating.token import token
from espalier.experiments.cli.runs import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EXIT_USAGE,
    searches_for,
    verifier_for,
)
from espalier.experiments.cli.schema_options import flag_of, with_schema
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.search.algorithms import unscored_default
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.run.load import on_gpu
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import CodeName, declared
from espalier.search.service.settings import LogFormat, ServerSettings, default_searches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from espalier.search.run.executor import Executor

log = logging.getLogger("espalier.cli")

app = CommandLine(
    name="espalier",
    help="Test-time-compute search: a generator and a process reward model in one engine, over one paged KV pool.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.add_typer(models_app, name="models")

_SHOWCASE = 4
"""Index in the demo benchmark of the default problem of `espalier solve`.

Beam search solves it; greedy decoding and a majority of 16 do not.
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        from espalier import __version__

        print(f"espalier {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@with_schema
def solve(
    context: typer.Context,
    problem: Annotated[
        str | None, typer.Argument(help="The problem; '-' reads standard input; default: one of the demo benchmark.")
    ] = None,
    endpoint: opt.Endpoint = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=opt.output_file(opt.PLOT_SUFFIXES), help="Draw the search tree to this .svg, .png or .pdf."
        ),
    ] = None,
    trace: opt.Trace = None,
    profile: opt.Profile = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="With --endpoint: seconds to wait in all; default: 600.")
    ] = None,
    priority: Annotated[
        int, typer.Option(help="With --endpoint: searches of a higher priority go first; -100 to 100.")
    ] = 0,
    *,
    request: SearchRequest,
    runtime: RuntimeSettings,
    connection: ConnectionOptions,
) -> None:
    """Search for the answer to one problem and show the tree."""
    from rich.console import Console
    from rich.text import Text

    from espalier.experiments.cli.render import show_result

    if endpoint:
        local = {field.name for field in declared(RuntimeSettings)} | {"trace", "profile"}
        opt.refuse(context, local, "only for searches in this process; leave out --endpoint")
        if isinstance(request.algorithm, CodeName):
            raise opt.OptionError(
                f"--algorithm {request.algorithm}: a server runs its own searches; leave out --endpoint"
            )
    else:
        remote = {field.name for field in declared(ConnectionOptions)} | {"timeout", "priority"}
        opt.refuse(context, remote, "only for a server's searches; give --endpoint")
    text, gold = _problem_text(problem)
    request = replace(request, problem=text)
    console = Console()
    if not as_json:
        console.print(Text.assemble(("problem  ", "bold"), text, "\n"))
    if endpoint:
        from espalier.search.client.async_client import TIMEOUT

        with retries_shown(), connection.connect(endpoint) as client:
            result = client.solve(request, timeout or TIMEOUT, include_nodes=True, priority=priority)
    else:
        from espalier.experiments.cli.loading import load_with_progress
        from espalier.experiments.runs.chrome_trace import profiled
        from espalier.search.result import SearchResult

        (request,) = searches_for([request], runtime)
        orchestrator = load_with_progress(replace(runtime, verifier=verifier_for([request], runtime)))
        try:
            orchestrator.submit(request, options=SubmitOptions(report_nodes=trace is not None))
            with profiled(orchestrator, profile):
                while not (ended := orchestrator.step()):
                    pass
        finally:
            orchestrator.close()
        (result,) = ended
        assert isinstance(result, SearchResult)
        if result.error:
            raise SearchFailedError(result.error)
    for warning in result.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        show_result(console, result, gold)
    if plot:  # after the result, which a disk that is full must not hide
        from espalier.experiments.plots.tree import plot_tree

        plot_tree(result, text, plot)
    if trace:
        from espalier.search.trace import write_trace

        write_trace(result, trace)


@app.command("replay")
def replay_command(
    file: Annotated[Path, typer.Argument(help="A trace written by `espalier solve --trace`.")],
    algorithm: Annotated[
        str,
        typer.Option("--algorithm", "-a", help="Load the trace's search from MODULE:CLASS of yours.", metavar="NAME"),
    ] = "",
) -> None:
    """Check that a recorded search makes the same decisions when replayed; needs no model."""
    from espalier.search.trace import read_trace, replay

    trace = read_trace(file)
    rounds = replay(trace, algorithm)
    print(
        f"{trace['configuration']['algorithm']}: the same decisions in all {rounds} rounds, {len(trace['nodes'])} nodes"
    )


@app.command()
@with_schema
def serve(
    *,
    settings: ServerSettings,
    runtime: RuntimeSettings,
    where: ExecutorSettings,
) -> None:
    """Serve searches over gRPC (espalier.v1.SearchService), with --http-port also over HTTP as OpenAI's chats."""
    from espalier.experiments.cli.loading import load_executor
    from espalier.search.service.model_names import short_name
    from espalier.search.service.server import Addresses
    from espalier.search.service.server import serve as run_server

    def load() -> "Executor":
        from espalier.kernels.cpu.threads import usable_cores

        gpu = bool(where.gpus_per_worker) or on_gpu(runtime.device)
        most = settings.max_searches or default_searches(gpu, runtime.threads or usable_cores(), where.workers)
        return load_executor(replace(runtime, max_running=-(-most // where.workers)), where)

    if runtime.verify_incremental:
        raise typer.BadParameter(
            "a server would stop at the first difference; use solve or eval",
            param_hint="--verify-incremental",
        )
    settings = replace(settings, model_name=settings.model_name or short_name(runtime.generator))

    def report(addresses: Addresses) -> None:
        where = " and ".join(filter(None, addresses))
        print(f"serving {runtime.generator} with {runtime.verifier or 'no verifier'} on {where}", flush=True)
        if not runtime.verifier:
            log.warning("%s", unscored_default())

    with _log_of(settings.log_format) as end_log:
        logging.getLogger("espalier").setLevel(logging.INFO)
        code = run_server(load, settings, ready=report)
        # A hard exit: after a signal during loading, the engine's thread is still inside torch, which would abort.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        end_log()
        os._exit(code)


@contextmanager
def _log_of(form: LogFormat) -> "Iterator[Callable[[], None]]":
    """Log to standard error in this form, errors of the command too; yields what ends it before a hard exit."""
    if form is LogFormat.TEXT:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        yield lambda: None
        return
    from espalier.experiments.cli.operating.json_log import stderr_as_json

    with stderr_as_json() as end:
        try:
            yield end
        except (EspalierError, OSError) as error:
            raise typer.Exit(_say(error)) from error


app.command("eval")(evaluate_command)
app.command("eval-prm")(eval_prm_command)
app.command("sweep")(sweep_command)
app.command("report")(report_command)
app.command("view")(view_command)
app.command("rollouts")(rollouts_command)
app.command("learn-verifier")(learn_verifier_command)
app.command("advise")(advise_command)
app.command("plan")(plan_command)
app.command()(doctor)
app.command()(health)
app.command()(token)


def main() -> None:
    """Entry point: run a command; errors become one line and an exit code."""
    run_app(app)


class SearchFailedError(EspalierError):
    """A search ended without a result; the message says why."""


_FAILURES = (SearchFailedError, FatalError, NumericalError)
"""Errors that are not of the command's use."""


def run_app(commands: typer.Typer) -> None:
    """Run a Typer application; a typed error becomes one line on standard error and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # never fail on an unencodable character; stderr already replaces them
    try:
        with lasting_interrupts() as terminated:
            try:
                commands()
            except SystemExit as end:
                if end.code == EXIT_INTERRUPTED and terminated():
                    sys.exit(EXIT_TERMINATED)
                raise
    except (EspalierError, OSError) as error:
        sys.exit(_say(error))


def _say(error: EspalierError | OSError) -> int:
    """Print an error as one line; returns the exit code for it.

    An OSError is a disk that is full or read-only, or a lack of processes: nothing that a traceback would explain.
    """
    if isinstance(error, InvalidRequestError):
        rules = (f"{flag_of(violation.field)}: {violation.description}" for violation in error.violations)
        print(f"error: {'; '.join(rules)}", file=sys.stderr)
        return EXIT_USAGE
    print(f"error: {error}", file=sys.stderr)
    return EXIT_FAILED if isinstance(error, (*_FAILURES, OSError)) else EXIT_USAGE


def _problem_text(problem: str | None) -> tuple[str, str | None]:
    """The problem to solve; and its gold answer if it is from the benchmark."""
    if problem is None:
        from espalier.experiments.runs.benchmarks import load_benchmark

        shown = load_benchmark("demo")[_SHOWCASE]
        return shown.problem, shown.answer
    return (sys.stdin.read().strip() if problem == "-" else problem), None


if __name__ == "__main__":
    main()
