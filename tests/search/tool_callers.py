"""Generators that call tools: tiny checkpoints that write calls as Hermes does, and say what a script has them say."""

from pathlib import Path

import torch
from engine_driver import scripted
from thinkers import Shape, ids_of, write_thinker

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator

TURNS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
)
_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def write_tool_caller(source: Path, folder: Path, evidence: str = "") -> Checkpoint:
    """A copy of a tiny checkpoint whose template lists tools and has `evidence` of a form; it may think and call."""
    end = f"<|im_start|>assistant\n{{# {evidence} #}}"
    return write_thinker(source, folder, Shape(_MARKS, False, end), TURNS)


def tool_caller(checkpoint: Checkpoint, *script: str) -> Model:
    """A generator that says the tokens of the script's texts, and then ends; without a script it is free."""
    model = load_generator(checkpoint, torch.float32, "cpu")
    return scripted(model, [*ids_of(model, script), *[model.eos_token_ids[0]] * 99]) if script else model
