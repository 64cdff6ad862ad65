r"""How checkpoints write calls of tools: one form a family, found from the marks in its chat template and vocabulary.

A call is a mark, the name, the arguments as JSON or between tags, and often a closing mark, as in
`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from espalier.engine.errors import CheckpointError
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.reading import CALL

Content = Literal["json", "tags", "gemma", "python"]
_NAME = r"(?P<name>[\w.-]+)"
_BY_NAME = '{"name": "', '", "arguments": ', "}"


@dataclass(frozen=True, slots=True)
class Writing:
    """The texts around the parts of a message's calls.

    Attributes:
        before: in front of a call's name.
        middle: between its name and its arguments.
        after: behind its arguments.
        first: in front of the first call.
        between: between two calls; None where a message has one call at most.
        last: behind the last call.
        parameter: around each argument, with `{}` for its name; None for arguments that are one JSON object.
    """

    before: str
    middle: str
    after: str
    first: str = ""
    between: str | None = "\n"
    last: str = ""
    parameter: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a family of checkpoints writes calls.

    Attributes:
        family: the name of the checkpoints.
        evidence: texts that the template or the vocabulary has.
        mark: text that begins a call.
        closing: text that ends it; empty where its JSON does.
        content: how the arguments are written; `json` with the name beside them where `head` has none.
        head: regular expression of what stands between the mark and the arguments, with the `name`.
        tag: regular expression of one argument of `tags`, with its `key` and its `value`.
        around: texts before the first call and behind the last one, which are no content.
        bracket: with which its JSON begins.
        at_start: whether the call must be the first thing in the answer, and `mark` is part of its JSON.
        writing: for guided decoding; None where that is not offered.
    """

    family: str
    evidence: tuple[str, ...]
    mark: str
    closing: str
    content: Content = "json"
    head: str = ""
    tag: str = ""
    around: tuple[str, ...] = ()
    bracket: str = "{"
    at_start: bool = False
    writing: Writing | None = None

    @property
    def trigger(self) -> str:
        """The text from which on a message's calls are bound; empty where nothing but a call's JSON tells one."""
        if self.writing is None or self.at_start:
            return ""
        start = self.writing.first + self.writing.before
        return next((text for text in self.around if start.startswith(text)), self.mark)


_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_TOOL_CALL = "<tool_call>", "</tool_call>"
_DEEPSEEK = rf"(?:function{_SEP})?{_NAME}(?:{_SEP}|\s*```json)"

