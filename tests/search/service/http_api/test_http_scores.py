"""Scores of given solutions over HTTP, in the shapes of vLLM's and SGLang's clients; over a real engine."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from plain import plain_classifier_scores
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.prm.families import load_verifier
from espalier.prm.verifier import Verifier
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.service.settings import ServerSettings

PROBLEM = "Tom starts with 38 coins. He finds 47 more."
STEPS = ["38+47=85", "Then he loses 12 of them."]
OTHER = ["38+47=75"]
BODY = {"problem": PROBLEM, "steps": [STEPS, OTHER]}
ROUTES = ("/v1/score", "/score", "/classify", "/pooling")


@pytest.fixture(scope="module")
def server(tiny_checkpoints: dict[str, Path]) -> Iterator[ServerThread]:
    talker = load_generator(Checkpoint(tiny_checkpoints["talker"]), torch.float32, "cpu")
    family = load_verifier(Checkpoint(tiny_checkpoints["classifier"]), torch.float32, "cpu")
    settings = EngineSettings(kv_memory_bytes=2**22, block_size=4)
    engine = Engine({"generator": talker, "verifier": family.model}, settings)
    names = {"generator": "org/talker", "verifier": "org/judge@main"}
    orchestrator = Orchestrator(engine, Generator(engine, "", {}), Verifier(family), model_names=names)
    running = ServerThread(lambda: orchestrator, ServerSettings(port=0, http_port=0))
    running.wait_loaded()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _leaves_nothing(server: ServerThread) -> Iterator[None]:
    yield
    wait_until(lambda: not server.info().occupancy.running)
    assert [blocks.live for blocks in server.info().occupancy.kv_blocks.values()] == [0, 0]


@pytest.fixture(scope="module")
def post(server: ServerThread) -> Iterator[Callable[..., Any]]:
    with httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False) as http:

        def send(path: str, body: Any, status: int = 200) -> Any:
            headers = {"content-type": "application/json"}
            response = http.post(path, content=json.dumps(body), headers=headers)
            assert response.status_code == status, response.text
            return response.json()

        yield send


@pytest.fixture(scope="module")
def expected(tiny_checkpoints: dict[str, Path]) -> list[list[float]]:
    """What TRL's layout gives, fed as a whole to transformers."""
    folder = tiny_checkpoints["classifier"]
    return [plain_classifier_scores(folder, PROBLEM, steps, "\n", chat=False) for steps in (STEPS, OTHER)]


def test_each_solution_has_a_score_and_those_of_its_steps(
    post: Callable[..., Any], expected: list[list[float]]
) -> None:
    answer = post("/v1/score", BODY)
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    for entry, steps, scores in zip(answer["data"], answer["scores"], expected, strict=True):
        assert entry["step_scores"] == steps == pytest.approx(scores, abs=1e-5)
        assert entry["score"] == steps[-1]
    usage = answer["espalier"]["usage"]
    assert usage["verifier_tokens"] == usage["verifier_tree_tokens"] == answer["usage"]["total_tokens"]
    assert answer["espalier"]["aggregation"] == "last"


def test_vllms_and_sglangs_names_are_read_alike(post: Callable[..., Any]) -> None:
    scores = post("/v1/score", BODY)["scores"]
    texts = ["\n\n".join(steps) for steps in (STEPS, OTHER)]
    for body in (
        {"model": "espalier", "text_1": PROBLEM, "text_2": texts},
        {"queries": PROBLEM, "documents": texts},
        {"queries": [PROBLEM], "documents": texts},
        {"data_1": PROBLEM, "data_2": texts},
        {"query": PROBLEM, "items": texts, "apply_softmax": True, "item_first": False},
    ):
        for path in ("/v1/score", "/score"):
            assert post(path, body)["scores"] == scores
    alone = post("/v1/score", {"text_1": PROBLEM, "text_2": texts[0]})
    assert alone["scores"] == scores[:1]


