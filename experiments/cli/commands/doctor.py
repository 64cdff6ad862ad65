"""`espalier doctor`: reports installed packages, devices and kernels, with advice for what is missing."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import typer

from espalier import DISTRIBUTION, __version__
from espalier.experiments.cli.operating.finding import Finding
from espalier.experiments.cli.schema_options import with_schema
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.search.run.settings import RuntimeSettings
from espalier.search.service.settings import ServerSettings

_OPTIONAL = {
    "triton": "kernels for GPUs; without it attention is plain torch, and slow: pip install 'espalier-search[gpu]'",
    "datasets": "for Parquet, `datasets` folders and benchmarks of the hub: pip install 'espalier-search[datasets]'",
    "torchao": "for int4 weights, and int8 on a GPU: pip install 'espalier-search[quantization]'",
    "ray": "for --executor ray, workers on several machines: pip install 'espalier-search[ray]'",
}


@with_schema
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    *,
    settings: ServerSettings,
    runtime: RuntimeSettings,
    where: ExecutorSettings,
) -> None:
    """Show installed packages, devices, kernels, and what a server would find, with advice for what is missing.

    Takes the options of `espalier serve`, also by --config and from the environment: the port, the certificate, the
    callers and the models that they name are examined. Exits with 0 if a search can run, else with 1 and the reason on
    standard error.
    """
    findings = examine(settings, runtime)
    fatal = [finding for finding in findings if finding.fatal]
    if as_json:
        print(json.dumps({"ok": not fatal, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(*findings, sep="\n")
    for finding in fatal:
        print(f"error: {finding.name}: {finding.advice}", file=sys.stderr)
    if fatal:
        raise typer.Exit(1)


def examine(settings: ServerSettings | None = None, runtime: RuntimeSettings | None = None) -> list[Finding]:
    """Return all findings; a check that raises becomes a finding itself.

    Args:
        settings: of a server to be started; None for the default ones.
        runtime: which models are to be loaded; None for the bundled ones.
    """
    from espalier.experiments.cli.operating.server_findings import server_findings

    findings = [Finding("python", platform.python_version())]

    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "packages": _packages,
        "processor": _processor,
        "gpus": _gpus,
        "kernels": _kernels,
        "weights": partial(_kept_weights, runtime or RuntimeSettings()),
        "models": partial(_models, runtime or RuntimeSettings()),
        "server": partial(server_findings, settings or ServerSettings()),
    }
    for what, check in checks.items():
        try:
            findings.extend(check())
        except Exception as error:  # a broken installation may raise anything
            findings.append(Finding(what, "", f"cannot be examined: {type(error).__name__}: {error}", fatal=True))
    return findings


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    yield Finding("espalier", __version__)
    for needed in map(Requirement, requires(DISTRIBUTION) or ()):
        if needed.marker:  # of an extra
            continue
        found = _version(needed.name)
        fits = bool(found) and needed.specifier.contains(found, prereleases=True)
        advice = "" if fits else f"{'another version is' if found else ''} needed: pip install '{needed}'".strip()
        yield Finding(needed.name, found, advice, fatal=not fits)
    for name, advice in _OPTIONAL.items():
        found = _version(name)
        yield Finding(name, found, "" if found else advice)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> Iterator[Finding]:
    from espalier.experiments.runs.provenance import memory_bytes, processor_name, vector_units
    from espalier.kernels.cpu.threads import num_threads

    memory = memory_bytes()
    yield Finding("processor", processor_name())
    yield Finding("vector units", ", ".join(vector_units()) or "none that Espalier uses")
    yield Finding("threads", f"{num_threads()} of {os.cpu_count()} processors")
    yield Finding("memory", f"{memory / 2**30:.1f} GiB" if memory else "", "" if memory else "the system does not say")


def _gpus() -> Iterator[Finding]:
    import torch

    from espalier.experiments.runs.provenance import gpus

    found = gpus()
    if not found:
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device or driver"
        yield Finding("GPU", "", f"{why}; searches run on the CPU")
    for index, gpu in enumerate(found):
        size, capability = gpu["memory_bytes"] / 2**30, gpu["compute_capability"]
        yield Finding(f"cuda:{index}", f"{gpu['name']}, {size:.1f} GiB, compute capability {capability}")


def _kernels() -> Iterator[Finding]:
    from espalier.kernels.cpu import compiled

    if (place := compiled.place) is None:
        advice = (
            "no folder for them is writable, so every process compiles again: set NUMBA_CACHE_DIR to a writable one"
        )
        yield Finding("compiled kernels", "", advice)
        return
    count = len(list(place.rglob("*.nbc")))
    advice = "" if count else "none yet: the first search compiles them, which takes about 20 seconds"
    yield Finding("compiled kernels", f"{count} in {place}", advice)


def _kept_weights(runtime: RuntimeSettings) -> Iterator[Finding]:
    from espalier.engine.models.load_cache import open_cache
    from espalier.kernels.cpu import HAS_VNNI

    if (cache := open_cache(runtime.load_cache)) is None:
        yield Finding("kept int8 weights", "none: --load-cache none, or no home")
        return
    entries = cache.entries()
    held = f"{len(entries)} in {cache.folder}, {sum(size for _, size in entries) / 2**30:.1f} GiB"
    yield Finding("kept int8 weights", held, "" if HAS_VNNI else "this processor has no AVX-512 VNNI: none are kept")


def _code_of(folder: Path, runtime: RuntimeSettings) -> str:
    """The code that runs a checkpoint's decoder, by its configuration alone."""
    from espalier.engine.models.families import impl_of
    from espalier.engine.models.text_files import parse_object, read_text

    file = folder / "config.json"
    text = read_text(file) if folder.is_dir() else None  # a GGUF file has another description
    return f"{impl_of(parse_object(file, text) if text else {}, runtime.model_impl)} code"


def _states_of(folder: Path, runtime: RuntimeSettings) -> str:
    """Recurrent state of one path; empty for decoders without, and for those that cannot run."""
    from espalier.engine.errors import EspalierError
    from espalier.engine.models.checkpoint import Checkpoint

    try:
        size = Checkpoint(folder, model_impl=runtime.model_impl).decoder_config.state_bytes
    except EspalierError:
        return ""
    return f", {size / 2**20:.2f} MiB of recurrent state a path" if size else ""


def _models(runtime: RuntimeSettings) -> Iterator[Finding]:
    from espalier.engine.errors import EspalierError
    from espalier.engine.models.hub import HubSettings, locate, locate_with_adapter
    from espalier.prm.scorers import names_checkpoint

    bundled = RuntimeSettings().generator, RuntimeSettings().verifier
    for name in (runtime.generator, runtime.verifier):
        if name not in bundled and names_checkpoint(name):
            try:
                hub = HubSettings(offline=True, cache_dir=runtime.cache_dir)
                folder, adapter = locate_with_adapter(name, runtime.load_format, hub)
                places = " + ".join(map(str, filter(None, (folder, adapter))))
                yield Finding(name, f"{places}, run by {_code_of(folder, runtime)}{_states_of(folder, runtime)}")
            except EspalierError as error:
                yield Finding(name, "", f"{error}; a server would try to download it")
    for name in bundled:
        try:
            folder = locate(name)
            missing = [file for file in ("config.json", "model.safetensors") if not (folder / file).is_file()]
            advice = f"{', '.join(missing)} missing in {folder}; install Espalier again" if missing else ""
            yield Finding(name, "" if missing else str(folder), advice, fatal=bool(missing))
        except EspalierError as error:
            yield Finding(name, "", f"{error}; install Espalier again", fatal=True)
