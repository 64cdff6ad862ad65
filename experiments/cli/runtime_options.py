"""The options that every command which loads models has, said once."""

import functools
import inspect
from collections.abc import Callable

import typer

from espalier.engine.models.options import LoadFormat, Quantization
from espalier.experiments.cli import options as opt
from espalier.search.request import GroupingName
from espalier.search.run.load import RuntimeSettings


def with_runtime(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of the models in place of its parameter `runtime`, which is made of them.

    A new option is then added here and nowhere else.
    """
    own, shared = inspect.signature(command), inspect.signature(_runtime)

    @functools.wraps(command)
    def run(**given: object) -> None:
        runtime = _runtime(**{name: given.pop(name) for name in shared.parameters})  # pyright: ignore[reportArgumentType]
        command(**given, runtime=runtime)

    kept = [parameter for parameter in own.parameters.values() if parameter.name != "runtime"]
    run.__signature__ = own.replace(parameters=[*kept, *shared.parameters.values()])  # pyright: ignore[reportAttributeAccessIssue] - what Typer reads
    return run


def refuse_with_endpoint(context: typer.Context) -> None:
    """Refuse what a server would never hear of: options of the models, and a trace, which is where the search runs.

    What the environment sets may be meant for other commands and is let pass.

    Raises:
        OptionError: naming every such option on the command line.
    """
    local = {*inspect.signature(_runtime).parameters, "trace"}
    flags = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in local and _is_on_the_line(context, parameter.name)
    ]
    if flags:
        raise opt.OptionError(f"{', '.join(flags)}: for a search in this process only; leave out --endpoint")


def _is_on_the_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _runtime(
    generator: opt.Generator = "demo-generator",
    generator_revision: opt.GeneratorRevision = None,
    verifier: opt.Verifier = "demo-verifier",
    verifier_revision: opt.VerifierRevision = None,
    verifier_family: opt.VerifierFamily = None,
    verifier_reference: opt.VerifierReference = "",
    verify_incremental: opt.VerifyIncremental = False,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    load_format: opt.LoadFormatOption = LoadFormat.AUTO,
    generator_quantization: opt.GeneratorQuantization = Quantization.NONE,
    verifier_quantization: opt.VerifierQuantization = Quantization.NONE,
    offline: opt.Offline = False,
    cache_dir: opt.CacheDir = None,
    kv_memory: opt.KvMemory = None,
    reserved_share: opt.ReservedShare = 0.25,
    launch_ahead: opt.LaunchAhead = False,
    system_prompt: opt.SystemPrompt = None,
    grouping: opt.Grouping = GroupingName.MATH_VERIFY,
    grader_memory: opt.GraderMemory = "2G",
    threads: opt.Threads = None,
) -> RuntimeSettings:
    return RuntimeSettings(
        generator=_at(generator, generator_revision),
        verifier=_at(verifier, verifier_revision),
        verifier_family=verifier_family,
        verifier_reference=verifier_reference,
        verify_incremental=verify_incremental,
        device=device,
        dtype=dtype,
        kv_memory_bytes=opt.parse_bytes(kv_memory),
        reserved_share=reserved_share,
        launch_ahead=launch_ahead,
        system_prompt=system_prompt,
        threads=threads,
        grouping=grouping,
        grader_memory_bytes=opt.parse_grader_memory(grader_memory),
        load_format=load_format,
        generator_quantization=generator_quantization,
        verifier_quantization=verifier_quantization,
        offline=offline,
        cache_dir=cache_dir,
    )


def _at(name: str, revision: str | None) -> str:
    """A model's name with its revision, as the hub's own paths spell it."""
    return f"{name}@{revision}" if revision else name
