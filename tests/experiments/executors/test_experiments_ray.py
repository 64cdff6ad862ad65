"""Searches on a Ray cluster of one node, and in the slow tests of two, both on this machine.

What any transport does is tested with processes; what is left here is what Ray does: its errors, its restarts.
"""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executor_runs import REQUEST, RUNTIME, Samples, run

from espalier.engine.errors import EspalierError, InvalidRequestError, RequestTooLargeError
from espalier.experiments.executors.settings import ExecutorName, ExecutorSettings
from espalier.experiments.executors.worker import Run
from espalier.experiments.executors.worker_executor import WorkerExecutor
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.record import Sample
from espalier.search.client import SearchClient
from espalier.search.result import Finished, StepDone, StopReason
from espalier.search.run.executor import request_of
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.service.settings import ServerSettings

ray = pytest.importorskip("ray")
from espalier.experiments.executors import ray_transport  # noqa: E402 - after the check for Ray
from espalier.experiments.executors.ray_transport import RayTransport, RayWorker  # noqa: E402

pytestmark = pytest.mark.timeout(900)  # a dozen processes are started beside whatever else the machine does
PATIENCE = 60.0
RESTART = 240.0
"""Seconds for Ray to start a worker again on a machine that is busy with others."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One node with room for the shared workers and one more. Each process beside a node imports Ray for seconds."""
    from ray.cluster_utils import Cluster

    alone = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    gc.collect()  # KV pools of engines before: Ray forks, which Linux refuses a process with more memory than there is
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_worker_niceness", "0")  # else workers give way to all other tests
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, **alone})
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def kept(cluster: Any) -> Iterator[list[WorkerExecutor]]:
    """The executor that tests share while it is open: a worker takes seconds to start."""
    kept: list[WorkerExecutor] = []
    yield kept
    for executor in kept:
        executor.close()


@pytest.fixture
def make_executor(cluster: Any, kept: list[WorkerExecutor]) -> Iterator[Callable[..., WorkerExecutor]]:
    """Makes executors of a test's own, for which the shared one makes room."""
    while kept:
        kept.pop().close()
    made: list[WorkerExecutor] = []

    def make(workers: int = 1, runtime: RuntimeSettings = RUNTIME) -> WorkerExecutor:
        settings = ExecutorSettings(ExecutorName.RAY, cluster.address, workers)
        made.append(WorkerExecutor(RayTransport(runtime, settings), runtime, longest_first=True))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


@pytest.fixture
def executor(cluster: Any, kept: list[WorkerExecutor], local: Samples) -> WorkerExecutor:
    """Two workers, one of them up at least; Ray starts others in the place of those that an earlier test has killed.

    What one process finds is found first: it compiles, and the workers, which would each wait to, read what it kept.
    """
    if not kept:
        settings = ExecutorSettings(ExecutorName.RAY, cluster.address, 2)
        kept.append(WorkerExecutor(RayTransport(RUNTIME, settings), RUNTIME, longest_first=True))
    (executor,) = kept
    assert not executor.busy
    wait_for(executor, 1)
    return executor


def wait_for(executor: WorkerExecutor, workers: int) -> None:
    """Wait until so many workers are up."""
    end = time.monotonic() + RESTART
    while sum(worker.up for worker in executor._workers.states) < workers:
        assert time.monotonic() < end, "a worker did not come back"
        executor.step()


@pytest.fixture
def processes(cluster: Any) -> Callable[[], list[int]]:
    """Gives the process ids of the workers of this cluster that have an engine."""

    def find() -> list[int]:
        raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in raylets and (folder / "cmdline").read_bytes().startswith(b"ray::RayWorker"):
                    found.append(int(folder.name))
            except OSError:
                continue  # it has ended
        return found

    return find


