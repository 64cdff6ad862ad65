"""The `espalier` command. Heavy imports stay inside the commands, so that `espalier --help` is fast."""

import io
import json
import logging
import os
import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from annotated_types import Interval
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from espalier import __version__
from espalier.engine.errors import EspalierError, FatalError, InvalidRequestError, NumericalError
from espalier.engine.interrupts import lasting_interrupts
from espalier.experiments.cli import options as opt
from espalier.experiments.cli import runs
from espalier.experiments.cli.commands import eval_prm, evaluate, planning, report, rollouts
from espalier.experiments.cli.help import CommandLine
from espalier.experiments.cli.operating import doctor, health, token
from espalier.experiments.cli.operating.json_log import stderr_as_json
from espalier.experiments.cli.progress import load_executor, load_with_progress
from espalier.experiments.cli.render import show_result
from espalier.experiments.cli.schema_options import flag_of, with_schema
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.experiments.runs.files import write_whole
from espalier.search.algorithms import unscored_default
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.result import SearchResult
from espalier.search.run.settings import RuntimeSettings, on_gpu
from espalier.search.schema import CodeName, option, optional
from espalier.search.service.errors import SearchFailedError
from espalier.search.service.settings import LogFormat, ServerSettings, default_searches
from espalier.search.trace import read_trace, replay, write_trace

if TYPE_CHECKING:
    from espalier.search.run.executor import Executor

log = logging.getLogger("espalier.cli")

