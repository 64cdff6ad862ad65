"""Texts with calls of tools as each family of checkpoints writes them, and what is right to read in them."""

import json
from dataclasses import dataclass
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "default": 2},
        "zip": {"type": "string"},
        "weight": {"type": "number"},
        "fragile": {"type": "boolean"},
        "to": {"anyOf": [{"type": "object", "properties": {"name": {"type": "string"}}}, {"type": "null"}]},
    },
}
TOOLS = json.dumps([
    {"type": "function", "function": {"name": "get_weather", "description": "Forecast", "parameters": SCHEMA}},
    {"type": "function", "name": "send", "parameters": SCHEMA},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
])  # fmt: skip
CALLS, CALL = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEP = "<｜tool▁sep｜>"
OSLO, ROME = {"city": "Oslo"}, {"city": "Rome"}


@dataclass(frozen=True)
class Written:
    """A text of a family.

    Attributes:
        family: its name, see `forms.FORMS`.
        marks: what of its template or tokens tells it.
        text: an answer.
        content: what of it is content.
        calls: names and arguments of its calls.
    """

    family: str
    marks: tuple[str, ...]
    text: str
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


def _weather(*arguments: dict[str, Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
    return tuple(("get_weather", each) for each in arguments)


HERMES = "Qwen2.5, Qwen3, Hermes, Granite 4"
TYPED = {"zip": "02134", "weight": 1.5, "days": "two", "fragile": True, "to": {"name": "Ann <b>"}}
TEXTS = {
    "hermes": Written(
        HERMES, ("<tool_call>",),
        'I look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>{"arguments":{"city":"Rome"},"name":"get_weather"}</tool_call>',
        "I look.", _weather(OSLO, ROME),
    ),
    "hermes, a mark in a text": Written(
        HERMES, ("<tool_call>",),
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a </tool_call> \\" {"}}\n</tool_call>',
        "", _weather({"city": 'a </tool_call> " {'}),
    ),
    "hermes, without its end": Written(
        HERMES, ("<tool_call>",), '<tool_call>\n{"name": "now", "arguments": {}}', "", (("now", {}),),
    ),
    "hermes, broken": Written(
        HERMES, ("<tool_call>",), '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}\n</tool_call>', (),
    ),
    "hermes, a text that is open": Written(
        HERMES, ("<tool_call>",), '<tool_call>\n{"name": "now", "arguments": {"a": "\n</tool_call> and on',
        '<tool_call>\n{"name": "now", "arguments": {"a": "\n</tool_call> and on', (),
    ),
    "hermes, another tool": Written(
        HERMES, ("<tool_call>",), 'So <tool_call>{"name": "rm", "arguments": {}}</tool_call> it is.',
        'So <tool_call>{"name": "rm", "arguments": {}}</tool_call> it is.', (),
    ),
    "hermes, arguments as text": Written(
        HERMES, ("<tool_call>",),
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        "", _weather(OSLO),
    ),
    "hermes, the beginning of a mark": Written(HERMES, ("<tool_call>",), "a < b <tool", "a < b <tool", ()),
    "qwen3-coder": Written(
        "Qwen3-Coder, Qwen3.5, Nemotron 3", ("<function=", "<parameter=", "<tool_call>"),
        "<tool_call>\n<function=send>\n<parameter=zip>\n02134\n</parameter>\n<parameter=weight>\n1.5\n</parameter>\n"
        "<parameter=days>\ntwo\n</parameter>\n<parameter=fragile>\ntrue\n</parameter>\n<parameter=to>\n"
        '{"name": "Ann <b>"}\n</parameter>\n<parameter=city>\nring twice\n\n  then wait\n</parameter>\n'
        "</function>\n</tool_call>",
        "", (("send", {**TYPED, "city": "ring twice\n\n  then wait"}),),
    ),
    "qwen3-coder, no arguments": Written(
        "Qwen3-Coder, Qwen3.5, Nemotron 3", ("<function=", "<parameter="),
        "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", (("now", {}),),
    ),
    "glm": Written(
        "GLM 4.5 and later", ("<arg_key>", "<tool_call>"),
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call><tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
        "</tool_call>",
        "", _weather({**OSLO, "days": 3}, ROME),
    ),
    "minimax": Written(
        "MiniMax-M2", ("<minimax:tool_call>",),
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>',
        "", _weather(OSLO, ROME),
    ),
    "deepseek v3": Written(
        "DeepSeek V3, R1", (CALL[0], "```json"),
        f"Hi{CALLS[0]}{CALL[0]}function{SEP}get_weather\n```json\n{json.dumps(OSLO)}\n```{CALL[1]}\n"
        f"{CALL[0]}function{SEP}get_weather\n```json\n{json.dumps(ROME)}\n```{CALL[1]}{CALLS[1]}",
        "Hi", _weather(OSLO, ROME),
    ),
    "deepseek v3.1": Written(
        "DeepSeek V3.1", (CALL[0],), f"{CALLS[0]}{CALL[0]}get_weather{SEP}{json.dumps(OSLO)}{CALL[1]}{CALLS[1]}",
        "", _weather(OSLO),
    ),
    "deepseek v3.2": Written(
        "DeepSeek V3.2 and later", ("｜DSML｜",),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
        'Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "", _weather({**OSLO, "days": 2}),
    ),
    "kimi": Written(
        "Kimi-K2", ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{json.dumps(OSLO)}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>"
        f"{json.dumps(ROME)}<|tool_call_end|><|tool_calls_section_end|>",
        "", _weather(OSLO, ROME),
    ),
    "mistral v13": Written(
        "Mistral, tokenizers v11 and later", ("[TOOL_CALLS]", "[ARGS]"),
        f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(OSLO)}[TOOL_CALLS]get_weather[CALL_ID]abc12DEF9[ARGS]{json.dumps(ROME)}",
        "", _weather(OSLO, ROME),
    ),
    "mistral v3": Written(
        "Mistral, tokenizers v3 to v7", ("[TOOL_CALLS]",),
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {json.dumps(OSLO)}, "id": "a"}}, '
        f'{{"name": "get_weather", "arguments": {json.dumps(ROME)}}}]',
        "", _weather(OSLO, ROME),
    ),
    "gemma 4": Written(
        "Gemma 4", ("<|tool_call>", "call:"),
        'Sure.<|tool_call>call:get_weather{city:<|"|>Os"lo, x:{1}<|"|>,days:2}<tool_call|>',
        "Sure.", _weather({"city": 'Os"lo, x:{1}', "days": 2}),
    ),
    "lfm": Written(
        "LFM2.5", ("<|tool_call_start|>",),
        "<|tool_call_start|>[get_weather(city='Oslo', days=2), now()]<|tool_call_end|>Wait.",
        "Wait.", (("get_weather", {**OSLO, "days": 2}), ("now", {})),
    ),
    "phi-4-mini": Written(
        "Phi-4-mini", ("<|tool_call|>", "<|/tool_call|>"),
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>', "", _weather(OSLO),
    ),
    "granite 3": Written(
        "Granite 3", ("<|tool_call|>",), '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        "", _weather(OSLO),
    ),
    "functools": Written(
        "Phi-4-mini, by functools", ("functools[",),
        'functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        "", _weather(OSLO),
    ),
    "functionary 3.1": Written(
        "Functionary 3.1", ("<function=",), '<function=get_weather>{"city": "Oslo"}</function>', "", _weather(OSLO)
    ),
    "functionary 3.2": Written(
        "Functionary 3.2", (">>>all",), '>>>get_weather\n{"city": "Oslo"}', "", _weather(OSLO)
    ),
    "llama 3": Written(
        "Llama 3", ("ipython", '"parameters"'),
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}', "", _weather(OSLO),
    ),
    "llama 3, within a text": Written(
        "Llama 3", ("ipython", '"parameters"'), 'Say {"name": "now", "parameters": {}}.',
        'Say {"name": "now", "parameters": {}}.', (),
    ),
    "gpt-oss": Written(
        "gpt-oss", ("<|channel|>", "functions."),
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Oslo"}',
        "", _weather(OSLO),
    ),
}  # fmt: skip
