"""Searches on workers that are processes of this machine."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from executor_runs import REQUEST, RUNTIME, run
from exposition import scrape  # pyright: ignore[reportMissingImports] - on pytest's path
from killed_runs import finish, results
from killed_runs import started as started_command
from process_tree import alive, descendants, stop, wait_until
from server_thread import ServerThread  # pyright: ignore[reportMissingImports] - on pytest's path
from tiny_models import disturb  # pyright: ignore[reportMissingImports] - on pytest's path

from espalier.engine.errors import EspalierError, RequestTooLargeError
from espalier.experiments.demo import generator_path
from espalier.experiments.executors import process_transport
from espalier.experiments.executors import workers as executor_workers
from espalier.experiments.executors.process_transport import ProcessTransport
from espalier.experiments.executors.worker_executor import WorkerExecutor
from espalier.experiments.runs.benchmarks import Problem
from espalier.search.client import SearchClient
from espalier.search.result import StopReason
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.service.settings import ServerSettings
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceStub

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

PATIENCE = 60.0
LONG = replace(REQUEST, beam_width=8)
EVAL = ("eval", "-N", "2", "-M", "2", "--threads", "1", "--kv-memory", "64M", "--in-flight", "2")


class Workers:
    """An executor on two processes."""

    def __init__(self, runtime: RuntimeSettings = RUNTIME, workers: int = 2) -> None:
        self.transport = ProcessTransport(runtime, workers)
        self.executor = WorkerExecutor(self.transport, runtime, longest_first=True)

    def live(self) -> int:
        return sum(blocks.live for blocks in self.executor.occupancy().kv_blocks.values())

    def wait_for(self, workers: int) -> None:
        """Wait until so many workers are up, and none is busy."""

        def ready() -> bool:
            self.executor.step()
            return sum(worker.up for worker in self.executor._workers.states) == workers and not self.live()

        wait_until(ready, PATIENCE)

    def kill(self, number: int) -> int:
        process = self.transport._processes[number]
        assert process
        os.kill(process.pid, signal.SIGKILL)
        return process.pid


@pytest.fixture(scope="module")
def two_cores() -> Iterator[None]:
    """Two workers also where there is but one core."""
    with pytest.MonkeyPatch.context() as patch:
        from espalier.kernels.cpu import threads

        patch.setattr(threads, "usable_cores", lambda: max(2, os.cpu_count() or 1))
        yield


@pytest.fixture(scope="module")
def started(two_cores: None) -> Iterator[Workers]:
    workers = Workers()
    yield workers
    pids = workers.transport.process_ids
    workers.executor.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture
def workers(started: Workers) -> Workers:
    """Both workers, idle."""
    started.wait_for(2)
    return started


def test_two_processes_find_what_one_finds_and_hold_nothing_afterwards(workers, problems, local, grader):
    assert run(workers.executor, problems, grader) == local
    assert not workers.executor.busy
    assert workers.live() == 0
    assert sum(blocks.cached for blocks in workers.executor.occupancy().kv_blocks.values()) > 0


def test_a_killed_worker_loses_nothing_and_another_takes_its_place(workers, problems, local, grader):
    killed: list[int] = []

    def kill(_: object) -> None:
        if not killed:
            assert workers.live()
            killed.append(workers.kill(0))

    assert run(workers.executor, problems, grader, kill) == local
    assert killed
    workers.wait_for(2)
    assert killed[0] not in workers.transport.process_ids
    assert run(workers.executor, problems[:8], grader).items() <= local.items()


def test_processes_go_on_with_other_weights_also_one_that_is_started_again(workers, problems, grader, tmp_path):
    original, changed = (shutil.copytree(generator_path(), tmp_path / name) for name in ("original", "changed"))
    fresh = load_orchestrator(replace(RUNTIME, generator=str(disturb(changed, share=0.02)), verifier="demo-verifier"))
    few, executor = problems[1:7], workers.executor  # without one of which the bundled generator warns by its name
    try:
        expected = run(fresh, few, grader)
        digest = executor.prepare_reload(str(changed))
        executor.reload(str(changed))
        assert executor.describe_models() == fresh.describe_models()
        assert executor.describe_models()["generator"] == digest
        assert run(executor, few, grader) == expected
        workers.kill(0)
        assert run(executor, few, grader) == expected
        workers.wait_for(2)
        assert run(executor, few, grader) == expected
    finally:
        fresh.close()
        executor.reload(str(original))
        executor._folder = ""


def test_what_can_never_fit_is_said_before_it_is_submitted(workers):
    with pytest.raises(RequestTooLargeError, match="context"):
        workers.executor.check(replace(REQUEST, problem="1" + " + 1" * 2000))
    workers.executor.check(replace(REQUEST, problem="1 + 1"))


def test_a_worker_that_hangs_delays_a_check_for_a_bounded_time(workers, monkeypatch, caplog):
    monkeypatch.setattr(executor_workers, "_ANSWER_SECONDS", 0.2)
    pids = workers.transport.process_ids
    try:
        for pid in pids:
            stop(pid)
        workers.executor.check(replace(REQUEST, problem="1" + " + 1" * 2000))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert "did not answer within 0.2 s" in caplog.text


def test_cancelled_searches_end_and_dropped_ones_are_forgotten_and_hold_nothing(workers, problems):
    executor = workers.executor
    names = [executor.submit(replace(LONG, problem=problem.problem)) for problem in problems[:14]]
    assert executor.step() == []
    wait_until(lambda: executor.step() == [] and workers.live(), PATIENCE)
    executor.cancel(names[0])
    executor.drop(names[1:13])
    found = {}
    while executor.busy:
        found |= {result.search_id: result for result in executor.step()}
    assert found.keys() == {names[0], names[13]}
    assert found[names[0]].stop_reason is StopReason.CANCELLED
    wait_until(lambda: workers.live() == 0, PATIENCE)


def test_the_service_answers_every_call_of_a_crowd_while_a_worker_is_killed(workers, problems, local, monkeypatch):
    monkeypatch.setattr(workers.executor, "close", lambda: None)  # other tests need it
    server = ServerThread(lambda: workers.executor, ServerSettings(port=0, max_searches=8, max_queue=64))
    try:
        server.wait_loaded()
        with SearchClient(server.address) as client, ThreadPoolExecutor(32) as crowd:
            requests = [replace(REQUEST, problem=problem.problem) for problem in problems]
            calls = [crowd.submit(client.solve, request, PATIENCE) for request in requests * 2]
            wait_until(lambda: any(call.done() for call in calls), PATIENCE)
            workers.kill(0)
            answers = [call.result(PATIENCE).answer for call in calls]
            with pytest.raises(EspalierError, match="context"):
                client.solve(replace(REQUEST, problem="1" + " + 1" * 2000), PATIENCE)
        assert answers == [local[problem.unique_id, 0]["answer"] for problem in problems] * 2
        with grpc.insecure_channel(server.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            info = SearchServiceStub(channel).GetServerInfo

            def idle() -> bool:
                seen: pb.GetServerInfoResponse = info(pb.GetServerInfoRequest(), timeout=PATIENCE)
                assert set(seen.kv_blocks) == {"generator", "verifier"}
                searches = seen.running_searches + seen.waiting_searches + seen.admitted_calls
                return not searches and not any(blocks.live for blocks in seen.kv_blocks.values())

            wait_until(idle, PATIENCE)
        seen = scrape(server)
        assert seen.value("espalier_sampled_tokens_total"), "of the results"
        for role in ("generator", "verifier"):
            counted = seen.value("espalier_engine_batch_tokens_sum", role=role)
            assert counted
            assert counted >= (seen.value("espalier_computed_tokens_total", role=role) or 0), "lost searches count too"
    finally:
        server.close()


def start(folder: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", "from espalier.experiments.cli.main import main; main()", *options]
    return subprocess.Popen(
        [*command, "--executor", "processes", "--workers", "2", "--out", str(folder)],
        text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def samples(folder: Path) -> int:
    path = folder / "samples.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two cores")
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_killed_or_interrupted_leaves_no_process(kind: signal.Signals, tmp_path: Path):
    command = start(tmp_path / "run", *EVAL)
    try:
        wait_until(lambda: samples(tmp_path / "run") >= 1, PATIENCE)
        processes = descendants(command.pid)
        assert len(processes) >= 2
        if kind is signal.SIGINT:
            os.killpg(command.pid, kind)  # as a terminal does
        else:
            os.kill(command.pid, kind)
        _, errors = command.communicate(timeout=PATIENCE)
        wait_until(lambda: not alive(processes), PATIENCE)
    finally:
        command.kill()
    if kind is signal.SIGINT:
        assert command.returncode == 130
        assert errors.strip().startswith("interrupted: what was finished is in")
        assert "Traceback" not in errors


NEVER_CLOSED = """
from exposition import scrape  # pyright: ignore[reportMissingImports] - on pytest's path
from executor_runs import RUNTIME
from espalier.experiments.executors.process_transport import ProcessTransport
from espalier.experiments.executors.worker_executor import WorkerExecutor
transport = ProcessTransport(RUNTIME, 1)
executor = WorkerExecutor(transport, RUNTIME)
print(*transport.process_ids, flush=True)
"""


@pytest.mark.slow
def test_a_script_that_never_closes_its_executor_ends_and_so_does_the_worker():
    path = os.pathsep.join(sys.path)  # of what tests share
    script = subprocess.run(
        [sys.executable, "-c", NEVER_CLOSED], capture_output=True, text=True, timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert script.returncode == 0, script.stderr
    wait_until(lambda: not Path(f"/proc/{int(script.stdout)}").exists(), PATIENCE)


FRAGILE = """
import os
from espalier.engine.errors import FatalError
from espalier.experiments.executors import process_transport, worker
from espalier.search.run.executor import request_of

