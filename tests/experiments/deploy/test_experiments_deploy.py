"""The files for containers, systemd, Kubernetes and proxies: what can be checked without any of these."""

import re
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from readme_files import ROOT

from espalier.experiments.cli.connection import TOKEN_VARIABLE, ConnectionOptions
from espalier.experiments.cli.main import app
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.search.run.load import RuntimeSettings
from espalier.search.service.server import FLUSH_SECONDS, STOP_SECONDS
from espalier.search.service.settings import ServerSettings

DEPLOY = ROOT / "experiments" / "deploy"
DRAIN_SECONDS = ServerSettings().drain_seconds
TO_STOP = DRAIN_SECONDS + STOP_SECONDS + 3 * FLUSH_SECONDS
DECLARED = ServerSettings, RuntimeSettings, ExecutorSettings, ConnectionOptions
VARIABLES = {f"{kind.env_prefix}{field.name.upper()}" for kind in DECLARED for field in fields(kind)} | {TOKEN_VARIABLE}
MOST_EXPOSED = 20
"""Of systemd-analyze security, in tenths: 100 is unprotected."""


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text("Dockerfile"), flags=re.MULTILINE)).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def command(name: str, given: list[str]) -> None:
    """Read a command's options as it would itself, without running it."""
    parser: Any = typer.main.get_command(app)
    parser.commands[name].make_context(name, given)


def tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("name", ["Dockerfile", "espalier.service", "kubernetes.yaml", "server.toml"])
def test_every_environment_variable_is_one_that_is_read(name: str):
    used = set(re.findall(r"\bESPALIER_[A-Z_]+", text(name)))
    assert used <= VARIABLES


# ---- the container


def test_the_dockerfile_passes_hadolint():
    ran = subprocess.run([tool("hadolint"), DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_image_runs_as_an_ordinary_user_and_looks_after_its_health():
    last = [number for number, (word, _) in enumerate(instructions()) if word == "FROM"][-1]
    image = dict(instructions()[last:])
    user, group = image["USER"].split(":")
    assert min(int(user), int(group)) > 0
    assert re.search(r'CMD \["espalier", "health"\]', image["HEALTHCHECK"])
    assert image["ENTRYPOINT"] == '["espalier"]'
    assert image["EXPOSE"] == str(ServerSettings().port)
    command("health", [])
    command("serve", ["--insecure-bind"])


def test_everything_that_the_image_installs_is_pinned():
    installs = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    assert len(installs) == 3
    for rest in installs:
        assert "--no-deps" in rest or "--constraint requirements.txt" in rest, rest


def test_the_image_gets_the_layers_and_nothing_of_tests_or_figures():
    rules = [line for line in text("Dockerfile.dockerignore").splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    assert {"engine", "experiments", "kernels", "prm", "proto", "search", "pyproject.toml", "requirements.txt"} <= kept
    assert "tests" not in kept


# ---- systemd


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that exists here."""
    file = tmp_path / "espalier.service"
    file.write_text(text("espalier.service").replace("/opt/espalier/bin/espalier", sys.executable))
    return file


def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path):
    ran = subprocess.run([tool("systemd-analyze"), "verify", unit], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_unit_exposes_little(unit: Path):
    options = ["security", "--offline=yes", f"--threshold={MOST_EXPOSED}"]
    ran = subprocess.run([tool("systemd-analyze"), *options, unit], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-500:] + ran.stderr


def test_systemd_waits_longer_than_a_server_needs_to_drain():
    unit = RawConfigParser(strict=False)
    unit.read_string(text("espalier.service"))
    assert float(unit["Service"]["TimeoutStopSec"]) > TO_STOP
    assert unit["Service"]["KillMode"] == "mixed", "processes that compare answers go on while the server drains"
    assert unit["Service"]["ExecStart"].endswith("/bin/espalier serve --config /etc/espalier/server.toml")


# ---- Kubernetes


def test_kubernetes_waits_longer_than_a_server_needs_to_drain_and_asks_for_its_health():
    deployment, service = yaml.safe_load_all(text("kubernetes.yaml"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + TO_STOP
    assert pod["enableServiceLinks"] is False
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["exec"]["command"] == ["espalier", "health"]
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == ServerSettings().port
    name, *options = container["args"]
    command(name, [*options, "--insecure-bind"])
    assert float(options[options.index("--drain-seconds") + 1]) == DRAIN_SECONDS
    user = next(rest for word, rest in instructions() if word == "USER").split(":")[0]
    assert str(pod["securityContext"]["runAsUser"]) == user


# ---- proxies


def test_proxies_cut_no_search_off_that_the_server_lets_run():
    settings = ServerSettings()
    longest = settings.queue_seconds + settings.search_seconds
    minutes = re.findall(r"(?:grpc|proxy)_(?:read|send)_timeout (\d+)m;", text("nginx.conf"))
    assert len(minutes) == 4
    assert min(60 * int(each) for each in minutes) > longest
    envoy = yaml.safe_load(text("envoy.yaml"))
    manager = envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    assert float(manager["stream_idle_timeout"].removesuffix("s")) > longest
    assert [route["route"]["timeout"] for route in manager["route_config"]["virtual_hosts"][0]["routes"]] == ["0s"] * 2
