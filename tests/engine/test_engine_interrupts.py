"""Ctrl-C takes effect between steps, and nothing is lost by it."""

import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
from engine_driver import drain, release

from espalier.engine import interrupts
from espalier.engine.engine import Engine
from espalier.engine.execution.runner import ModelRunner
from espalier.engine.interrupts import interrupts_held, lasting_interrupts
from espalier.engine.work import Generate, Generated, Sampling


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@contextmanager
def handler(of_ours: Callable[..., None]):
    signal.signal(signal.SIGINT, of_ours)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_interrupt_waits_for_the_end_of_the_outermost_block():
    reached = []

    @interrupts_held()
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("inner")

    @interrupts_held()
    def outer() -> None:
        inner()
        reached.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert reached == ["inner", "outer"]
    with interrupts_held():
        pass


def test_a_second_interrupt_does_not_wait():
    reached = []

    @interrupts_held()
    def block() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        signal.raise_signal(signal.SIGINT)
        reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == [1]


def test_a_block_that_takes_too_long_is_interrupted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.05)
    reached = []

    @interrupts_held()
    def block() -> None:
        signal.raise_signal(signal.SIGINT)
        for _ in range(1000):
            threading.Event().wait(0.05)
        reached.append("end")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == []


def test_a_held_interrupt_comes_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.05)
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
    threading.Event().wait(0.2)


def test_an_error_of_the_block_is_seen_below_the_interrupt():
    @interrupts_held()
    def block() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert str(caught.value.__context__) == "of the block"


def test_handlers_of_others_are_left_alone():
    seen = []
    with handler(lambda number, _: seen.append(number)), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]


def test_threads_other_than_the_main_one_hold_nothing():
    errors = []

    def run() -> None:
        try:
            with interrupts_held():
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        except BaseException as error:  # a failure here must reach the test's own thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []


class _Watched:
    """Something whose end Ctrl-C meets in a callback, where Python drops what is raised."""


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """What Python has dropped."""
    found: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: found.append(unraisable.exc_value))
    return found


def _interrupt_within_a_callback() -> None:
    watched = _Watched()
    callback = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
    del watched
    assert callback() is None


def test_an_interrupt_that_python_drops_comes_before_the_next_step(dropped: list[BaseException | None]):
    reached = []

    @interrupts_held()
    def step(name: str) -> None:
        reached.append(name)

    @lasting_interrupts()
    def command() -> None:
        step("first")
        _interrupt_within_a_callback()
        reached.append("between")
        step("second")

    with pytest.raises(KeyboardInterrupt):
        command()
    assert reached == ["first", "between"]
    assert [type(error) for error in dropped] == [KeyboardInterrupt]


def test_a_lasting_interrupt_waits_for_the_end_of_its_step_and_a_second_does_not():
    reached = []

    @lasting_interrupts()
    @interrupts_held()
    def step(times: int) -> None:
        for time in range(times):
            signal.raise_signal(signal.SIGINT)
            reached.append(time)

    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            step(times)
    assert reached == [0, 0]


def test_an_interrupt_lasts_no_longer_than_its_command():
    with pytest.raises(KeyboardInterrupt), lasting_interrupts():
        signal.raise_signal(signal.SIGINT)
    with lasting_interrupts(), interrupts_held():
        pass


def test_an_interrupted_step_ends_its_batch_and_the_next_returns_its_work(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    launch = ModelRunner.launch

    def interrupt(runner: ModelRunner, *step: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return launch(runner, *step)

    texts = []
    for interrupted in (True, False):
        engine = make_engine()
        prompt = engine.open("generator", list(range(20, 40)), owner="search")
        engine.submit(Generate("search", prompt, (Sampling(key=1), Sampling(key=2)), 1, ""))
        if interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(ModelRunner, "launch", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            assert engine.stats()["generator"].steps == 1
            engine.check_integrity()
        done = drain(engine)
        texts.append([(d.indices, d.token_ids) for d in done if isinstance(d, Generated)])
        release(engine, prompt, *(d.sequence for d in done if isinstance(d, Generated)))
        engine.check_drained()
    assert texts[0] == texts[1] != []
