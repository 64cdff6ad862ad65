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

from espalier.experiments.cli.main import app
from espalier.experiments.cli.options import TOKEN_VARIABLE, ConnectionOptions
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.search.run.settings import RuntimeSettings
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


@pytest.mark.parametrize(
    "name",
    ["Dockerfile", "espalier.service", "kubernetes/base/deployment.yaml", "server.toml", "compose/compose.yaml"],
)
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
    deployment, service = (yaml.safe_load(text(f"kubernetes/base/{name}.yaml")) for name in ("deployment", "service"))
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


def kustomized(folder: str) -> list[dict[str, Any]]:
    """The objects that `kubectl apply -k` would send."""
    ran = subprocess.run([tool("kubectl"), "kustomize", DEPLOY / "kubernetes" / folder], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return sorted(yaml.safe_load_all(ran.stdout), key=lambda each: each["kind"])


def test_kustomize_makes_pods_whose_servers_take_their_options():
    for folder, metrics, gpus in (("base", False, None), ("gpu", True, "1")):
        deployment, service = kustomized(folder)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        name, *options = container["args"]
        command(name, [*options, "--insecure-bind"])
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert (f"--metrics-port={named.get('metrics')}" in options) is metrics
        assert service["spec"]["ports"][0]["targetPort"] in named


@pytest.mark.tools
def test_the_objects_have_the_form_that_kubernetes_declares(tmp_path: Path):
    validate = ROOT / "build" / "tools" / "kubernetes" / "bin" / "kubernetes-validate"
    if not validate.exists():
        pytest.skip(f"{validate} is not there; `make test-tools` installs it")
    for folder in ("base", "gpu"):
        file = tmp_path / f"{folder}.yaml"
        file.write_text(yaml.safe_dump_all(kustomized(folder)))
        ran = subprocess.run([validate, "--strict", file], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


# ---- compose


def composed() -> dict[str, Any]:
    return yaml.safe_load(text("compose/compose.yaml"))["services"]


def test_compose_starts_a_server_with_metrics_where_prometheus_looks_for_them():
    server = composed()["espalier"]
    name, *options = server["command"]
    command(name, [*options, "--insecure-bind"])
    assert float(server["stop_grace_period"].removesuffix("s")) > TO_STOP
    (scraped,) = yaml.safe_load(text("compose/prometheus.yml"))["scrape_configs"]
    port = options[options.index("--metrics-port") + 1]
    assert scraped["static_configs"][0]["targets"] == [f"espalier:{port}"]
    assert scraped["job_name"] == "espalier", "whom the alerts are about"
    assert all(published.startswith("127.0.0.1:") for each in composed().values() for published in each["ports"])


def test_compose_mounts_files_that_exist_where_they_are_looked_for():
    mounted = {}
    for service in composed().values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).is_file(), source
                mounted[target] = source
    (rules,) = yaml.safe_load(text("compose/prometheus.yml"))["rule_files"]
    assert f"/etc/prometheus/{rules}" in mounted
    (source,) = yaml.safe_load(text("compose/datasource.yaml"))["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load(text("compose/dashboards.yaml"))["providers"]
    home = composed()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounted
    assert home.startswith(provider["options"]["path"])


def test_promtool_accepts_what_compose_gives_to_prometheus(tmp_path: Path):
    for source in (DEPLOY / "compose" / "prometheus.yml", ROOT / "search/service/observability/alerts.yaml"):
        shutil.copy(source, tmp_path)
    ran = subprocess.run(
        [tool("promtool"), "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


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
