from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import edit_json

from espalier.engine.checkpoint import Checkpoint
from espalier.engine.errors import CheckpointError
from espalier.engine.tokenizer import TextTokenizer
from espalier.search.generator import render_prompt

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
        edit_json(folder / "tokenizer_config.json", {"chat_template": template, "bos_token": "<s>"})
        return TextTokenizer(Checkpoint(folder))

    return make


def test_a_template_that_takes_no_system_message_gets_it_before_the_problem(with_template):
    assert render_prompt(with_template(REFUSES_SYSTEM), "Use steps.", "1+1?") == "[INST] Use steps.\n\n1+1? [/INST]"
    assert render_prompt(with_template(REFUSES_SYSTEM), "", "1+1?") == "[INST] 1+1? [/INST]"


def test_a_model_that_could_think_aloud_is_told_not_to(with_template):
    assert render_prompt(with_template(THINKS), "Use steps.", "1+1?") == "<system>Use steps.<user>1+1?<think></think>"


def test_without_a_template_the_prompt_is_plain_text_and_a_blank_line(with_template):
    assert render_prompt(with_template(None), "Use steps.", "1+1?") == "<s>Use steps.\n\n1+1?\n\n"
    assert render_prompt(with_template(None), "", "1+1?") == "<s>1+1?\n\n"


def test_a_template_that_refuses_the_problem_too_is_an_error(with_template):
    with pytest.raises(CheckpointError, match="never"):
        render_prompt(with_template("{{ raise_exception('never') }}"), "Use steps.", "1+1?")
