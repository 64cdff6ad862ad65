"""`--algorithm MODULE:CLASS`: the example of the README, as a user's file in the current folder."""

import json
import re
import sys
from pathlib import Path

import pytest

from espalier.search.trace import TraceError, read_trace, replay

NAME = "halving:Halving"
SMALL = ("-N", 1, "-M", 2, "--max-step-tokens", 32)
PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"


def example() -> str:
    """The page's module; fenced as `py`, since those of `python` are scripts, which `test_readme` runs."""
    text = (Path(__file__).parents[3] / "search/algorithms/README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    return found


def forget() -> None:
    """As in a new process: nothing of the user's module is loaded."""
    sys.modules.pop("halving", None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "halving.py").write_text(example(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget()
    yield tmp_path
    forget()


def test_solve_runs_the_example_and_its_result_and_trace_name_it(espalier, folder):
    ran = espalier("solve", PROBLEM, "-a", NAME, *SMALL, "--json", "--trace", "trace.json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["configuration"]["algorithm"] == NAME
    assert result["answer"] == "73"
    ran = espalier("replay", "trace.json", "--algorithm", NAME)
    assert ran.out.startswith(f"{NAME}: the same decisions in all")
    with pytest.raises(TraceError, match="no built-in search; load it by --algorithm halving:Halving"):
        replay(read_trace(folder / "trace.json"))


@pytest.mark.parametrize("command", ["solve", "eval"])
def test_its_parameter_as_an_option_of_its_own_is_told_its_form(espalier, folder, command):
    ran = espalier(command, "-a", NAME, "--growth", 2)
    assert ran.code == 2
    form = "No such option: --growth; a parameter of a class of yours follows its name: halving:Halving:growth=VALUE"
    assert form in " ".join(ran.err.split())
    assert "of yours" not in espalier(command, "-a", "beam", "--growth", 2).err


def test_eval_keeps_the_name_and_resumes_only_the_same_code(espalier, folder):
    command = ("eval", "-a", NAME, *SMALL, "--limit", 2, "--out", "run")
    ran = espalier(*command)
    assert ran.code == 0, ran.err
    assert json.loads((folder / "run/config.json").read_text())["algorithm"] == NAME
    assert json.loads((folder / "run/summary.json").read_text())["configuration"]["algorithm"] == NAME
    samples = (folder / "run/samples.jsonl").read_text()
    assert espalier(*command).code == 0
    assert (folder / "run/samples.jsonl").read_text() == samples
    (folder / "halving.py").write_text(example().replace("= 0.5", "= 0.25"))
    forget()
    ran = espalier(*command)
    assert ran.code == 2
    assert "holds a run of another configuration: algorithm_code" in ran.err
    (folder / "twin.py").write_text(example())
    ran = espalier("eval", "-a", "twin:Halving", *command[3:])
    assert ran.code == 2
    assert "algorithm" in ran.err
    assert "twin:Halving" in ran.err


def test_a_sweep_has_cells_of_it_beside_built_in_ones_and_finds_them_again(espalier, folder):
    quarter = f"{NAME}:share=0.25"
    algorithms = f"{NAME},beam,{quarter}"
    command = ("sweep", "-a", algorithms, "-N", 1, "-M", 2, "--max-step-tokens", 32, "--limit", 1)
    for _ in range(2):
        ran = espalier(*command, "--out", "sweep", "--json")
        assert ran.code == 0, ran.err
        assert [cell["algorithm"] for cell in json.loads(ran.out)] == ["beam", NAME, quarter]
        forget()
    assert sorted(path.name for path in (folder / "sweep").glob("*/")) == [
        "beam-N1-M2",
        f"{NAME}-N1-M2",
        f"{quarter}-N1-M2",
    ]
    ran = espalier("sweep", "-a", NAME, "-N", 2, "-M", 2, "--limit", 1, "--out", "sweep", "--dry-run")
    assert ran.code == 0, ran.err
    ran = espalier("report", "sweep", "--out", "report")
    assert ran.code == 0, ran.err
    assert NAME in (folder / "report/report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("eval", "-a", "halving:Nothing", "--limit", 1),
            "error: -a/--algorithm: halving:Nothing: module 'halving' has no",
        ),
        (("sweep", "-a", "beam,half:X", "--limit", 1), "half:X: No module named 'half'"),
        (("solve", "-a", f"{NAME}:share=1"), f"{NAME}:share=1: share must be above 0 and below 1, is 1"),
        (
            ("eval", "-a", f"{NAME}:shares=1", "--limit", 1),
            f"{NAME}:shares=1: shares is unknown; did you mean 'share'?, its parameters are share",
        ),
        (("solve", "-a", "halving"), "'halving' is not one of 'greedy', 'chain'"),
        (("solve", "-a", NAME, "--endpoint", "127.0.0.1:1"), "a server runs its own searches; leave out --endpoint"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_loaded(espalier, folder, arguments, said):
    ran = espalier(*arguments)
    assert ran.code == 2
    assert said in " ".join(ran.err.replace("│", " ").split())


def test_a_grid_with_a_parameter_of_its_own_as_a_key_is_told_where_to_write(espalier, folder):
    (folder / "grid.toml").write_text(f'algorithm = ["{NAME}"]\nshare = [0.25]\n')
    ran = espalier("sweep", "--grid", "grid.toml", "--limit", 1)
    assert ran.code == 2
    assert "share; parameters of a class of yours follow its name, MODULE:CLASS:NAME=VALUE" in " ".join(ran.err.split())


@pytest.mark.parametrize(
    ("method", "command"),
    [
        ("candidates", ("solve", PROBLEM)),
        ("memory", ("solve", PROBLEM)),
        ("violations", ("eval", "--limit", 1)),
        ("sampled", ("sweep", "--limit", 1, "--dry-run")),
    ],
)
def test_a_class_method_that_fails_is_told_in_one_line(espalier, folder, method, command):
    body = f"    @classmethod\n    def {method}(cls, request): return 1 / 0\n\n    def kept"
    (folder / "halving.py").write_text(example().replace("    def kept", body))
    ran = espalier(*command, "-a", NAME)
    assert ran.code == 2
    assert f"{NAME}: {method} failed, " in " ".join(ran.err.split())
    assert "Traceback" not in ran.err


def test_a_class_that_lacks_a_method_is_told_in_one_line(espalier, folder):
    (folder / "halving.py").write_text(example().replace("def kept", "def held"))
    ran = espalier("solve", PROBLEM, "-a", NAME)
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1
    assert f"{NAME}: lacks the methods kept; search/algorithms/README.md" in ran.err
