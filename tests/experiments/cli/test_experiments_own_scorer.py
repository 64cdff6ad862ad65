"""`--verifier MODULE:FUNCTION`: the example of the README, as a user's file in the current folder."""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from espalier.engine.errors import CheckpointError, EspalierError, InvalidRequestError
from espalier.engine.own_code import load_code
from espalier.experiments.prm_evaluation.scoring import load_scoring
from espalier.search.run.load import load_orchestrator, load_verifier_alone
from espalier.search.run.settings import RuntimeSettings
from espalier.search.solver import Solver

NAME = "copied:score"
SMALL = ("-N", 1, "-M", 2, "--max-step-tokens", 32)
PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"


def example() -> str:
    """The page's module; fenced as `py`, since those of `python` are scripts, which `test_readme` runs."""
    text = (Path(__file__).parents[3] / "prm/README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r'```py\n(""".*?)```', text, re.DOTALL)
    return found


def scorer_example() -> str:
    """The page's `Scorer`."""
    text = (Path(__file__).parents[3] / "prm/README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"```py\n(from espalier.*?)```", text, re.DOTALL)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "copied.py").write_text(example(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("copied", None)
    yield tmp_path
    sys.modules.pop("copied", None)


def expected(result: dict) -> None:
    """Every step's score is the function's of the path's text; at least one of them is below 1."""
    sys.modules.pop("copied", None)
    import copied  # pyright: ignore[reportMissingImports]

    nodes = {node["node_id"]: node for node in result["nodes"]}
    scored = [node for node in nodes.values() if node["score"] is not None]
    assert min(node["score"] for node in scored) < 1
    for node in scored:
        steps, step = [], node
        while step["parent_id"] is not None:
            steps, step = [step["text"], *steps], nodes[step["parent_id"]]
        assert node["score"] == copied.score(PROBLEM, [text for text in steps if text.strip()])


def test_every_step_has_the_score_that_the_function_returns(espalier, folder: Path):
    ran = espalier("solve", PROBLEM, "--verifier", NAME, "-a", "beam", "-N", 2, "-M", 4, "--temperature", 1.5, "--json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    expected(result)
    assert result["usage"]["verifier_tokens"] == result["usage"]["verifier_tree_tokens"] == 0


def test_an_evaluation_records_the_function_and_is_not_resumed_with_an_edited_one(espalier, folder: Path):
    command = ("eval", "--verifier", NAME, "-a", "beam", *SMALL, "--limit", 2, "--out", "run")
    ran = espalier(*command)
    assert ran.code == 0, ran.err
    assert json.loads((folder / "run/config.json").read_text())["verifier_family"] == NAME
    assert espalier(*command).code == 0
    (folder / "copied.py").write_text(example().replace("1 +", "2 +"))
    sys.modules.pop("copied", None)
    ran = espalier(*command)
    assert ran.code == 2
    assert "holds a run of another configuration: verifier" in ran.err


def test_python_takes_the_function_itself(folder: Path):
    seen = []

    def later_is_better(problem: str, steps: list[str]) -> float:
        seen.append((problem, tuple(steps)))
        return 1 - 1 / (1 + len(steps))

    with Solver(verifier=later_is_better, kv_memory="64M") as solver:
        result = solver.solve(PROBLEM, algorithm="beam", beam_width=1, expansion=2, max_step_tokens=32)
    assert seen
    assert {problem for problem, _ in seen} == {PROBLEM}
    assert all(text.strip() for _, steps in seen for text in steps)
    assert {node.score for node in result.nodes} <= {None, *(1 - 1 / (1 + len(steps)) for _, steps in seen)}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1 / 0", r"copied\.py:\d+: ZeroDivisionError: division by zero"),
        ("return 2", "a number from 0 to 1; it returned 2"),
        ("return [0.5]", r"the score of the last step, a number from 0 to 1; it returned \[0\.5\]"),
        ("return float('nan')", "a number from 0 to 1; it returned nan"),
        ("return None", "a number from 0 to 1; it returned None"),
        ("return '0.5'", "a number from 0 to 1; it returned '0.5'"),
    ],
)
def test_what_a_function_does_wrong_fails_the_search_in_one_line(body: str, said: str, folder: Path):
    (folder / "copied.py").write_text(f"def score(problem, steps):\n    {body}\n")
    with Solver(verifier=NAME, kv_memory="64M") as solver:
        with pytest.raises(EspalierError, match=f"^verifier copied:score: .*{said}"):
            solver.solve(PROBLEM, algorithm="beam", beam_width=1, expansion=2)
        assert solver.solve(PROBLEM, algorithm="greedy").answer, "the next one runs"


def test_python_takes_the_scorer_of_the_example_and_every_step_has_its_score(folder: Path):
    (folder / "copied.py").write_text(scorer_example())
    with Solver(verifier=load_code("copied:Shorter")(), kv_memory="64M") as solver:
        result = solver.solve(PROBLEM, algorithm="beam", beam_width=1, expansion=2, max_step_tokens=32)
    scored = [node for node in result.nodes if node.score is not None]
    assert scored
    assert [node.score for node in scored] == [1 / (1 + len(node.text)) for node in scored]
    assert result.digests["verifier"] == hashlib.sha256((folder / "copied.py").read_bytes()).hexdigest()


def test_a_costly_scorer_is_asked_about_whole_paths_alone_where_their_last_score_is_the_one_that_counts(folder: Path):
    costly = scorer_example().replace(
        '    name = "shorter"', '    name = "shorter"\n    needs = ScorerNeeds(final_only="if enough")'
    )
    (folder / "copied.py").write_text(costly.replace("Scorer,", "Scorer, ScorerNeeds,"))
    with Solver(verifier="copied:shorter", kv_memory="64M") as solver:
        last, least = (
            solver.solve(PROBLEM, algorithm="best-of-n", beam_width=2, aggregation=a) for a in ("last", "min")
        )
    ended = [node.path for node in last.nodes if node.termination in ("eos", "boxed")]
    assert [node.path for node in last.nodes if node.score is not None] == ended
    assert sum(node.score is not None for node in least.nodes) > len(ended) > 0


def test_the_command_line_takes_a_scorer_and_records_the_digest_of_its_file(espalier, folder: Path):
    (folder / "copied.py").write_text(scorer_example())
    command = ("eval", "--verifier", "copied:shorter", "-a", "beam", *SMALL, "--limit", 1, "--out", "run")
    ran = espalier(*command)
    assert ran.code == 0, ran.err
    assert json.loads((folder / "run/config.json").read_text())["verifier_family"] == "shorter"
    (folder / "copied.py").write_text(scorer_example().replace("1 +", "2 +"))
    sys.modules.pop("copied", None)
    assert "holds a run of another configuration: verifier" in espalier(*command).err
    with pytest.raises(CheckpointError, match="copied:shorter: scores the steps of searches; give a function"):
        load_scoring(RuntimeSettings(verifier="copied:shorter"), 1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return (StepScore(node, 80),)", "a score is a number from 0 to 1 or None, not 80"),
        ("return (StepScore(node, float('nan')),)", "a score is a number from 0 to 1 or None, not nan"),
        ("return (StepScore(node, '0.5'),)", "a score is a number from 0 to 1 or None, not '0.5'"),
        ("return (1 / 0 for _ in 'a')", r"failed, .*copied\.py:\d+: ZeroDivisionError: division by zero"),
        ("return 0.5", "failed, .*TypeError: 'float' object is not iterable"),
        ("return [0.5]", "must return StepScores, returned 0.5"),
        ("yield StepScore(node, 0.5)\n        raise OSError('gone')", r"failed, .*copied\.py:\d+: OSError: gone"),
    ],
)
def test_what_a_scorer_does_wrong_fails_the_search_in_one_line(body: str, said: str, folder: Path):
    right = "return (StepScore(node, 1 / (1 + len(node.text))),)"
    (folder / "copied.py").write_text(scorer_example().replace(right, body))
    assert body in (folder / "copied.py").read_text()
    with Solver(verifier="copied:shorter", kv_memory="64M") as solver:
        with pytest.raises(EspalierError, match=f"^verifier shorter: {said}"):
            solver.solve(PROBLEM, algorithm="beam", beam_width=1, expansion=2)
        assert solver.solve(PROBLEM, algorithm="greedy").answer, "the next one runs"


def test_a_scorer_that_cannot_begin_fails_the_search_in_one_line(folder: Path):
    for body, said in (
        ("raise OSError('no')", r"failed, .*OSError: no"),
        ("return 3", "begin must return a ScoreSession, ret"),
    ):
        text = scorer_example().replace("return ShorterSession()", body)
        (folder / "copied.py").write_text(text)
        sys.modules.pop("copied", None)
        with (
            Solver(verifier="copied:shorter", kv_memory="64M") as solver,
            pytest.raises(EspalierError, match=f"^verifier shorter: {said}"),
        ):
            solver.solve(PROBLEM, algorithm="beam", beam_width=1, expansion=2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"verifier": "copied:nothing"}, "--verifier copied:nothing: module 'copied' has no attribute 'nothing'"),
        ({"verifier": "missing:score"}, "--verifier missing:score: No module named 'missing'"),
        ({"verifier": "copied:NUMBER"}, "--verifier copied:NUMBER: it is neither a function nor a Sc"),
        (
            {"verifier": "copied:Shorter"},
            r"copied:Shorter: it is a class; name an instance, such as scorer = Shorter\(\)",
        ),
        ({"verifier": "copied:nameless"}, "--verifier copied:nameless: copied:Nameless: a Scorer must have a name"),
        ({"verifier": NAME, "verify_incremental": True}, "--verify-incremental: copied:score reads no path"),
    ],
)
def test_what_is_no_function_or_cannot_be_checked_is_refused(settings: dict, said: str, folder: Path):
    wrong = "class Nameless(Shorter): name = ''\nnameless = Nameless()\n"
    (folder / "copied.py").write_text(f"{example()}\n{scorer_example()}\n{wrong}")
    with pytest.raises(CheckpointError, match=said):
        load_orchestrator(RuntimeSettings(kv_memory=2**26, **settings))


def test_a_function_has_no_family_and_no_engine_of_its_own(folder: Path):
    with pytest.raises(InvalidRequestError, match="is not for --verifier copied:score, which names no checkpoint"):
        load_orchestrator(RuntimeSettings(verifier=NAME, verifier_family="yes-no"))
    with pytest.raises(CheckpointError, match="is a function, which has no model to load; give a process reward model"):
        load_verifier_alone(RuntimeSettings(verifier=NAME))


def test_a_function_scores_the_steps_of_given_solutions(espalier, folder: Path):
    steps = ["(a) 38 + 47 = 85", "(b) 85 - 12 = 74"]
    solution = {"id": "s", "problem": PROBLEM, "steps": steps, "label": 1, "final_answer_correct": False}
    (folder / "solutions.jsonl").write_text(json.dumps(solution) + "\n")
    command = ("eval-prm", "--benchmark", "solutions.jsonl", "--verifier", NAME, "--out", "run")
    ran = espalier(*command)
    assert ran.code == 0, ran.err
    import copied  # pyright: ignore[reportMissingImports]

    (scored,) = [json.loads(line) for line in (folder / "run/scores.jsonl").read_text().splitlines()]
    assert scored["scores"] == [copied.score(PROBLEM, steps[:end]) for end in (1, 2)]
    assert json.loads((folder / "run/config.json").read_text())["verifier_family"] == NAME
    assert espalier(*command).code == 0
    (folder / "copied.py").write_text(example().replace("1 +", "2 +"))
    sys.modules.pop("copied", None)
    assert "holds a run of another configuration: verifier" in espalier(*command).err
    assert "--verify-incremental: copied:score" in espalier(*command, "--verify-incremental").err
    assert "is not for --verifier copied:score" in espalier(*command, "--verifier-family", "yes-no").err


def test_a_plan_counts_no_verifier(espalier, folder: Path):
    ran = espalier("plan", "--generator", "demo-generator", "--memory", "1G", "--verifier", NAME, "--json")
    assert ran.code == 0, ran.err
    assert list(json.loads(ran.out)["models"]) == ["generator"]
