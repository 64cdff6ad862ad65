"""What other tools' clients send besides OpenAI's own parameters, read without a server."""

import json
from typing import Any

import pytest

from espalier.engine.errors import InvalidRequestError
from espalier.search.completion import ChatPrompt
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.request import SearchRequest
from espalier.search.service.grpc_api.convert import request_from_wire, request_to_wire
from espalier.search.service.http_api.openai.bodies import read_chat, read_completion
from espalier.search.service.http_api.openai.responses import read_response
from espalier.search.service.model_names import ModelNames

NAMES = ModelNames("pair", 0)
ASKED = {"messages": [{"role": "user", "content": "6*7?"}]}


def read(model: str = "pair@greedy", **body: Any) -> Any:
    call = read_chat({"model": model, **ASKED, **body}, NAMES)
    if call.violations:
        raise InvalidRequestError(call.violations)
    return call


def searched(**body: Any) -> SearchRequest:
    call = read(**body)
    assert isinstance(call.request, SearchRequest)
    return call.request


def prompted(**body: Any) -> ChatPrompt:
    call = read("pair@plain", **body)
    (prompt,) = call.sampled.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refused(**body: Any) -> list[str]:
    with pytest.raises(InvalidRequestError) as caught:
        read(**body)
    return [violation.field for violation in caught.value.violations]


# ---- thinking


@pytest.mark.parametrize(
    ("body", "thinking"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, "64"),
        ({"thinking": {"type": "enabled"}}, "on"),
        ({"thinking": {"type": "disabled"}}, "off"),
        ({"thinking": {"type": "disabled", "budget_tokens": 64}}, "off"),
        ({"thinking": {"type": "adaptive"}}, "auto"),
        ({"thinking": None, "think": None, "reasoning": None, "enable_thinking": None}, "auto"),
        ({"thinking": False}, "off"),
        ({"enable_thinking": True}, "on"),
        ({"enable_thinking": False, "thinking_budget": 64}, "off"),
        ({"enable_thinking": True, "thinking_budget": 64}, "64"),
        ({"thinking_budget": 64, "thinking_token_budget": 32}, "32"),
        ({"thinking_budget": 0}, "off"),
        ({"thinking_budget": -1}, "auto"),
        ({"thinking_budget_tokens": 64}, "64"),
        ({"reasoning_budget": 2**40, "think": True}, "on"),
        ({"think": False}, "off"),
        ({"think": "low"}, "on"),
        ({"think": "none"}, "off"),
        ({"reasoning": {"effort": "none", "summary": "auto"}}, "off"),
        ({"reasoning": {"effort": "high"}}, "auto"),
        ({"reasoning": {"enabled": True, "max_tokens": 64}}, "64"),
        ({"reasoning": {"enabled": False}}, "off"),
        ({"reasoning": {"max_tokens": 64, "exclude": True}}, "64"),
        ({"reasoning": {}}, "auto"),
        ({"reasoning_effort": "minimal"}, "auto"),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 64}}, "64"),
        ({"chat_template_kwargs": {"enable_thinking": None, "reasoning_effort": "none"}}, "off"),
        ({"include_reasoning": False}, "auto"),
        ({"espalier": {"thinking": "1000"}, "think": False}, "1000"),
    ],
)
def test_every_spelling_of_thinking_is_a_searchs_own(body: dict[str, Any], thinking: str):
    assert searched(**body).thinking == thinking
    response = read_response({"model": "pair@greedy", "input": "6*7?", **body}, NAMES)
    assert not response.chat.violations
    assert response.chat.request.thinking == thinking


@pytest.mark.parametrize(
    ("body", "places"),
    [
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, {"thinking.type"}),
        ({"think": True, "reasoning_effort": "none"}, {"think"}),
        ({"reasoning": {"enabled": True, "effort": "none"}}, {"reasoning.effort"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, {"thinking.budget_tokens"}),
        ({"chat_template_kwargs": {"enable_thinking": True}, "think": False}, {"think"}),
        ({"include_reasoning": False, "reasoning": {"exclude": False}}, {"reasoning.exclude"}),
        ({"thinking": {"type": "on"}}, {"thinking.type"}),
        ({"thinking": {"budget_tokens": "many"}}, {"thinking.budget_tokens"}),
        ({"thinking": {"depth": 3}}, {"thinking.depth"}),
        ({"thinking": "yes"}, {"thinking"}),
        ({"thinking_budget": -2, "thinking_token_budget": True}, {"thinking_budget", "thinking_token_budget"}),
        ({"think": "a bit", "include_reasoning": 0, "reasoning": 3}, {"think", "include_reasoning", "reasoning"}),
        ({"reasoning_format": "raw"}, {"reasoning_format"}),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, {"chat_template_kwargs.enable_thinking"}),
    ],
)
def test_spellings_that_contradict_one_another_or_say_nothing_are_refused_by_name(body, places: set[str]):
    assert set(refused(**body)) == places


