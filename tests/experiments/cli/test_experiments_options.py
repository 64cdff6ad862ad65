import io
import os
import select
import sys
from collections.abc import Callable

import pytest
import typer

from espalier.engine.errors import EspalierError
from espalier.experiments.cli.main import run_app
from espalier.experiments.cli.options import PLOT_SUFFIXES, parse_int_list

SOLVE = ("solve", "1+1?", "-a", "greedy")


@pytest.fixture
def refused(espalier, monkeypatch) -> Callable[..., str]:
    """The one line of error of a command that ends before any model loads."""

    monkeypatch.setattr("espalier.search.run.load.load_orchestrator", None)  # who calls it fails

    def refused(*arguments: object) -> str:
        ran = espalier(*SOLVE, *arguments)
        assert (ran.code, ran.out) == (2, "")
        (line,) = ran.err.splitlines()
        return line

    return refused


@pytest.mark.parametrize(("text", "numbers"), [("1", [1]), ("1,2,4", [1, 2, 4]), (" 4 , 1 ", [4, 1])])
def test_lists_of_numbers_keep_their_order(text, numbers):
    assert parse_int_list(text) == numbers


@pytest.mark.parametrize("text", ["", ",", "1,", "0", "-1", "1,0", "1,1", "a", "1;2", "1.5", "1 2"])
def test_anything_else_is_not_a_list_of_different_positive_numbers(text):
    with pytest.raises(typer.BadParameter, match=r"write 1,2,4") as caught:
        parse_int_list(text)
    assert repr(text) in str(caught.value)


def test_a_server_does_not_go_down_with_a_difference(espalier):
    refused = espalier("serve", "--port", 0, "--verify-incremental")
    assert refused.code == 2
    assert "use solve or eval" in " ".join(refused.err.replace("│", " ").split())


def test_help_names_the_extra_that_quantised_weights_need(espalier):
    assert "espalier-search[quantization]" in espalier("solve", "--help").out


# --- files to write ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tree", "tree.gif", "tree.xyz", ".svg", "folder"])
def test_a_plot_is_what_the_help_names_and_nothing_else(refused, tmp_path, name):
    (tmp_path / "folder").mkdir()
    assert refused("--plot", tmp_path / name) == f"error: --plot: '{tmp_path / name}' must end in .svg, .png or .pdf"


@pytest.mark.parametrize("suffix", [*PLOT_SUFFIXES, ".PNG"])
def test_every_kind_of_plot_that_the_help_names_is_drawn(espalier, tmp_path, suffix):
    assert suffix.lower() in espalier("solve", "--help").out
    ran = espalier(*SOLVE, "--plot", tmp_path / f"tree{suffix}")
    assert ran.code == 0, ran.err
    assert (tmp_path / f"tree{suffix}").stat().st_size > 1000


@pytest.mark.parametrize("flags", [("--trace",), ("--json", "--trace"), ("--plot",)])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere/a.svg", "there is no folder '{}/nowhere'"),
        ("file/a.svg", "Not a directory"),
        ("folder.svg", "Is a directory"),
        ("/proc/a.svg", "No such file or directory"),  # nobody can write there, not even root
        ("a" * 300 + ".svg", "File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_any_work(refused, tmp_path, flags, name, why):
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").touch()
    file = tmp_path / name
    assert refused(*flags, file) == f"error: {flags[-1]}: cannot write '{file}': {why.format(tmp_path)}"


def test_the_check_of_a_file_leaves_it_as_it_was(espalier, tmp_path):
    (tmp_path / "old.svg").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    before = sorted(tmp_path.iterdir())
    for flags in (
        ("--plot", tmp_path / "old.svg", "--trace", tmp_path / "new.json"),
        ("--trace", tmp_path / "link.json"),
    ):
        assert "no checkpoint" in espalier(*SOLVE, *flags, "--generator", "nope").err
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "old.svg").read_text() == "old"


