"""Sampling without a search over HTTP: text completions, plain chats, tokens; over a real engine."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.service.settings import ServerSettings

BODIES = Path(__file__).with_name("bodies")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Tom starts with 38 coins."
SAMPLED = {"model": "espalier", "prompt": PROMPT, "max_tokens": 24, "temperature": 1.0, "seed": 3}
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def engine(tiny_checkpoints: dict[str, Path]) -> Orchestrator:
    talker = load_generator(Checkpoint(tiny_checkpoints["talker"]), torch.float32, "cpu")
    made = Engine({"generator": talker}, EngineSettings(kv_memory_bytes=2**22, block_size=4))
    return Orchestrator(made, Generator(made, "", {"temperature": 1.0, "top_p": 1.0}), None)


@pytest.fixture(scope="module")
def server(engine: Orchestrator) -> Iterator[ServerThread]:
    running = ServerThread(lambda: engine, ServerSettings(port=0, http_port=0))
    running.wait_loaded()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _leaves_nothing(server: ServerThread) -> Iterator[None]:
    yield
    wait_until(lambda: not server.info().occupancy.running)
    assert [blocks.live for blocks in server.info().occupancy.kv_blocks.values()] == [0]


@pytest.fixture(scope="module")
def client(server: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def post(server: ServerThread) -> Iterator[Callable[..., Any]]:
    """Posts a body, in ASCII, or gets a path, and returns the answer of that status."""
    with httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False) as http:

        def send(path: str, body: Any = None, status: int = 200) -> Any:
            headers = {"content-type": "application/json"}
            response = http.get(path) if body is None else http.post(path, content=json.dumps(body), headers=headers)
            assert response.status_code == status, response.text
            return response.json()

        yield send


def sent_by(name: str) -> dict[str, Any]:
    """A body as a client sends it, for this server's names."""
    text = (BODIES / f"{name}.json").read_text().replace("demo-generator", "espalier")
    return json.loads(text)


# ---- text completions


def test_a_completion_is_a_text_and_what_it_took(client: openai.OpenAI) -> None:
    completion = client.completions.create(**SAMPLED)
    (choice,) = completion.choices
    assert (completion.object, choice.index, choice.logprobs) == ("text_completion", 0, None)
    assert choice.finish_reason in ("stop", "length")
    assert choice.text
    usage = completion.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 24
    assert completion.espalier["algorithm"] == "plain"
    assert client.completions.create(**SAMPLED).choices[0].text == choice.text


def test_a_completion_has_sixteen_tokens_and_a_seed_unless_others_are_given(client: openai.OpenAI) -> None:
    told = [client.completions.create(model="espalier@plain", prompt=PROMPT, temperature=0.5) for _ in range(2)]
    assert all(completion.usage.completion_tokens <= 16 for completion in told)
    seeds = [completion.espalier["seed"] for completion in told]
    assert seeds[0] != seeds[1]
    again = client.completions.create(model="espalier", prompt=PROMPT, temperature=0.5, seed=seeds[0])
    assert again.choices[0].text == told[0].choices[0].text


def test_prompts_come_back_in_order_with_their_samples_one_after_another(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "Then he loses 12", "The total is"]
    together = client.completions.create(**{**SAMPLED, "prompt": prompts}, n=2)
    assert [choice.index for choice in together.choices] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = client.completions.create(**{**SAMPLED, "prompt": prompt}, n=2)
        assert [c.text for c in alone.choices] == [c.text for c in together.choices[2 * i : 2 * i + 2]]


