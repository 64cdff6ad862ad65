"""The `espalier` command. Heavy imports stay inside the commands, so that `espalier --help` is fast."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.experiments.cli import options as opt
from espalier.experiments.cli.doctor import doctor
from espalier.experiments.cli.models import app as models_app
from espalier.experiments.cli.schema_options import flags_by_field, with_schema
from espalier.search.algorithms import needs_verifier
from espalier.search.request import SearchRequest
from espalier.search.run.load import RuntimeSettings
from espalier.search.schema import declared
from espalier.search.service.settings import ServerSettings

if TYPE_CHECKING:
    from espalier.experiments.evaluation.sample import Sample

app = typer.Typer(
    name="espalier",
    help="Test-time-compute search: a generator and a process reward model in one engine, over one paged KV pool.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(models_app, name="models")

_SHOWCASE = 4
"""Index in the demo benchmark of the default problem of `espalier solve`.

Beam search solves it; greedy decoding and a majority of 16 do not.
"""

_EXIT_USAGE, _EXIT_INTERRUPTED = 2, 130


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"espalier {version('espalier')}")
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
    *,
    request: SearchRequest,
    runtime: RuntimeSettings,
) -> None:
    """Search for the answer to one problem and show the tree."""
    from rich.console import Console
    from rich.text import Text

    from espalier.experiments.cli.render import show_result

    if endpoint:
        _refuse_with_endpoint(context)
    text, gold = _problem_text(problem)
    request = replace(request, problem=text)
    console = Console()
    if not as_json:
        console.print(Text.assemble(("problem  ", "bold"), text, "\n"))
    if endpoint:
        from espalier.search.client import SearchClient

        with SearchClient(endpoint) as client:
            result = client.solve(request, include_nodes=True)
    else:
        from espalier.experiments.cli.loading import load_with_progress

        orchestrator = load_with_progress(replace(runtime, verifier=_verifier_for(request, runtime.verifier)))
        try:
            orchestrator.submit(request)
            _warn_of_unknown(text, runtime.generator)
            while not (ended := orchestrator.step()):
                pass
        finally:
            orchestrator.close()
        (result,) = ended
        if result.error:
            raise EspalierError(result.error)
    if plot:
        from espalier.experiments.cli.plots import plot_tree

        plot_tree(result, text, plot)
    if trace:
        from espalier.search.trace import write_trace

        write_trace(result, trace)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        show_result(console, result, gold)


@app.command("replay")
def replay_command(
    file: Annotated[Path, typer.Argument(help="A trace written by `espalier solve --trace`.")],
) -> None:
    """Check that a recorded search makes the same decisions when replayed; needs no model."""
    from espalier.search.trace import read_trace, replay

    trace = read_trace(file)
    rounds = replay(trace)
    print(
        f"{trace['configuration']['algorithm']}: the same decisions in all {rounds} rounds, {len(trace['nodes'])} nodes"
    )


@app.command()
@with_schema
def serve(
    *,
    settings: ServerSettings,
    runtime: RuntimeSettings,
) -> None:
    """Serve searches over gRPC (espalier.v1.SearchService)."""
    import logging

    from espalier.experiments.cli.loading import load_with_progress
    from espalier.search.service.server import serve as run_server

    if runtime.verify_incremental:
        raise typer.BadParameter(
            "a server would stop at the first difference; use solve or eval",
            param_hint="--verify-incremental",
        )
    runtime = replace(runtime, max_running=settings.max_searches)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("espalier").setLevel(logging.INFO)

    def report(address: str) -> None:
        print(f"serving {runtime.generator} with {runtime.verifier or 'no verifier'} on {address}", flush=True)

    code = run_server(lambda: load_with_progress(runtime), settings, ready=report)
    # Not a normal exit: after a signal during loading, the engine's thread is still inside torch, which would abort.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@app.command("eval")
@with_schema
def evaluate_command(
    benchmark: opt.Benchmark = "demo",
    field_map: opt.FieldMap = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for samples.jsonl and summary.json; running the command again resumes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    in_flight: opt.InFlight = 32,
    *,
    request: SearchRequest,
    runtime: RuntimeSettings,
) -> None:
    """Run a search on every problem of a benchmark and grade the answers."""
    from rich.console import Console

    from espalier.experiments.cli.loading import load_with_progress
    from espalier.experiments.cli.render import sample_progress, show_summary
    from espalier.experiments.evaluation.benchmarks import load_benchmark
    from espalier.experiments.evaluation.evaluate import evaluate, left_open, run_configuration
    from espalier.experiments.evaluation.provenance import describe_command
    from espalier.experiments.evaluation.run_folder import RunFolder
    from espalier.search.voting.math_verify import Grader

    # The folder may hold samples of problems beyond the limit; the whole benchmark tells which of them are current.
    problems = load_benchmark(benchmark, None if out else limit, opt.parse_field_map(field_map))
    asked = problems[:limit]
    runtime = replace(runtime, verifier=_verifier_for(request, runtime.verifier), max_running=in_flight)
    orchestrator = load_with_progress(runtime)
    fresh: list[Sample] = []
    folder, before = None, 0
    if out:
        command = describe_command(benchmark, runtime, orchestrator)
        folder = RunFolder(out, run_configuration(benchmark, request, orchestrator), left_open(request), command)
        before = sum(not sample.refused for sample in folder.samples_of(asked))
    grader = Grader(memory_bytes=runtime.grader_memory)
    with _kept_on_interrupt(out), closing(orchestrator), grader, sample_progress(len(asked), before) as on_sample:
        summary = evaluate(
            orchestrator, problems, request, grader,
            benchmark=benchmark, limit=limit, folder=folder, on_sample=_both(fresh.append, on_sample),
        )  # fmt: skip
    if runtime.verify_incremental:
        _say_what_was_verified(fresh, len(asked), runtime.verifier)
    if as_json:
        from dataclasses import asdict

        print(json.dumps(asdict(summary), indent=2))
    else:
        show_summary(Console(), summary, len(asked), out)


@app.command("sweep")
@with_schema
def sweep_command(
    beam_width: Annotated[str, typer.Option("--beam-width", "-N", help="Values of N, like 1,2,4.")] = "1,2,4",
    expansion: Annotated[str, typer.Option("--expansion", "-M", help="Values of M, like 1,2,4.")] = "1,2,4",
    benchmark: opt.Benchmark = "demo",
    field_map: opt.FieldMap = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the cells, the table and the plot; running the command again resumes.")
    ] = Path("runs/sweep"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the cells as JSON.")] = False,
    in_flight: opt.InFlight = 32,
    *,
    request: SearchRequest,
    runtime: RuntimeSettings,
) -> None:
    """Evaluate beam search over a grid of N and M; writes a table and a plot of accuracy against tokens."""
    from dataclasses import asdict

    from rich.console import Console

    from espalier.experiments.cli.loading import load_with_progress
    from espalier.experiments.cli.plots import plot_cells
    from espalier.experiments.cli.render import sample_progress, show_cells
    from espalier.experiments.evaluation.benchmarks import load_benchmark
    from espalier.experiments.evaluation.provenance import describe_command
    from espalier.experiments.evaluation.sweep import TABLE, sweep
    from espalier.search.voting.math_verify import Grader

    widths, expansions = opt.parse_int_list(beam_width, "-N"), opt.parse_int_list(expansion, "-M")
    problems = load_benchmark(benchmark, field_map=opt.parse_field_map(field_map))
    runtime = replace(runtime, max_running=in_flight)
    orchestrator = load_with_progress(runtime)
    total = len(problems[:limit]) * len(widths) * len(expansions)
    fresh: list[Sample] = []
    grader = Grader(memory_bytes=runtime.grader_memory)
    with _kept_on_interrupt(out), closing(orchestrator), grader, sample_progress(total, 0) as on_sample:
        cells = sweep(
            orchestrator, problems, request, grader, widths, expansions,
            benchmark=benchmark, folder=out, limit=limit, on_sample=_both(fresh.append, on_sample),
            command=describe_command(benchmark, runtime, orchestrator),
        )  # fmt: skip
    plot_cells(cells, benchmark, out / "accuracy.png")
    if runtime.verify_incremental:
        _say_what_was_verified(fresh, total, runtime.verifier)
    if as_json:
        print(json.dumps([asdict(cell) for cell in cells], indent=2))
    else:
        console = Console()
        show_cells(console, cells, out)
        console.print(f"table {out / TABLE}\nplot  {out / 'accuracy.png'}", highlight=False, markup=False)


app.command()(doctor)


def main() -> None:
    """Entry point: run a command; errors become one line and an exit code."""
    run_app(app)


def run_app(commands: typer.Typer) -> None:
    """Run a Typer application; a typed error becomes one line on standard error and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # never fail on an unencodable character; stderr already replaces them
    try:
        commands()
    except InvalidRequestError as error:
        rules = (f"{_flag(violation.field)}: {violation.description}" for violation in error.violations)
        print(f"error: {'; '.join(rules)}", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    except EspalierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_EXIT_USAGE)


