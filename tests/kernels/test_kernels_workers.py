"""Threads that share the items of a compiled function's phases."""

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from forked_process import is_true_when_forked

from espalier.kernels.cpu import threads as workers
from espalier.kernels.cpu.threads import parallel_run, phase_items

ITEMS, PHASES = 37, 50


@numba.njit(nogil=True)
def _add_neighbours(counters: int, values: np.ndarray, touched: np.ndarray) -> None:
    """Each phase computes a row from the whole row before it, so a phase begun too early gives another sum."""
    for phase in range(len(touched)):
        for item in phase_items(counters, phase, values.shape[1]):
            total = 0
            for i in range(values.shape[1]):
                total += values[phase, i]
            values[phase + 1, item] = (total + item) % 1009
            touched[phase, item] += 1


def expected() -> np.ndarray:
    values = np.zeros((PHASES + 1, ITEMS), dtype=np.int64)
    values[0] = np.arange(ITEMS)
    for phase in range(PHASES):
        values[phase + 1] = (values[phase].sum() + np.arange(ITEMS)) % 1009
    return values


def check() -> None:
    values = np.zeros((PHASES + 1, ITEMS), dtype=np.int64)
    values[0], touched = np.arange(ITEMS), np.zeros((PHASES, ITEMS), dtype=np.int64)
    parallel_run(_add_neighbours, PHASES, values, touched)
    assert (values == expected()).all()
    assert (touched == 1).all(), "every item is run by exactly one thread"


@pytest.fixture
def threads():
    before = workers.num_threads()
    yield workers.set_threads
    workers.set_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_item_runs_once_and_phases_follow_each_other(count: int, threads):
    threads(count)
    for _ in range(100):
        check()


def test_a_finished_call_leaves_no_memory(threads, monkeypatch: pytest.MonkeyPatch):
    threads(1)  # a helper may hold a call's arrays a moment longer
    made: list[weakref.ref[np.ndarray]] = []
    zeros = np.zeros

    def noted(*args: Any, **options: Any) -> np.ndarray:
        array = zeros(*args, **options)
        made.append(weakref.ref(array))
        return array

    monkeypatch.setattr(workers.np, "zeros", noted)
    for _ in range(3):
        check()
    assert len(made) >= 9
    assert [array() for array in made if array() is not None] == []


def test_others_are_asked_to_help_where_there_is_enough_to_do(threads, monkeypatch: pytest.MonkeyPatch):
    threads(3)
    asked = []
    monkeypatch.setattr(workers, "_WORTH_HELP", 0.1)
    monkeypatch.setattr(workers._helpers, "call", lambda function, counters, args: asked.append(function))
    for seconds, calls in ((0.09, 0), (0.11, 1)):
        values, touched = np.zeros((2, ITEMS), dtype=np.int64), np.zeros((1, ITEMS), dtype=np.int64)
        parallel_run(_add_neighbours, 1, values, touched, seconds=seconds)
        assert (touched == 1).all()
        assert len(asked) == calls


def test_several_callers_at_once_do_not_disturb_each_other(threads):
    threads(3)
    failures: list[BaseException] = []

    def caller() -> None:
        try:
            for _ in range(50):
                check()
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("100000 100000", 1, 1), ("50000 100000", 1, 1), ("max 100000", 1, 10**6), ("", 1, 10**6)],
)
def test_a_containers_share_of_the_cores_bounds_the_threads(text: str, least: int, most: int, tmp_path: Path):
    (tmp_path / "cpu.max").write_text(text)
    assert least <= workers.usable_cores(tmp_path / "cpu.max") <= most
    assert workers.usable_cores(tmp_path / "cpu.max") <= workers.usable_cores(tmp_path / "nothing")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_helpers_of_its_own(threads):
    threads(2)
    check()
    assert is_true_when_forked(lambda: check() is None)