FORMS = (
    CallForm(
        "GLM 4.5 and later", ("<arg_key>", _TOOL_CALL[0]), *_TOOL_CALL, "tags", rf"\s*{_NAME}",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        writing=Writing(
            _TOOL_CALL[0], "\n", _TOOL_CALL[1], parameter=("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
        ),
    ),
    CallForm(
        "Qwen3-Coder, Qwen3.5, Nemotron 3", ("<function=", "<parameter="), *_TOOL_CALL, "tags",
        r"\s*<function=(?P<name>[^>\n]+)>",
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
        writing=Writing(
            "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>",
            parameter=("<parameter={}>\n", "\n</parameter>\n"),
        ),
    ),
    CallForm(
        "MiniMax-M2", ("<minimax:tool_call>",), '<invoke name="', "</invoke>", "tags", r'(?P<name>[^"]+)">',
        r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>',
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        writing=Writing(
            '<invoke name="', '">\n', "</invoke>", "<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>",
            ('<parameter name="{}">', "</parameter>\n"),
        ),
    ),
    CallForm(
        "DeepSeek V3.2 and later", ("｜DSML｜",), '<｜DSML｜invoke name="', "</｜DSML｜invoke>", "tags",
        r'(?P<name>[^"]+)">',
        r'<｜DSML｜parameter name="(?P<key>[^"]+)"(?: string="(?P<string>true|false)")?>'
        r"(?P<value>.*?)</｜DSML｜parameter>",
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ),
    CallForm("Gemma 4", ("<|tool_call>", "call:"), "<|tool_call>", "<tool_call|>", "gemma", rf"\s*call:{_NAME}"),
    CallForm(
        "DeepSeek V3, R1", (_CALL, "```json"), _CALL, _CALL_END, head=_DEEPSEEK, around=_CALLS,
        writing=Writing(f"{_CALL}function{_SEP}", "\n```json\n", f"\n```{_CALL_END}", _CALLS[0], "\n", _CALLS[1]),
    ),
    CallForm(
        "DeepSeek V3.1", (_CALL,), _CALL, _CALL_END, head=_DEEPSEEK, around=_CALLS,
        writing=Writing(_CALL, _SEP, _CALL_END, _CALLS[0], "", _CALLS[1]),
    ),
    CallForm(
        "Kimi-K2", (_SECTION[0],), "<|tool_call_begin|>", "<|tool_call_end|>",
        head=r"\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>", around=_SECTION,
        writing=Writing(
            "<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>",
            _SECTION[0], "", _SECTION[1],
        ),
    ),
    CallForm("gpt-oss", ("<|channel|>", "functions."), CALL.partition("{}")[0], "", head=rf"{_NAME}<\|message\|>"),
    CallForm(
        "Mistral, tokenizers v11 and later", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "",
        head=rf"\s*{_NAME}(?:\[CALL_ID\][\w-]*)?\[ARGS\]",
        writing=Writing("[TOOL_CALLS]", "[ARGS]", "", between=""),
    ),
    CallForm(
        "Mistral, tokenizers v3 to v7", ("[TOOL_CALLS]",), "[TOOL_CALLS]", "", bracket="[",
        writing=Writing(*_BY_NAME, "[TOOL_CALLS][", ", ", "]"),
    ),
    CallForm("LFM2.5", ("<|tool_call_start|>",), "<|tool_call_start|>", "<|tool_call_end|>", "python"),
    CallForm(
        "Phi-4-mini", ("<|tool_call|>", "<|/tool_call|>"), "<|tool_call|>", "<|/tool_call|>", bracket="[{",
        writing=Writing(*_BY_NAME, "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    ),
    CallForm(
        "Granite 3", ("<|tool_call|>",), "<|tool_call|>", "", bracket="[",
        writing=Writing(*_BY_NAME, "<|tool_call|>[", ", ", "]"),
    ),
    CallForm(
        "Phi-4-mini, by functools", ("functools[",), "functools", "", bracket="[",
        writing=Writing(*_BY_NAME, "functools[", ", ", "]"),
    ),
    CallForm(
        "Qwen2.5, Qwen3, Hermes, Granite 4", (_TOOL_CALL[0],), *_TOOL_CALL, bracket="[{",
        writing=Writing('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    ),
    CallForm(
        "Functionary 3.1", ("<function=",), "<function=", "</function>", head=rf"{_NAME}>",
        writing=Writing("<function=", ">", "</function>", between=""),
    ),
    CallForm("Functionary 3.2", (">>>all",), ">>>", "", head=rf"{_NAME}\n", writing=Writing(">>>", "\n", "")),
    CallForm(
        "Llama 3", ("ipython", '"parameters"'), "{", "", around=("<|python_tag|>",), at_start=True,
        writing=Writing('{"name": "', '", "parameters": ', "}", between=None),
    ),
)  # fmt: skip
"""The first whose evidence a checkpoint has is its form."""
_SHOWN = "zq_shown_xkw"


def find_form(tokenizer: TextTokenizer) -> CallForm | None:
    """The form of a checkpoint's calls; None for one whose template knows no tools, or writes calls in another form."""
    template = tokenizer.chat_template_for_tools or ""
    if not shows_tools(tokenizer):
        return None

    def has(text: str) -> bool:
        return text in template or tokenizer.token_id(text) is not None

    return next((form for form in FORMS if all(map(has, form.evidence))), None)


def shows_tools(tokenizer: TextTokenizer) -> bool:
    """Return whether the chat template shows the tools that it is given."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    function = {"name": _SHOWN, "description": "", "parameters": parameters}
    try:
        listed = [{"type": "function", "function": function}]
        shown = tokenizer.render_chat([{"role": "user", "content": "2"}], tools=listed)
    except CheckpointError:
        return False
    return _SHOWN in shown


def no_form(tokenizer: TextTokenizer) -> str:
    """Why calls of a checkpoint that has no form are not read."""
    if not shows_tools(tokenizer):
        return "the generator's chat template does not show tools; take a checkpoint that was taught to call them"
    known = "; ".join(form.family for form in FORMS)
    return f"the generator writes calls in a form that is not known; known are those of {known}"
