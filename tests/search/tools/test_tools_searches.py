"""Searches whose answer is a call: votes by value, bound arguments, and draws that tools do not change."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from call_texts import TOOLS
from engine_driver import scripted
from jsonschema import Draft202012Validator
from search_runs import run
from thinkers import Shape, ids_of, write_thinker
from tool_callers import TURNS, tool_caller, write_tool_caller

from espalier.engine.errors import InvalidRequestError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.search.completion import ChatPrompt, CompletionRequest
from espalier.search.conversation import ToolCall
from espalier.search.grading.answers import canonical, exact_match_key
from espalier.search.request import AlgorithmName, SearchRequest, Vote, make_request
from espalier.search.result import Candidate
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.tools.declared import answer_of_calls, read_tools
from espalier.search.tools.forms import FORMS
from espalier.search.tools.guiding import FromMark
from espalier.search.tools.plan import CallPlan
from espalier.search.voting.vote import select

HERMES = next(form for form in FORMS if form.family.startswith("Qwen2.5"))
WEATHER = read_tools(TOOLS)
_CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FEW = json.dumps([{"name": "get_weather", "parameters": _CITY}, {"name": "now"}])
"""Tools that the context of a tiny model has room for."""
PATHS = [
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
    '<tool_call>\n{"arguments": {"days": 3.0, "city": "Os\\u006co"}, "name": "get_weather"}\n</tool_call>',
    'Let me look.\n\n<tool_call>{"name":"get_weather","arguments":{"days":3e0,"city":"Oslo"}}</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3, "rain": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3, "rain": true}}\n</tool_call>',
    "It will be \\boxed{3} days of sun.",
]


def _candidate(number: int, text: str) -> Candidate:
    plan = CallPlan(WEATHER.tools, WEATHER.tools, HERMES, one=False)
    content, calls = plan.split(text)
    return Candidate(number, answer_of_calls(calls) if calls else "3", 0.5, 1, (), 0, calls, content)


def test_calls_vote_together_where_they_are_equal_as_values():
    candidates = [_candidate(number, text) for number, text in enumerate(PATHS)]
    keys = [exact_match_key(candidate.answer) for candidate in candidates]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == 5
    assert [canonical(candidate.answer) for candidate in candidates[:6]] == keys[:6]
    for order in range(8):
        shuffled = random.Random(order).sample(candidates, len(candidates))
        best = select(shuffled, Vote.MAJORITY).best
        assert best is not None
        assert best.answer == candidates[0].answer
    (call,) = candidates[2].calls
    assert (call.name, call.values) == ("get_weather", {"city": "Oslo", "days": 3})
    assert candidates[2].content == "Let me look."


@pytest.mark.parametrize(("one", "other"), [("a b", "a  b"), ("Yes", "YES"), ("a\u2013b", "a-b")])
def test_texts_in_arguments_are_compared_as_they_are(one: str, other: str):
    answers = [answer_of_calls([ToolCall("f", json.dumps({"x": text}))]) for text in (one, other)]
    assert exact_match_key(answers[0]) != exact_match_key(answers[1])
    assert canonical(answers[0]) != canonical(answers[1])


@pytest.fixture
def checkpoint(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Checkpoint:
    return write_tool_caller(tiny_checkpoints["talker"], tmp_path / "caller")


@pytest.mark.parametrize("algorithm", [AlgorithmName.MAJORITY, AlgorithmName.BEAM, AlgorithmName.ADAPTIVE])
def test_the_call_of_a_searchs_answer_comes_back(
    algorithm: AlgorithmName, checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]
):
    orchestrator = make_orchestrator(tool_caller(checkpoint, "I look.\n\n", PATHS[0]), kv_memory_bytes=2**24)
    request = make_request("Weather?", {"algorithm": algorithm, "beam_width": 2, "expansion": 1, "tools": FEW})
    result = run(orchestrator, request).only
    assert result.best is not None
    assert [(call.name, call.values) for call in result.best.calls] == [("get_weather", {"city": "Oslo", "days": 3})]
    assert result.answer == answer_of_calls(result.best.calls)
    assert result.best.content == "I look."
    assert PATHS[0] in result.best.text


def test_a_call_with_a_blank_line_in_a_value_is_read_over_the_steps_that_it_spans(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, make_orchestrator: Callable[..., Orchestrator]
):
    tagged = write_tool_caller(tiny_checkpoints["talker"], tmp_path / "tagged", "<function= <parameter=")
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n\nb\n</parameter>\n</function>\n</tool_call>"
    orchestrator = make_orchestrator(tool_caller(tagged, text), kv_memory_bytes=2**24)
    result = run(orchestrator, make_request("Weather?", {"algorithm": "beam", "beam_width": 1, "tools": FEW})).only
    assert result.best is not None
    assert [call.values for call in result.best.calls] == [{"city": "a\n\nb"}]


@pytest.mark.parametrize("choice", ["auto", "required", "now"])
def test_draws_are_those_without_tools_until_a_call_begins(
    choice: str, checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]
):
    """The template shows the tools in both, so that the prompts are the same."""
    tools = [tool.for_template for tool in read_tools(FEW).tools]
    prompt = ChatPrompt(({"role": "user", "content": "And now?"},), variables={"tools": tools})
    free = CompletionRequest((prompt,), samples=8, seed=5, temperature=1.0, max_tokens=48)
    offered = replace(free, tools=FEW, tool_choice=choice)  # type: ignore[arg-type]
    texts = {}
    for name, request in (("free", free), ("offered", offered)):
        orchestrator = make_orchestrator(tool_caller(checkpoint), None, kv_memory_bytes=2**24)
        result = _finish(orchestrator, request)
        texts[name] = [(each.token_ids, each.calls) for each in result.choices]
    mark = checkpoint_token(checkpoint, "<tool_call>")
    if choice != "auto":
        assert texts["free"] != texts["offered"]
        return
    for (ids, _), (others, _) in zip(texts["free"], texts["offered"], strict=True):
        until = ids.index(mark) + 1 if mark in ids else len(ids)
        assert others[:until] == ids[:until]


def _finish(orchestrator: Orchestrator, request: CompletionRequest) -> Any:
    orchestrator.submit(request, lambda event: None)
    (result,) = [each for _ in iter(lambda: orchestrator.busy, False) for each in orchestrator.step()]
    return result


def checkpoint_token(checkpoint: Checkpoint, text: str) -> int:
    from espalier.engine.models.tokenizer import TextTokenizer

    found = TextTokenizer(checkpoint).token_id(text)
    assert found is not None
    return found


def _schema(choose: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema of small values, which a random model ends soon."""
    kinds = ["integer", "boolean", "enum", "null", "const"] + (["object", "array", "anyOf"] if depth < 2 else [])
    match choose.choice(kinds):
        case "object":
            names = choose.sample("abcde", choose.randint(0, 3))
            properties = {name: _schema(choose, depth + 1) for name in names}
            required = [name for name in names if choose.random() < 0.6]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {"type": "array", "items": _schema(choose, depth + 1), "minItems": 1, "maxItems": 2}
        case "anyOf":
            return {"anyOf": [_schema(choose, depth + 1), _schema(choose, depth + 1)]}
        case "enum":
            return {"enum": choose.sample(["red", "green", 7, None, True], 2)}
        case "const":
            return {"const": choose.choice(["x", 3])}
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": 99}
        case kind:
            return {"type": kind}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("portion", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 32))])