app = CommandLine(
    name="espalier",
    help="Test-time-compute search: a generator and a process reward model in one engine, over one paged KV pool.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.add_typer(planning.app, name="models")

_MAX_TRACES = 2
_SHOWCASE = 4
"""Index in the demo benchmark of the default problem of `espalier solve`.

Beam search solves it; greedy decoding and a majority of 16 do not.
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"espalier {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@with_schema
def solve(
    context: typer.Context,
    problem: Annotated[
        str | None, Argument(help="'-' reads standard input; default: one of the demo benchmark.")
    ] = None,
    endpoint: opt.Endpoint = None,
    as_json: Annotated[bool, Option("--json", help="Print the whole result as JSON.")] = False,
    plot: Annotated[
        Path | None,
        Option(callback=opt.output_file(opt.PLOT_SUFFIXES), help="Draw the search tree to this .svg, .png or .pdf."),
    ] = None,
    trace: opt.Trace = None,
    profile: opt.Profile = None,
    timeout: float | None = optional("With --endpoint: seconds to wait; default: 600.", Interval(ge=0.001)),
    priority: int = option(0, "With --endpoint: searches of a higher priority go first; -100 to 100."),
    *,
    request: SearchRequest,
    runtime: RuntimeSettings,
    connection: opt.ConnectionOptions,
) -> None:
    """Search for the answer to one problem and show the tree."""
    opt.check_place(context, endpoint, "searches")
    if endpoint and isinstance(request.algorithm, CodeName):
        raise opt.OptionError(f"--algorithm {request.algorithm}: a server runs its own searches; leave out --endpoint")
    text, gold = _problem_text(problem)
    request = replace(request, problem=text)
    console = Console()
    if not as_json:
        console.print(Text.assemble(("problem  ", "bold"), text, "\n"))
    if endpoint:
        from espalier.search.client.async_client import TIMEOUT

        with opt.retries_shown(), connection.connect(endpoint) as client:
            result = client.solve(request, timeout or TIMEOUT, include_nodes=True, priority=priority)
    else:
        from espalier.experiments.runs.chrome_trace import profiled

        (request,) = runs.searches_for([request], runtime)
        orchestrator = load_with_progress(replace(runtime, verifier=runs.verifier_for([request], runtime)))
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
        write_trace(result, trace)


@app.command("replay")
def replay_command(
    file: Annotated[Path, Argument(help="A trace written by `espalier solve --trace`.")],
    algorithm: Annotated[
        str, Option("--algorithm", "-a", help="Load the trace's search from MODULE:CLASS of yours.", metavar="NAME")
    ] = "",
) -> None:
    """Check that a recorded search makes the same decisions when replayed; needs no model."""
    trace = read_trace(file)
    rounds = replay(trace, algorithm)
    name, nodes = trace["configuration"]["algorithm"], trace["nodes"]
    print(f"{name}: the same decisions in all {rounds} rounds, {len(nodes)} nodes")


@app.command("view")
def view_command(
    traces: Annotated[
        list[Path], Argument(metavar="TRACE...", help="One trace of `espalier solve --trace`, or two side by side.")
    ],
    html: Annotated[
        Path | None, Option(callback=opt.output_file([".html"]), help="Default: the first trace's name with .html.")
    ] = None,
    show: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one HTML page that shows a recorded search tree, round by round."""
    from espalier.search.service.page.files import standalone_page

    if len(traces) > _MAX_TRACES:
        raise opt.OptionError(f"TRACE: the page shows {_MAX_TRACES} searches at most, {len(traces)} are given")
    html = html or traces[0].with_suffix(".html")
    if html.resolve() in [file.resolve() for file in traces]:
        raise opt.OptionError(f"--html: {str(html)!r} is a trace; name another file")
    write_whole(html, standalone_page([read_trace(file) for file in traces]))
    typer.echo(f"page  {html}")
    if show and not webbrowser.open(html.resolve().as_uri()):
        typer.echo("warning: no browser was found to open it", err=True)


@app.command()
@with_schema
def serve(*, settings: ServerSettings, runtime: RuntimeSettings, where: ExecutorSettings) -> None:
    """Serve searches over gRPC (espalier.v1.SearchService), with --http-port also over HTTP as OpenAI's chats."""
    from espalier.search.service.model_names import short_name
    from espalier.search.service.server import Addresses
    from espalier.search.service.server import serve as run_server

    def load() -> "Executor":
        from espalier.kernels.cpu.threads import usable_cores

        gpu = bool(where.gpus_per_worker) or on_gpu(runtime.device)
        most = settings.max_searches or default_searches(gpu, runtime.threads or usable_cores(), where.workers)
        return load_executor(replace(runtime, max_running=-(-most // where.workers)), where)

    if runtime.verify_incremental:
        why = "a server would stop at the first difference; use solve or eval"
        raise typer.BadParameter(why, param_hint="--verify-incremental")
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
def _log_of(form: LogFormat) -> Iterator[Callable[[], None]]:
    """Log to standard error in this form, errors of the command too; yields what ends it before a hard exit."""
    if form is LogFormat.TEXT:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        yield lambda: None
        return
    with stderr_as_json() as end:
        try:
            yield end
        except (EspalierError, OSError) as error:
            raise typer.Exit(_say(error)) from error


for name, command in {
    "eval": evaluate.evaluate_command,
    "eval-prm": eval_prm.eval_prm_command,
    "sweep": evaluate.sweep_command,
    "report": report.report_command,
    "rollouts": rollouts.rollouts_command,
    "learn-verifier": rollouts.learn_verifier_command,
    "advise": evaluate.advise_command,
    "plan": planning.plan_command,
    "doctor": doctor.doctor,
    "health": health.health,
    "token": token.token,
}.items():
    app.command(name)(command)


def main() -> None:
    """Entry point: run a command; errors become one line and an exit code."""
    run_app(app)


def run_app(commands: typer.Typer) -> None:
    """Run a Typer application; a typed error becomes one line on standard error and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # never fail on an unencodable character; stderr already replaces them
    try:
        with lasting_interrupts() as terminated:
            try:
                commands()
            except SystemExit as end:
                if end.code == runs.EXIT_INTERRUPTED and terminated():
                    sys.exit(runs.EXIT_TERMINATED)
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
        return runs.EXIT_USAGE
    print(f"error: {error}", file=sys.stderr)
    is_no_misuse = isinstance(error, (SearchFailedError, FatalError, NumericalError, OSError))
    return runs.EXIT_FAILED if is_no_misuse else runs.EXIT_USAGE


def _problem_text(problem: str | None) -> tuple[str, str | None]:
    """The problem to solve; and its gold answer if it is from the benchmark."""
    if problem is None:
        shown = load_benchmark("demo")[_SHOWCASE]
        return shown.problem, shown.answer
    return (sys.stdin.read().strip() if problem == "-" else problem), None


if __name__ == "__main__":
    main()
