"""What operators are given names only what a server shows: the tables, the queries, the dashboard and the alerts."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from callers_files import callers_file
from exposition import OPENMETRICS, Exposition, read, some_stats
from raw_client import bearer, raw_stub
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread

from espalier.engine.stats import COUNTERS
from espalier.search.result import USAGE_COUNTERS
from espalier.search.service.settings import ServerSettings
from espalier.v1 import search_pb2 as pb

ROOM = Path(__file__).parents[3] / "search" / "service" / "observability"
RULE_TESTS = Path(__file__).with_name("alerts_test.yaml")
DECLARED = {f"espalier_{each.metric}" for each in (*COUNTERS.values(), *USAGE_COUNTERS.values())}
"""Metrics that may be in no table and on no dashboard: what they count is said where they are declared."""
OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus itself makes."""
TARGET_LABELS = {"job", "instance"}
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def run_searches(server: ServerThread, *problems: str) -> None:
    with raw_stub(server.address) as stub:
        for problem in problems:
            asked = stub.SolveProblem.future(pb.SolveProblemRequest(problem=problem), PATIENCE, bearer("ann"))
            asked.exception(PATIENCE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """One on which everything has happened that makes series."""
    fake = ScriptedOrchestrator()
    fake.stats = {"generator": some_stats(), "verifier": some_stats()}
    callers = callers_file(tmp_path_factory.mktemp("callers"), ann="")
    server = ServerThread(lambda: fake, ServerSettings(port=0, metrics_port=0, callers=callers))
    server.wait_loaded()
    run_searches(server, "solve", "fail", "pool")
    yield server
    server.close()


@pytest.fixture(scope="module")
def shown(server: ServerThread) -> Exposition:
    return read(*server.server.metrics.render(OPENMETRICS))


def own(shown: Exposition) -> dict[str, Any]:
    return {name: family for name, family in shown.families.items() if name.startswith("espalier_")}


# ---- the metrics themselves


def test_names_units_and_help_keep_to_prometheus_rules(shown: Exposition):
    for name, family in own(shown).items():
        assert re.fullmatch(r"espalier(_[a-z]+)+", name)
        assert family.samples, f"{name} has no series"
        assert family.documentation.endswith("."), name
        assert not re.search(r"_(total|count|sum|bucket|info|milliseconds|ms|kb|percent)$", name), name
        assert family.type in ("counter", "gauge", "histogram", "info", "stateset")
        if re.search(r"second|byte", name):
            assert name.endswith(("_seconds", "_bytes")), name
        labels = {label for sample in family.samples for label in sample.labels}
        assert not labels & {"request_id", "search_id", "problem", "host", "text"}


def test_the_tables_are_those_of_what_a_server_shows(shown: Exposition):
    suffixes = {"counter": "_total", "info": "_info"}
    expected = {}
    for name, family in own(shown).items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        expected[name + suffixes.get(family.type, "")] = (family.type, labels)
    text = (ROOM / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(espalier_\w+)` \| (\w+) \|(.*?)\| \S.* \|$", text, re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows)
    told = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    undocumented = {name: each for name, each in expected.items() if name not in told}
    assert told == {name: each for name, each in expected.items() if name in told}
    assert {name.removesuffix("_total") for name in undocumented} <= DECLARED


# ---- queries


def dashboard() -> dict[str, Any]:
    return json.loads((ROOM / "grafana.json").read_text(encoding="utf-8"))


def of_the_dashboard() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def of_the_alerts() -> list[str]:
    rules = yaml.safe_load((ROOM / "alerts.yaml").read_text(encoding="utf-8"))
    return [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def of_the_readme() -> list[str]:
    return re.findall(r"^```promql\n(.*?)\n```$", (ROOM / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M)


QUERIES = [*of_the_dashboard(), *of_the_alerts(), *of_the_readme()]


def names_in(query: str) -> dict[str, set[str]]:
    """The metrics of a query, each with the labels that it is matched by."""
    found: dict[str, set[str]] = {}
    for name, matchers in re.findall(r"\b((?:espalier|process)_\w+|up)\b(?:\{(.*?)\})?", query):
        found.setdefault(name, set()).update(re.findall(r"(\w+)(?:=~|!=|=)\"", matchers))
    return found


def grouped_by(query: str) -> set[str]:
    return {label.strip() for found in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for label in found.split(",")}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_metrics_and_labels_that_exist(query: str, shown: Exposition):
    existing, labels = shown.samples(), set()
    names = names_in(query)
    assert names
    for name, matched in names.items():
        assert name in existing or name in OF_PROMETHEUS, name
        assert matched <= existing.get(name, set()) | TARGET_LABELS, name
        labels |= existing.get(name, set())
    assert grouped_by(query) - {""} <= labels | TARGET_LABELS


def test_a_query_of_a_metric_or_a_label_that_does_not_exist_is_found(shown: Exposition):
    for query in ("rate(espalier_call_total[5m])", 'espalier_kv_blocks{rôle="generator", rolle="x"}'):
        with pytest.raises(AssertionError):
            test_a_query_names_metrics_and_labels_that_exist(query, shown)
    with pytest.raises(AssertionError):
        test_a_query_names_metrics_and_labels_that_exist("sum by (rolle) (espalier_kv_blocks)", shown)


def test_every_metric_is_on_the_dashboard(shown: Exposition):
    used = {name for query in of_the_dashboard() for name in names_in(query)}
    missing = [name for name in own(shown) if not any(series.startswith(name) for series in used)]
    assert set(missing) <= DECLARED | {"espalier_recurrent_states"}, "whose blocks are"


def test_the_dashboard_is_whole():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_dashboard_and_the_alerts_are_installed():
    room = files("espalier.search.service.observability")
    assert json.loads(room.joinpath("grafana.json").read_text())["title"] == "Espalier"
    assert "EspalierEngineDead" in room.joinpath("alerts.yaml").read_text()


# ---- Prometheus' own judgement, where it is installed


def promtool(*arguments: str | Path, text: bytes = b"") -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    ran = subprocess.run(["promtool", *map(str, arguments)], input=text, capture_output=True)
    assert ran.returncode == 0, (ran.stdout + ran.stderr).decode()


def test_promtool_finds_nothing_to_say_about_the_metrics(server: ServerThread):
    text, _ = server.server.metrics.render()
    lines = [line for line in text.decode().splitlines(keepends=True) if "_created" not in line]
    promtool("check", "metrics", text="".join(lines).encode())


def test_promtool_accepts_the_alerts_and_they_fire_when_they_should():
    promtool("check", "rules", ROOM / "alerts.yaml")
    promtool("test", "rules", RULE_TESTS)


@pytest.mark.slow
def test_prometheus_answers_every_query_about_a_server(server: ServerThread, tmp_path: Path):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOM / "alerts.yaml")],
        "scrape_configs": [{"job_name": "espalier", "static_configs": [{"targets": [server.server.metrics_address]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    address = f"127.0.0.1:{free_port()}"

    def ask(query: str) -> list[Any]:
        asked = urllib.parse.urlencode({"query": query.replace("$__rate_interval", "30s")})
        with NO_PROXY.open(f"http://{address}/api/v1/query?{asked}", timeout=PATIENCE) as response:
            return json.load(response)["data"]["result"]

    with subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: ask("up == 1"))
            for _ in range(5):
                run_searches(server, "solve", "fail", "budget")
                time.sleep(1.1)
            for query in (*of_the_dashboard(), *of_the_readme()):
                assert ask(query.replace("$job", ".*").replace("$instance", ".*")), query
            for query in of_the_alerts():
                ask(query)
            assert ask('ALERTS{alertname="EspalierInternalErrors"}'), "searches have failed"
            assert not ask('ALERTS{alertname="EspalierLiveBlocksOfAnIdleServer"}')
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for(true: Callable[[], Any]) -> None:
    """Wait for something of a server that may not have started yet."""
    end = time.monotonic() + 6 * PATIENCE
    while time.monotonic() < end:
        with suppress(OSError):
            if true():
                return
        time.sleep(0.2)
    raise AssertionError("not in time")