@pytest.mark.parametrize(
    "more", [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 0}, {"n": 3}], ids=str
)
@pytest.mark.parametrize("stop", [None, "a", ["e", "12"]])
def test_a_stream_is_the_whole_answer_in_pieces(more: dict[str, Any], stop: Any, client: openai.OpenAI) -> None:
    whole = client.completions.create(**SAMPLED, **more, stop=stop)
    *chunks, last = client.completions.create(
        **SAMPLED,
        **more,
        stop=stop,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert (last.choices, last.usage) == ([], whole.usage)
    told = [chunk.usage.completion_tokens for chunk in chunks]
    assert told == sorted(told)
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].espalier == {"seed": SAMPLED["seed"]}
    for choice in whole.choices:
        its = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(piece.text for piece in its) == choice.text
        assert [piece.finish_reason for piece in its] == [None] * (len(its) - 1) + [choice.finish_reason]
        if choice.logprobs:
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [value for piece in its for value in getattr(piece.logprobs, name)]
                assert joined == getattr(choice.logprobs, name), name


def test_a_stop_text_is_left_out_and_named(post: Callable[..., Any]) -> None:
    whole = post(COMPLETIONS, SAMPLED)["choices"][0]["text"]
    stop = whole[5:8]
    (choice,) = post(COMPLETIONS, {**SAMPLED, "stop": stop})["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert choice["stop_reason"] == stop
    (choice,) = post(COMPLETIONS, {**SAMPLED, "stop": [stop], "include_stop_str_in_output": True})["choices"]
    assert choice["text"] == whole[: whole.index(stop) + len(stop)]


def test_log_likelihoods_have_every_prompt_token_and_exactly_one_more(post: Callable[..., Any]) -> None:
    """What lm_eval's multiple-choice tasks read."""
    body = sent_by("lm_eval_completions_loglikelihood")
    choices = post(COMPLETIONS, body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for ids, choice in zip(body["prompt"], choices, strict=True):
        read = choice["logprobs"]
        assert {len(each) for each in read.values()} == {len(ids) + 1}
        assert read["token_logprobs"][0] is read["top_logprobs"][0] is None
        places = zip(read["tokens"], read["token_logprobs"], read["top_logprobs"], strict=True)
        for token, logprob, top in list(places)[1:]:
            assert top[token] == logprob <= max(top.values())
            assert 1 <= len(top) <= 2
        assert max(read["top_logprobs"][-1].values()) == read["token_logprobs"][-1]


def test_rollouts_have_their_tokens_by_id(post: Callable[..., Any]) -> None:
    """What TRL reads."""
    body = sent_by("trl_completions_rollout")
    answer = post(COMPLETIONS, body)
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 1
    assert answer["espalier"]["seed"] == 4611686018427387904
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == [40, 41, 42]
        read = choice["logprobs"]
        assert read["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert read["top_logprobs"] == [{t: v} for t, v in zip(read["tokens"], read["token_logprobs"], strict=True)]


def test_an_echo_is_the_prompt_and_its_text(post: Callable[..., Any]) -> None:
    (alone,) = post(COMPLETIONS, SAMPLED)["choices"]
    (choice,) = post(COMPLETIONS, {**SAMPLED, "echo": True})["choices"]
    assert choice["text"] == PROMPT + alone["text"]
    (nothing,) = post(COMPLETIONS, {**SAMPLED, "echo": True, "max_tokens": 0})["choices"]
    assert (nothing["text"], nothing["finish_reason"]) == (PROMPT, "length")


# ---- plain chats


def test_a_plain_chat_is_an_answer_without_a_search(client: openai.OpenAI) -> None:
    asked = {"model": "espalier@plain", "messages": MESSAGES, "max_tokens": 20, "temperature": 1.0, "seed": 1}
    completion = client.chat.completions.create(**asked, n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in completion.choices}) > 1
    assert completion.espalier["algorithm"] == "plain"
    chunks = list(client.chat.completions.create(**asked, n=3, stream=True))
    for choice in completion.choices:
        deltas = [c.choices[0].delta for c in chunks if c.choices[0].index == choice.index]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == choice.message.content


def test_a_chat_that_asks_for_token_ids_is_plain_and_has_them(post: Callable[..., Any]) -> None:
    """What TRL reads of conversations."""
    answer = post(CHAT, sent_by("trl_chat_rollout"))
    assert answer["espalier"]["algorithm"] == "plain"
    prompt = post("/tokenize", {"messages": MESSAGES})["tokens"]
    assert answer["prompt_token_ids"] == prompt
    assert len(answer["choices"]) == 4
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 1
    for choice in answer["choices"]:
        read = choice["logprobs"]["content"]
        assert [place["token"] for place in read] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert all(place["logprob"] < 0 for place in read)


def test_who_waits_for_a_server_of_vllm_finds_this_one(post: Callable[..., Any]) -> None:
    assert post("/health") == {"ready": True}
    assert post("/v1/models")["data"][0]["id"] == "espalier"


def test_a_plain_chat_tells_log_probabilities(client: openai.OpenAI) -> None:
    asked = {"model": "espalier@plain", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    (choice,) = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices
    assert len(choice.logprobs.content) <= 8
    for token in choice.logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    said = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert said.decode(errors="replace") == choice.message.content


def test_the_last_message_of_its_hub_is_continued_up_to_its_stop_text(post: Callable[..., Any]) -> None:
    """What its_hub sends to a backend while it steps a beam itself: no search, whatever the model's name."""
    body = sent_by("its_hub_backend_chat")
    answer = post(CHAT, body)
    assert answer["espalier"]["algorithm"] == "plain"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["usage"]["completion_tokens"] <= 128
    rendered = post("/tokenize", {k: body[k] for k in ("messages", "add_generation_prompt", "continue_final_message")})
    assert answer["usage"]["prompt_tokens"] == rendered["count"]
    text = post("/detokenize", {"tokens": rendered["tokens"]})["prompt"]
    assert text.endswith("First, write 3 + 4.")


def test_lm_evals_chat_is_taken_with_a_search_and_without(post: Callable[..., Any]) -> None:
    for strategy in ("majority-2", "plain"):
        body = {**sent_by("lm_eval_chat_gsm8k"), "model": f"espalier@{strategy}", "max_tokens": 24}
        (choice,) = post(CHAT, body)["choices"]
        assert isinstance(choice["message"]["content"], str)
        assert not any(stop in choice["message"]["content"] for stop in body["stop"])


def test_inspects_chat_is_answered_by_its_schema(client: openai.OpenAI) -> None:
    body = {**sent_by("inspect_chat"), "model": "espalier@plain", "stream": True, "max_tokens": 100}
    *chunks, last = client.chat.completions.create(**body)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    if chunks[-1].choices[0].finish_reason == "stop":
        assert json.loads(said).keys() == {"answer"}
    assert last.usage.prompt_tokens
    assert last.choices == []
    assert all(chunk.choices[0].logprobs.content is not None for chunk in chunks if chunk.choices[0].delta.content)


# ---- refusals


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [2**70]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt"),
        (COMPLETIONS, {"n": 0}, "n"),
        (COMPLETIONS, {"n": True}, "n"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": "9"}, "max_tokens"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": "x"}, "logprobs"),
        (COMPLETIONS, {"stop": [3]}, "stop"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop"),
        (COMPLETIONS, {"suffix": "end"}, "suffix"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"max_completion_tokens": 3}, "max_completion_tokens"),
        (COMPLETIONS, {"espalier": {"beam_width": 2}}, "espalier.beam_width"),
        (COMPLETIONS, {"espalier": {"time_limit": 0}}, "espalier.time_limit"),
        (COMPLETIONS, {"espalier": {"priority": "x"}}, "espalier.priority"),
        (COMPLETIONS, {"espalier": {"priority": 7}}, "espalier.priority"),
        (COMPLETIONS, {"model": "espalier@beam"}, "model"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 30}, "top_logprobs"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (CHAT, {"add_generation_prompt": False}, "add_generation_prompt"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_is_refused_by_its_name(
    path: str, wrong: dict[str, Any], param: str, post: Callable[..., Any]
) -> None:
    body = SAMPLED if path == COMPLETIONS else {"model": "espalier@plain", "messages": MESSAGES}
    error = post(path, {**body, **wrong}, 400)["error"]
    assert error["param"] == param


def test_a_prompt_longer_than_the_context_is_refused_by_the_code_that_clients_know(
    post: Callable[..., Any], engine: Orchestrator
) -> None:
    ids = [5] * engine.engine.model("generator").config.max_positions
    error = post(COMPLETIONS, {**SAMPLED, "prompt": ids}, 400)["error"]
    assert error["code"] == "context_length_exceeded"


# ---- leaving


def test_a_client_that_leaves_ends_its_completion(client: openai.OpenAI, engine: Orchestrator) -> None:
    long = {**SAMPLED, "max_tokens": 400, "n": 8, "temperature": 5.0}
    stream = client.completions.create(**long, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: not engine.busy)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(**long, logprobs=5)
    wait_until(lambda: not engine.busy)


def test_a_time_limit_cuts_a_completion_and_is_no_error(client: openai.OpenAI) -> None:
    long = {**SAMPLED, "max_tokens": 400, "n": 4, "temperature": 5.0, "logprobs": 1}
    completion = client.completions.create(**long, extra_body={"espalier": {"time_limit": 0.02}})
    assert completion.espalier["stop_reason"] == "deadline"
    assert len(completion.choices) == 4


# ---- tokens


def test_tokens_are_those_of_the_generator(post: Callable[..., Any]) -> None:
    found = post("/tokenize", {"model": "espalier@beam", "prompt": "The answer<|im_end|>", "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["token_strs"][-1] == "<|im_end|>"
    assert post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "The answer<|im_end|>"}
    assert post("/tokenize", {"prompt": ""})["tokens"] == []
    chat = post("/tokenize", {"messages": MESSAGES})
    assert chat["count"] > post("/tokenize", {"prompt": "What is 3 + 4?"})["count"]
    info = post("/tokenizer_info")
    assert info["eos_token"] in ("<|im_end|>", "<|endoftext|>")
    assert "im_start" in info["chat_template"]
    for wrong in ({}, {"prompt": "a", "messages": MESSAGES}, {"prompt": 3}):
        post("/tokenize", wrong, 400)
    for tokens in ([-1], [2**70], "a", [0.5], None):
        post("/detokenize", {"tokens": tokens}, 400)
    assert post("/detokenize", {"tokens": [2**31 - 1]}) == {"prompt": ""}
    post("/tokenize", {"model": "other", "prompt": "a"}, 404)


def test_the_openapi_document_has_every_route_and_body(post: Callable[..., Any]) -> None:
    document = post("/openapi.json")
    assert document["openapi"].startswith("3.1")
    for path in (COMPLETIONS, CHAT, "/v1/searches", "/tokenize", "/detokenize"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["$ref"].rpartition("/")[2] in document["components"]["schemas"]
    assert {"/v1/models/{model}", "/metrics", "/tokenizer_info"} < document["paths"].keys()
    search = document["components"]["schemas"]["SearchRequest"]["properties"]
    assert search["beam_width"] | {"description": ""} == {
        "type": "integer",
        "minimum": 1,
        "maximum": 256,
        "description": "",
    }


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"espalier": {"text_form": "grammar:start: nothing"}}, "espalier.text_form"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_form_that_cannot_be_used_is_refused_by_its_parameter(path: str, wrong, param, post: Callable[..., Any]):
    body = SAMPLED if path == COMPLETIONS else {"model": "espalier@plain", "messages": MESSAGES}
    assert post(path, {**body, **wrong}, 400)["error"]["param"] == param


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["yes", 'a "no"']}, '(yes|a "no")'),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
        ({"guided_json": '{"enum": ["a", 3]}'}, '("a"|3)'),
        ({"ebnf": 'start: "q"'}, "q"),
    ],
    ids=str,
)
def test_the_parameters_of_other_servers_bind_the_text(asked: dict, form: str, post: Callable[..., Any]):
    (choice,) = post(COMPLETIONS, {**SAMPLED, **asked})["choices"]
    assert re.fullmatch(form, choice["text"])
    assert choice["finish_reason"] == "stop"
