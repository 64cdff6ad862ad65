"""Marks of thoughts that no table knows, found by what a chat template does; where nothing is found, a warning."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from search_runs import GREEDY, run
from thinkers import Shape, thinker, write_thinker

from espalier.engine.errors import CheckpointError
from espalier.engine.models.chat.template import ChatTemplate
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.completion import ChatPrompt, CompletionRequest
from espalier.search.rules import ThinkingMode
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.thoughts.marks import ThoughtMarks, find_marks, unknown_thoughts

TURN = "<|im_start|>{{ m.role }}\n{{ %s }}<|im_end|>\n"
GRANITE = (
    "{% if thinking %}<|start_of_role|>system<|end_of_role|>You are a model. Write your thoughts after "
    "'Here is my thought process:' and write your response after 'Here is my response:' for each user query."
    "<|end_of_text|>{% endif %}{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
CHAIN = "m.content.split('{close}')[0].rstrip('\\n').split('{open}')[-1] if 0 else m.content.split('{close}')[-1]"


class Tokenizer:
    """A tokenizer of nothing but a template and added tokens."""

    def __init__(self, template: str | None, *added: str) -> None:
        self.chat_template, self.added_tokens = template, list(added)
        self._template = ChatTemplate(template, "template") if template else None

    def token_id(self, token: str) -> int | None:
        return self.added_tokens.index(token) if token in self.added_tokens else None

    def render_chat(self, messages: list[dict[str, str]], add: bool = True, **variables: object) -> str:
        assert self._template
        return self._template.render(messages, add, {}, **variables)


def tokenizer_of(template: str | None, *added: str) -> TextTokenizer:
    return cast(TextTokenizer, Tokenizer(template, *added))


def ends_with(end: str, content: str = "m.content") -> str:
    turns = "{% for m in messages %}" + TURN % content + "{% endfor %}"
    return turns + "{% if add_generation_prompt %}<|im_start|>assistant\n" + end + "{% endif %}"


def off(thought: str) -> str:
    return "{% if enable_thinking is defined and not enable_thinking %}" + thought + "{% endif %}"


def by(opening: str, closing: str) -> str:
    return CHAIN.format(open=opening, close=closing)


@pytest.mark.parametrize(
    ("template", "added", "opening", "closing"),
    [
        (ends_with("<reason>\n"), (), "<reason>", "</reason>"),
        (ends_with("<muse>\n"), ("<muse>", "</muse>"), "<muse>", "</muse>"),
        (ends_with("[PONDER]"), (), "[PONDER]", "[/PONDER]"),
        (ends_with("◁reflect▷"), (), "◁reflect▷", "◁/reflect▷"),
        (ends_with("<|begin_of_plan|>"), ("<|end_of_plan|>",), "<|begin_of_plan|>", "<|end_of_plan|>"),
        (ends_with("<|START_PLAN|>"), ("<|END_PLAN|>",), "<|START_PLAN|>", "<|END_PLAN|>"),
        (ends_with(off("<muse>\n\n</muse>\n\n")), (), "<muse>", "</muse>"),
        (ends_with("<muse>\n" + off("\n</muse>\n\n")), (), "<muse>", "</muse>"),
        (ends_with(off("<|muse_on|><|muse_off|>")), (), "<|muse_on|>", "<|muse_off|>"),
        (ends_with("", by("<muse>", "</muse>")), (), "<muse>", "</muse>"),
        (ends_with("", by("((", "))")), (), "((", "))"),
        (ends_with("", by("My plan:", "My reply:")), (), "My plan:", "My reply:"),
        (ends_with("", "m.content.split('</muse>') | last"), ("<muse>", "</muse>"), "<muse>", "</muse>"),
        (GRANITE, (), "Here is my thought process:", "Here is my response:"),
        (ends_with(""), ("<|begin_of_thought|>", "<|end_of_thought|>"), "<|begin_of_thought|>", "<|end_of_thought|>"),
        (ends_with(""), ("<seed:think>", "</seed:think>"), "<seed:think>", "</seed:think>"),
        (ends_with("{# <reason> </reason> #}"), (), "<reason>", "</reason>"),
        (ends_with("<muse>\n{# <think> </think> #}"), (), "<muse>", "</muse>"),
        (ends_with("<think>\n"), ("<think>", "</think>"), "<think>", "</think>"),
    ],
)
def test_marks_are_found_by_what_a_template_does(template: str, added: tuple[str, ...], opening: str, closing: str):
    marks = find_marks(tokenizer_of(template, *added))
    assert marks is not None
    assert (marks.opening.text, marks.closing.text) == (opening, closing)


@pytest.mark.parametrize(
    "template",
    [
        None,
        ends_with(""),
        ends_with("", "m.content.split('</tool_call>')[-1]"),
        ends_with("<answer>"),
        "{{ raise_exception('no') }}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>",
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>\n",
        "{% for m in messages %}[{{ 'Q' if m.role == 'user' else 'A' }}] {{ m.content }}[/X] {% endfor %}[A]",
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}</s>"
        "{% endif %}{% endfor %}",
    ],
)
def test_turns_tools_and_answers_are_no_thoughts(template: str | None):
    tokenizer = tokenizer_of(template)
    assert find_marks(tokenizer) is None
    assert unknown_thoughts(tokenizer) == ""


@pytest.mark.parametrize(
    ("template", "sign"),
    [
        (ends_with("{% if enable_thinking %}Think.{% endif %}"), "enable_thinking"),
        (ends_with("{% if thinking %}Think.{% endif %}"), "thinking"),
        (ends_with("", "m.reasoning_content or m.content"), "reasoning_content"),
        (ends_with("{{ reasoning_effort }}"), "reasoning_effort"),
    ],
)
def test_a_template_that_has_a_model_think_by_unknown_marks_is_warned_of(template: str, sign: str):
    tokenizer = tokenizer_of(template)
    assert find_marks(tokenizer) is None
    assert f"reads {sign}," in unknown_thoughts(tokenizer)
    assert "--thought-marks" in unknown_thoughts(tokenizer)


def test_given_marks_may_have_blanks():
    marks = find_marks(tokenizer_of(None), "Here is my thought process: ... Here is my response:")
    assert marks is not None
    assert (marks.opening.text, marks.closing.text) == ("Here is my thought process:", "Here is my response:")
    with pytest.raises(CheckpointError, match=r"or ' \.\.\. ' where they have blanks themselves"):
        find_marks(tokenizer_of(None), "<a> ... <a>")


SAID = ["Try \\boxed{7}.\n", "{close}", "\n\nIt is \\boxed{8}."]
MODELS = {
    "opened by the prompt": (Shape((), False, "<|im_start|>assistant\n<reason>\n"), "", "</reason>"),
    "opened by the prompt, as a token": (
        Shape(("<reason>", "</reason>"), True, "<|im_start|>assistant\n<reason>\n"),
        "",
        "</reason>",
    ),
    "sentences": (
        Shape((), False, f"<|im_start|>assistant\n{{# '{by('My plan:', 'My reply:')}' #}}"),
        "My plan:",
        "My reply:",
    ),
    "another closing mark": (
        Shape((), False, "<|im_start|>assistant\n<think>\n{# </think> <reason> </reason> #}"),
        "",
        "</reason>",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_box_between_such_marks_is_no_answer_in_a_search_or_a_chat(
    name: str, tiny_checkpoints: dict[str, Path], tmp_path: Path, make_orchestrator: Callable[..., Orchestrator]
):
    shape, opening, closing = MODELS[name]
    checkpoint = write_thinker(tiny_checkpoints["talker"], tmp_path / "it", shape)
    script = [opening, *(text.replace("{close}", closing) for text in SAID)]
    expected = "Try \\boxed{7}.", "It is \\boxed{8}."
    for rule in ("paragraph", "tokens:3"):
        request = replace(GREEDY, max_steps=None, max_step_tokens=None, max_tokens=400, step_rule=rule)
        result = run(make_orchestrator(thinker(checkpoint, *script), None), request).only
        assert result.best is not None
        assert (result.best.thought, result.best.content, result.answer) == (*expected, "8")
    orchestrator = make_orchestrator(thinker(checkpoint, *script), None, kv_memory_bytes=2**23)
    orchestrator.submit(CompletionRequest((ChatPrompt(({"role": "user", "content": "6+1?"},)),), max_tokens=200))
    results = [result for _ in iter(lambda: orchestrator.busy, False) for result in orchestrator.step()]
    assert (results[0].choices[0].thought, results[0].choices[0].text) == expected


@pytest.mark.parametrize(("mode", "thinks"), [("auto", False), ("on", True), ("off", False)])
def test_a_model_that_thinks_where_it_is_asked_to_alone_is_expected_to_there(
    mode: str, thinks: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path, make_orchestrator: Callable
):
    checkpoint = write_thinker(tiny_checkpoints["talker"], tmp_path / "it", Shape((), False, ""), GRANITE)
    generator = make_orchestrator(thinker(checkpoint, "5"), None)._generator
    assert isinstance(generator.marks, ThoughtMarks)
    assert generator.prompt("1+1?", (), ThinkingMode(mode)).thinks is thinks
