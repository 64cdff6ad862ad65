"""The Responses API with OpenAI's own client: searches on a scripted orchestrator, sampling on a real one."""

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