@pytest.mark.parametrize("model", ["espalier", "espalier@plain", "org/judge@main", "judge"])
def test_the_model_is_the_pair_or_the_verifier(model: str, post: Callable[..., Any]) -> None:
    for path in ROUTES:
        assert post(path, {**BODY, "model": model})["model"] == model
    post("/v1/score", {**BODY, "model": "talker"}, 404)


def test_a_conversation_ends_with_the_solution(post: Callable[..., Any]) -> None:
    messages = [{"role": "user", "content": PROBLEM}, {"role": "assistant", "content": "\n\n".join(STEPS)}]
    scores = post("/v1/score", BODY)["scores"]
    assert post("/v1/score", {"messages": messages})["scores"] == scores[:1]
    longer = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}, *messages]
    assert post("/v1/score", {"messages": longer})["scores"] != scores[:1]


def test_classes_are_the_probabilities_of_wrong_and_right(post: Callable[..., Any]) -> None:
    scores = [entry["score"] for entry in post("/v1/score", BODY)["data"]]
    data = post("/classify", BODY)["data"]
    assert [entry["probs"] for entry in data] == [[1 - score, score] for score in scores]
    assert [entry["label"] for entry in data] == ["right" if score >= 0.5 else "wrong" for score in scores]
    assert {entry["num_classes"] for entry in data} == {2}


def test_pooling_has_a_pair_for_each_step(post: Callable[..., Any]) -> None:
    scores = post("/v1/score", BODY)["scores"]
    answer = post("/pooling", {**BODY, "task": "token_classify"})
    assert [entry["data"] for entry in answer["data"]] == [[[1 - s, s] for s in steps] for steps in scores]


def test_a_budget_leaves_steps_without_scores_and_is_no_error(post: Callable[..., Any]) -> None:
    answer = post("/v1/score", {**BODY, "espalier": {"verifier_budget": 1}})
    assert answer["espalier"]["stop_reason"] == "budget"
    assert answer["scores"] == [[None, None], [None]]
    assert {entry["reason"] for entry in answer["data"]} == {"verifier_budget is used up"}
    assert post("/classify", {**BODY, "espalier": {"verifier_budget": 1}})["data"][0]["probs"] == []


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"problem": None}, "problem"),
        ({"problem": " "}, "problem"),
        ({"problem": 3}, "problem"),
        ({"steps": None}, "problem"),
        ({"steps": []}, "steps"),
        ({"steps": [[]]}, "steps"),
        ({"steps": [["a", " "]]}, "steps"),
        ({"steps": [["\ud800"]]}, "steps"),
        ({"text_2": "also"}, "problem"),
        ({"use_activation": False}, "use_activation"),
        ({"label_token_ids": [1, 2]}, "label_token_ids"),
        ({"nonsense": 1}, "nonsense"),
        ({"espalier": {"beam_width": 2}}, "espalier.beam_width"),
        ({"espalier": {"aggregation": "sum"}}, "espalier.aggregation"),
        ({"espalier": {"verifier_budget": 0}}, "espalier.verifier_budget"),
        ({"espalier": {"priority": 5}}, "espalier.priority"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_refused_by_its_name(
    path: str, wrong: dict[str, Any], param: str, post: Callable[..., Any]
) -> None:
    error = post(path, {**BODY, **wrong}, 400)["error"]
    assert error["param"].partition("[")[0] == param


def test_a_conversation_must_end_with_a_solution(post: Callable[..., Any]) -> None:
    for messages in ([], [{"role": "user", "content": PROBLEM}], [{"role": "assistant", "content": "so"}]):
        assert post("/v1/score", {"messages": messages}, 400)["error"]["param"] == "messages"


def test_an_unknown_model_scores_nothing(post: Callable[..., Any]) -> None:
    assert "'other'" in post("/v1/score", {**BODY, "model": "other"}, 404)["error"]["message"]
