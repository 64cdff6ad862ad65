"""`espalier doctor`: packages, devices, kernels, models and a server's settings, with advice for what is missing."""

import os
import platform
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from espalier import DISTRIBUTION, __version__
from espalier.engine.errors import EspalierError
from espalier.experiments.cli.runs import EXIT_FAILED
from espalier.experiments.cli.schema_options import Outcome, with_schema
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.prm.scorers import names_checkpoint
from espalier.search.run.settings import RuntimeSettings
from espalier.search.service.access.callers import read_callers
from espalier.search.service.access.watched_files import TlsFiles
from espalier.search.service.settings import ServerSettings, connections_by_file_limit, file_limit

_OPTIONAL = {
    "triton": "kernels for GPUs; without it attention is plain torch, and slow: pip install 'espalier-search[gpu]'",
    "datasets": "for Parquet, `datasets` folders and benchmarks of the hub: pip install 'espalier-search[datasets]'",
    "torchao": "for int4 weights: pip install 'espalier-search[quantization]'",
    "ray": "for --executor ray, workers on several machines: pip install 'espalier-search[ray]'",
}
_DAYS = 21
"""Days before its end from which a certificate gets advice."""
_FEW_FILES = 4096
"""Open files below which a server gets advice."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `value` is empty if missing, `fatal` is set if no search can run because of it."""

    name: str
    value: str
    advice: str = ""
    fatal: bool = False

    def __str__(self) -> str:
        mark = "✗" if self.fatal else "–" if not self.value else "!" if self.advice else "✓"
        return f"{mark} {self.name:<26}{self.value or 'missing'}{self.advice and f'; {self.advice}'}"


@with_schema
def doctor(*, settings: ServerSettings, runtime: RuntimeSettings, where: ExecutorSettings) -> Outcome:
    """Show installed packages, devices, kernels, and what a server would find, with advice for what is missing.

    Takes the options of `espalier serve`, also by --config and from the environment: the port, the certificate, the
    callers and the models that they name are examined. Exits with 0 if a search can run, else with 1 and the reason on
    standard error.
    """
    findings = examine(settings, runtime)
    fatal = [finding for finding in findings if finding.fatal]
    values = {"ok": not fatal, "findings": [asdict(finding) for finding in findings]}
    errors = [f"{finding.name}: {finding.advice}" for finding in fatal]
    return Outcome(values, lambda _: print(*findings, sep="\n"), EXIT_FAILED if fatal else 0, errors)


def examine(settings: ServerSettings | None = None, runtime: RuntimeSettings | None = None) -> list[Finding]:
    """Return all findings; a check that raises becomes a finding itself.

    Args:
        settings: of a server to be started; None for the default ones.
        runtime: which models are to be loaded; None for the bundled ones.
    """
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "packages": _packages,
        "processor": _processor,
        "gpus": _gpus,
        "kernels": _kernels,
        "weights": lambda: _kept_weights(runtime or RuntimeSettings()),
        "models": lambda: _models(runtime or RuntimeSettings()),
        "server": lambda: server_findings(settings or ServerSettings()),
    }
    findings = [Finding("python", platform.python_version())]
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

    if compiled.place is None:
        advice = "no folder for them is writable, so each process compiles again: set NUMBA_CACHE_DIR to a writable one"
        yield Finding("compiled kernels", "", advice)
        return
    count = len(list(compiled.place.rglob("*.nbc")))
    advice = "" if count else "none yet: the first search compiles them, which takes about 20 seconds"
    yield Finding("compiled kernels", f"{count} in {compiled.place}", advice)


def _kept_weights(runtime: RuntimeSettings) -> Iterator[Finding]:
    from espalier.engine.models.load_cache import open_cache
    from espalier.kernels.cpu import HAS_VNNI

    if (cache := open_cache(runtime.load_cache)) is None:
        yield Finding("kept int8 weights", "none: --load-cache none, or no home")
        return
    entries = cache.entries()
    held = f"{len(entries)} in {cache.folder}, {sum(size for _, size in entries) / 2**30:.1f} GiB"
    yield Finding("kept int8 weights", held, "" if HAS_VNNI else "this processor has no AVX-512 VNNI: none are kept")


