"""Chat templates against transformers' own rendering, and the process that renders them."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from forked_process import is_true_when_forked
from transformers.utils.chat_template_utils import render_jinja_template

from espalier.engine.errors import CheckpointError, TemplateLimitError
from espalier.engine.models.chat import template as template_module
from espalier.engine.models.chat.template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be  brief.\n"},
    {"role": "user", "content": "Größe {{x}} <b> 'q' \\boxed{1}"},
    {"role": "assistant", "content": "日本 2\n\n"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None}
LOOP = "{% for m in messages %}"
TEMPLATES = {
    "generation": LOOP
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}\n{% endfor %}",
    "generation with dashes": LOOP + "\n  {%- generation -%}\n {{ m.content }}\n  {%- endgeneration -%}\n{% endfor %}",
    "names inside generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "break and continue": LOOP + "{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "tojson": "{{ messages | tojson }}",
    "tojson with options": "{{ messages[0] | tojson(indent=2, sort_keys=True) }}{{ 'é' | tojson(ensure_ascii=True) }}"
    "{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "namespace": "{% set n = namespace(last='') %}" + LOOP + "{% set n.last = m.role %}{% endfor %}{{ n.last }}",
    "dict": "{{ dict(a=1, b=2).items() | list }}{{ dict.fromkeys(['a'], 1) }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ pad_token is defined }}"
    "{{ sep_token is defined }}",
    "tools": "{{ tools is none }}{{ documents is none }}{{ tools }}",
    "options": "{{ enable_thinking is defined and not enable_thinking }}{{ reasoning_effort is defined }}",
    "blocks are trimmed": "  {% if true %}  \n  a\n  {% endif %}\n{#- note #}\nb\n",
    "filters": LOOP + "{{ m.content | trim | upper | length }}{{ m.role | title }}{% endfor %}"
    "{{ messages | map('first') | list }}",
    "slices": "{{ messages[1:] | length }}{{ messages[-1].content[:2] }}{{ messages[::-1][0].role }}",
    "macros": "{% macro turn(m, end='') %}[{{ m.role }}]{{ m.content }}{{ end }}{% endmacro %}"
    "{{ turn(messages[0], end='!') }}",
    "string methods": "{{ messages[1].content.split(' ')[0] }}{{ 'a,b'.split(',') | join('-') }}"
    "{{ 'x'.startswith('x') }}",
    "raw": "{% raw %}{{ x }}{% endraw %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("opens", [True, False])
def test_a_template_renders_as_transformers_renders_it(name: str, opens: bool):
    given = {name: token for name, token in SPECIAL.items() if token}
    (expected,), _ = render_jinja_template(
        conversations=[MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=opens,
        enable_thinking=False,
        **given,
    )
    ours = ChatTemplate(TEMPLATES[name], "x").render(
        MESSAGES, opens, SPECIAL | {"sep_token": None}, enable_thinking=False
    )
    assert ours == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('not like this') }}",
        "{% set n = namespace(_x=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ dict.__class__() }}",
        "{{ messages.append(1) }}",
        "{{ undefined_thing.x }}",
        "{{ [] | tojson(default=1) }}",
        "{% include 'x' %}",
    ],
)
def test_what_transformers_refuses_is_refused(source: str):
    with pytest.raises(Exception):  # noqa: B017 - theirs are of many kinds
        render_jinja_template(conversations=[MESSAGES], chat_template=source)
    with pytest.raises(CheckpointError, match=r"some/file: the chat template failed"):
        ChatTemplate(source, "some/file").render(MESSAGES, True, SPECIAL)


def test_a_special_token_that_the_tokenizer_lacks_adds_nothing():
    source = "{{ bos_token + 'a' }}{{ 'b' + bos_token }}{{ bos_token ~ 'c' }}{% if bos_token %}!{% endif %}"
    assert ChatTemplate(source, "x").render([], True, {"bos_token": None}) == "abc"


def rendered(source: str, **variables: Any) -> str:
    return ChatTemplate(source, "x").render([], False, {}, **variables)


@pytest.fixture
def process() -> Iterator[Any]:
    """The process that renders, which has rendered something."""
    rendered("")
    yield template_module._process
    assert rendered("{{ 1 + 1 }}") == "2"  # whatever happened to it, the next prompt is rendered


def test_a_template_that_takes_too_long_is_stopped_and_the_next_one_is_rendered(
    process: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(template_module, "MAX_CPU_SECONDS", 0.1)
    with pytest.raises(TemplateLimitError, match=r"x: .* more than 0\.1 s of computing"):
        rendered("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")


@pytest.mark.parametrize("source", ["{{ 'a' * 10**10 }}", "{{ [0] * 10**10 }}", "{{ 'a'.ljust(10**10) }}"])
def test_a_template_that_takes_too_much_memory_is_stopped(source: str, process: Any):
    with pytest.raises(TemplateLimitError, match=r"x: .* more than 512 MiB of memory"):
        rendered(source)


def test_a_prompt_that_is_too_long_is_refused(process: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_module, "MAX_PROMPT_CHARACTERS", 10)
    assert rendered("{{ 'a' * 10 }}") == "a" * 10
    with pytest.raises(TemplateLimitError, match="more than 10 characters"):
        rendered("{{ 'a' * 11 }}")


def test_a_process_that_was_killed_is_started_again(process: Any):
    first = process._running.pid
    os.kill(first, signal.SIGKILL)
    assert rendered("{{ 2 + 2 }}") == "4"
    assert process._running.pid != first


def test_a_process_that_cannot_be_started_is_an_error_of_ours(process: Any, monkeypatch: pytest.MonkeyPatch):
    process.close()
    with monkeypatch.context() as patch:
        patch.setattr(template_module.sys, "executable", "/nowhere/python")
        with pytest.raises(CheckpointError, match=r"/nowhere/python.* cannot be started"):
            rendered("a")
    with monkeypatch.context() as patch:
        patch.setattr(template_module, "_PROGRAM", template_module._PROGRAM.with_name("nothing.py"))
        with pytest.raises(CheckpointError, match="ends without an answer"):
            rendered("a")


def test_an_interrupt_while_waiting_does_not_mix_up_answers(process: Any, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process, "_read_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rendered("the first")
    assert rendered("the second") == "the second"


def test_many_threads_get_each_their_own_prompt(process: Any):
    together = threading.Barrier(4, timeout=60)

    def ask(number: int) -> bool:
        together.wait()
        return all(rendered("{{ n }}|{{ 'x' * n }}", n=n) == f"{n}|{'x' * n}" for n in range(number, 200 + number))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(4)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_process_renders_by_one_of_its_own(process: Any):
    def renders() -> bool:
        fine = process._running is None and rendered("{{ 3 }}") == "3"
        process.close()
        return fine

    assert is_true_when_forked(renders)
    assert rendered("{{ 4 }}") == "4"


@pytest.mark.parametrize("name", ["self", "special_tokens", "source", "variables", "absent", "now", "__init__", "a b"])
def test_a_variable_of_a_caller_may_have_any_name(name: str):
    assert ChatTemplate("{{ messages | length }}", "x").render([], False, {}, **{name: "x"}) == "0"
