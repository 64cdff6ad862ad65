"""The Responses API with OpenAI's own client: searches on a scripted orchestrator, sampling on a real one."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from scripted_orchestrator import STEPS, USAGE

from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.orchestrator import Orchestrator

TEXT = "".join(step.text for step in STEPS)
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 2,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


FUNCTION = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALL_ORDER = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]
TEXT_ORDER = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
THOUGHT_ORDER = [
    "response.output_item.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.output_item.done",
]


def asked(fake: Any) -> SearchRequest:
    return list(fake.requests.values())[-1]


@pytest.fixture
def plain(
    make_orchestrator: Callable[..., Orchestrator], serve: Callable[..., Any], chat: Callable[..., openai.OpenAI]
) -> openai.OpenAI:
    """A client of a server over a tiny model that is named `espalier`."""
    made = make_orchestrator()
    server = serve(lambda: made)
    server.wait_loaded()
    return chat(server)


def test_a_response_is_the_selected_path_with_what_the_search_took(serve, chat):
    response = chat(serve()).responses.create(model="espalier@beam-n2-m2", input="solve")
    assert response.output_text == TEXT
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (USAGE.prompt_tokens, USAGE.generated_tokens)
    assert usage.total_tokens == USAGE.prompt_tokens + USAGE.generated_tokens
    assert response.espalier["answer"] == "42"
    assert response.id == f"resp_{response.espalier['search_id']}"


def test_a_stream_has_the_events_that_clients_follow_in_their_order(serve, chat):
    events = list(chat(serve()).responses.create(model="espalier", input="solve", stream=True))
    assert [event.type for event in events] == ORDER
    assert [event.sequence_number for event in events] == list(range(len(ORDER)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert events[-1].response.output_text == TEXT
    assert events[-1].response.output == [events[-2].item]
    assert events[0].response.status == "in_progress"


def test_the_clients_helper_for_streams_puts_a_response_together(serve, chat):
    with chat(serve()).responses.stream(model="espalier", input="solve") as stream:
        assert stream.get_final_response().output_text == TEXT


def test_parameters_and_messages_reach_the_search(serve, chat, fake):
    response = chat(serve()).responses.create(
        model="espalier@best-of-4",
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "Hello"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "user", "content": "6*7?"},
            {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": "Add."}]},
            {"role": "assistant", "content": "42."},
            {"role": "user", "content": [{"type": "input_text", "text": "solve"}]},
        ],
        max_output_tokens=99,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "none"},
        store=True,
        metadata={"run": "1"},
        extra_body={"seed": 7, "espalier": {"time_limit": 9}},
    )
    request = asked(fake)
    assert (request.algorithm, request.beam_width) == (AlgorithmName.BEST_OF_N, 4)
    assert (request.problem, request.max_tokens, request.temperature, request.top_p) == ("solve", 99, 0.5, 0.9)
    assert (request.seed, request.time_limit, request.thinking) == (7, 9, "off")
    assert request.history == (
        ChatMessage(ChatRole.SYSTEM, "Be brief."),
        ChatMessage(ChatRole.USER, "Hello"),
        ChatMessage(ChatRole.ASSISTANT, "Hi"),
        ChatMessage(ChatRole.USER, "6*7?"),
        ChatMessage(ChatRole.ASSISTANT, "42.", "Add."),
    )
    assert (response.metadata, response.max_output_tokens, response.instructions) == ({"run": "1"}, 99, "Be brief.")
    assert response.store is False


def test_an_answer_of_one_turn_can_be_sent_back_in_the_next(serve, chat, fake):
    client = chat(serve())
    first = client.responses.create(model="espalier", input="solve")
    turns = [{"role": "user", "content": "solve"}, *first.output, {"role": "user", "content": "again"}]
    client.responses.create(model="espalier", input=turns)
    assert [message.content for message in asked(fake).history] == ["solve", TEXT]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "table"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "assistant", "content": "Hi"}]}, "input"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"extra_body": {"espalier": {"beam_width": 0}}}, "espalier.beam_width"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_own_name(wrong, param, serve, chat):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(serve()).responses.create(**{"model": "espalier", "input": "solve", **wrong})
    assert refused.value.param is not None
    assert refused.value.param.startswith(param)


def test_an_unknown_model_is_not_found(serve, chat):
    with pytest.raises(openai.NotFoundError):
        chat(serve()).responses.create(model="gpt", input="solve")


def test_a_search_that_fails_ends_a_stream_by_an_error(serve, chat):
    with pytest.raises(openai.APIError):
        list(chat(serve()).responses.create(model="espalier", input="fail", stream=True))


def test_plain_sampling_streams_the_text_of_the_whole_response(plain: openai.OpenAI):
    call: Any = {"model": "espalier@plain", "input": "What is 2 + 3?", "max_output_tokens": 12, "temperature": 0}
    whole = plain.responses.create(**call)
    events = list(plain.responses.create(**call, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 12
    assert events[-1].type == "response.incomplete"


# ---- functions


@pytest.mark.parametrize("model", ["espalier@plain", "espalier@greedy"])
@pytest.mark.parametrize(
    ("script", "kinds", "order"),
    [
        ((OSLO, "\n", ROME), ["function_call"] * 2, CALL_ORDER * 2),
        (("I look.\n\n", OSLO), ["message", "function_call"], TEXT_ORDER + CALL_ORDER),
        (("<think>", "Hm.", "</think>", OSLO), ["reasoning", "function_call"], THOUGHT_ORDER + CALL_ORDER),
    ],
    ids=["two calls", "text and call", "thought and call"],
)
def test_calls_are_items_that_a_stream_tells_as_the_whole_response_has_them(
    script: tuple[str, ...], kinds: list[str], order: list[str], model: str, say: Any, chat: Any
):
    call: Any = {"model": model, "input": "Weather?", "tools": [FUNCTION], "max_output_tokens": 300}
    whole = chat(say(*script)).responses.create(**call)
    assert [item.type for item in whole.output] == kinds
    calls = [item for item in whole.output if item.type == "function_call"]
    cities = [(item.name, json.loads(item.arguments)["city"], item.status) for item in calls]
    assert cities == [("get_weather", city, "completed") for city in ("Oslo", "Rome")][: len(calls)]
    assert len({item.call_id for item in calls}) == len(calls)
    assert len({item.id for item in whole.output}) == len(kinds)
    assert whole.status == "completed"
    events = list(chat(say(*script)).responses.create(**call, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    told = [event.type for event in events]
    assert [kind for kind, before in zip(told, ["", *told], strict=False) if kind != before or "delta" not in kind] == [
        "response.created", "response.in_progress", *order, "response.completed",
    ]  # fmt: skip
    done = [event.item for event in events if event.type == "response.output_item.done"]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert events[-1].response.output == done
    assert [(item.id, item.type) for item in added] == [(item.id, item.type) for item in done]
    ends = [event for event in events if event.type == "response.function_call_arguments.done"]
    called = [item for item in done if item.type == "function_call"]
    assert [(end.item_id, end.arguments, end.name) for end in ends] == [
        (item.id, item.arguments, item.name) for item in called
    ]
    assert [(item.name, item.arguments) for item in called] == [(item.name, item.arguments) for item in calls]


@pytest.mark.parametrize("model", ["espalier@plain", "espalier@greedy"])
def test_a_call_that_the_limit_cuts_is_left_out_and_the_one_before_it_is_whole(model: str, say: Any, chat: Any):
    half = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro'
    call: Any = {"model": model, "input": "Weather?", "tools": [FUNCTION], "max_output_tokens": 120}
    script = (OSLO, half, " and on" * 200)
    whole = chat(say(*script)).responses.create(**call)
    last = list(chat(say(*script)).responses.create(**call, stream=True))[-1]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        (item,) = response.output
        assert (json.loads(item.arguments), item.status) == ({"city": "Oslo"}, "completed")
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_choice_of_one_function_binds_the_whole_answer(say: Any, chat: Any):
    yes = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    other = {**FUNCTION, "name": "answer", "parameters": {**yes, "additionalProperties": False}}
    call: Any = {"input": "Weather?", "tools": [FUNCTION, other], "parallel_tool_calls": False}
    for choice in (
        {"type": "function", "name": "answer"},
        {"type": "allowed_tools", "mode": "required", "tools": [other]},
    ):
        asked: Any = {**call, "tool_choice": choice, "extra_body": {"seed": 7}}
        response = chat(say(ROME)).responses.create(model="espalier@plain", **asked)
        (item,) = response.output
        assert (item.type, item.name) == ("function_call", "answer")
        assert list(json.loads(item.arguments)) == ["yes"]
        assert (response.status, response.tool_choice.to_dict()) == ("completed", choice)


def test_results_of_functions_are_turns_behind_their_calls(serve: Any, chat: Any, fake: Any):
    calls = [
        {"call_id": name, "name": "get_weather", "arguments": f'{{"city": "{name}"}}'} for name in ("Oslo", "Rome")
    ]
    outputs: list[Any] = ["rain", [{"type": "input_text", "text": "sun"}]]
    results = [{"call_id": call["call_id"], "output": output} for call, output in zip(calls, outputs, strict=True)]
    turns = [
        {"role": "user", "content": "solve"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Both."}]},
        *({"type": "function_call", "id": f"fc_{call['call_id']}", "status": "completed", **call} for call in calls),
        *({"type": "function_call_output", **result} for result in results),
    ]
    chat(serve()).responses.create(model="espalier", input=turns)
    request = asked(fake)
    assert request.problem == "solve"
    called, *told = request.history[-3:]
    assert (called.role, called.content, called.reasoning_content) == (ChatRole.ASSISTANT, "", "Both.")
    assert [call["id"] for call in json.loads(called.more)["tool_calls"]] == ["Oslo", "Rome"]
    assert [(turn.role, turn.content) for turn in told] == [(ChatRole.TOOL, "rain"), (ChatRole.TOOL, "sun")]
    assert [json.loads(turn.more)["tool_call_id"] for turn in told] == ["Oslo", "Rome"]


def test_what_clients_ask_for_besides_that_changes_nothing_is_no_error(serve: Any, chat: Any):
    response = chat(serve()).responses.create(
        model="espalier",
        input="solve",
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "medium", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        store=False,
        prompt_cache_key="k",
        safety_identifier="u",
        top_logprobs=0,
        truncation="disabled",
        extra_body={"prompt_cache_options": {"mode": "auto"}},
    )
    assert response.output_text == TEXT