def _models(runtime: RuntimeSettings) -> Iterator[Finding]:
    from espalier.engine.models.hub import HubSettings, locate, locate_with_adapter

    bundled = RuntimeSettings().generator, RuntimeSettings().verifier
    for name in (runtime.generator, runtime.verifier):
        if name not in bundled and names_checkpoint(name):
            hub = HubSettings(offline=True, cache_dir=runtime.cache_dir)
            try:
                folder, adapter = locate_with_adapter(name, runtime.load_format, hub)
                places = " + ".join(map(str, filter(None, (folder, adapter))))
                yield Finding(name, places + _run_by(folder, runtime))
            except EspalierError as error:
                yield Finding(name, "", f"{error}; a server would try to download it")
    for name in bundled:
        try:
            folder = locate(name)
            if missing := [file for file in ("config.json", "model.safetensors") if not (folder / file).is_file()]:
                raise EspalierError(f"{', '.join(missing)} missing in {folder}")
            yield Finding(name, str(folder))
        except EspalierError as error:
            yield Finding(name, "", f"{error}; install Espalier again", fatal=True)


def _run_by(folder: Path, runtime: RuntimeSettings) -> str:
    """The code that runs a checkpoint's decoder, and what it keeps of a path; empty where none can run it."""
    from espalier.engine.models.checkpoint import Checkpoint

    try:
        config = Checkpoint(folder, model_impl=runtime.model_impl).decoder_config
    except EspalierError:
        return ""
    size = config.state_bytes / 2**20
    return f", run by {config.impl} code" + (f", {size:.2f} MiB of recurrent state a path" if size else "")


def server_findings(settings: ServerSettings) -> Iterator[Finding]:
    """Findings about a server's settings: whether it would start with them, and what will trouble it later."""
    for field in fields(settings):
        port = getattr(settings, field.name)
        if port and (field.name == "port" or field.name.endswith("_port")):  # not 0, which takes a free one
            host = getattr(settings, field.name.removesuffix("port") + "host", settings.host)
            yield _port(host, port, "--" + field.name.replace("_", "-"))
    yield _open_files(settings)
    if settings.tls:
        yield _certificate(settings.tls)
    if settings.callers:
        yield _callers(settings.callers)


def _port(host: str, port: int, flag: str) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server's: connections that end do not count
        try:
            tried.bind((host, port))
        except OSError as error:
            return Finding(f"port {port}", f"of {host}", f"{error.strerror}: a server needs another {flag} or --host")
    return Finding(f"port {port}", f"of {host}, free")


def _open_files(settings: ServerSettings) -> Finding:
    files = file_limit()
    most = settings.max_connections or connections_by_file_limit()
    few = "few for a server: raise the hard limit with ulimit -Hn or systemd's LimitNOFILE" * (files < _FEW_FILES)
    advice = f"fewer than --max-connections {most}" if most > files else few
    return Finding("open files", f"{'any' if files >= 2**62 else files}, {most} connections", advice)


def _certificate(files: TlsFiles) -> Finding:
    try:
        files.context()
        shown = _shown_certificate(files)
    except (EspalierError, ssl.SSLError) as error:
        return Finding("certificate", "", str(error), fatal=True)
    names = ", ".join(value for _, value in shown.get("subjectAltName", ())) or "no name, so no client will take it"
    end = ssl.cert_time_to_seconds(shown["notAfter"])
    days = int((end - time.time()) // 86400)
    advice = f"ends in {days} days" if days < _DAYS else _if_readable(files.key, "its key")
    return Finding("certificate", f"for {names}, until {datetime.fromtimestamp(end, UTC):%Y-%m-%d}", advice)


def _shown_certificate(files: TlsFiles) -> dict:
    """The server's certificate as a client sees it, from a handshake in memory: `ssl` reads certificates only there.

    Raises:
        ssl.SSLError: it is not valid now.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusted for itself, whoever has signed it
    client.load_verify_locations(files.certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = TlsFiles(files.certificate, files.key).context().wrap_bio(to_server, to_client, server_side=True)
    seen = client.wrap_bio(to_client, to_server)
    for side in (seen, server, seen):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return dict(seen.getpeercert() or {})


def _callers(file: Path) -> Finding:
    try:
        count = len(read_callers(file))
    except EspalierError as error:
        return Finding("callers", "", str(error), fatal=True)
    advice = _if_readable(file, "it") if count else "nobody can log in: espalier token NAME adds a caller"
    return Finding("callers", f"{count} in {file}", advice)


def _if_readable(file: Path, what: str) -> str:
    """Advice if everybody may read a file."""
    said = f"everybody on this machine may read {what}: chmod o= {file}"
    return said if file.stat().st_mode & stat.S_IROTH else ""
