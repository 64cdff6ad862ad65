"""inspect_ai, its_hub and curl, as the README has them."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from readme_files import blocks

from espalier.experiments.bench.service.server_process import ServerProcess
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.search.grading.answers import extract_answer

pytestmark = pytest.mark.tools

README = "search/service/http_api/openai/README.md"
WRITTEN = "http://127.0.0.1:8080"
PROBLEMS = 6
SECONDS = 300


def of_readme(kind: str, word: str, served: ServerProcess) -> str:
    """The block of the README that has a word, for a running server."""
    (block,) = [block for block in blocks(README, kind) if word in block]
    return block.replace(WRITTEN, served.url or "")


def run(command: list[Any], folder: Path, **environment: str) -> str:
    told = {**os.environ, "NO_PROXY": "*", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    ended = subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout[-2000:]
    return ended.stdout


def test_inspect_scores_what_evaluations_of_espalier_score(
    served: ServerProcess, tool: Callable[[str, str], Path], tmp_path: Path
) -> None:
    inspect = tool("inspect_ai", "inspect")
    (tmp_path / "coins.py").write_text(of_readme("py", "inspect_ai", served))
    problems = list(load_benchmark("demo", PROBLEMS))
    lines = [json.dumps({"question": problem.problem, "answer": problem.answer}) for problem in problems]
    (tmp_path / "coins.jsonl").write_text("\n".join(lines))
    command = of_readme("sh", "inspect eval", served)
    run(["sh", "-c", command], tmp_path, PATH=f"{inspect.parent}:{os.environ['PATH']}", INSPECT_LOG_DIR="logs")
    (log,) = (tmp_path / "logs").iterdir()
    told = json.loads(run([inspect, "log", "dump", str(log)], tmp_path))
    assert told["status"] == "success"
    right = [
        extract_answer(each["output"]["choices"][0]["message"]["content"]) == each["target"] for each in told["samples"]
    ]
    assert len(right) == PROBLEMS
    (score,) = told["results"]["scores"]
    assert score["metrics"]["accuracy"]["value"] == pytest.approx(sum(right) / PROBLEMS)
    assert sum(right) > PROBLEMS / 3


def test_its_hub_searches_over_plain_chats_and_the_servers_verifier(
    served: ServerProcess, tool: Callable[[str, str], Path], tmp_path: Path
) -> None:
    python = tool("its_hub", "python")
    (tmp_path / "beam.py").write_text(of_readme("py", "its_hub", served))
    assert extract_answer(run([python, "beam.py"], tmp_path)) is not None


def test_a_caller_of_its_hubs_service_may_call_the_server_instead(served: ServerProcess, tmp_path: Path) -> None:
    answer = json.loads(run(["sh", "-c", of_readme("sh", "X-ITS-Budget", served)], tmp_path))
    told = answer["metadata"]
    assert told["algorithm"] == "best-of-n"
    assert answer["espalier"]["configuration"]["beam_width"] == 4
    assert told["all_responses"][told["selected_index"]]["content"] == answer["choices"][0]["message"]["content"]
    assert sum(told["response_counts"].values()) == 4
