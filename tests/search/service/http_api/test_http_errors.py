"""Every status that HTTP callers may see, and what they are told with it."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import httpx2
import openai
import pytest
from scripted_orchestrator import SECRET, WHY
from server_thread import PATIENCE, wait_until

from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.answers import answer_of

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "solve"}


def body(text: str = "solve", **more: Any) -> dict[str, Any]:
    return {"model": "espalier", "messages": [{"role": "user", "content": text}], **more}


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error object, which always has the same entries."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


# ---- 400


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "solve"}, "messages"),
        ({"messages": ["solve"]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": "42."}]}, "messages"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [USER, {"role": "assistant", "content": "y"}, {"role": "system", "content": "y"}]}, "messages"),
        ({"messages": [USER] * 300}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 11}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -2}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"n": "1"}, "n"),
        ({"model": "espalier@greedy", "n": 2}, "n"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", None]}, "stop"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty"),
        ({"repeat_penalty": -1}, "repeat_penalty"),
        ({"espalier": {"repetition_penalty": 101}}, "espalier.repetition_penalty"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"extra_body": {"top_k": 3}}, "extra_body"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"model": "espalier@beam", "return_token_ids": True}, "return_token_ids"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"model": "espalier@beam", "continue_final_message": True}, "continue_final_message"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.01}, "presence_penalty"),
        ({"logit_bias": {"50256": -101}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {"hello": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"beam_width": 4}, "beam_width"),
        ({"nonsense": 1}, "nonsense"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"model": "espalier@beam-n0"}, "model"),
        ({"model": "espalier@beam-n256-m64"}, "model"),
        ({"espalier": []}, "espalier"),
        ({"espalier": {"nonsense": 1}}, "espalier.nonsense"),
        ({"espalier": {"beam_width": 0}}, "espalier.beam_width"),
        ({"espalier": {"beam_width": None}}, "espalier.beam_width"),
        ({"espalier": {"algorithm": "beams"}}, "espalier.algorithm"),
        ({"espalier": {"problem": "x"}}, "espalier.problem"),
        ({"espalier": {"history": []}}, "espalier.history"),
        ({"espalier": {"priority": 1}}, "espalier.priority"),
        ({"espalier": {"priority": "high"}}, "espalier.priority"),
        ({"espalier": {"priority": True}}, "espalier.priority"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("streaming", [False, True])
def test_what_cannot_be_honoured_is_refused_by_its_name(
    wrong: dict[str, Any], param: str, streaming: bool, shared: httpx2.Client
):
    raw = json.dumps(body(**{"stream": streaming, **wrong}))  # in ASCII: half a pair of surrogates, too
    response = shared.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1},
        {"n": 2},
        {"stop": None},
        {"stop": "\n"},
        {"stop": ["a", ""]},
        {"reasoning_effort": "high", "verbosity": "low"},
        {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "guided_json": None, "ignore_eos": False},
        {"extra_body": {}},
        {"top_k": 3, "extra_body": {"top_k": 3}},
        {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True},
        {"messages": [{"role": "user", "content": "x", "mood": "good", "cache_control": {"type": "ephemeral"}}]},
        {"messages": [USER, {"role": "assistant", "content": None, "reasoning": "so"}, USER]},
        {"stop": []},
        {"logprobs": False, "top_logprobs": 0},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}},
        {
            "frequency_penalty": 2,
            "presence_penalty": -2,
            "repeat_penalty": 1.1,
            "logit_bias": {"50256": -100, "3": 1.5},
        },
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "none", "parallel_tool_calls": True},
        {"user": "ann", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prediction": None},
        {"safety_identifier": "x", "prompt_cache_key": "y", "prompt_cache_retention": "24h"},
        {"temperature": None, "top_p": None, "seed": None, "max_tokens": None, "max_completion_tokens": None},
        {"stream": None, "stream_options": None, "espalier": None, "audio": None, "reasoning_effort": None},
        {"espalier": {"top_k": None, "priority": 0}},
        {"espalier": {}},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_taken(harmless: dict[str, Any], shared: httpx2.Client):
    response = shared.post(CHAT, json=body(**harmless))
    assert response.status_code == 200, response.text


def test_everything_that_is_wrong_is_told_at_once(shared: httpx2.Client):
    wrong = body(stop=2, temperature=-1, nonsense=0, espalier={"beam_width": 0, "priority": "x"})
    message = error_of(shared.post(CHAT, json=wrong))["message"]
    assert all(name in message for name in ("stop:", "temperature:", "nonsense:", ".beam_width:", ".priority:"))


@pytest.mark.parametrize(
    ("raw", "status", "text"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b"null", 400, "must be a JSON object"),
        (b'"solve"', 400, "must be a JSON object"),
        (b'{"a": NaN}', 400, "NaN is no number"),
        (b'{"a": -Infinity}', 400, "-Infinity is no number"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', 400, "'c' is given twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b'{"a": "\xff"}', 400, "not UTF-8: byte 7"),
        (b"\xef\xbb\xbf{}", 400, "not JSON"),
        ("{}".encode("utf-16"), 400, "not UTF-8"),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", 400, "more than 32 levels"),
        (b"[" * 500_000, 400, "more than 32 levels"),
        (b'{"a":' * 100_000, 400, "more than 32 levels"),
        (b'{"a": "' + b"[" * 1000 + b'"}', 400, "model"),
        (b'{"a": "' + b'\\"[' * 300 + b'"}', 400, "model"),
        (b"{" + b",".join(b'"%d":%d' % (i, i) for i in range(50_000)) + b',"49999":0}', 400, "'49999' is given twice"),
        (b"x" * (2**20 + 1), 413, "larger than 1048576 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_body_that_is_no_good_is_the_callers_error(raw: bytes, status: int, text: str, shared: httpx2.Client):
    response = shared.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert text in error_of(response)["message"]


# ---- 401, 403, 404, 405, 415


def test_without_a_known_token_nobody_gets_in(serve, http, chat, tmp_path):
    (tmp_path / "callers.toml").write_text(f'[ann]\ntoken_sha256 = "{sha256(b"secret").hexdigest()}"\n')
    server = serve(callers=tmp_path / "callers.toml")
    with pytest.raises(openai.AuthenticationError) as caught:
        chat(server, api_key="wrong").chat.completions.create(**body())
    assert caught.value.response.headers["www-authenticate"] == "Bearer"
    assert caught.value.code == "invalid_api_key"
    assert chat(server, api_key="secret").chat.completions.create(**body()).espalier["answer"] == "42"
    client = http(server)
    for path in ("/v1/models", "/v1/models/espalier", "/v1/server", "/metrics", "/nowhere"):
        assert error_of(client.get(path))["code"] == "invalid_api_key", path
    for path in (CHAT, "/v1/searches"):
        assert client.post(path, json=body(user="ann")).status_code == 401, path
    assert [client.get(path).status_code for path in ("/healthz", "/readyz")] == [200, 200]


@pytest.mark.parametrize("path", ["/v1", "/v1/models/", "/v1/searches/", "/v1/embeddings", "/x//", "/%00", "/..%2f"])
def test_an_unknown_path_is_not_found(path: str, shared: httpx2.Client):
    response = shared.get(path)
    assert response.status_code == 404
    error_of(response)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, {"POST"}),
        ("PUT", "/v1/searches", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/v1/models/espalier", {"GET", "HEAD"}),
        ("OPTIONS", CHAT, {"POST"}),
        ("NONSENSE", "/v1/server", {"GET", "HEAD"}),
    ],
)
def test_a_method_that_a_path_does_not_offer_is_told_those_that_it_does(
    method: str, path: str, allowed: set[str], shared: httpx2.Client
):
    response = shared.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed
    error_of(response)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": ""},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
    ids=str,
)
def test_a_body_that_is_not_said_to_be_json_is_refused(headers: dict[str, str], shared: httpx2.Client):
    response = shared.post(CHAT, content=b"{}", headers=headers)
    assert response.status_code == 415
    error_of(response)


# ---- 429


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as executor:
        yield executor


def test_a_full_queue_says_when_to_try_again(serve, chat, fake, pool):
    server = serve(max_searches=1, max_queue=0)
    held = [pool.submit(chat(server).chat.completions.create, **body("hold")) for _ in range(2)]  # share the slot
    for _ in held:
        fake.submitted.get(timeout=PATIENCE)
    with pytest.raises(openai.RateLimitError, match="queue of 0 is full") as caught:
        chat(server).chat.completions.create(**body())
    assert caught.value.response.headers["retry-after"] == "5"
    assert caught.value.code == "rate_limit_exceeded"
    fake.release.set()
    for each in held:
        each.result(PATIENCE)


def test_openais_client_repeats_a_call_that_found_the_queue_full(serve, chat, fake, pool, monkeypatch):
    monkeypatch.setattr("openai._base_client.SyncAPIClient._calculate_retry_timeout", lambda *_, **__: 0.05)
    server = serve(max_searches=1, max_queue=0)
    held = [pool.submit(chat(server).chat.completions.create, **body("hold")) for _ in range(2)]  # share the slot
    for _ in held:
        fake.submitted.get(timeout=PATIENCE)
    again = pool.submit(chat(server, max_retries=100).chat.completions.create, **body())
    fake.release.set()
    assert {each.result(PATIENCE).espalier["answer"] for each in (again, *held)} == {"42"}


def test_a_caller_who_has_taken_what_she_may_is_told_when_there_is_more(serve, chat, tmp_path):
    file = tmp_path / "callers.toml"
    file.write_text(f'[ann]\ntoken_sha256 = "{sha256(b"ann").hexdigest()}"\ntokens_per_minute = 60\n')
    client = chat(serve(callers=file), api_key="ann")
    client.chat.completions.create(**body())
    with pytest.raises(openai.RateLimitError, match="60 tokens a minute") as caught:
        client.chat.completions.create(**body())
    assert 90 <= int(caught.value.response.headers["retry-after"]) <= 97, "155 were taken, one comes back a second"


# ---- 499: nobody is there to be told


def test_a_client_that_is_gone_is_logged_as_such(serve, chat, fake, caplog):
    with caplog.at_level(logging.INFO, "espalier.access"):
        with pytest.raises(openai.APITimeoutError):
            chat(serve(), timeout=0.2).chat.completions.create(**body("hold"))
        fake.cancelled.get(timeout=PATIENCE)
        wait_until(lambda: len(caplog.records) == 1)
    assert "method=POST /v1/chat/completions code=CANCELLED" in caplog.text


# ---- 500


@pytest.mark.parametrize("streaming", [False, True])
def test_an_internal_error_tells_an_id_and_nothing_else(streaming: bool, serve, http):
    client = http(serve())
    for path, asked in ((CHAT, body("bug")), ("/v1/searches", {"problem": "bug"})):
        response = client.post(path, json={**asked, "stream": streaming})
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        assert error_of(response)["message"].startswith("internal error, id=")
        assert SECRET not in response.text
    assert client.post(CHAT, json=body()).status_code == 200


def test_a_search_that_a_model_cannot_compute_tells_why(serve, chat):
    with pytest.raises(openai.InternalServerError, match=WHY):
        chat(serve(), max_retries=5).chat.completions.create(**body("fail"))


def test_a_search_that_fails_in_its_stream_ends_it_with_the_error(serve, chat, http, caplog):
    server = serve()
    stream = chat(server).chat.completions.create(**body("fail", stream=True))
    with pytest.raises(openai.APIError, match=WHY) as caught:
        list(stream)
    assert (caught.value.code, caught.value.type) == ("internal_error", "server_error")
    with caplog.at_level(logging.INFO, "espalier.access"):
        raw = http(server).post(CHAT, json=body("fail", stream=True)).text
        wait_until(lambda: "code=INTERNAL" in caplog.text)
    assert "[DONE]" not in raw
    assert raw.count("event: error\n") == 1


# ---- 503, 504


def ready(client: httpx2.Client) -> tuple[int, int]:
    return client.get("/healthz").status_code, client.get("/readyz").status_code


def test_a_server_that_loads_lives_and_is_not_ready(serve, http, fake):
    go = threading.Event()
    server = serve(lambda: go.wait(PATIENCE) and fake)
    client = http(server)
    assert ready(client) == (200, 503)
    response = client.post(CHAT, json=body())
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert "still loading" in error_of(response)["message"]
    assert client.get("/v1/models").status_code == 200
    assert client.get("/v1/server").status_code == 503
    go.set()
    server.wait_loaded()
    assert ready(client) == (200, 200)


def test_a_server_that_drains_is_not_ready_and_ends_what_runs(serve, http, chat, fake, pool):
    server = serve()
    client = http(server)
    stream = chat(server).chat.completions.create(**body("hold", stream=True))
    next(iter(stream))
    drained = pool.submit(server.call, server.server.drain())
    wait_until(lambda: ready(client) == (200, 503))
    response = client.post(CHAT, json=body())
    assert response.status_code == 503
    assert "shutting down" in error_of(response)["message"]
    fake.release.set()
    assert list(stream)[-1].choices[0].finish_reason == "stop"
    drained.result(PATIENCE)


def test_a_dead_engine_fails_its_searches_and_turns_others_away(serve, http, fake, pool):
    client = http(serve())
    held = pool.submit(client.post, CHAT, json=body("hold"))
    fake.submitted.get(timeout=PATIENCE)
    assert client.post(CHAT, json=body("die")).status_code == 503
    response = held.result(PATIENCE)
    assert "the engine has stopped" in response.text
    assert response.status_code == 503
    assert ready(client) == (200, 503)
    assert SECRET not in response.text


def test_a_stream_says_that_the_engine_has_died(serve, http):
    client = http(serve())
    with client.stream("POST", CHAT, json=body("hold", stream=True)) as response:
        assert client.post(CHAT, json=body("die")).status_code == 503
        response.read()
    assert response.status_code == 200
    assert "the engine has stopped" in response.text
    assert ready(client) == (200, 503)
    assert SECRET not in response.text


def test_a_search_that_does_not_end_at_the_servers_limit_is_a_timeout(serve, http, fake, monkeypatch):
    monkeypatch.setattr("espalier.search.service.session._GRACE", 0.0)
    fake.late = True
    response = http(serve(search_seconds=0.05)).post(CHAT, json=body("hold"))
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    assert "limit of 0.05 s" in error_of(response)["message"]
    fake.cancelled.get(timeout=PATIENCE)


def test_every_code_of_a_failure_has_a_status():
    from espalier.search.service.errors import _CODES
    from espalier.search.service.http_api.answers import _STATUSES

    assert {code for _, code, _ in _CODES} <= set(_STATUSES)
    assert answer_of(RuntimeError(SECRET), Call("GET /", "r")).status_code == 500
