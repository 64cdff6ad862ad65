"""Chat completions with OpenAI's own client."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_orchestrator import CANDIDATE, NODES, STEPS, USAGE, ScriptedOrchestrator, result_of
from server_thread import PATIENCE, wait_until

from espalier.search.client import SearchClient, ServiceError
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.request import AlgorithmName, SearchRequest, Vote
from espalier.search.result import Candidate, Finished, NodeRecord, ScoredStep, SearchResult, StopReason
from espalier.search.service.http_api.openai.bodies import read_chat
from espalier.search.service.http_api.openai.completion import Completion
from espalier.search.service.model_names import ModelNames
from espalier.search.service.shown import shown

BODIES = Path(__file__).with_name("bodies")
TEXT = "".join(step.text for step in STEPS)


def user(text: str = "solve") -> list[Any]:
    return [{"role": "user", "content": text}]


def asked(fake: ScriptedOrchestrator) -> SearchRequest:
    """The request of the last search."""
    return list(fake.requests.values())[-1]


class Candidates(ScriptedOrchestrator):
    """Searches that end with two candidates."""

    def _finish(self, search: Any, reason: StopReason) -> SearchResult:
        on_event = search.on_event
        other = Candidate(3, "41", 0.25, 1, (ScoredStep("6*7=41\n\n", 0.25),))

        def with_another(event: Any) -> None:
            if isinstance(event, Finished):
                event = replace(event, result=replace(event.result, candidates=(other, CANDIDATE)))
            on_event(event)

        search.on_event = with_another
        return super()._finish(search, reason)


def pieces(chunks: list[Any], name: str = "content") -> list[str]:
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    return [text for delta in deltas if (text := getattr(delta, name, None))]


# ---- answers


def test_a_completion_is_the_selected_path_with_what_the_search_took(serve, chat):
    completion = chat(serve()).chat.completions.create(model="espalier", messages=user())
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (USAGE.prompt_tokens, USAGE.generated_tokens)
    assert usage.total_tokens == USAGE.prompt_tokens + USAGE.generated_tokens
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert "reasoning_content" not in choice.message.model_dump()
    own = completion.espalier
    assert completion.id == f"chatcmpl-{own['search_id']}"
    assert (own["answer"], own["score"], own["stop_reason"]) == ("42", 0.5, "finished")
    assert own["usage"]["verifier_tokens"] == USAGE.verifier_tokens
    assert "problem" not in own["configuration"]
    assert completion._request_id


def test_a_stream_shows_progress_apart_from_the_answer_and_ends_with_the_usage(serve, chat):
    stream = chat(serve()).chat.completions.create(
        model="espalier@beam-n2-m2", messages=user(), stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(pieces(chunks)) == TEXT
    progress = [chunk.espalier["progress"] for chunk in chunks[1:-1] if getattr(chunk, "espalier", None)]
    assert [line.split(":")[0] for line in progress] == ["Depth 1", "Depth 2"]
    assert pieces(chunks, "reasoning_content") == []
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1].espalier["answer"] == "42"
    assert {chunk.id for chunk in (*chunks, last)} == {f"chatcmpl-{chunks[-1].espalier['search_id']}"}
    assert {chunk.model for chunk in (*chunks, last)} == {"espalier@beam-n2-m2"}
    assert (last.choices, last.usage.completion_tokens) == ([], USAGE.generated_tokens)


def test_a_stream_has_no_usage_unless_it_is_asked_for(serve, chat):
    stream = chat(serve()).chat.completions.create(model="espalier", messages=user(), stream=True)
    assert [chunk for chunk in stream if chunk.usage or not chunk.choices] == []


def test_a_stream_ends_as_servers_of_openai_end_it(serve, http):
    body = {"model": "espalier", "messages": user(), "stream": True}
    lines = http(serve()).post("/v1/chat/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk" for line in lines[:-2])


def test_nothing_that_was_scored_on_the_way_is_ever_content(serve, http, fake):
    """The stream of a search with many changing candidates."""
    client, body = http(serve()), {"model": "espalier", "messages": user("flood"), "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        fake.flood_until(500)
        fake.release.set()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    chunks = list(map(json.loads, events))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert len([chunk for chunk in chunks if "progress" in chunk.get("espalier", {})]) > 1
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT


def test_an_async_client_has_many_completions_at_once(serve):
    server = serve(max_searches=16)

    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE) as client:
            calls = [client.chat.completions.create(model="espalier", messages=user()) for _ in range(16)]
            return [completion.choices[0].message.content for completion in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [TEXT] * 16


def test_a_search_without_an_answer_is_a_completion_with_what_there_is(serve, chat):
    completion = chat(serve()).chat.completions.create(model="espalier", messages=user("nothing"))
    (choice,) = completion.choices
    assert (choice.finish_reason, completion.espalier["answer"]) == ("length", "")
    assert choice.message.content == TEXT


def test_a_time_limit_is_an_outcome_and_not_an_error(serve, chat):
    client = chat(serve())
    completion = client.chat.completions.create(
        model="espalier", messages=user("hold"), extra_body={"espalier": {"time_limit": 0.05}}
    )
    assert completion.choices[0].finish_reason == "length"
    assert completion.espalier["stop_reason"] == "deadline"


# ---- the path that is shown


def outcome(stop_reason: StopReason = StopReason.FINISHED, **changed: Any) -> SearchResult:
    return replace(result_of(SearchRequest("x"), "s", stop_reason), **changed)


def test_the_selected_path_is_whole_even_if_the_search_was_cut():
    path = shown(outcome(StopReason.BUDGET, best=CANDIDATE, candidates=(CANDIDATE,)))
    assert (path.steps, path.finish_reason) == (tuple(s.text for s in STEPS), "stop")


def test_without_an_answer_the_best_complete_path_is_shown():
    worse = replace(CANDIDATE, answer="", score=0.5, steps=STEPS[:1])
    better = replace(CANDIDATE, answer="", score=0.75, node_id=3)
    assert shown(outcome(best=None, candidates=(worse, better))).steps == tuple(s.text for s in STEPS)


def test_without_a_complete_path_the_one_that_came_furthest_is_shown():
    further = NodeRecord(4, 3, (1, 0), "so", 0.9, "budget", 1, 2)
    path = shown(outcome(StopReason.BUDGET, best=None, candidates=(), nodes=(*NODES, further)))
    assert (path.steps, path.finish_reason) == (("6*7=41\n\n", "so"), "length")


def test_a_search_that_never_began_shows_nothing():
    path = shown(outcome(StopReason.DEADLINE, best=None, candidates=(), nodes=()))
    assert (path.steps, path.finish_reason) == ((), "length")


# ---- what is asked


def test_openais_parameters_reach_the_search(serve, chat, fake):
    chat(serve(max_priority=9)).chat.completions.create(
        model="espalier@dvts-n2-m3",
        messages=user(),
        temperature=1,
        top_p=0.5,
        seed=7,
        max_tokens=99,
        max_completion_tokens=500,
        user="somebody",
        metadata={"a": "b"},
        store=True,
        extra_body={"espalier": {"vote": "naive", "beam_width": 5, "top_k": 3, "priority": 9}},
    )
    assert asked(fake) == SearchRequest(
        "solve", AlgorithmName.DVTS, beam_width=5, expansion=3, vote=Vote.NAIVE, temperature=1, top_k=3, top_p=0.5,
        seed=7, max_tokens=99,
    )  # fmt: skip
    assert list(fake.options.values())[-1].priority == 9


def test_the_candidates_of_a_search_are_its_choices_the_selected_one_first(serve, chat):
    two = {"model": "espalier", "messages": user(), "n": 2}
    client = chat(serve(load=lambda: Candidates()))
    completion = client.chat.completions.create(**two)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert [choice.message.content for choice in completion.choices] == [TEXT, "6*7=41\n\n"]
    assert completion.espalier["choices"] == [
        {"answer": "42", "score": 0.5, "multiplicity": 3},
        {"answer": "41", "score": 0.25, "multiplicity": 1},
    ]
    chunks = list(client.chat.completions.create(**two, stream=True))
    for choice in completion.choices:
        deltas = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(filter(None, deltas)) == choice.message.content


def test_a_client_of_its_hub_sets_the_number_of_paths_and_is_told_of_all_candidates(serve, http, fake):
    """its_hub's own service is asked so; its header wins over the body."""
    sent = json.loads((BODIES / "its_hub_front_chat.json").read_text()) | {"model": "espalier@best-of-n"}
    client = http(serve(load=lambda: fake))
    answer = client.post("/v1/chat/completions", json=sent).json()
    assert (asked(fake).algorithm, asked(fake).beam_width, asked(fake).max_tokens) == ("best-of-n", 8, 256)
    assert answer["metadata"] == {
        "algorithm": "best-of-n",
        "all_responses": 3 * [{"role": "assistant", "content": TEXT}],
        "response_counts": {"42": 3},
        "selected_index": 0,
    }
    alone = client.post("/v1/chat/completions", json={**sent, "return_response_only": True})
    assert "metadata" not in alone.json()
    client.post("/v1/chat/completions", json=sent, headers={"X-ITS-Budget": "5"})
    assert asked(fake).beam_width == 5
    for budget in (0, 1001, "8", 300):
        assert client.post("/v1/chat/completions", json={**sent, "budget": budget}).status_code == 400
    for header in ("0", "x", "-1", "99999"):
        refused = client.post("/v1/chat/completions", json=sent, headers={"X-ITS-Budget": header})
        assert refused.status_code == 400