def test_a_plain_chat_is_switched_by_the_same_spellings_and_keeps_no_budget():
    off = {"enable_thinking": False, "thinking": False}
    for body in ({"thinking": {"type": "disabled"}}, {"think": False}, {"reasoning": {"enabled": False}}):
        assert prompted(**body).variables == off
    assert prompted(reasoning_effort="none").variables == off | {"reasoning_effort": "none"}
    assert prompted(reasoning={"effort": "low"}).variables == {"reasoning_effort": "low"}
    assert prompted(enable_thinking=True).variables == {"enable_thinking": True, "thinking": True}
    assert prompted(chat_template_kwargs={"enable_thinking": "yes", "x": 1}).variables == {
        "enable_thinking": "yes",
        "x": 1,
    }
    assert prompted(thinking={"type": "disabled", "budget_tokens": 9}).variables == off
    assert refused(model="pair@plain", thinking={"type": "enabled", "budget_tokens": 9}) == ["thinking.budget_tokens"]


def test_thoughts_can_be_left_out():
    for body in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}, {"reasoning_format": "hidden"}):
        assert not read(**body).thoughts
        assert not read("pair@plain", **body).thoughts
    assert read(include_reasoning=True).thoughts


# ---- seeds


@pytest.mark.parametrize("model", ["pair", "pair@plain"])
def test_a_seed_of_minus_one_is_drawn_as_if_there_were_none(model: str):
    seeds = [read(model, seed=-1).request.seed for _ in range(2)]
    assert seeds[0] != seeds[1]
    assert min(seeds) >= 0
    assert read_completion({"model": "pair", "prompt": "6*7", "seed": -1}, NAMES).sampled.seed > 0
    response = read_response({"model": model, "input": "6*7?", "seed": -1}, NAMES)
    assert response.chat.request.seed > 0
    assert not response.chat.violations
    assert read(model, seed=0).request.seed == 0


def test_other_negative_seeds_are_refused():
    assert refused(seed=-2) == ["seed"]
    plain = read_completion({"model": "pair", "prompt": "6*7", "seed": -2}, NAMES).sampled
    with pytest.raises(InvalidRequestError, match="seed"):
        plain.validate()


# ---- blanks in JSON


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
TABS = {"x-guidance": {"whitespace_pattern": "\t"}}


@pytest.mark.parametrize(
    ("body", "schema"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, SCHEMA | COMPACT),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False, "whitespace_pattern": None}}, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": "\t"}}, SCHEMA | TABS),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, {"type": "object"} | COMPACT),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "\t"}, SCHEMA | TABS),
        ({"guided_json": "true", "guided_whitespace_pattern": "\t"}, TABS),
        (
            {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar:no-fallback,disable-any-whitespace"},
            SCHEMA | COMPACT,
        ),
        ({**FORMAT, "structured_outputs": {"disable_any_whitespace": True}}, SCHEMA | COMPACT),
        ({**FORMAT, "structured_outputs": {"whitespace_pattern": "\t"}}, SCHEMA | TABS),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        (
            {"structured_outputs": {"json": {"items": [SCHEMA]}, "disable_additional_properties": True}},
            {"items": [{**SCHEMA, "additionalProperties": False}]},
        ),
    ],
    ids=str,
)
def test_options_of_json_are_part_of_the_form(body: dict[str, Any], schema: dict[str, Any]):
    request = read_completion({"model": "pair", "prompt": "6*7", **body}, NAMES).sampled
    request.validate()
    for form in (searched(**body).text_form, read("pair@plain", **body).sampled.text_form, request.text_form):
        assert json.loads(form.removeprefix("json:")) == schema


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"structured_outputs": {"disable_any_whitespace": "yes"}}, "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"whitespace_pattern": 3}}, "structured_outputs.whitespace_pattern"),
        (
            {"guided_whitespace_pattern": " ", "structured_outputs": {"disable_any_whitespace": True}},
            "guided_whitespace_pattern",
        ),
        ({"guided_json": None, "guided_regex": "a+", "guided_whitespace_pattern": " "}, "guided_regex"),
    ],
    ids=str,
)
def test_options_of_json_that_say_nothing_are_refused(body: dict[str, Any], place: str):
    assert refused(**{"guided_json": SCHEMA, **body}) == [place]