def test_arguments_of_random_schemas_parse_and_fit(
    portion: int, choice: str, checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]
):
    """Of 8 schemas; with the slow portions of 256 for each choice. For auto a bias has the model begin calls."""
    choose = random.Random(portion)
    model = tool_caller(checkpoint)
    orchestrator = make_orchestrator(model, None, kv_memory_bytes=2**25)
    checked = 0
    for _ in range(8):
        names = choose.sample("pqrst", choose.randint(1, 3))
        properties = {name: _schema(choose) for name in names}
        schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        tools = json.dumps([{"name": "f", "parameters": schema}, *([{"name": "now"}] if choose.random() < 0.3 else [])])
        bias = "" if choice == "required" else f"{checkpoint_token(checkpoint, '<tool_call>')}:100"
        request = CompletionRequest(
            (ChatPrompt(({"role": "user", "content": "Go."},)),), samples=4, seed=choose.randrange(99),
            temperature=1.0, max_tokens=300, tools=tools, tool_choice=choice, parallel_tool_calls=False,
            logit_bias=bias,
        )  # type: ignore[arg-type]  # fmt: skip
        result = _finish(orchestrator, request)
        for made in result.choices:
            assert made.finish_reason in ("stop", "length"), made.error
            for call in made.calls:
                assert call.name in ("f", "now")
                if call.name == "f":
                    Draft202012Validator(schema).validate(call.values)
                    checked += 1
            if choice == "required" and made.finish_reason == "stop":
                assert made.calls
                assert made.text == ""
    assert checked >= 8


