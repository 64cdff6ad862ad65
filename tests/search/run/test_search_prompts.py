from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from search_runs import BEAM, GREEDY, MAJORITY, PROBLEM, run
from tiny_models import edit_json

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, InvalidRequestError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.verifier import Verifier
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.run.generator import Generator, render_turns
from espalier.search.run.orchestrator import Orchestrator

REFUSES_SYSTEM = """\
{%- for message in messages %}
    {%- if message.role != 'user' %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}
    {{- '[INST] ' + message.content + ' [/INST]' }}
{%- endfor %}"""
THINKS = """\
{%- for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}"""


@pytest.fixture
def with_template(copy_of: Callable[[str], Path]) -> Callable[[str | None], TextTokenizer]:
    def make(template: str | None) -> TextTokenizer:
        folder = copy_of("talker")
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        begin = {"bos_token": "<|endoftext|>", "add_bos_token": True}
        edit_json(folder / "tokenizer_config.json", {"chat_template": template, **begin})
        return TextTokenizer(Checkpoint(folder))

    return make


def test_a_template_that_takes_no_system_message_gets_it_before_the_problem(with_template):
    assert render_turns(with_template(REFUSES_SYSTEM), "Use steps.", "1+1?").text == "[INST] Use steps.\n\n1+1? [/INST]"
    assert render_turns(with_template(REFUSES_SYSTEM), "", "1+1?").text == "[INST] 1+1? [/INST]"


def test_a_model_that_could_think_aloud_is_told_not_to(with_template):
    assert (
        render_turns(with_template(THINKS), "Use steps.", "1+1?").text == "<system>Use steps.<user>1+1?<think></think>"
    )


def test_without_a_template_the_prompt_is_plain_text_and_a_blank_line(with_template):
    assert render_turns(with_template(None), "Use steps.", "1+1?").text == "<|endoftext|>Use steps.\n\n1+1?\n\n"
    assert render_turns(with_template(None), "", "1+1?").text == "<|endoftext|>1+1?\n\n"


CONVERSATION = (
    ChatMessage(ChatRole.USER, "6*7?"),
    ChatMessage(ChatRole.ASSISTANT, "42."),
)
SYSTEM = ChatMessage(ChatRole.SYSTEM, "Be brief.")
ALTERNATES = """\
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<' + message.role + '>' + message.content }}
{%- endfor %}"""


def test_earlier_turns_come_before_the_problem_and_a_system_message_replaces_the_system_prompt(with_template):
    tokenizer = with_template(THINKS.partition("\n")[0])
    turns = "<user>6*7?<assistant>42.<user>Twice?"
    assert render_turns(tokenizer, "Use steps.", "Twice?", CONVERSATION).text == f"<system>Use steps.{turns}"
    assert render_turns(tokenizer, "Use steps.", "Twice?", (SYSTEM, *CONVERSATION)).text == f"<system>Be brief.{turns}"
    assert render_turns(tokenizer, "Use steps.", "Twice?", (ChatMessage(ChatRole.SYSTEM, ""),)).text == "<user>Twice?"


def test_without_a_system_message_in_the_template_it_goes_before_the_first_thing_the_user_says(with_template):
    greeting = ChatMessage(ChatRole.ASSISTANT, "Hello.")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + THINKS.partition("\n")[0]
    rendered = render_turns(with_template(refuses), "Use steps.", "Twice?", (greeting, *CONVERSATION)).text
    assert rendered == "<assistant>Hello.<user>Use steps.\n\n6*7?<assistant>42.<user>Twice?"


def test_without_a_template_a_conversation_is_plain_text(with_template):
    rendered = render_turns(with_template(None), "Use steps.", "Twice?", (SYSTEM, *CONVERSATION)).text
    assert rendered == "<|endoftext|>Be brief.\n\nUser: 6*7?\n\nAssistant: 42.\n\nUser: Twice?\n\n"