class Fragile(worker.Worker):
    def _start(self, orchestrator, order):
        if "poison" in request_of(order.request).problem:
            {act}
        super()._start(orchestrator, order)

process_transport.Worker = Fragile
process_transport.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "why"),
    [
        ("os._exit(9)", "ended with exit code 9"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("raise FatalError('the device is lost')", "the device is lost"),
    ],
)
def test_a_search_that_kills_workers_is_refused_and_no_other_is(
    two_cores, problems, local, grader, monkeypatch: pytest.MonkeyPatch, act: str, why: str
):
    monkeypatch.setattr(process_transport, "_COMMAND", FRAGILE.format(act=act))
    fragile = Workers()
    try:
        poison = Problem("poison", "A poison of 3 grams.", "3", 1)
        found = run(fragile.executor, [poison, *problems], grader)
    finally:
        fragile.executor.close()
    refused = found.pop(("poison", 0))
    assert refused["stop_reason"] == "refused"
    assert refused["error"].startswith("4 workers died while they ran this search")
    assert refused["error"].endswith(why)
    assert found == local


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on_to_the_files_of_one_process(two_cores, tmp_path: Path):
    local, folder = tmp_path / "local", tmp_path / "processes"
    where = ("--executor", "processes", "--workers", "2")
    assert finish((*EVAL, "--limit", 60, "--trees", "--out", local))
    with started_command((*EVAL, "--limit", 60, "--trees", *where, "--out", folder)) as command:
        wait_until(lambda: samples(folder) >= 3, PATIENCE)
        command.kill()
    assert 3 <= samples(folder) < 60
    assert finish((*EVAL, "--limit", 60, "--trees", *where, "--out", folder))
    assert results(folder) == results(local)


def test_a_worker_that_cannot_load_is_an_error_in_its_own_words_and_leaves_no_process():
    before = descendants(os.getpid())
    with pytest.raises(EspalierError, match="no-such-folder"):
        Workers(replace(RUNTIME, generator="no-such-folder"), 1)
    assert not alive({pid: at for pid, at in descendants(os.getpid()).items() if pid not in before})
