"""lm-evaluation-harness, as its users run it: by both endpoints, and beside its own transformers backend."""

import json
import os
import random
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from readme_files import blocks

from espalier.experiments.demo import generator_path
from espalier.experiments.lab.bench.service.server_process import ServerProcess
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.search.grading.answers import extract_answer

pytestmark = pytest.mark.tools

TASKS = Path(__file__).with_name("lm_eval_tasks")
README = "search/service/http_api/openai/README.md"
PROBLEMS = 20
SECONDS = 600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the tasks and their data: 20 problems of the bundled benchmark, in the shape of GSM8K."""
    for task in TASKS.glob("*.yaml"):
        shutil.copy(task, tmp_path)
    draw = random.Random(0)
    with (tmp_path / "coins.jsonl").open("w") as plain, (tmp_path / "coins_choice.jsonl").open("w") as choice:
        for problem in load_benchmark("demo", PROBLEMS):
            plain.write(json.dumps({"question": problem.problem, "answer": problem.answer}) + "\n")
            wrong = [str(int(problem.answer) + shift) for shift in (-10, 1, 7)]
            choices = [f"\\boxed{{{answer}}}" for answer in draw.sample([problem.answer, *wrong], 4)]
            gold = choices.index(f"\\boxed{{{problem.answer}}}")
            choice.write(json.dumps({"question": problem.problem, "choices": choices, "gold": gold}) + "\n")
    return tmp_path


@pytest.fixture
def lm_eval(tool: Callable[[str, str], Path], folder: Path) -> Callable[..., tuple[dict[str, Any], list[Any]]]:
    """Runs a task; returns its results and its samples in the order of the problems."""
    program = tool("lm_eval", "lm_eval")

    def run(task: str, *arguments: str) -> tuple[dict[str, Any], list[Any]]:
        out = folder / f"out-{len(list(folder.iterdir()))}"
        command = [program, "run", *arguments, "--tasks", task, "--include_path", folder]
        command += ["--output_path", out, "--log_samples"]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
        environment = {**os.environ, **offline, "OPENAI_API_KEY": "none", "NO_PROXY": "*"}
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        (results,) = out.rglob("results_*.json")
        (samples,) = out.rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        return json.loads(results.read_text())["results"][task], sorted(lines, key=lambda line: line["doc_id"])

    return run


def of_readme(number: int, served: ServerProcess, strategy: str = "") -> list[str]:
    """The arguments of a command of the README, for a running server and another strategy; the task is the test's."""
    (line, *_) = [block for block in blocks(README, "sh") if block.startswith("lm_eval ")][number:]
    for written, meant in (("\\\n", " "), ("http://127.0.0.1:8080", served.url or ""), ("@majority-8", strategy)):
        line = line.replace(written, meant)
    words = shlex.split(line)
    return [word for at, word in enumerate(words[2:], 2) if not {word, words[at - 1]} & {"--tasks", "--include_path"}]


def of_transformers() -> list[str]:
    return ["--model", "hf", "--model_args", f"pretrained={generator_path()},dtype=float32", "--device", "cpu"]


def answered(sample: dict[str, Any]) -> bool:
    """Whether a sample's text has the right answer, as evaluations of Espalier read it."""
    return extract_answer(sample["resps"][0][0]) == sample["doc"]["answer"]


@pytest.mark.parametrize("strategy", ["@plain", "@majority-8"])
def test_generation_by_chats_is_scored_as_evaluations_of_espalier_score_it(
    strategy: str, served: ServerProcess, lm_eval: Callable[..., Any]
) -> None:
    results, samples = lm_eval("coins", *of_readme(0, served, strategy))
    assert len(samples) == PROBLEMS
    right = [answered(sample) for sample in samples]
    assert [bool(sample["exact_match"]) for sample in samples] == right
    assert results["exact_match,boxed"] == pytest.approx(sum(right) / PROBLEMS)
    print(f"{strategy}: {sum(right)} of {PROBLEMS}")
    assert sum(right) > PROBLEMS / 4


def test_generation_by_text_completions_is_that_of_its_own_transformers_backend(
    served: ServerProcess, lm_eval: Callable[..., Any]
) -> None:
    _, samples = lm_eval("coins", *of_readme(1, served))
    _, own = lm_eval("coins", *of_transformers())
    assert [sample["resps"] for sample in samples] == [sample["resps"] for sample in own]


def test_multiple_choice_by_log_likelihood_is_that_of_its_own_transformers_backend(
    served: ServerProcess, lm_eval: Callable[..., Any]
) -> None:
    results, samples = lm_eval("coins_choice", *of_readme(1, served))
    own_results, own = lm_eval("coins_choice", *of_transformers())
    assert len(samples) == PROBLEMS
    for sample, other in zip(samples, own, strict=True):
        for (read,), (wanted,) in zip(sample["resps"], other["resps"], strict=True):
            assert float(read[0]) == pytest.approx(float(wanted[0]), abs=1e-3)
            assert str(read[1]) == str(wanted[1])
        assert (sample["acc"], sample["acc_norm"]) == (other["acc"], other["acc_norm"])
    for name in ("acc,none", "acc_norm,none"):
        assert results[name] == own_results[name]
    print(f"acc {results['acc,none']}, acc_norm {results['acc_norm,none']}")