def test_a_conversation_that_the_template_rejects_is_the_callers_error(make_engine, copy_of):
    folder = copy_of("talker")
    (folder / "chat_template.jinja").write_text(ALTERNATES)
    generator = Generator(make_engine(load_generator(Checkpoint(folder), torch.float32, "cpu")), "", {})
    assert generator.prompt_ids("Twice?", CONVERSATION)
    with pytest.raises(InvalidRequestError, match=r"history: is rejected .*: roles must alternate") as caught:
        generator.prompt_ids("Twice?", CONVERSATION[:1])
    assert str(folder) not in str(caught.value)


def test_the_verifier_reads_a_conversation_as_plain_text_and_a_second_turn_finds_the_first_in_the_cache(
    make_orchestrator,
):
    orchestrator = make_orchestrator()
    first = run(orchestrator, BEAM).only
    said = (ChatMessage(ChatRole.USER, PROBLEM), ChatMessage(ChatRole.ASSISTANT, "85."))
    followed = replace(BEAM, problem="And 2 more?", history=said)
    with pytest.MonkeyPatch.context() as patch:
        read: list[str] = []
        begin = Verifier.begin
        patch.setattr(Verifier, "begin", lambda self, search: read.append(search.problem) or begin(self, search))
        second = run(orchestrator, followed).only
        fresh = run(make_orchestrator(), followed).only
    assert set(read) == {f"User: {PROBLEM}\n\nAssistant: 85.\n\nUser: And 2 more?"}
    assert second.usage.prompt_tokens == fresh.usage.prompt_tokens > first.usage.prompt_tokens
    assert fresh.usage.generator_tokens - second.usage.generator_tokens >= first.usage.prompt_tokens // 2
    assert second.configuration.history == said


def test_a_template_that_refuses_the_problem_too_is_an_error(with_template):
    with pytest.raises(CheckpointError, match="never"):
        render_turns(with_template("{{ raise_exception('never') }}"), "Use steps.", "1+1?")


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ({}, (0.8, 0, 1.0, 0.0)),
        ({"temperature": None, "top_k": None, "top_p": None, "min_p": None}, (0.8, 0, 1.0, 0.0)),
        ({"temperature": 0}, (0.0, 0, 1.0, 0.0)),
        ({"temperature": 0.0, "top_k": 20, "top_p": 0.8, "min_p": 0.05}, (0.0, 20, 0.8, 0.05)),
        ({"top_k": -1}, (0.8, 0, 1.0, 0.0)),
        ({"top_p": 0}, (0.8, 0, 1e-9, 0.0)),
        ({"do_sample": False}, (0.8, 0, 1.0, 0.0)),
        ({"do_sample": False, "temperature": 0.6}, (0.6, 0, 1.0, 0.0)),
    ],
)
def test_sampling_defaults_are_what_the_checkpoint_sets_zero_included(
    configured: dict[str, Any], expected: tuple[float, ...], make_engine: Callable[..., Engine]
):
    made = Generator(make_engine("talker"), "", configured).defaults
    assert (made.temperature, made.top_k, made.top_p, made.min_p) == expected


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        ({"temperature": -1}, "temperature in generation_config.json must be a number from 0 to 10, is -1"),
        ({"temperature": "0"}, "temperature .* is '0'"),
        ({"top_p": 1.5}, "top_p .* from 0 to 1, is 1.5"),
        ({"min_p": float("nan")}, "min_p .* is nan"),
        ({"top_k": True}, "top_k .* is True"),
        ({"repetition_penalty": 0}, "repetition_penalty .* from 1e-06 to 100, is 0"),
    ],
)
def test_a_sampling_default_that_means_nothing_is_an_error_by_its_name(
    configured: dict[str, Any], message: str, make_engine: Callable[..., Engine]
):
    with pytest.raises(CheckpointError, match=message):
        Generator(make_engine("talker"), "", configured)


def test_a_checkpoint_that_configures_temperature_zero_samples_greedily(make_engine: Callable[..., Engine]):
    engine = make_engine("talker")
    orchestrator = Orchestrator(engine, Generator(engine, "", {"temperature": 0}), None)
    greedy, *sampled = run(orchestrator, replace(GREEDY, max_steps=5), MAJORITY, replace(MAJORITY, seed=4)).results
    assert {node.text for result in sampled for node in result.nodes} == {node.text for node in greedy.nodes}