def test_the_check_of_a_pipe_does_not_end_it(espalier, tmp_path):
    """Opening and closing it would tell the reader at the other end that this was all."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    seen = select.poll()
    seen.register(reader)
    espalier(*SOLVE, "--trace", tmp_path / "pipe", "--generator", "nope")
    assert seen.poll(0) == []
    os.close(reader)


# --- solving at a server -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint", ["", "foo", "foo:", ":50051", "foo:bar", "foo:0", "foo:65536", "::1:50051", "a b:1"]
)
def test_an_endpoint_is_a_host_and_a_port(refused, endpoint):
    assert refused("--endpoint", endpoint) == f"error: --endpoint must be HOST:PORT, is {endpoint!r}"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9", "localhost:9", "[::1]:9"])
def test_an_endpoint_may_be_a_name_or_an_address(espalier, endpoint):
    assert f"no server at {endpoint}" in espalier(*SOLVE, "--endpoint", endpoint).err


@pytest.mark.parametrize(
    "flags",
    [
        *[(f"--{role}", "demo-generator") for role in ("generator", "verifier")],
        *[("--device", "cpu"), ("--dtype", "auto"), ("--kv-memory", "1G"), ("--offline",)],
        ("--answer-equivalence", "exact-match"),
        *[("--threads", 1), ("--trace", "t.json")],
    ],
)
def test_what_a_server_would_not_hear_of_is_refused_beside_endpoint(refused, monkeypatch, tmp_path, flags):
    monkeypatch.chdir(tmp_path)
    said = refused("--endpoint", "127.0.0.1:9", *flags)
    assert said == f"error: {flags[0]}: only for searches in this process; leave out --endpoint"


def test_models_that_the_environment_names_do_not_keep_from_a_server(espalier, monkeypatch):
    monkeypatch.setenv("ESPALIER_GENERATOR", "demo-generator")
    assert "no server at 127.0.0.1:9" in espalier(*SOLVE, "--endpoint", "127.0.0.1:9").err


# --- the rest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("processors", "most"), [(2, 64), (16, 64), (48, 192)])
def test_threads_have_a_limit(refused, monkeypatch, processors, most):
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    said = f"error: --threads: must be at most {most} with {processors} processors, is {most + 1}"
    assert refused("--threads", most + 1) == said
    monkeypatch.setenv("ESPALIER_THREADS", f"{most + 1}")
    assert refused() == said


def test_as_many_threads_as_the_limit_are_let_pass(espalier, monkeypatch):

    def stop(settings: object, _: object) -> None:
        raise EspalierError(f"{settings}")

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr("espalier.search.run.load.load_orchestrator", stop)
    assert "threads=64" in espalier(*SOLVE, "--threads", 64).err


def test_a_result_is_not_lost_where_the_terminal_cannot_show_a_sign(monkeypatch):
    app = typer.Typer()

    @app.command()
    def show() -> None:
        print("6 ÷ 2 × 3 = 9")

    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["show"])
    with pytest.raises(SystemExit) as ended:
        run_app(app)
    assert ended.value.code == 0
    assert shown.getvalue() == b"6 ? 2 ? 3 = 9\n"


# --- options that a dataclass declares -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("rollouts", "-N", 0), "error: -N/--solutions: must be between 1 and 1024, is 0"),
        (("rollouts", "--temperature", -1), "error: --temperature: must be above 0 and at most 10, is -1.0"),
        (("learn-verifier", "--continuations", 0), "error: --continuations: must be between 1 and 256, is 0"),
        (("eval", "--limit", 0), "error: --limit: must be at least 1, is 0"),
        (("sweep", "--limit", -3), "error: --limit: must be at least 1, is -3"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_flag_before_anything_is_written(espalier, tmp_path, arguments, line):
    refused = espalier(*arguments, "--out", tmp_path / "out")
    assert (refused.code, refused.err.strip()) == (2, line)
    assert not list(tmp_path.iterdir())
