"""`/v1/messages` as Anthropic's clients call it: blocks, events in order, tools, thoughts, errors, counts of tokens."""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from server_thread import ServerThread

TOOL = {
    "name": "get_weather",
    "description": "Forecast",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
HEADERS = {"anthropic-version": "2023-06-01", "x-api-key": "none", "anthropic-beta": "any-2026-01-01"}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Oslo?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "And Rome?"},
        ],
    },
    {"role": "system", "content": "Be short."},
]
ASKED: dict[str, Any] = {
    "model": "espalier@plain",
    "max_tokens": 128_000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=36ee5;"},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
    ],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tools": [TOOL],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "messages": HISTORY,
    "context_management": {"edits": []},
}
CALL = '\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n'
SCRIPT = ("<think>", "Now Rome.\n", "</think>", "\n\nI look.\n\n", "<tool_call>", CALL, "</tool_call>")
BLOCKS = [
    {"type": "thinking", "thinking": "Now Rome.", "signature": "espalier"},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}},
]


def asked(model: str) -> dict[str, Any]:
    """What is asked of a model: searches keep the thought's budget, for which the tiny model has no room."""
    return {**ASKED, "model": model, **({} if model.endswith("plain") else {"thinking": {"type": "enabled"}})}


def _without_id(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name != "id"}


@pytest.mark.parametrize("model", ["espalier@plain", "espalier@greedy"])
def test_a_message_has_its_thought_its_text_and_its_call_as_blocks(
    model: str, say: Callable[..., ServerThread], http: Callable[..., httpx2.Client]
):
    answer = http(say(*SCRIPT)).post("/v1/messages?beta=true", json=asked(model), headers=HEADERS)
    message = answer.json()
    assert answer.status_code == 200, message
    assert [_without_id(block) for block in message["content"]] == BLOCKS
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["usage"]["input_tokens"] > 0
    assert message["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("model", ["espalier@plain", "espalier@greedy"])
def test_a_stream_begins_and_ends_each_block_before_the_next(
    model: str, say: Callable[..., ServerThread], http: Callable[..., httpx2.Client]
):
    body = {**asked(model), "stream": True}
    text = http(say(*SCRIPT)).post("/v1/messages", json=body, headers=HEADERS).text
    assert "[DONE]" not in text
    events = [part.split("\n") for part in text.strip().split("\n\n") if not part.startswith(":")]
    told: list[dict[str, Any]] = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [event["type"] for event in told]
    blocks: list[dict[str, Any]] = []
    order: list[str] = []
    for event in told:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif kind == "delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            kind = delta.pop("type")
            ((name, value),) = delta.items()
            blocks[-1][name] = blocks[-1].get(name, "") + value
        if not order or order[-1] != kind:
            order.append(kind)
    call = blocks[-1]
    call["input"] = json.loads(call.pop("partial_json"))
    assert [_without_id(block) for block in blocks] == BLOCKS
    thought = ["start", "thinking_delta", "signature_delta", "stop"]
    rest = ["start", "text_delta", "stop", "start", "input_json_delta", "stop", "message_delta", "message_stop"]
    assert order == ["message_start", *thought, *rest]
    assert told[0]["message"]["usage"]["input_tokens"] > 0
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] > 0


def test_the_prompt_has_all_that_was_said_and_no_billing_header(
    say: Callable[..., ServerThread], http: Callable[..., httpx2.Client]
):
    client = http(say())
    counted = client.post("/v1/messages/count_tokens", json={k: v for k, v in ASKED.items() if k != "max_tokens"})
    assert counted.status_code == 200, counted.text
    messages = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Oslo?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "toolu_1", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "And Rome?"},
        {"role": "system", "content": "Be short."},
    ]
    same = client.post("/tokenize", json={"model": "espalier", "messages": messages, "tools": [TOOL]}).json()
    assert counted.json() == {"input_tokens": same["count"]}
    prompt = client.post("/detokenize", json={"tokens": same["tokens"]}).json()["prompt"]
    assert prompt.index("rain") < prompt.index("And Rome?")


def test_a_stop_sequence_and_a_limit_are_told_apart(
    say: Callable[..., ServerThread], http: Callable[..., httpx2.Client]
):
    asked = {"model": "espalier@plain", "messages": [{"role": "user", "content": "Go on."}]}
    stopped = http(say("One. Two. Three.")).post(
        "/v1/messages", json={**asked, "max_tokens": 100, "stop_sequences": ["Two"]}
    )
    assert stopped.json()["content"] == [{"type": "text", "text": "One. "}]
    assert (stopped.json()["stop_reason"], stopped.json()["stop_sequence"]) == ("stop_sequence", "Two")
    cut = http(say("One. Two. Three. " * 20)).post("/v1/messages", json={**asked, "max_tokens": 8}).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_thread_is_refused_in_the_words_on_which_clients_send_the_whole(path: str, shared: httpx2.Client):
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        body = {"model": "espalier@plain", "max_tokens": 9, "messages": HISTORY[:1], "thread": thread}
        answer = shared.post(f"{path}?beta=true", json=body, headers=HEADERS)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_what_agents_send_besides_is_answered(say: Callable[..., ServerThread], http: Callable[..., httpx2.Client]):
    client = http(say("Sure."))
    assert client.head("/").status_code == 200, "asked whether the server lives"
    body = {
        **ASKED,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "diagnostics": {"previous_message_id": None},
        "output_config": {"effort": "high"},
        "speed": "fast",
        "cache_control": {"type": "ephemeral"},
        "tools": [{**TOOL, "strict": True, "eager_input_streaming": True, "defer_loading": False}],
    }
    assert client.post("/v1/messages/count_tokens?beta=true", json=body, headers=HEADERS).status_code == 200
    answer = client.post("/v1/messages?beta=true", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    assert [block["text"] for block in answer.json()["content"]] == ["Sure."]


def _said(block: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [block]}


@pytest.mark.parametrize(
    ("more", "status", "kind", "why"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "messages[0]"),
        ({"model": "gpt-9"}, 404, "not_found_error", "gpt-9"),
        ({"tool_choice": {"type": "tool", "name": "rm"}}, 400, "invalid_request_error", "tool_choice: names 'rm'"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error", "must be function"),
        ({"stop_sequences": [1]}, 400, "invalid_request_error", "stop_sequences"),
        ({"messages": [_said({"type": "tool_result", "content": 5})]}, 400, "invalid_request_error", "content[0].type"),
        (
            {"messages": [_said({"type": "tool_result", "content": ["x"]})]},
            400,
            "invalid_request_error",
            "content[0].type",
        ),
        ({"messages": [_said({"type": ["text"]})]}, 400, "invalid_request_error", "content[0].type"),
        ({"system": [{"type": 5}]}, 400, "invalid_request_error", "system[0].type"),
        ({"tool_choice": {"type": ["auto"]}}, 400, "invalid_request_error", "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": {"a": 1}}}, 400, "invalid_request_error", "tool_choice"),
        ({"output_config": {"format": "json"}}, 400, "invalid_request_error", "output_config.format"),
    ],
)
def test_errors_are_anthropics(more: dict[str, Any], status: int, kind: str, why: str, shared: httpx2.Client):
    for stream in (False, True):
        body = {"model": "espalier@plain", "max_tokens": 9, "messages": HISTORY[:1], "tools": [TOOL], "stream": stream}
        answer = shared.post("/v1/messages", json={**body, **more})
        assert answer.status_code == status
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == kind
        assert why in answer.json()["error"]["message"]
