"""`espalier eval-prm` on the bundled verifier, and the scorer on a random one."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from espalier.experiments.demo import planted_errors_path
from espalier.experiments.lab.recipe.planted_errors import SUBSETS, demo_records, write_planted_errors
from espalier.experiments.prm_evaluation.scoring import Scored, score_on_engine
from espalier.experiments.prm_evaluation.solutions import Solution, choose, read_solutions
from espalier.search.run.load import load_verifier_alone
from espalier.search.run.settings import RuntimeSettings

TEST = SUBSETS[1]


def demo_solutions() -> list[Solution]:
    return read_solutions(planted_errors_path())[1]


@pytest.fixture(scope="module")
def demo_verifier():
    return load_verifier_alone(RuntimeSettings(kv_memory=2**26))


def score(loaded, solutions, in_flight=8) -> dict[str, Scored]:
    found: dict[str, Scored] = {}
    engine, scorer = loaded
    score_on_engine(engine, scorer, in_flight, solutions, lambda each: found.update({each.unique_id: each}))
    engine.check_integrity()
    engine.check_drained()
    return found


def test_scores_do_not_depend_on_what_runs_beside_them(demo_verifier):
    solutions = demo_solutions()[:12]
    together = score(demo_verifier, solutions, in_flight=12)
    assert score(demo_verifier, solutions, in_flight=1) == together
    assert [len(together[each.unique_id].scores) for each in solutions] == [len(each.steps) for each in solutions]


def test_scores_equal_those_of_the_whole_text():
    checked = load_verifier_alone(RuntimeSettings(kv_memory=2**26, verify_incremental=True))
    assert not any(each.refused for each in score(checked, demo_solutions()[:6]).values())


def test_a_solution_that_is_too_long_is_refused_and_the_others_are_not(demo_verifier):
    good = demo_solutions()[0]
    many = tuple(["(a) 1+1=2, and 2+2=4"] * 250)
    long = Solution("long", good.problem, many, (), "s")
    wide = Solution("wide", "word " * 5000, ("1+1=2",), (), "s")
    found = score(demo_verifier, [long, good, wide])
    assert "beyond the verifier's context" in found["long"].refused
    assert "context" in found["wide"].refused
    assert found[good.unique_id] == score(demo_verifier, [good])[good.unique_id]


def test_a_random_part_is_another_one_and_the_same_for_the_same_seed():
    solutions = demo_solutions()
    first, one, other = choose(solutions, 3), choose(solutions, 3, 0), choose(solutions, 3, 1)
    assert choose(solutions, 3, 0) == one
    assert len({frozenset(each.unique_id for each in part) for part in (first, one, other)}) == 3
    assert sorted(each.subset for each in one) == sorted(each.subset for each in first)
    assert choose(solutions, None) == solutions


def test_shuffle_scores_a_random_part(espalier, tmp_path):
    ran = espalier("eval-prm", "--limit", 2, "--shuffle", "--shuffle-seed", 7, "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    scored = {json.loads(line)["id"] for line in (tmp_path / "out" / "scores.jsonl").read_text().splitlines()}
    assert scored == {each.unique_id for each in choose(demo_solutions(), 2, 7)}


def test_training_data_is_measured_by_its_first_wrong_steps(espalier, tmp_path):
    solutions = demo_solutions()[:30]
    for each in solutions:
        labels = [i not in each.wrong for i in range(len(each.steps))]
        steps = [f"Step {i}: {step} " for i, step in enumerate(each.steps, start=1)]
        signs = [f"{step}{'+' if right else '-'}" for step, right in zip(steps, labels, strict=True)]
        completions = [
            {"completions": [{"text": step, "rating": 1 if right else -1}], "chosen_completion": 0}
            for step, right in zip(each.steps, labels, strict=True)
        ]
        records = {
            "trl": {"prompt": each.problem, "completions": each.steps, "labels": labels},
            "math-shepherd": {
                "input": f"{each.problem} " + "\n".join(f"{step}ки" for step in steps),
                "label": f"{each.problem} " + "\n".join(signs),
            },
            "prm800k": {"question": {"problem": each.problem}, "label": {"steps": completions}},
            "processbench": {"id": each.unique_id, "problem": each.problem, "steps": each.steps, "label": each.label},
        }
        for form, record in records.items():
            with (tmp_path / f"{form}.jsonl").open("a") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    found = {}
    for form in ("processbench", "trl", "prm800k", "math-shepherd"):
        ran = espalier("eval-prm", "--benchmark", tmp_path / f"{form}.jsonl", "--json")
        assert ran.code == 0, ran.err
        summary = json.loads(ran.out)
        assert (summary["format"], summary["scored"]) == (form, len(solutions))
        found[form] = summary["overall"]
    assert found["trl"] == found["prm800k"] == found["processbench"]
    assert found["math-shepherd"].keys() == found["trl"].keys()
    shown = espalier("eval-prm", "--benchmark", tmp_path / "trl.jsonl", "--limit", 4)
    assert (shown.code, "accuracy, erroneous" in " ".join(shown.out.split())) == (0, True)


def test_little_memory_changes_no_score(demo_verifier):
    solutions = demo_solutions()[:24]
    small = load_verifier_alone(RuntimeSettings(kv_memory=4 * 2**20))
    assert score(small, solutions, in_flight=24) == score(demo_verifier, solutions)


def test_planted_errors_are_labelled_by_the_oracle_and_always_the_same():
    records = demo_records(TEST, 40)
    assert records == demo_records(TEST, 40)
    assert sum(each["label"] >= 0 for each in records) == 20
    assert {each["final_answer_correct"] for each in records if each["label"] < 0} == {True}


def test_the_bundled_solutions_are_those_that_the_recipe_writes(tmp_path):
    write_planted_errors(tmp_path)
    bundled = planted_errors_path()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        f.name: f.read_text() for f in bundled.iterdir()
    }


def test_the_bundled_verifier_finds_planted_errors(espalier, tmp_path):
    for subset in ("gsm8k", "math"):
        lines = "".join(json.dumps(each) + "\n" for each in demo_records(subset, 60))
        (tmp_path / f"{subset}.jsonl").write_text(lines)
    out = tmp_path / "run"
    ran = espalier("eval-prm", "--benchmark", tmp_path, "--out", out, "--json")
    assert ran.code == 0
    summary = json.loads(ran.out)
    assert "highest F1 on subset 'gsm8k'" in summary["threshold_source"]
    assert summary["by"]["subset"]["math"]["f1"]["value"] > 0.7
    assert summary["auc"] > 0.9
    _, solutions = read_solutions(tmp_path)
    records = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    assert [each["id"] for each in records] == [each.unique_id for each in solutions]
    assert [each["label"] for each in records] == [each.label for each in solutions]
    assert (out / "reliability.svg").read_text().startswith("<?xml")
    again = espalier("eval-prm", "--benchmark", tmp_path, "--out", out, "--threshold", 0.9)
    assert again.code == 0
    assert "given with --threshold" in again.out
    other = espalier("eval-prm", "--out", out)
    assert other.code == 2
    assert "another configuration: benchmark" in other.err


def test_prmbench_is_scored_by_classification_and_refusals_are_partial(espalier, tmp_path):
    records = [
        {
            "idx": str(i),
            "modified_question": each["problem"],
            "modified_process": each["steps"],
            "error_steps": [] if each["label"] < 0 else [each["label"] + 1],
            "classification": "counterfactual" if i % 4 < 2 else "circular",
        }
        for i, each in enumerate(demo_records(TEST, 12))
    ]
    file = tmp_path / "p.json"
    file.write_text(json.dumps(records))
    ran = espalier("eval-prm", "--benchmark", file, "--json")
    assert ran.code == 0
    assert set(json.loads(ran.out)["by"]["classification"]) == {"circular", "counterfactual"}
    records[0]["modified_process"] = ["1+1=2, and so 2+2=4"] * 250
    file.write_text(json.dumps(records))
    partial = espalier("eval-prm", "--benchmark", file)
    assert partial.code == 3
    assert "1 of 12" in partial.out
    assert "counterfactual_0: step " in partial.out


@pytest.mark.parametrize("arguments", [["--benchmark", "nothing"], ["--tune-on", "x"], ["--verifier", ""]])
def test_wrong_input_is_a_usage_error(espalier, arguments):
    ran = espalier("eval-prm", *arguments)
    assert ran.code == 2
    assert "Traceback" not in ran.err


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_scores(tmp_path):
    command = "from espalier.experiments.cli.main import main; main()"
    arguments = ["eval-prm", "--limit", "30", "--in-flight", "2", "--out"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def start(folder):
        line = [sys.executable, "-c", command, *arguments, str(folder)]
        return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)

    process = start(killed)
    scores = killed / "scores.jsonl"
    while process.poll() is None and not (scores.exists() and scores.read_text().count("\n") >= 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = scores.read_text()
    assert 5 <= kept.count("\n") < 60
    scores.write_text(kept + '{"id": "demo-te')  # a line cut off in the middle
    assert start(killed).wait() == 0
    assert start(whole).wait() == 0
    for name in ("scores.jsonl", "summary.json", "reliability.svg"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
