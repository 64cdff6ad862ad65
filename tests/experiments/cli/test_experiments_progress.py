"""Progress without a terminal: a line every so often, also while nothing is finished."""

import io
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from espalier.experiments.cli import progress
from espalier.experiments.cli.progress import bytes_progress, count_progress, share_progress


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Waits for a line on standard error that holds a text, with little time between two lines."""
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.01)
    seen: list[str] = []

    def said(text: str) -> str:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            seen.extend(capsys.readouterr().err.splitlines())
            if found := [line for line in seen if text in line]:
                return found[-1]
            time.sleep(0.01)
        pytest.fail(f"{text!r} is not in {seen}")

    return said


def test_lines_count_what_is_done_and_go_on_while_nothing_is(said):
    with share_progress(60, 20) as advance:
        assert said("20 of 60 problems").startswith("20 of 60 problems, 0:00 passed")
        advance(1, 1)
        advance(0, 1)
        line = said("22 of 60 problems, 50.0% right, 0:00 passed, about 0:")
        assert line.endswith(" left")


def test_other_things_are_counted_by_their_name(said):
    with count_progress("cells", 3) as advance:
        advance()
        assert said("1 of 3 cells")


def test_what_is_left_is_told_by_the_pace_of_all_that_is_under_way():
    for finished, waiting in ((0, 34), (34, 0)):
        assert progress.seconds_left(340, finished, waiting, 24) is None
    # One of 24 that began together is finished: the others are half done, not unbegun.
    assert progress.seconds_left(340, 1, 33, 24) == pytest.approx(340 / 12.5 * 21.5)
    assert progress.seconds_left(60, 6, 4, 1) == pytest.approx(40)  # one after the other
    assert progress.seconds_left(60, 6, 1, 24) == pytest.approx(10)  # the last


def test_a_line_counts_what_is_under_way_together(said, monkeypatch):
    asked: list[tuple[int, ...]] = []

    def seconds_left(_passed: float, *counts: int) -> float:
        asked.append(counts)
        return 5

    monkeypatch.setattr(progress, "seconds_left", seconds_left)
    with share_progress(60, 20, 8) as advance:
        advance(1, 1)
        assert said("21 of 60 problems").endswith("about 0:05 left")
    assert asked[-1] == (1, 39, 8)


def test_nothing_is_said_of_what_ends_soon_nor_after_the_end(capsys):
    with count_progress("cells", 1) as advance:
        advance()
    assert capsys.readouterr().err == ""


def test_loading_is_told_in_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.01)
    console = Console(file=io.StringIO(), force_terminal=False)
    assert isinstance(console.file, io.StringIO)
    with bytes_progress(console) as on_bytes:
        on_bytes(2**30, 4 * 2**30)
        end = time.monotonic() + 10
        while "of 4.0 GiB" not in console.file.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert "loading: 1.0 of 4.0 GiB of weights\n" in console.file.getvalue()


def test_a_long_time_is_shown_in_hours():
    assert [progress._clock(seconds) for seconds in (5.2, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
