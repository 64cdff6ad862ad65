"""TRL's own client of vLLM, unmodified, in the place of whose server this one answers.

The client asks whether vLLM is installed, and imports what sends weights from GPU to GPU, before it does anything; a
package of that name which has nothing else stands in for it.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from readme_files import blocks

from espalier.experiments.lab.bench.service.server_process import ServerProcess

pytestmark = pytest.mark.tools

README = "search/service/http_api/openai/README.md"
WRITTEN = "http://127.0.0.1:8080"
PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
VERSION = "0.24.0"
STAND_IN = {
    f"vllm-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n",
    "vllm/__init__.py": f'__version__ = "{VERSION}"\nLLM = RequestOutput = SamplingParams = None\n',
    "vllm/sampling_params.py": "StructuredOutputsParams = None\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_engine.py": "NCCLTrainerSendWeightsArgs = NCCLWeightTransferEngine = None\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": "get_ip = get_open_port = None\n",
}
CALLER = """
import json, sys
from trl.generation.vllm_client import VLLMClient

url, problem, ids = sys.argv[1:]
ids, messages = json.loads(ids), [{"role": "user", "content": problem}]
client = VLLMClient(url, connection_timeout=60)
print(json.dumps({
    "text": client.generate([problem, "Ann has 12 pens."], n=3, max_tokens=24, generation_kwargs={"seed": 7}),
    "ids": client.generate([ids], n=3, max_tokens=24, generation_kwargs={"seed": 7}),
    "greedy": client.generate([ids], n=1, temperature=0, max_tokens=24, logprobs=2),
    "regex": client.generate([ids], n=4, max_tokens=24, structured_outputs_regex="[0-9]{3}"),
    "chat": client.chat([messages, messages], n=2, max_tokens=24, generation_kwargs={"seed": 7}),
}))
"""


@pytest.fixture
def run(tool: Callable[[str, str], Path], tmp_path: Path) -> Callable[..., str]:
    """Runs a script in TRL's environment."""
    python = tool("trl", "python")
    for name, text in STAND_IN.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    told = {**os.environ, "NO_PROXY": "*", "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def run(script: str, *arguments: str) -> str:
        command = [python, "-c", script, *arguments]
        ended = subprocess.run(command, env=told, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    return run


def post(served: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    request = Request(f"{served.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=60) as response:
        return json.load(response)


def test_trls_client_has_token_ids_and_log_probabilities(served: ServerProcess, run: Callable[..., str]) -> None:
    ids = post(served, "/tokenize", {"prompt": PROBLEM})["tokens"]
    told = json.loads(run(CALLER, served.url or "", PROBLEM, json.dumps(ids)).splitlines()[-1])
    text, by_ids = told["text"], told["ids"]
    assert text["prompt_ids"][0] == by_ids["prompt_ids"][0] == ids
    assert [len(each["completion_ids"]) for each in (text, by_ids)] == [6, 3]
    assert by_ids == {name: values[: len(by_ids[name])] for name, values in text.items()}
    assert len(set(map(tuple, by_ids["completion_ids"]))) > 1
    for found in told.values():
        for tokens, values, names in zip(
            found["completion_ids"], found["logprobs"], found["logprob_token_ids"], strict=True
        ):
            assert len(tokens) == len(values) == len(names)
            assert all(token in among for token, among in zip(tokens, names, strict=True))
            assert all(-50 < value <= 0 for each in values for value in each)
    (greedy,), (values,) = told["greedy"]["completion_ids"], told["greedy"]["logprobs"]
    best = told["greedy"]["logprob_token_ids"][0]
    assert greedy == [among[0] for among in best]
    assert all(each == sorted(each, reverse=True) for each in values)
    echoed = post(served, "/v1/completions", {
        "model": "demo-generator", "prompt": ids + greedy, "echo": True, "logprobs": 0, "max_tokens": 0,
    })  # fmt: skip
    read = echoed["choices"][0]["logprobs"]["token_logprobs"][len(ids) :]
    assert read == pytest.approx([each[0] for each in values], abs=1e-4), "as the generator itself reads them"
    shown = [post(served, "/detokenize", {"tokens": tokens})["prompt"] for tokens in told["regex"]["completion_ids"]]
    assert all(text.removesuffix("<|im_end|>").isdigit() for text in shown)
    chat = told["chat"]
    assert (
        chat["prompt_ids"]
        == [post(served, "/tokenize", {"messages": [{"role": "user", "content": PROBLEM}]})["tokens"]] * 2
    )
    assert chat["completion_ids"][:2] == chat["completion_ids"][2:], "a choice depends on seed and prompt alone"


def test_the_example_of_the_readme_runs(served: ServerProcess, run: Callable[..., str]) -> None:
    (example,) = [block for block in blocks(README, "py") if "trl" in block]
    assert run(example.replace(WRITTEN, served.url or "")).splitlines()[-1].startswith("4 [[")