def test_a_matcher_from_a_mark_on_binds_nothing_before_it(checkpoint: Checkpoint):
    from espalier.engine.models.tokenizer import TextTokenizer

    class Inside:
        error = ""
        ended = False

        def __init__(self) -> None:
            self.taken: list[int] = []

        def allow(self, bits: np.ndarray) -> None:
            bits[:] = 0

        def advance(self, token_id: int) -> None:
            self.taken.append(token_id)
            self.ended = len(self.taken) == 2

        def give_up(self) -> None:
            self.error = "slow"

        def copy(self) -> "Inside":
            return Inside()

    tokenizer = TextTokenizer(checkpoint)
    mark = checkpoint_token(checkpoint, "<tool_call>")
    matcher = FromMark(Inside(), b"<tool_call>", tokenizer)  # type: ignore[arg-type]
    bits = np.empty(-(-tokenizer.vocab_size // 8), dtype=np.uint8)

    def free() -> bool:
        matcher.allow(bits)
        return bool((bits == 255).all())

    for token in tokenizer.encode("Let me call <tool"):
        assert free()
        matcher.advance(token)
    for token in tokenizer.encode("_ca"):
        matcher.advance(token)
    assert free(), "of these tokens none is the rest of the mark and more"
    other = matcher.copy()
    matcher.advance(mark)
    assert not free()
    for token in (1, 2):
        matcher.advance(token)
    assert free(), "behind a call"
    other.allow(bits)
    assert (bits == 255).all(), "a copy goes its own way"
    for token in tokenizer.encode("ll>"):
        other.advance(token)
    other.allow(bits)
    assert not bits.any(), "a mark that is spelled out is one, too"


def test_a_token_with_the_marks_end_and_more_is_not_drawn():
    """What stands behind a mark is bound from its first letter on."""
    tokens = [b"a", b"<tool", b"_call>", b"_call>\n", b"<tool_call>x", b"<tool_call>"]

    class Free:
        error, ended = "", False

    tokenizer = SimpleNamespace(token_bytes=tokens, decode_bytes=lambda ids: b"".join(tokens[i] for i in ids))
    matcher = FromMark(Free(), b"<tool_call>", tokenizer)  # type: ignore[arg-type]

    def allowed() -> list[int]:
        bits = np.empty(1, dtype=np.uint8)
        matcher.allow(bits)
        return [i for i in range(len(tokens)) if bits[0] >> i & 1]

    assert allowed() == [0, 1, 2, 3, 5]
    matcher.advance(1)
    assert allowed() == [0, 1, 2, 5]
    matcher.advance(0)
    assert allowed() == [0, 1, 2, 3, 5]


def test_what_cannot_be_is_refused(checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]):
    orchestrator = make_orchestrator(tool_caller(checkpoint), None, kv_memory_bytes=2**24)

    def refused(**fields: Any) -> str:
        with pytest.raises(InvalidRequestError) as found:
            orchestrator.check(make_request("Weather?", {"algorithm": "greedy", "tools": FEW, **fields}))
        return str(found.value)

    assert "tool_choice: must be auto, none, required, or the name" in refused(tool_choice="rm")
    assert "answer_form: binds boxes" in refused(answer_form="[0-9]+")
    assert "tools: leaves a path no box to probe" in refused(probe_every=8)
    assert "tools: must be a JSON list" in refused(tools="{")
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    heavy = json.dumps([{"name": "f", "parameters": schema}])
    assert "tools: cannot be used" in refused(tools=heavy, tool_choice="required")
    resolved = orchestrator.check(SearchRequest("Weather?", AlgorithmName.GREEDY, tools=heavy))  # type: ignore[arg-type]
    assert any("not bound to their schemas" in warning for warning in resolved.warnings)


def test_python_functions_are_tools():
    def add(a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: One number.
            b: The other one.
        """
        return a + b

    request = make_request("2 + 3?", {"tools": [add, json.loads(TOOLS)[0]]})
    first, second = request.callable_tools
    assert (first.name, first.description) == ("add", "Add two numbers.")
    assert first.parameters["properties"]["a"] == {"type": "integer", "description": "One number."}
    assert second.name == "get_weather"
    with pytest.raises(ValueError, match="is no tool"):
        make_request("2?", {"tools": [lambda x: x]})


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
ANALYSIS = ("<|channel|>analysis<|message|>", "Look at Oslo.", "<|end|>", "<|start|>assistant")
ADDRESSES = {
    "behind the channel": ("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",),
    "before the channel": (" to=functions.get_weather<|channel|>commentary json<|message|>",),
    "in analysis": ("<|channel|>analysis to=functions.get_weather code<|message|>",),
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_channel_that_addresses_a_function_is_a_call(
    address: str,
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    make_orchestrator: Callable[..., Orchestrator],
):
    shape = Shape(HARMONY, True, "<|start|>assistant{# functions. #}")
    checkpoint = write_thinker(tiny_checkpoints["talker"], tmp_path / "harmony", shape, TURNS)
    said = (*ANALYSIS, *ADDRESSES[address], '{"city": "Oslo"}', "<|call|>")

    orchestrator = make_orchestrator(tool_caller(checkpoint, *said), None, kv_memory_bytes=2**24)
    prompt = ChatPrompt(({"role": "user", "content": "Oslo?"},), variables={"tools": json.loads(FEW)})
    (choice,) = _finish(orchestrator, CompletionRequest((prompt,), max_tokens=200, tools=FEW)).choices  # type: ignore[arg-type]
    assert (choice.thought, choice.text, choice.finish_reason) == ("Look at Oslo.", "", "stop")
    assert [(call.name, call.values) for call in choice.calls] == [("get_weather", {"city": "Oslo"})]

    opened = said[1:]  # as the host opens the thought of a search
    orchestrator = make_orchestrator(tool_caller(checkpoint, *opened), None, kv_memory_bytes=2**24)
    best = run(orchestrator, make_request("Oslo?", {"algorithm": "greedy", "tools": FEW})).only.best
    assert best is not None
    assert (best.thought, best.content) == ("Look at Oslo.", "")
    assert [(call.name, call.values) for call in best.calls] == [("get_weather", {"city": "Oslo"})]


@pytest.mark.parametrize("early_stop", ["off", "decided", "frugal"])
def test_a_majority_of_eight_that_spell_a_number_otherwise_is_of_one_answer(
    early_stop: str, checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]
):
    model = tool_caller(checkpoint)
    before = ids_of(model, ['<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3'])
    (point,), (letter,) = ids_of(model, ["."]), ids_of(model, ["e"])
    behind = ids_of(model, ["0}}\n</tool_call>"])
    said = [*before, (point, letter), *behind, *[model.eos_token_ids[0]] * 20]
    orchestrator = make_orchestrator(scripted(model, said * 8), None, kv_memory_bytes=2**24)
    fields = {"algorithm": "majority", "beam_width": 8, "temperature": 1.0, "seed": 3, "early_stop": early_stop}
    numbers = FEW.replace("integer", "number")
    result = run(orchestrator, make_request("Weather?", {**fields, "tools": numbers})).only
    texts = {candidate.text for candidate in result.candidates}
    assert {candidate.answer for candidate in result.candidates} == {result.answer}
    assert result.best is not None
    assert result.best.calls[0].values == {"city": "Oslo", "days": 3}
    if early_stop != "frugal":
        assert len(texts) == 2, "both spellings were drawn"
        assert sum(candidate.multiplicity for candidate in result.candidates) >= 5
