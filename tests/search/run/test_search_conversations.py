"""What chat templates take of conversations, and what is said in another way: the same for searches and plain chats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import edit_json

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, InvalidRequestError
from espalier.engine.models.chat.template import CALLS_AS_TEXT, DROPPED, FOLDED, RenderedChat, render_conversation
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.completion import ChatPrompt, CompletionRequest
from espalier.search.conversation import ChatMessage, ChatRole, split_conversation
from espalier.search.run.generator import Generator, render_turns

Load = Callable[[str | None], TextTokenizer]

PLAIN = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
FRONT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{{ '<' + m.role + '>' + m.content }}"
    "{% endfor %}"
)
NONE = PLAIN.replace("{{ '<'", "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ '<'", 1)
DROPS_ALL = "{% for m in messages if m.role != 'system' %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
DROPS_LATER = (
    "{% for m in messages if loop.first or m.role != 'system' %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
).replace("loop.first", "m == messages[0]")
TRIMS = PLAIN.replace("m.content", "m.content | trim | replace('/think', '')")
IN_FRONT_OF_THE_USER = (
    "{% set ns = namespace(s='') %}{% if messages[0].role == 'system' %}{% set ns.s = messages[0].content + '|' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<' + m.role + '>' + (ns.s if loop.first else '') + m.content }}{% endfor %}"
)


@pytest.fixture
def load(copy_of: Callable[[str], Path]) -> Load:
    def make(template: str | None) -> TextTokenizer:
        folder = copy_of("talker")
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        edit_json(folder / "tokenizer_config.json", {"chat_template": template})
        return TextTokenizer(Checkpoint(folder))

    return make


def said(*turns: str) -> list[ChatMessage]:
    """Messages from their roles' initials and their texts: `s:Be brief.`."""
    roles = {role[0]: role for role in (ChatRole.SYSTEM, ChatRole.USER, ChatRole.ASSISTANT)}
    return [ChatMessage(roles[turn[0]], turn[2:]) for turn in turns]


def searched(tokenizer: TextTokenizer, *turns: str) -> RenderedChat:
    problem, history = split_conversation(said(*turns))
    return render_turns(tokenizer, "", problem, history, {})


MIDDLE = ("s:Brief.", "u:A", "a:B", "s:Coins.", "u:C")
BEHIND = ("s:Brief.", "u:A", "s:Coins.")


@pytest.mark.parametrize(
    ("template", "turns", "text", "warnings"),
    [
        (PLAIN, MIDDLE, "<system>Brief.<user>A<assistant>B<system>Coins.<user>C", ()),
        (PLAIN, BEHIND, "<system>Brief.<user>A<system>Coins.", ()),
        (PLAIN, ("s:Brief.", "s:Coins.", "u:A"), "<system>Brief.<system>Coins.<user>A", ()),
        (TRIMS, ("s: Brief./think ", "u:Brief.", "s:/think"), "<system>Brief.<user>Brief.<system>", ()),
        (FRONT, MIDDLE, "<system>Brief.<user>A<assistant>B<user>Coins.\n\nC", (FOLDED,)),
        (FRONT, BEHIND, "<system>Brief.<user>A\n\nCoins.", (FOLDED,)),
        (FRONT, ("s:Brief.", "s:Coins.", "u:A"), "<system>Brief.\n\nCoins.<user>A", ()),
        (FRONT, ("u:A", "s:Coins.", "a:B", "u:C"), "<user>A\n\nCoins.<assistant>B<user>C", (FOLDED,)),
        (NONE, MIDDLE, "<user>Brief.\n\nA<assistant>B<user>Coins.\n\nC", (FOLDED,)),
        (NONE, ("s:Brief.", "a:Hello.", "u:A"), "<assistant>Hello.<user>Brief.\n\nA", (FOLDED,)),
        (DROPS_ALL, MIDDLE, "<user>Brief.\n\nA<assistant>B<user>Coins.\n\nC", (FOLDED,)),
        (DROPS_ALL, ("s:A", "u:A"), "<user>A\n\nA", (FOLDED,)),
        (DROPS_LATER, MIDDLE, "<system>Brief.<user>A<assistant>B<user>Coins.\n\nC", (FOLDED,)),
        (IN_FRONT_OF_THE_USER, MIDDLE, "<user>Brief.|A<assistant>B<user>Coins.\n\nC", (FOLDED,)),
        (IN_FRONT_OF_THE_USER, ("s:Brief.", "u:A"), "<user>Brief.|A", ()),
        ("{{ messages[-1].role }}", ("s:Brief.", "u:A"), "user", (DROPPED,)),
        (None, MIDDLE, "Brief.\n\nUser: A\n\nAssistant: B\n\nUser: Coins.\n\nC\n\n", (FOLDED,)),
        (None, BEHIND, "Brief.\n\nA\n\nCoins.\n\n", (FOLDED,)),
    ],
)
def test_the_system_is_heard_wherever_it_speaks(template, turns, text: str, warnings, load: Load):
    tokenizer = load(template)
    assert searched(tokenizer, *turns) == RenderedChat(text, warnings)
    if template:
        messages = [{"role": str(turn.role), "content": turn.content} for turn in said(*turns)]
        assert render_conversation(tokenizer.render_chat, messages) == RenderedChat(text, warnings)