# ---- messages of the system, and turns of tools


CALLS = [{"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"thing": "pen"}'}}]
TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]
AGENT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does a pen cost?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
    {"role": "developer", "content": "Answer now."},
]
TURNS = (
    ChatMessage(ChatRole.ASSISTANT, "", more=json.dumps({"tool_calls": CALLS})),
    ChatMessage(ChatRole.TOOL, "5", more='{"tool_call_id": "c1"}'),
    ChatMessage(ChatRole.SYSTEM, "Answer now."),
)


def test_a_search_is_asked_what_the_user_says_last_wherever_the_system_and_tools_speak():
    asked = searched(messages=AGENT)
    first = ChatMessage(ChatRole.SYSTEM, "Be brief.")
    assert (asked.problem, asked.history) == (
        "What does a pen cost?",
        (first, ChatMessage(ChatRole.PROBLEM, ""), *TURNS),
    )
    again = searched(messages=[*AGENT, {"role": "user", "content": "And two?"}])
    assert (again.problem, again.history) == (
        "And two?",
        (first, ChatMessage(ChatRole.USER, "What does a pen cost?"), *TURNS),
    )
    again.validate()
    for last in (AGENT[2], {"role": "assistant", "content": "5"}):
        assert refused(messages=[*AGENT, last]) == ["messages"]
    assert refused(messages=AGENT[:1]) == ["messages"]
    assert request_from_wire(request_to_wire(again))[0].history == again.history


def test_a_plain_chat_has_its_messages_as_they_were_sent():
    prompt = prompted(messages=AGENT, tools=TOOLS, tool_choice="none")
    assert prompt.variables == {"tools": TOOLS}
    assert [*prompt.messages] == [
        *AGENT[:2],
        {**AGENT[2], "content": ""},
        {**AGENT[3], "content": "5"},
        {"role": "system", "content": "Answer now."},
    ]


def test_functions_are_tools_by_their_older_name():
    old = [
        *AGENT[:2],
        {"role": "assistant", "content": None, "function_call": CALLS[0]["function"]},
        {"role": "function", "name": "price", "content": "5"},
    ]
    functions = [tool["function"] for tool in TOOLS]
    prompt = prompted(messages=old, functions=functions, function_call="none")
    assert prompt.variables == {"tools": TOOLS}
    assert [(message["role"], message.get("name")) for message in prompt.messages[2:]] == [
        ("assistant", None),
        ("tool", "price"),
    ]
    assert prompt.messages[2]["tool_calls"] == [{"type": "function", "function": CALLS[0]["function"]}]


@pytest.mark.parametrize("model", ["pair", "pair@plain"])
def test_tools_may_be_listed_where_none_is_called(model: str):
    assert not read(model, tools=TOOLS, tool_choice="none").violations
    assert refused(model=model, functions=[{}], function_call="auto") == ["functions"]
    assert refused(model=model, tools=TOOLS, tool_choice="none", functions=[{}]) == ["functions"]


def test_a_response_has_tools_and_their_turns_as_items():
    body = {
        "model": "pair",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "What does a pen cost?"},
            {"type": "function_call", "call_id": "c1", "name": "price", "arguments": '{"thing": "pen"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "5"},
            {"role": "developer", "content": "Answer now."},
        ],
        "tools": [{"type": "function", "name": "price", "parameters": {"type": "object"}}, {"type": "web_search"}],
        "tool_choice": "none",
    }
    response = read_response(body, NAMES).chat
    assert not response.violations
    assert [turn.role for turn in response.request.history] == ["system", "problem", "assistant", "tool", "system"]
    plain = read_response({**body, "model": "pair@plain"}, NAMES).chat
    (prompt,) = plain.sampled.prompts
    assert prompt.variables == {"tools": TOOLS}
    assert prompt.messages[2]["tool_calls"] == CALLS
    with pytest.raises(InvalidRequestError, match=r"tools: \[1\].type must be function, is 'web_search'"):
        read_response({**body, "tool_choice": "auto"}, NAMES)
