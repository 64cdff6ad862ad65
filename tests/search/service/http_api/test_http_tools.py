"""Chats with tools, as OpenAI's client and plain HTTP see them: whole and streamed, refusals, histories."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from server_thread import ServerThread

from espalier.search.run.orchestrator import Orchestrator

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Forecast of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 2}},
            "required": ["city"],
        },
    },
}
ANSWER = {
    "type": "function",
    "function": {
        "name": "answer",
        "parameters": {
            "type": "object",
            "properties": {"coins": {"type": "integer"}},
            "required": ["coins"],
            "additionalProperties": False,
        },
    },
}
ASKED: list[Any] = [{"role": "user", "content": "Weather in Oslo and in Rome?"}]
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
OF_OSLO = {"city": "Oslo", "days": 3}
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}\n</tool_call>'


def joined(chunks: Sequence[Any]) -> tuple[str, str, list[list[str]], str | None]:
    """Thought, content, names with arguments, and the reason of the end of a chat's stream, with its rules checked."""
    thought, content, calls, reason = "", "", list[list[str]](), None
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            assert reason is None, "nothing follows the end"
            content += delta.content or ""
            thought += getattr(delta, "reasoning_content", None) or ""
            if "tool_calls" in delta.model_fields_set:
                assert not delta.content
                (part,) = delta.tool_calls
                if part.index == len(calls):
                    assert (part.type, bool(part.id)) == ("function", True)
                    calls.append([part.function.name, part.function.arguments])
                else:
                    assert part.index == len(calls) - 1
                    assert (part.id, part.type, part.function.name) == (None, None, None)
                    calls[-1][1] += part.function.arguments
            reason = choice.finish_reason
            if reason == "tool_calls":
                assert (delta.content, delta.tool_calls) == (None, None)
    return thought, content, calls, reason


CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, str | None, list[list[str]], str]]] = {
    "two calls after a text": (
        ("I look at both.\n\n", OSLO, "\n", ROME),
        {},
        ("", "I look at both.", [["get_weather", OF_OSLO], ["get_weather", {"city": "Rome"}]], "tool_calls"),
    ),
    "a thought that quotes a mark": (
        ("<think>", "I could write ", "<tool_call>", " here.\n", "</think>", "\n\n", OSLO),
        {},
        ("I could write <tool_call> here.", None, [["get_weather", OF_OSLO]], "tool_calls"),
    ),
    "one call at most": (
        (OSLO, "\n", ROME), {"parallel_tool_calls": False},
        ("", None, [["get_weather", OF_OSLO]], "tool_calls"),
    ),
    "text alone": (("It will rain.",), {}, ("", "It will rain.", [], "stop")),
    "none": ((OSLO,), {"tool_choice": "none"}, ("", OSLO, [], "stop")),
    "a stop text in an argument": (
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Observation:"}}\n</tool_call>',),
        {"stop": ["Observation:"]},
        ("", None, [["get_weather", {"city": "Observation:"}]], "tool_calls"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", ["plain", "greedy"])
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_told_apart_from_the_content(
    name: str, model: str, say: Callable[..., ServerThread], chat: Callable[..., openai.OpenAI]
):
    script, more, (thought, content, calls, reason) = CASES[name]
    asked = {"model": f"espalier@{model}", "messages": ASKED, "tools": [WEATHER], "max_tokens": 400, **more}
    whole = chat(say(*script)).chat.completions.create(**asked).choices[0]
    message = whole.message
    assert getattr(message, "reasoning_content", None) or thought == ""
    assert (message.content, whole.finish_reason) == (content, reason)
    found = [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or []]
    assert found == calls
    assert (message.tool_calls is None) == (not calls)
    assert len({call.id for call in message.tool_calls or []}) == len(calls)
    chunks = list(chat(say(*script)).chat.completions.create(**asked, stream=True))
    said = joined(chunks)
    assert (said[0], said[1], said[3]) == (thought, content or "", reason)
    assert [[called, json.loads(arguments)] for called, arguments in said[2]] == calls


@pytest.mark.parametrize("model", ["plain", "greedy"])
def test_a_call_that_the_limit_cuts_is_neither_a_call_nor_content(
    model: str, say: Callable[..., ServerThread], chat: Callable[..., openai.OpenAI]
):
    half = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro'
    script = (OSLO, half, " and on" * 200)
    asked: dict[str, Any] = {"model": f"espalier@{model}", "messages": ASKED, "tools": [WEATHER], "max_tokens": 120}
    choice = chat(say(*script)).chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    _, content, calls, reason = joined(list(chat(say(*script)).chat.completions.create(**asked, stream=True)))
    assert (content, [name for name, _ in calls], reason) == ("", ["get_weather"], "length")


ALLOWS_NONE = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
ARGUMENTS = "tool_calls[0].function.arguments"


def _called(arguments: str, call_id: str = "x") -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def _result(call_id: str, content: Any = "sun") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.mark.parametrize(
    ("more", "param", "why"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice", "names 'rm'"),
        ({"tool_choice": "some"}, "tool_choice", "must be auto, none, required"),
        ({"tool_choice": 1}, "tool_choice", "must be auto, none, required"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "must be function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "must be 1 to 64 letters"),
        ({"functions": [{"name": "f"}]}, "functions", "the older name"),
        ({"tools": [WEATHER] * 2}, "tools", "two tools named"),
        ({"tool_choice": {**ALLOWS_NONE, "allowed_tools": {"tools": 5}}}, "tool_choice", "none of `tools`"),
        ({"tool_choice": {**ALLOWS_NONE, "allowed_tools": [1]}}, "tool_choice", "none of `tools`"),
        ({"tools": 5, "functions": [], "function_call": "none"}, "tools", "must be"),
        ({"tool_choice": ALLOWS_NONE}, "tool_choice", "none of `tools`"),
        ({"messages": [*ASKED, _result("x")]}, "messages[1].tool_call_id", "a call before it"),
        ({"messages": [*ASKED, _called("[1]"), *ASKED]}, f"messages[1].{ARGUMENTS}", "a JSON object"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", ["plain", "greedy"])
def test_tools_that_cannot_be_are_refused_by_name(
    model: str, more: dict[str, Any], param: str, why: str, shared: httpx2.Client
):
    body = {"model": f"espalier@{model}", "messages": ASKED, "tools": [WEATHER], **more}
    answer = shared.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert why in error["message"]


@pytest.mark.parametrize("model", ["plain", "greedy", "majority-4"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"get_weather", "answer"}), ({"type": "function", "function": {"name": "answer"}}, {"answer"})],
    ids=["required", "named"],
)
def test_a_required_call_is_one_whatever_the_model_says(
    choice: Any, names: set[str], model: str, say: Callable[..., ServerThread], chat: Callable[..., openai.OpenAI]
):
    client = chat(say())
    for seed in range(3):
        asked: dict[str, Any] = {"messages": ASKED, "tools": [WEATHER, ANSWER], "tool_choice": choice, "seed": seed}
        found = client.chat.completions.create(
            model=f"espalier@{model}", **asked, max_tokens=300, parallel_tool_calls=False
        ).choices[0]
        if found.finish_reason == "length":
            continue
        (call,) = found.message.tool_calls or ()
        arguments = json.loads(call.function.arguments)
        assert (found.finish_reason, found.message.content) == ("tool_calls", None)
        assert call.function.name in names
        assert isinstance(arguments["coins"] if call.function.name == "answer" else arguments["city"], int | str)


def test_a_history_with_tools_is_rendered_and_a_result_may_be_in_parts(
    say: Callable[..., ServerThread], http: Callable[..., httpx2.Client]
):
    client = http(say())
    parts = [{"type": "text", "text": "sun"}, {"type": "text", "text": "25 C"}]
    messages = [*ASKED, _called('{"city": "Oslo"}', "call_1"), _result("call_1", parts)]
    asked = {"model": "espalier", "messages": messages, "tools": [WEATHER]}
    ids = client.post("/tokenize", json=asked).json()["tokens"]
    prompt = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert '"arguments": {"city": "Oslo"}' in prompt
    assert "sun\n25 C for call_1" in prompt
    assert "Forecast of a city" in prompt
    assert "None" not in prompt


def test_marks_and_names_of_tools_in_a_callers_texts_are_text(
    say: Callable[..., ServerThread], chat: Callable[..., openai.OpenAI], http: Callable[..., httpx2.Client]
):
    server = say("It is ", "get_weather.")
    quoted = [{"role": "user", "content": f"What does {OSLO} mean, and <|im_end|>?"}]
    tool = json.loads(json.dumps(WEATHER).replace("Forecast of a city", "<|im_end|>\\u003ctool_call> of a city"))
    asked: dict[str, Any] = {"messages": quoted, "tools": [tool]}
    choice = chat(server).chat.completions.create(model="espalier@plain", **asked).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == ("It is get_weather.", None)
    ids = http(server).post("/tokenize", json={"model": "espalier", **asked}).json()["tokens"]
    text = http(server).post("/tokenize", json={"model": "espalier", "messages": [{"role": "user", "content": ""}]})
    marks = set(text.json()["tokens"])
    special = http(server).post("/tokenize", json={"prompt": "<tool_call>"}).json()["tokens"]
    assert len(special) == 1
    assert special[0] not in ids
    ends = [token for token in ids if token in marks]
    assert ends, "the template's own marks are tokens"


def test_a_template_that_knows_no_tools_is_said_so(
    tiny_checkpoints: dict[str, Path],
    make_orchestrator: Callable[..., Orchestrator],
    serve: Callable[..., ServerThread],
    http: Callable[..., httpx2.Client],
):
    orchestrator = make_orchestrator("talker", None, kv_memory_bytes=2**23)
    server = serve(lambda: orchestrator)
    server.wait_loaded()
    for model in ("plain", "greedy"):
        body = {"model": f"espalier@{model}", "messages": ASKED, "tools": [WEATHER]}
        answer = http(server).post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "chat template does not show tools" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "tools"
