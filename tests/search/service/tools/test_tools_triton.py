"""Triton Inference Server's own client, over gRPC and HTTP."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from readme_files import blocks

from espalier.experiments.lab.bench.service.server_process import ServerProcess

pytestmark = pytest.mark.tools

README = "search/service/kserve/README.md"
PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
CALLER = """
import json, queue, sys
import numpy
import tritonclient.grpc, tritonclient.http
from tritonclient.utils import InferenceServerException

grpc, http, problem, model = sys.argv[1:]


def text_of(module, shape):
    tensor = module.InferInput("text_input", shape, "BYTES")
    tensor.set_data_from_numpy(numpy.full(shape, problem, dtype=object))
    return tensor


def status_of(call):
    try:
        call()
    except InferenceServerException as error:
        return str(error.status()), error.message()
    return "OK", ""


def read(found):
    text, answer = (found.as_numpy(name).item().decode() for name in ("text_output", "answer"))
    return {"text": text, "answer": answer, "score": float(found.as_numpy("score").item())}


told = {}
for module, address in ((tritonclient.grpc, grpc), (tritonclient.http, http)):
    client = module.InferenceServerClient(address)
    text, same = text_of(module, [1]), {"parameters": {"seed": 7}}
    wanted = [module.InferRequestedOutput("answer")]
    told[module.__name__] = {
        "ready": [client.is_server_live(), client.is_server_ready(), client.is_model_ready(model)],
        "unready": client.is_model_ready("nothing"),
        "found": read(client.infer(model, [text], request_id="1", **same)),
        "again": read(client.infer(model, [text_of(module, [1, 1])], priority=1, timeout=60_000_000, **same)),
        "one": client.infer(model, [text], outputs=wanted, **same).as_numpy("answer").item().decode(),
        "wrong": status_of(lambda: client.infer(model, [text], parameters={"beam_width": 1000, "x": 1})),
        "priority": status_of(lambda: client.infer(model, [text], priority=500)),
        "unknown": status_of(lambda: client.infer("nothing", [text])),
    }

client = tritonclient.grpc.InferenceServerClient(grpc)
text, answers = text_of(tritonclient.grpc, [1]), queue.Queue()
told["late"] = status_of(lambda: client.infer(model, [text], client_timeout=0.001))
client.start_stream(lambda result, error: answers.put((result, error)))
client.async_stream_infer(model, [text], request_id="a", parameters={"seed": 7}, enable_empty_final_response=True)
client.async_stream_infer(model, [text], request_id="b", parameters={"beam_width": -1})
told["stream"], told["refused"], final = "", "", False
while not (final and told["refused"]):
    result, error = answers.get(timeout=60)
    if error:
        told["refused"] = error.message()
        continue
    response = result.get_response()
    final = response.parameters["triton_final_response"].bool_param
    if not final:
        told["stream"] += result.as_numpy("text_output").item().decode()
client.stop_stream()
print(json.dumps(told))
"""


def run(script: str, tool: Callable[[str, str], Path], *arguments: str) -> str:
    command = [tool("triton", "python"), "-c", script, *arguments]
    told = {**os.environ, "NO_PROXY": "*", "no_grpc_proxy": "*"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=told)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_tritons_client_reads_the_same_over_both(served: ServerProcess, tool: Callable[[str, str], Path]) -> None:
    http = (served.url or "").removeprefix("http://")
    told: dict[str, Any] = json.loads(run(CALLER, tool, served.address, http, PROBLEM, "demo-generator@beam-n2-m2"))
    by_grpc, by_http = told["tritonclient.grpc"], told["tritonclient.http"]
    for each in (by_grpc, by_http):
        assert each["ready"] == [True, True, True]
        assert not each["unready"]
        assert each["found"] == each["again"] == by_grpc["found"]
        assert each["found"]["answer"] == each["one"] == "73"
        assert "parameters.beam_width: " in each["wrong"][1]
        assert "parameters.x: is unknown" in each["wrong"][1]
        assert "1 is the soonest" in each["priority"][1]
    names = ("wrong", "priority", "unknown")
    invalid = "StatusCode.INVALID_ARGUMENT"
    assert [by_grpc[name][0] for name in names] == [invalid, invalid, "StatusCode.NOT_FOUND"]
    assert [by_http[name][0] for name in names] == ["400", "400", "404"]
    assert told["late"][0] == "StatusCode.DEADLINE_EXCEEDED"
    assert told["stream"] == by_grpc["found"]["text"]
    assert told["refused"].startswith("INVALID_ARGUMENT: parameters.beam_width: ")


def test_the_example_of_the_readme_runs(served: ServerProcess, tool: Callable[[str, str], Path]) -> None:
    (example,) = blocks(README, "py")
    answer, tokens = run(example.replace("127.0.0.1:50051", served.address), tool).split()
    assert answer == "73"
    assert int(tokens) > 0
