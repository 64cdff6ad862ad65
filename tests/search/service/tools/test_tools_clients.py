"""inspect_ai, its_hub, its service's callers and curl, as the README has them."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from readme_files import blocks

from espalier.experiments.lab.bench.service.server_process import ServerProcess
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


CALLER = """
import json, sys
from its_hub.integration.iaas.models import ChatCompletionRequest, ChatCompletionResponse
from openai import OpenAI

url, model, endpoint, problem = sys.argv[1:]
client = OpenAI(base_url=url, api_key="none", max_retries=0)
question = {"model": model, "messages": [{"role": "user", "content": problem}], "temperature": 0.8, "max_tokens": 300}
whole = {"return_response_only": False}
header = {"X-ITS-Budget": "2", "X-ITS-Endpoint": endpoint, "X-ITS-API-Key": "none"}
for body, headers in (({"budget": 4, **whole}, {}), ({"budget": 8, **whole}, header), ({"budget": 3}, {})):
    ChatCompletionRequest(**question, **body)
    answer = client.chat.completions.create(**question, extra_body=body, extra_headers=headers)
    print(json.dumps(ChatCompletionResponse(**answer.model_dump()).model_dump()))
stream = client.chat.completions.create(**question, stream=True, extra_body={"budget": 2})
print(json.dumps("".join(chunk.choices[0].delta.content or "" for chunk in stream)))
"""
"""Calls as its_hub's documentation has them, by OpenAI's client; its own models check what is sent and what comes."""


@contextmanager
def service_of_its_hub(program: Path, endpoint: str) -> Iterator[str]:
    """Run its_hub's own service over a backend; yields its URL."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    settings = {"endpoint": endpoint, "api_key": "none", "model": "demo-generator@plain", "alg": "self-consistency"}
    body = json.dumps({**settings, "regex_patterns": [r"boxed\{(\d+)\}"]}).encode()
    with subprocess.Popen([program, "--port", str(port)], env={**os.environ, "NO_PROXY": "*"}) as process:
        try:
            for _ in range(SECONDS):
                assert process.poll() is None
                try:
                    urlopen(Request(f"{url}/configure", body, {"content-type": "application/json"})).close()
                    break
                except URLError:
                    time.sleep(1)
            yield url
        finally:
            process.terminate()


def test_in_the_place_of_its_hubs_service_its_callers_read_what_they_read_of_it(
    served: ServerProcess, tool: Callable[[str, str], Path], tmp_path: Path
) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    problem, endpoint = next(iter(load_benchmark("demo", 1))).problem, f"{served.url}/v1"

    def called(url: str, model: str) -> list[Any]:
        command = [tool("its_hub", "python"), "caller.py", f"{url}/v1", model, endpoint, problem]
        return [json.loads(line) for line in run(command, tmp_path).splitlines()]

    with service_of_its_hub(tool("its_hub", "its-iaas"), endpoint) as url:
        its = called(url, "demo-generator@plain")
    ours = called(served.url or "", "demo-generator@majority-8")
    for answers in (its, ours):
        *whole, alone, streamed = answers
        for answer, budget in zip(whole, (4, 2), strict=True):
            told, (choice,) = answer["metadata"], answer["choices"]
            assert len(told["all_responses"]) == sum(told["response_counts"].values()) == budget
            assert told["all_responses"][told["selected_index"]]["content"] == choice["message"]["content"]
            assert choice["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] > 0
        assert alone["metadata"] is None
        assert extract_answer(alone["choices"][0]["message"]["content"])
        assert extract_answer(streamed)
    for one, other in zip(its[:3], ours[:3], strict=True):
        assert one.keys() == other.keys()
        assert (one["metadata"] or {}).keys() == (other["metadata"] or {}).keys()


def test_a_caller_of_its_hubs_service_may_call_the_server_instead(served: ServerProcess, tmp_path: Path) -> None:
    answer = json.loads(run(["sh", "-c", of_readme("sh", "X-ITS-Budget", served)], tmp_path))
    told = answer["metadata"]
    assert told["algorithm"] == "best-of-n"
    assert answer["espalier"]["configuration"]["beam_width"] == 4
    assert told["all_responses"][told["selected_index"]]["content"] == answer["choices"][0]["message"]["content"]
    assert sum(told["response_counts"].values()) == 4