def test_what_the_template_has_against_the_turns_themselves_comes_back_in_its_words(load: Load):
    with pytest.raises(CheckpointError, match="roles must alternate"):
        searched(load(IN_FRONT_OF_THE_USER), "s:Brief.", "u:A", "u:B", "s:Coins.")


# ---- turns of tools


CALLS = [{"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"thing": "pen"}'}}]
AGENT: list[dict[str, Any]] = [
    {"role": "user", "content": "A pen, at what price?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "5", "tool_call_id": "c1"},
]
_CALL = "{% for c in m.tool_calls %}{{ '[' + c.function.name + ARGUMENTS + ']' }}{% endfor %}"
AS_OBJECT = PLAIN.replace("{% endfor %}", "{% if m.tool_calls %}" + _CALL + "{% endif %}{% endfor %}").replace(
    "ARGUMENTS", "(c.function.arguments | tojson)"
)
AS_TEXT = AS_OBJECT.replace("(c.function.arguments | tojson)", "c.function.arguments")
NULL_CONTENT = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.content is none %}" + _CALL + "{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
).replace("ARGUMENTS", "c.function.arguments")
NINE = AS_OBJECT.replace(
    "{{ '<'",
    "{% if m.tool_call_id and m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ '<'",
    1,
).replace("ARGUMENTS + ']'", "ARGUMENTS + c.id + ']'")
NO_TOOLS = PLAIN.replace("{{ '<'", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ '<'", 1)
SHOWN = '<user>A pen, at what price?<assistant>[price{"thing": "pen"}]<tool>5'


@pytest.mark.parametrize(
    ("template", "text", "warnings"),
    [
        (AS_OBJECT, SHOWN, ()),
        (AS_TEXT, SHOWN, ()),
        (NULL_CONTENT, SHOWN, ()),
        (NINE, SHOWN, ()),
        (PLAIN, SHOWN.replace("[price{", '{"name": "price", "arguments": {').replace("]", "}"), (CALLS_AS_TEXT,)),
    ],
)
def test_turns_of_tools_are_what_the_template_takes(template: str, text: str, warnings, load: Load):
    tokenizer = load(template)
    assert render_conversation(tokenizer.render_chat, AGENT) == RenderedChat(text, warnings)
    history = [
        ChatMessage(ChatRole.PROBLEM, ""),
        ChatMessage(ChatRole.ASSISTANT, "", more=json.dumps({"tool_calls": CALLS})),
        ChatMessage(ChatRole.TOOL, "5", more='{"tool_call_id": "c1"}'),
    ]
    assert render_turns(tokenizer, "", AGENT[0]["content"], history, {}) == RenderedChat(text, warnings)


@pytest.mark.parametrize("template", [NO_TOOLS, PLAIN.replace("in messages", "in messages if m.role != 'tool'")])
def test_a_template_without_tools_is_an_error_that_says_what_would_do(template: str, load: Load):
    with pytest.raises(CheckpointError, match=r"(no tools|does not show what tools return); write what tools were"):
        render_conversation(load(template).render_chat, AGENT)


def test_a_search_and_a_plain_chat_read_the_same_tokens_and_both_warn(
    make_engine: Callable[..., Engine], copy_of: Callable[[str], Path]
):
    folder = copy_of("talker")
    (folder / "chat_template.jinja").write_text(NO_TOOLS.replace("'tool'", "'tool' or m.role == 'system'"))
    generator = Generator(make_engine(load_generator(Checkpoint(folder), torch.float32, "cpu")), "", {})
    turns = said(*MIDDLE[1:], "s:<|endoftext|>")
    problem, history = split_conversation(turns)
    prompted = generator.prompt(problem, history)
    chat = ChatPrompt(tuple({"role": str(turn.role), "content": turn.content} for turn in turns))
    plain = generator.completion_prompt(chat, CompletionRequest((chat,)))
    assert prompted.token_ids == plain.token_ids
    assert prompted.warnings == plain.warnings == (FOLDED,)
    assert generator.model.eos_token_ids[0] not in plain.token_ids
    assert not generator.prompt("C").warnings
    with pytest.raises(InvalidRequestError, match=r"history: is rejected .* no tools; write"):
        generator.prompt(problem, [*history, ChatMessage(ChatRole.TOOL, "5")])