def test_a_worker_that_could_not_load_ends_when_it_is_to_load_again(monkeypatch: pytest.MonkeyPatch):
    """So Ray starts another, which may find the memory that this one did not."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    worker = RayWorker(RuntimeSettings(generator="no-such-folder"))

    async def load_twice() -> None:
        with pytest.raises(EspalierError, match="no-such-folder"):
            await worker.load()
        with pytest.raises(SystemExit):
            await worker.load()

    asyncio.run(load_twice())


def test_clusters_that_are_missing_or_too_small_are_named(make_executor):
    with pytest.raises(EspalierError, match=r"4 workers with 1 CPUs each need 4, and the cluster has 3.*--workers"):
        make_executor(4)
    settings = ExecutorSettings(ExecutorName.RAY, "127.0.0.1:1")
    with pytest.raises(EspalierError, match="--ray-address"):
        RayTransport(RUNTIME, settings)
    with pytest.raises(EspalierError, match="no-such-folder"):
        make_executor(runtime=replace(RUNTIME, generator="no-such-folder"))


def test_two_workers_find_what_one_process_finds(executor, processes, problems, local, grader):
    assert len(processes()) == 2
    assert run(executor, problems, grader) == local
    assert not executor.busy
    held = executor.occupancy().kv_blocks
    assert held["generator"].cached
    assert not held["generator"].live + held["verifier"].live
    with pytest.raises(RequestTooLargeError, match="context"):
        executor.check(replace(REQUEST, problem="1" + " + 1" * 2000))
    with pytest.raises(InvalidRequestError, match="beam_width"):
        executor.submit(replace(REQUEST, problem="1 + 1", beam_width=0))
    assert not executor.busy


def test_what_cannot_be_searched_is_refused_with_the_words_of_one_process(executor, problems, grader):
    long = Problem("long", "What is 1" + " + 1" * 2000, "2001", 1)
    orchestrator = load_orchestrator(RUNTIME)
    here = run(orchestrator, [long, *problems[:2]], grader)
    orchestrator.close()
    assert here["long", 0]["error"]
    assert run(executor, [long, *problems[:2]], grader) == here


def test_cancelled_searches_end_and_dropped_ones_are_forgotten(executor, problems):
    many = [*problems, *problems]
    names = [executor.submit(replace(REQUEST, problem=p.problem, beam_width=8)) for p in many[:24]]
    executor.cancel(names[-1])
    found = {result.search_id: result for result in executor.step()}
    running = [name for worker in executor._workers.states for name in worker.running]
    executor.cancel(running[0])
    executor.cancel("unknown")
    dropped = [name for name in names if name not in found and name not in (running[0], names[-1])][:8]
    executor.drop(dropped)
    while executor.busy:
        found |= {result.search_id: result for result in executor.step()}
    assert set(found) == set(names) - set(dropped)
    assert found.pop(names[-1]).stop_reason is StopReason.CANCELLED
    assert found.pop(running[0]).stop_reason is StopReason.CANCELLED
    assert {result.stop_reason for result in found.values()} == {StopReason.FINISHED}


def test_killed_workers_change_nothing_and_those_that_come_back_are_used(
    executor, processes, problems, local, grader, caplog
):
    wait_for(executor, 2)
    killed: list[int] = []

    def kill(_: Sample) -> None:
        if not killed:
            killed.extend(processes())
            for process in killed:
                os.kill(process, signal.SIGKILL)

    assert run(executor, problems, grader, kill) == local
    assert len(killed) == 2
    assert "was lost" in caplog.text
    assert not set(processes()) & set(killed)


@pytest.mark.slow
def test_workers_are_replicas_of_the_service(executor, processes, problems, monkeypatch):
    from server_thread import ServerThread  # pyright: ignore[reportMissingImports] - on pytest's path

    monkeypatch.setattr(executor, "close", lambda: None)  # other tests need it
    request = replace(REQUEST, problem=problems[0].problem)
    server = ServerThread(lambda: executor, ServerSettings(port=0))
    try:
        server.wait_loaded()
        with SearchClient(server.address) as client:
            events = list(client.solve_stream(request, timeout=PATIENCE))
            assert isinstance(events[-1], Finished)
            assert any(isinstance(event, StepDone) for event in events)
            for process in processes()[:1]:
                os.kill(process, signal.SIGKILL)
            results = [client.solve(replace(request, seed=seed), timeout=PATIENCE) for seed in (0, 1)]
            assert results[0].answer == events[-1].result.answer
            with pytest.raises(EspalierError, match="context"):
                client.solve(replace(request, problem="1" + " + 1" * 2000), timeout=PATIENCE)
    finally:
        server.close()


@pytest.mark.slow
def test_a_search_that_no_worker_can_run_is_an_error(make_executor, problems, grader):
    executor = make_executor(runtime=replace(RUNTIME, verifier=""))
    with pytest.raises(InvalidRequestError, match="needs a verifier"):
        run(executor, problems, grader)
    assert not executor.busy


@pytest.mark.slow
def test_two_nodes_find_what_one_process_finds_also_when_one_of_them_is_lost(
    cluster, make_executor, processes, problems, local, grader
):
    cluster.add_node(num_cpus=1, include_dashboard=False, include_log_monitor=False)
    cluster.wait_for_nodes()
    executor = make_executor(2)
    wait_for(executor, 2)
    (second_node,) = cluster.worker_nodes
    parents = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in processes()}
    assert len(parents) == 2, "both workers are on one node"

    def lose(_: Sample) -> None:
        if second_node in cluster.list_all_nodes():
            cluster.remove_node(second_node, allow_graceful=False)

    assert run(executor, problems, grader, lose) == local
    assert second_node not in cluster.list_all_nodes()


class Fragile(RayWorker):
    """Its process ends at a problem that says so."""

    async def tell(self, number, order):
        if isinstance(order, Run) and "poison" in request_of(order.request).problem:
            os._exit(9)
        return await super().tell(number, order)


@pytest.mark.slow
def test_a_search_that_kills_workers_is_refused_and_no_other_is(
    make_executor, problems, local, grader, monkeypatch: pytest.MonkeyPatch
):
    import sys

    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    monkeypatch.setattr(ray_transport, "RayWorker", Fragile)
    poison = Problem("poison", "A poison of 3 grams.", "3", 1)
    found = run(make_executor(2), [poison, *problems], grader)
    refused = found.pop(("poison", 0))
    assert refused["stop_reason"] == "refused"
    assert "4 workers died" in refused["error"]
    assert found == local
