"""Generators that think, by their marks and chat templates: tiny checkpoints that say what a script has them say."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from engine_driver import scripted
from tiny_models import edit_json
from tokenizers import AddedToken, Tokenizer

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@dataclass(frozen=True)
class Shape:
    """Marks as tokens (special or not) and the prompt's end, as a template writes it."""

    tokens: tuple[str, ...]
    special: bool
    end: str


SWITCHED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
SHAPES = {
    "opened by the model": Shape(("<think>", "</think>"), False, "<|im_start|>assistant\n" + SWITCHED),
    "opened by the prompt": Shape(("<think>", "</think>"), True, "<|im_start|>assistant\n<think>\n{# </think> #}"),
    "no switch": Shape(("[THINK]", "[/THINK]"), True, "<|im_start|>assistant\n{# [THINK] [/THINK] #}"),
    "text": Shape((), False, "<|im_start|>assistant\n{# <think> </think> #}"),
    "harmony": Shape(HARMONY, True, "<|start|>assistant"),
    "channel": Shape(("<|channel>", "<channel|>"), True, "<|im_start|>model\n"),
    "none": Shape((), False, "<|im_start|>assistant\n"),
}

REPORTED = {
    "the opening mark is in the prompt alone": (
        "opened by the prompt",
        [
            "A first guess would be \\boxed{7}, yet 3*4 is 12.",
            "\n",
            "</think>",
            "\n\nThree rows make 12.\n\n\\boxed{12}",
        ],
        ("A first guess would be \\boxed{7}, yet 3*4 is 12.", "Three rows make 12.\n\n\\boxed{12}", "12"),
    ),
    "marks are split over several tokens": (
        "text",
        [
            "<th",
            "ink>",
            "\nAdd 8 and 5; a </th",
            "in> strip is no mark",
            ": 13.</",
            "think",
            ">",
            "\n\nIt is \\box",
            "ed{13}.",
        ],
        ("Add 8 and 5; a </thin> strip is no mark: 13.", "It is \\boxed{13}.", "13"),
    ),
    "the last box of the answer is another one": (
        "opened by the prompt",
        ["Maybe \\boxed{5}. The sign matters.\n", "</think>", "\n\nMine was \\boxed{5}. Corrected: \\boxed{-5}."],
        ("Maybe \\boxed{5}. The sign matters.", "Mine was \\boxed{5}. Corrected: \\boxed{-5}.", "-5"),
    ),
    "the thought is in another language": (
        "opened by the prompt",
        ["先试一下，答案是 \\boxed{8}。不对。\n", "</think>", "\n\nThe next value is \\boxed{9}."],
        ("先试一下，答案是 \\boxed{8}。不对。", "The next value is \\boxed{9}.", "9"),
    ),
    "a thought is in a thought": (
        "opened by the model",
        ["<think>Outer. <think>inner check: 20</think> still outer, so 21.</think>The count is \\boxed{21}."],
        ("Outer. <think>inner check: 20</think> still outer, so 21.", "The count is \\boxed{21}.", "21"),
    ),
}
"""Paths that parsers have stumbled over: shape, script, and thought, content and answer that are right."""


def write_thinker(source: Path, folder: Path, shape: Shape, turns: str = _TURNS) -> Checkpoint:
    """A copy of a tiny checkpoint with the tokens and the template of a shape; `turns` renders the messages."""
    shutil.copytree(source, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, special=shape.special, normalized=False) for token in shape.tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = turns + "{% if add_generation_prompt %}" + shape.end + "{% endif %}"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(folder / "tokenizer_config.json", {"chat_template": template})
    return Checkpoint(folder)


def thinker(checkpoint: Checkpoint, *script: str, ends: int = 600) -> Model:
    """A generator that says the tokens of the script's texts, marks among them, and then ends."""
    model = load_generator(checkpoint, torch.float32, "cpu")
    return scripted(model, [*ids_of(model, script), *[model.eos_token_ids[0]] * ends])


def ids_of(model: Model, script: Iterable[str]) -> list[int]:
    """Token ids of texts, each encoded by itself; special tokens are recognised."""
    return [token for text in script for token in model.tokenizer.encode(text)]
