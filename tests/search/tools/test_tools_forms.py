"""Forms of calls: found by their marks, and read alike wherever their text is cut."""

import json
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from call_texts import TEXTS, TOOLS, Written
from llguidance import LLMatcher, LLTokenizer

from espalier.search.thoughts.reading import CALL
from espalier.search.tools.declared import answer_of_calls, read_tools
from espalier.search.tools.forms import FORMS, find_form, no_form
from espalier.search.tools.guiding import calls_grammar
from espalier.search.tools.reading import CallReader

OFFERED = read_tools(TOOLS).tools
BY_FAMILY = {form.family: form for form in FORMS}


def _tokenizer(template: str, tokens: tuple[str, ...] = (), described: dict[str, Any] | None = None) -> Any:
    """A checkpoint as far as forms look at it, whose template lists tools if it has that word."""

    def render(messages: list[Any], **variables: Any) -> str:
        return json.dumps(variables["tools"]) if "tools" in template else ""

    def token_id(text: str) -> int | None:
        return tokens.index(text) if text in tokens else None

    own = {"chat_template_for_tools": template, "response_template": described or {}}
    return SimpleNamespace(**own, render_chat=render, token_id=token_id)


def _read(written: Written, pieces: list[str]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    reader = CallReader(BY_FAMILY[written.family], OFFERED)
    content = "".join(map(reader.feed, pieces)) + reader.end(cut=False)
    return content, [(call.name, json.loads(call.arguments)) for call in reader.calls]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_read_alike_wherever_it_is_cut(name: str):
    written = TEXTS[name]
    right = written.content, list(written.calls)
    text = written.text
    assert _read(written, [text]) == right
    assert _read(written, list(text)) == right
    for cut in range(len(text)):
        assert _read(written, [text[:cut], text[cut:]]) == right, cut


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_of_a_call_is_ever_content(name: str):
    written = TEXTS[name]
    reader = CallReader(BY_FAMILY[written.family], OFFERED)
    said = ""
    for char in written.text:
        said += reader.feed(char)
        assert written.content.startswith(said)


@pytest.mark.parametrize("name", [name for name, written in TEXTS.items() if written.calls])
def test_of_a_call_that_was_cut_nothing_is_told(name: str):
    written = TEXTS[name]
    for cut in range(len(written.text)):
        reader = CallReader(BY_FAMILY[written.family], OFFERED)
        content = reader.feed(written.text[:cut]) + reader.end(cut=True)
        calls = [(call.name, json.loads(call.arguments)) for call in reader.calls]
        assert calls == list(written.calls[: len(calls)])
        if written.content == "" and "Oslo" in written.text:
            assert "Oslo" not in content


@pytest.mark.parametrize("name", TEXTS)
def test_a_family_is_found_by_its_marks_in_the_template_or_among_its_tokens(name: str):
    written = TEXTS[name]
    by_template = find_form(_tokenizer("{{ tools }}" + " ".join(written.marks)))
    assert by_template is BY_FAMILY[written.family]
    assert find_form(_tokenizer("{{ tools }}", written.marks)) is by_template


def test_every_form_has_a_text():
    assert CALL.format("f").startswith(BY_FAMILY["gpt-oss"].mark)
    assert {written.family for written in TEXTS.values()} == BY_FAMILY.keys()


def test_a_checkpoints_own_account_of_its_calls_goes_first():
    def described(**field: Any) -> Any:
        return find_form(_tokenizer("{{ tools }} <arg_key> <tool_call>", (), {"fields": {"tool_calls": field}}))

    assert described(open="<tool_call>", close="</tool_call>", content="json").family.startswith("Qwen2.5")
    own = described(open="<<call", close="call>>", content="json", repeats=True)
    reader = CallReader(own, OFFERED)
    assert reader.feed('So <<call{"name": "now", "arguments": {}}call>>') + reader.end(cut=False) == "So"
    assert [call.name for call in reader.calls] == ["now"]
    by_tokens = described(open_pattern=r"<\w+>", content="json")
    assert by_tokens.family == "GLM 4.5 and later"


def test_a_template_without_tools_and_an_unknown_form_are_told_apart():
    silent, unknown = _tokenizer("<tool_call>"), _tokenizer("{{ tools }} <call>")
    assert find_form(silent) is None
    assert "does not show tools" in no_form(silent)
    assert find_form(unknown) is None
    assert "in a form that is not known" in no_form(unknown)


def _draw(source: str, choose: random.Random, closing: bytes) -> str:
    """A random text of a grammar, by bytes; the ends of JSON and `closing` are likelier than others."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    written = b""
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i // 8] >> i % 8 & 1]
        if any(i > 255 for i in allowed) and choose.random() < 0.5:
            break
        allowed = [i for i in allowed if i < 256]
        if len(allowed) > 100 and choose.random() < 0.1 and matcher.deep_copy().consume_tokens(list(closing)):
            matcher.consume_tokens(list(closing))
            written += closing
            continue
        ends = [i for i in allowed if chr(i) in '"}]>\n'] or [i for i in allowed if i == 10 or 32 <= i < 127] or allowed
        byte = choose.choice(
            ends if choose.random() < 0.8 else [i for i in allowed if i == 10 or 32 <= i < 127] or allowed
        )
        assert matcher.consume_token(byte)
        written += bytes([byte])
        assert len(written) < 4000
    assert matcher.is_accepting()
    return written.decode()


@pytest.mark.parametrize("behind", [False, True], ids=["from the beginning", "behind the mark"])
@pytest.mark.parametrize("family", [form.family for form in FORMS if form.writing])
def test_what_a_grammar_allows_is_read_as_calls(family: str, behind: bool):
    form, choose = BY_FAMILY[family], random.Random(family)
    assert form.writing
    closing = form.writing.parameter[1] if form.writing.parameter else '"'
    start = form.trigger if behind else ""
    for several in (False, True):
        grammar = calls_grammar(form, OFFERED[:1] + OFFERED[2:], several, start)
        for _ in range(4):
            text = start + _draw(grammar.source, choose, closing.encode())
            reader = CallReader(form, OFFERED)
            assert reader.feed(text) + reader.end(cut=False) == "", text
            assert len(reader.calls) == 1 or (several and reader.calls), text
            for call in reader.calls:
                assert call.name in ("get_weather", "now")
                assert isinstance(call.values.get("days", 1), int)
                assert isinstance(call.values.get("city", ""), str)


def test_calls_are_equal_as_values():
    def answer(*texts: str) -> str:
        reader = CallReader(BY_FAMILY["Qwen2.5, Qwen3, Hermes, Granite 4"], OFFERED)
        for text in texts:
            reader.feed(f'<tool_call>{{"name": "get_weather", "arguments": {text}}}</tool_call>')
        return answer_of_calls(reader.calls)

    one = answer('{"city": "Oslo", "days": 3}')
    assert one == answer('{"days": 3.0, "city": "Os\\u006co"}') == answer('{"days":3e0,"city":"Oslo"}')
    different = [
        answer('{"city": "Oslo"}'),
        answer('{"city": "Oslo", "days": 2}'),
        answer('{"city": "Oslo", "days": true}'),
        answer('{"city": "Oslo", "days": 1}'),
        answer('{"city": "oslo", "days": 3}'),
        answer('{"city": "Oslo", "days": "3"}'),
        answer('{"city": "Oslo", "days": 3}', '{"city": "Oslo", "days": 3}'),
    ]
    assert len({one, *different}) == 1 + len(different)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "must be a JSON list"),
        ("{}", "must be a list of tools"),
        ("[1]", "[0] must be an object"),
        ('[{"type": "web_search"}]', "[0].type must be function, is 'web_search'"),
        ('[{"type": "custom", "name": "f"}]', "[0].type must be function"),
        ('[{"function": {"name": "a b"}}]', "[0].name must be 1 to 64 letters"),
        ('[{"name": ""}]', "[0].name must be 1 to 64 letters"),
        ('[{"name": "f", "parameters": []}, {"name": "g", "parameters": [1]}]', "[1].parameters must be a JSON schema"),
        ('[{"name": "f", "parameters": {"type": "string"}}]', "[0].parameters must be a JSON schema of an object"),
        ('[{"name": "f", "parameters": {"properties": [1]}}]', "[0].parameters must have an object of properties"),
        ('[{"name": "f", "parameters": {"required": 5}}]', "[0].parameters must have an object of properties"),
        ('[{"name": "f"}, {"name": "f"}]', "two tools named 'f'"),
        (json.dumps([{"name": f"f{i}"} for i in range(1000)]), "at most 128 tools, are 1000"),
        (json.dumps([{"name": "f", "description": "x" * 300_000}]), "at most 262144 bytes"),
        ("[" * 100_000, "must be a JSON list"),
    ],
)
def test_tools_that_are_none_are_refused(given: str, why: str):
    with pytest.raises(ValueError, match=re.escape(why)):
        read_tools(given)


def test_arguments_of_a_megabyte_are_read_in_linear_time():
    value = 'a " \\ { </tool_call' * 50_000
    text = f"<tool_call>{json.dumps({'name': 'get_weather', 'arguments': {'city': value}})}</tool_call>"
    reader = CallReader(BY_FAMILY["Qwen2.5, Qwen3, Hermes, Granite 4"], OFFERED)
    pieces = [text[start : start + 4096] for start in range(0, len(text), 4096)]
    assert "".join(map(reader.feed, pieces)) + reader.end(cut=False) == ""
    assert [call.values for call in reader.calls] == [{"city": value}]
    unclosed = CallReader(BY_FAMILY["Qwen2.5, Qwen3, Hermes, Granite 4"], OFFERED)
    hostile = "<tool_call>" + '{"<' * 300_000
    assert unclosed.feed(hostile) + unclosed.end(cut=False) == hostile


def test_an_object_with_bare_keys_has_its_required_arguments_and_its_commas():
    properties = {
        "a": {"type": "integer"},
        "city": {"type": "string"},
        "k": {"enum": ["x", "y"]},
        "z": {"type": "null"},
    }
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    tools = read_tools(json.dumps([{"name": "f", "parameters": schema}, {"name": "now"}])).tools
    grammar = calls_grammar(BY_FAMILY["Gemma 4"], tools, False)

    def allows(call: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), grammar.source, log_level=0)
        text = f"<|tool_call>call:{call}<tool_call|>".replace("'", '<|"|>').encode()
        return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()

    for call in ("f{city:'Oslo'}", "f{a:1,city:'O'}", "f{city:'O',k:'x',z:null}", "f{a:1,city:'O',z:null}", "now{}"):
        assert allows(call), call
    for call in ("f{}", "f{a:1}", "f{k:'x'}", "f{city:'O',}", "f{city:'O',k:'w'}", "f{,city:'O'}", 'f{city:"O"}'):
        assert not allows(call), call


def test_a_number_beyond_floats_is_the_largest_one_and_stays_json():
    for family, text in (
        (
            "Qwen2.5, Qwen3, Hermes, Granite 4",
            '<tool_call>{"name": "get_weather", "arguments": {"weight": -1e999}}</tool_call>',
        ),
        ("Gemma 4", "<|tool_call>call:get_weather{weight:-1e999}<tool_call|>"),
        ("MiniMax-M2", '<invoke name="get_weather"><parameter name="weight">-1e999</parameter></invoke>'),
    ):
        reader = CallReader(BY_FAMILY[family], OFFERED)
        reader.feed(text)
        assert [call.arguments for call in reader.calls] == ['{"weight": -1.7976931348623157e+308}']
        assert "Infinity" not in answer_of_calls(reader.calls)
