"""Grading happens in child processes that can be killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
from pebble import ProcessPool

from espalier.search.grading.math_verify import Grade, Grader

RUNAWAY = "x+10^{10^{10}}"  # sympy computes it digit by digit


def eat(size: str, _: str) -> bool:
    """Takes that many MiB of memory, as an answer may."""
    return len(bytearray(int(size) * 2**20)) == int(size) * 2**20


def leave(code: str, _: str) -> bool:
    os._exit(int(code))


def compute(seconds: str, _: str) -> bool:
    """Computes for that many seconds of CPU time."""
    start = time.process_time()
    while time.process_time() < start + float(seconds):
        pass
    return True


def ends_silently(_one: str, _other: str) -> bool:
    """Tells whether SIGTERM ends this process at once: a handler in Python may print an error as the process ends."""
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def wait(seconds: str, _: str) -> bool:
    """Waits for that many seconds without computing."""
    time.sleep(float(seconds))
    return True


def fail(*args: object, **options: object) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("48", "48"),
        ("\\frac{1}{2}", "1/2"),
        ("1/2", "0.5"),
        ("\\frac{3}{4}", "\\dfrac34"),
        ("1234", "1,234"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)"),
        ("x^2+2x+1", "(x+1)^2"),
    ],
)
def test_equal_answers_in_other_spellings_are_right(grader, gold, answer):
    assert grader.grade(gold, answer) == Grade(True)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("48", "47"), ("\\frac{1}{2}", "2"), ("1/3", "0.333"), ("48", "-48"), ("(1,2)", "(2,1)"), ("5", "five apples")],
)
def test_other_answers_are_wrong(grader, gold, answer):
    assert grader.grade(gold, answer) == Grade(False)


@pytest.mark.parametrize("answer", ["\\frac{1}{", "$", "%", "}{", "\\boxed", " ", "日本"])
def test_unreadable_answers_are_wrong_and_harm_nothing(grader, answer):
    assert not grader.grade("3", answer).correct
    assert grader.grade("3", "3") == Grade(True)


def test_what_is_certain_about_huge_answers_is_a_verdict_and_no_error(grader):
    """The answers of https://github.com/huggingface/Math-Verify/issues/65 and 63 among them."""
    tower, fraction = "9^{9^{9^{9}}}", "\\dfrac{5^{(5^{(5^{5})})}-5}{16}"
    answers = [tower, fraction, "((1000!)!)!", "0." + "3" * 5_000, "{" * 3_000 + "x" * 3_000]
    futures = [grader.submit("5", answer) for answer in answers]
    assert [grader.resolve(future) for future in futures] == [Grade(False)] * len(answers)


def test_empty_answer_is_wrong_without_asking_a_child():
    with Grader(cpu_seconds=1e-6) as grader:
        assert grader.grade("3", "") == Grade(False)


def test_answer_that_runs_away_is_killed_and_the_next_is_graded():
    with Grader(cpu_seconds=2.0) as grader:
        assert grader.grade("3", "3") == Grade(True)  # the child is warm: only the answer itself takes time
        runaway, after = grader.submit("3", RUNAWAY), grader.submit("3", "3")
        grade = grader.resolve(runaway)
        assert not grade.correct
        assert grade.error == "grading took more than 2 s of CPU time"
        assert grade.cpu_seconds == 2.0
        assert grader.resolve(after) == Grade(True)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither CPU time limits nor SIGSTOP")
def test_a_grade_does_not_depend_on_how_much_of_the_processor_others_leave_it():
    """A child that is stopped for longer than its limit has used none of it."""
    others = set(multiprocessing.active_children())
    with Grader(cpu_seconds=1.0) as grader:
        assert grader.grade("3", "3") == Grade(True)
        (child,) = set(multiprocessing.active_children()) - others
        assert child.pid is not None
        grades = [grader.submit(seconds, "3", compute) for seconds in ("0.5", "0.6", "9")]
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(1.6)
        os.kill(child.pid, signal.SIGCONT)
        inside, again, beyond = map(grader.resolve, grades)
    assert inside == again == Grade(True)
    assert inside.cpu_seconds == pytest.approx(0.5, abs=0.1)
    assert beyond.error == "grading took more than 1 s of CPU time"


def test_a_check_that_only_waits_is_given_up():
    with Grader(cpu_seconds=0.05) as grader:
        grades = [grader.submit(seconds, "3", wait) for seconds in ("0.2", "60")]
        assert list(map(grader.resolve, grades)) == [Grade(True), Grade(False, "grading took more than 1.2 s")]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM between processes")
def test_a_child_that_is_stopped_says_nothing_on_the_terminal(grader):
    assert grader.resolve(grader.submit("3", "3", ends_silently)) == Grade(True)