def _flag(field: str) -> str:
    """The flag of a field; its own name if it has none."""
    return flags_by_field(SearchRequest, RuntimeSettings).get(field, field)


def _refuse_with_endpoint(context: typer.Context) -> None:
    """Refuse options that have no effect with --endpoint: those of the models, and --trace.

    Values from the environment may be meant for other commands and are ignored.

    Raises:
        OptionError: names every such option on the command line.
    """
    local = {field.name for field in declared(RuntimeSettings)} | {"trace"}
    given = (parameter for parameter in context.command.params if parameter.name in local)
    flags = [parameter.opts[0] for parameter in given if _is_on_the_line(context, parameter.name)]
    if flags:
        raise opt.OptionError(f"{', '.join(flags)}: only for searches in this process; leave out --endpoint")


def _is_on_the_line(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def _both(one: Callable[["Sample"], None], other: Callable[["Sample"], None]) -> Callable[["Sample"], None]:
    def call(sample: "Sample") -> None:
        one(sample)
        other(sample)

    return call


def _say_what_was_verified(fresh: "list[Sample]", searches: int, verifier: str) -> None:
    """Report how many searches `--verify-incremental` did not check, such as those of an earlier command."""
    verified = sum(not sample.refused for sample in fresh) if verifier else 0
    if verified < searches:
        why = "the other samples are of an earlier command, or refused; name another --out to search them again"
        why = why if verifier else "this search reads no scores"
        what = f"{verified} of {searches} searches" if verified else f"nothing, of {searches} searches"
        print(f"--verify-incremental verified {what}: {why}", file=sys.stderr)


@contextmanager
def _kept_on_interrupt(folder: Path | None) -> Iterator[None]:
    """On Ctrl-C, print where finished work is stored."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"what was finished is in {folder}; the same command resumes" if folder else "nothing was kept"
        print(f"interrupted: {kept}", file=sys.stderr)
        raise typer.Exit(_EXIT_INTERRUPTED) from None


def _problem_text(problem: str | None) -> tuple[str, str | None]:
    """The problem to solve; and its gold answer if it is from the benchmark."""
    if problem is None:
        from espalier.experiments.evaluation.benchmarks import load_benchmark

        shown = load_benchmark("demo")[_SHOWCASE]
        return shown.problem, shown.answer
    return (sys.stdin.read().strip() if problem == "-" else problem), None


def _warn_of_unknown(problem: str, generator: str) -> None:
    """Warn about operations that the bundled generator was not trained on, as it answers anyway."""
    if generator != RuntimeSettings().generator:
        return
    from espalier.experiments.demo.taught import DOMAIN, not_taught

    if unknown := not_taught(problem):
        typer.echo(
            f"warning: the bundled generator reads {DOMAIN}; it was hardly or never taught {' or '.join(unknown)}. "
            "Its answer is likely to be wrong; use --generator for another model",
            err=True,
        )


def _verifier_for(request: SearchRequest, verifier: str) -> str:
    """The verifier to load: none for a search that uses no scores."""
    return verifier if needs_verifier(request) else ""


if __name__ == "__main__":
    main()