@pytest.mark.parametrize(
    ("stop", "kept", "content"),
    [
        ("answer", False, "6*7=42\n\nThe "),
        (["nowhere", "\n\nThe"], False, "6*7=42"),
        (["answer", "\n\nThe"], True, "6*7=42\n\nThe"),
        ("nowhere", False, TEXT),
        ("6*7", False, ""),
    ],
)
def test_a_stop_text_cuts_what_is_shown_of_a_search(stop, kept: bool, content: str, serve, chat):
    asked = {"model": "espalier", "messages": user(), "stop": stop}
    client = chat(serve())
    more = {"include_stop_str_in_output": kept}
    completion = client.chat.completions.create(**asked, extra_body=more)
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == (content, "stop")
    assert completion.espalier["answer"] == "42"
    chunks = list(client.chat.completions.create(**asked, extra_body=more, stream=True))
    assert "".join(pieces(chunks)) == content


def test_the_smaller_of_both_token_limits_is_an_answers(serve, chat, fake):
    client = chat(serve())
    for limits in ({"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 30, "max_completion_tokens": 9}):
        client.chat.completions.create(model="espalier", messages=user(), **limits)
        assert (asked(fake).max_tokens, asked(fake).generator_budget) == (9, None)


def test_calls_without_a_seed_differ_and_tell_theirs(serve, chat, fake):
    client = chat(serve())
    told = [
        client.chat.completions.create(model="espalier", messages=user()).espalier["configuration"]["seed"]
        for _ in range(2)
    ]
    assert told == [request.seed for request in fake.requests.values()]
    assert told[0] != told[1]


def test_earlier_turns_and_the_system_message_are_the_searchs_history(serve, chat, fake):
    parts = [{"type": "text", "text": "sol"}, {"type": "text", "text": "ve"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Use steps."},
        {"role": "user", "content": "6*7?", "name": "ann"},
        {"role": "assistant", "content": "42.", "reasoning_content": "Depth 1", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "And twice?", "reasoning": "no thought of an assistant"},
        {"role": "assistant", "content": "84.", "reasoning": "Depth 2"},
        {"role": "user", "content": parts},
    ]
    chat(serve()).chat.completions.create(model="espalier", messages=messages)
    assert asked(fake).problem == "sol\nve"
    assert asked(fake).history == (
        ChatMessage(ChatRole.SYSTEM, "Be brief."),
        ChatMessage(ChatRole.SYSTEM, "Use steps."),
        ChatMessage(ChatRole.USER, "6*7?"),
        ChatMessage(ChatRole.ASSISTANT, "42.", "Depth 1"),
        ChatMessage(ChatRole.USER, "And twice?"),
        ChatMessage(ChatRole.ASSISTANT, "84.", "Depth 2"),
    )


def test_an_answer_can_be_sent_back_as_it_came(serve, chat, fake):
    client = chat(serve())
    first = client.chat.completions.create(model="espalier", messages=user()).choices[0].message
    messages = [*user(), first.model_dump(), *user()]
    client.chat.completions.create(model="espalier", messages=messages)
    assert [message.content for message in asked(fake).history] == ["solve", TEXT]


# ---- models


def test_models_are_the_pair_and_some_of_its_searches_and_each_of_them_answers(serve, chat, fake):
    client = chat(serve(model_name="org/pair-1.5B"))
    listed = [model.id for model in client.models.list()]
    assert listed[0] == "org/pair-1.5B"
    assert {"org/pair-1.5B@beam-n4-m4", "org/pair-1.5B@best-of-16", "org/pair-1.5B@auto"} < set(listed)
    for name in listed:
        assert client.models.retrieve(name).id == name
        if name.endswith("@plain"):
            continue
        assert client.chat.completions.create(model=name, messages=user()).model == name
    ran = {(request.algorithm, request.beam_width) for request in fake.requests.values()}
    assert {("best-of-n", 16), ("majority", 16), ("greedy", 4), ("auto", 4)} < ran


@pytest.mark.parametrize(
    ("strategy", "algorithm", "width", "expansion"),
    [
        ("beam", "beam", 4, 4),
        ("beam-n8", "beam", 8, 4),
        ("beam-m2", "beam", 4, 2),
        ("beam-n16-m8", "beam", 16, 8),
        ("best-of-n", "best-of-n", 4, 4),
        ("best-of-n32", "best-of-n", 32, 4),
        ("best-of-n-n32", "best-of-n", 32, 4),
        ("majority-7", "majority", 7, 4),
        ("adaptive-n9-m3", "adaptive", 9, 3),
        *((name.value, name.value, 4, 4) for name in AlgorithmName),
    ],
)
def test_a_models_name_says_the_search(strategy: str, algorithm: str, width: int, expansion: int):
    wanted = {"algorithm": algorithm, "beam_width": width, "expansion": expansion}
    assert {"beam_width": 4, "expansion": 4, **ModelNames("pair", 0).search_fields(f"pair@{strategy}")} == wanted


@pytest.mark.parametrize(
    "model",
    [
        "",
        "other",
        "pair@",
        "pair@beams",
        "pair@beam-4x4",
        "pair@best-of",
        "pair@beam@beam",
        "PAIR",
        "@beam",
        "pair@plain-n2",
    ],
)
def test_an_unknown_model_is_not_found_and_told_what_there_is(model: str, serve, chat):
    client = chat(serve(model_name="pair"))
    with pytest.raises(openai.NotFoundError, match=r"there is pair, and pair@SEARCH.*best-of-n.*auto") as caught:
        client.chat.completions.create(model=model, messages=user())
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    if model:
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(model)


# ---- leaving


def test_a_client_that_stops_reading_a_stream_cancels_its_search(serve, chat, fake):
    server = serve(max_searches=1)
    stream = chat(server).chat.completions.create(model="espalier", messages=user("hold"), stream=True)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    stream.close()
    assert fake.cancelled.get(timeout=PATIENCE) == fake.submitted.get(timeout=PATIENCE)
    wait_until(lambda: server.info().admitted_calls == 0)
    assert fake.running == 0


def test_a_client_whose_timeout_ends_cancels_its_search(serve, chat, fake):
    with pytest.raises(openai.APITimeoutError):
        chat(serve(), timeout=0.2).chat.completions.create(model="espalier", messages=user("hold"))
    fake.cancelled.get(timeout=PATIENCE)


def test_a_cancelled_task_cancels_its_search(serve, fake):
    server = serve()

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            call = client.chat.completions.create(model="espalier", messages=user("hold"))
            task = asyncio.create_task(call)
            search_id = await asyncio.to_thread(fake.submitted.get, timeout=PATIENCE)
            task.cancel()
            await asyncio.wait([task])
            return search_id

    assert asyncio.run(ask()) == fake.cancelled.get(timeout=PATIENCE)


def test_a_client_that_leaves_the_queue_takes_no_slot_with_it(serve, chat, fake):
    server = serve(max_searches=1)
    with ThreadPoolExecutor(2) as pool:  # two connections share the slot
        hold = partial(chat(server).chat.completions.create, model="espalier", messages=user("hold"))
        held = [pool.submit(hold) for _ in range(2)]
        for _ in held:
            fake.submitted.get(timeout=PATIENCE)
        with pytest.raises(openai.APITimeoutError):
            chat(server, timeout=0.2).chat.completions.create(model="espalier", messages=user())
        wait_until(lambda: server.info().waiting_calls == 0)
        fake.release.set()
        for each in held:
            each.result(PATIENCE)
    assert chat(server).chat.completions.create(model="espalier", messages=user()).espalier["answer"] == "42"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_silent_search_is_kept_alive_by_comments_that_clients_ignore(
    streaming: bool, serve, chat, http, fake, monkeypatch
):
    monkeypatch.setattr("espalier.search.service.session.QUIET_SECONDS", 0.05)
    server = serve()
    if streaming:
        stream = chat(server).chat.completions.create(model="espalier", messages=user("hold"), stream=True)
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        fake.release.set()
        assert "".join(pieces(list(stream))) == TEXT
        return
    with http(server).stream("POST", "/v1/searches", json={"problem": "hold"}) as response:
        lines = response.iter_lines()
        assert ": the search goes on" in (next(lines) for _ in range(20))
        fake.release.set()
        assert "event: result" in list(lines)


def test_both_endpoints_are_served_by_one_queue(serve, chat, fake):
    server = serve(max_searches=1, max_queue=0)
    hold = partial(chat(server).chat.completions.create, model="espalier", messages=user("hold"), stream=True)
    streams = [hold() for _ in range(2)]  # two connections share the slot
    for stream in streams:
        next(iter(stream))
    with SearchClient(server.address) as client:
        with pytest.raises(ServiceError, match="busy"):
            client.solve(SearchRequest("solve"), PATIENCE)
        fake.release.set()
        for stream in streams:
            list(stream)
        assert client.solve(SearchRequest("solve"), PATIENCE).answer == "42"


# ---- thoughts


ASKED = {
    "model": "espalier",
    "messages": [{"role": "user", "content": "6*7?"}],
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
}
CALL = read_chat(ASKED, ModelNames("espalier", 0))
THINKER = Completion("s", CALL, 0)
THOUGHTS = (
    ScoredStep("Is it 7?\n\n", 0.1, 10),
    ScoredStep("\\boxed{7}", 0.1, 9, "Considering the limited time"),
    ScoredStep("\n\nIt is ", 0.9),
    ScoredStep("42.", 0.9),
)
THOUGHT, CONTENT = "Is it 7?\n\n\\boxed{7}", "It is 42."


def thoughtful() -> SearchResult:
    best = Candidate(NODES[2].node_id, "42", 0.9, 1, THOUGHTS, thought_tokens=11)
    return outcome(best=best, candidates=(best,))


def test_a_thought_is_reasoning_and_not_content():
    whole = THINKER.whole(thoughtful())
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == (THOUGHT, THOUGHT, CONTENT)
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 11


def test_the_deltas_of_a_thought_and_its_answer_are_the_whole_message():
    deltas = [choice["delta"] for chunk in THINKER.last_chunks(thoughtful()) for choice in chunk["choices"]]
    joined = {name: "".join(delta.get(name, "") for delta in deltas) for name in ("reasoning_content", "content")}
    assert joined == {"reasoning_content": THOUGHT, "content": CONTENT}


def test_a_thought_that_is_not_wanted_is_told_nowhere():
    call = read_chat({**ASKED, "include_reasoning": False, "return_response_only": False}, ModelNames("espalier", 0))
    written = Completion("s", call, 0)
    for told in (written.whole(thoughtful()), *written.last_chunks(thoughtful())):
        assert "Is it 7?" not in json.dumps(told)
    assert written.whole(thoughtful())["usage"]["completion_tokens_details"]["reasoning_tokens"] == 11


def test_every_chunk_tells_the_usage_so_far_where_that_is_asked_for(serve, chat):
    create = chat(serve()).chat.completions.create
    asked = {"model": "espalier@beam-n2-m2", "messages": user(), "stream": True}
    *chunks, last = list(create(**asked, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert chunks[-1].usage == last.usage
    assert all(chunk.usage.total_tokens >= chunk.usage.completion_tokens for chunk in chunks)
    chunks = list(create(**asked, stream_options={"continuous_usage_stats": True}))
    assert all(chunk.choices and chunk.usage for chunk in chunks)
    with pytest.raises(openai.BadRequestError, match=r"stream_options\.usage: is unknown"):
        create(**asked, stream_options={"usage": True})