def test_child_that_dies_is_named_and_replaced(grader):
    grade = grader.resolve(grader.submit("3", "3", leave))
    assert not grade.correct
    assert "3" in grade.error
    assert grader.grade("3", "3") == Grade(True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's address space for certain")
def test_answer_that_eats_memory_is_cut_off_and_says_so_and_the_next_is_graded():
    with Grader(memory_bytes=200 * 2**20) as grader:
        assert grader.resolve(grader.submit("100", "3", eat)) == Grade(True)
        greedy, after = grader.submit("300", "3", eat), grader.submit("3", "3")
        assert grader.resolve(greedy) == Grade(False, "grading took more than 200 MiB of memory")
        assert grader.resolve(after) == Grade(True)


def test_stopped_grader_has_no_children_and_starts_others_when_asked_again():
    others = set(multiprocessing.active_children())
    grader = Grader()
    for _ in range(2):
        assert set(multiprocessing.active_children()) == others
        assert grader.grade("1/2", "0.5") == Grade(True)
        assert len(set(multiprocessing.active_children()) - others) == 1
        grader.stop()
    assert set(multiprocessing.active_children()) == others


def test_children_that_cannot_be_started_are_named_and_tried_again():
    with Grader() as grader:
        grader._pool = ProcessPool(1, initializer=fail, context=get_context("spawn"))
        grade = grader.grade("3", "3")
        assert not grade.correct
        assert "cannot be kept running" in grade.error
        assert grader.grade("3", "3") == Grade(True)


def test_an_answer_that_is_handed_over_as_the_last_child_is_given_up_is_not_waited_for():
    """pebble has then told all answers that it knows of, and this one is not among them."""
    others = set(multiprocessing.active_children())
    with Grader() as grader:
        assert grader.grade("3", "3") == Grade(True)
        pool, (child,) = grader._pool, set(multiprocessing.active_children()) - others
        tasks = pool._pool_manager.task_manager
        register = tasks.register

        def late(task: object) -> None:
            pool._pool_manager_loop.join(60)
            register(task)

        tasks.register = late
        future = grader.submit("3", "3")
        os.kill(child.pid, signal.SIGKILL)
        assert "cannot be kept running" in grader.resolve(future).error
        assert grader.grade("3", "3") == Grade(True)


def test_when_no_child_can_be_started_at_all_grades_say_so(monkeypatch):
    def refuse(*args: object, **options: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("pebble.pool.process.launch_process", refuse)
    with Grader() as grader:
        assert "cannot be kept running" in grader.grade("3", "3").error


def test_no_time_limit_passes_for_a_wrong_answer():
    with Grader(cpu_seconds=6.5) as grader:  # math-verify has a limit of its own, of 5 s
        grade = grader.grade("3", RUNAWAY)
    assert not grade.correct
    assert grade.error


def test_grading_works_from_a_thread(grader):
    grades: list[Grade] = []
    thread = threading.Thread(target=lambda: grades.append(grader.grade("\\frac{1}{2}", "0.5")))
    thread.start()
    thread.join(60)
    assert grades == [Grade(True)]


def test_many_answers_are_graded_in_order_of_asking(grader):
    futures = [grader.submit(str(i % 7), str(i % 5)) for i in range(70)]
    assert [grader.resolve(f).correct for f in futures] == [i % 7 == i % 5 for i in range(70)]


def test_leaving_on_an_error_does_not_wait_for_a_running_grade():
    def grade_and_fail() -> None:
        with Grader(cpu_seconds=120.0) as grader:
            grader.grade("3", "3")
            future = grader.submit("3", RUNAWAY)
            while not (future.running() or future.done()):
                time.sleep(0.01)
            assert future.running()
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        grade_and_fail()
    assert time.monotonic() - started < 60


SEES_CTRL_C = """
import multiprocessing, os, signal
from pathlib import Path
from espalier.search.grading.math_verify import Grader

def sees_ctrl_c(child):
    status = dict(line.split(":\\t", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
    return not int(status["SigBlk"], 16) >> (signal.SIGINT - 1) & 1

if __name__ == "__main__":
    with Grader() as grader:
        assert grader.grade("3", "3").correct
        (child,) = multiprocessing.active_children()
        print("first", sees_ctrl_c(child))
        os.kill(child.pid, signal.SIGKILL)
        assert any(grader.grade("3", "3").correct for _ in range(20))
        (child,) = multiprocessing.active_children()
        print("second", sees_ctrl_c(child))
    print("itself", sees_ctrl_c(multiprocessing.current_process()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_children_never_see_a_terminals_ctrl_c(tmp_path):
    script = tmp_path / "grade.py"
    script.write_text(SEES_CTRL_C)
    ran = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines() == ["first False", "second False", "itself True"]


def test_an_interrupt_waits_until_an_answer_is_handed_over(monkeypatch: pytest.MonkeyPatch):
    handed_over, end = [], threading.Event()

    def hand_over(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # which any thread may take, whatever this one blocks
        time.sleep(0.2)
        handed_over.append(True)

    other = threading.Thread(target=end.wait)
    other.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(ProcessPool, "schedule", hand_over)
        with pytest.raises(KeyboardInterrupt):
            Grader().submit("3", "3")
    finally:
        signal.signal(signal.SIGINT, before)
        end.set()
        other.join()
    assert handed_over


def test_name_holds_the_version_of_the_grader(grader):
    name, version = grader.name.split()
    assert name == "math-verify"
    assert version[0].isdigit()
