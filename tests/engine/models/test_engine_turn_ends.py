"""What ends a turn and what a prompt begins with, by each kind of evidence alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from hostile_gguf import Parts, T, take_apart, write
from tiny_models import edit_json

from espalier.engine.models.chat.turns import turn_ends
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.run.generator import render_turns

IM_END, TEXT_END, MARK = 2, 0, 3
"""`<|im_end|>`, `<|endoftext|>` and `<extra_0>`, a special token whose name says nothing of an end."""
TURNS = "{% for m in messages %}<|im_start|>{{ m.content }}END\n{% endfor %}"


def ends(folder: Path) -> dict[int, tuple[str, ...]]:
    checkpoint = Checkpoint(folder)
    return {end.token_id: end.sources for end in turn_ends(checkpoint, TextTokenizer(checkpoint))}


@pytest.fixture
def bare(copy_of: Callable[[str], Path]) -> Path:
    """A checkpoint in which no file says what ends a turn; only names do."""
    folder = copy_of("talker")
    edit_json(folder / "config.json", {"eos_token_id": None})
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", {"eos_token": None, "chat_template": None})
    return folder


def test_a_name_is_enough_whatever_its_type(bare: Path):
    assert ends(bare) == {TEXT_END: ("name",), IM_END: ("name",)}
    tokenizer = json.loads((bare / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] != IM_END]
    (bare / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert ends(bare)[IM_END] == ("name",)
    read = TextTokenizer(Checkpoint(bare))
    assert read.encode("so<|im_end|>")[-1] == IM_END  # and texts have it as one token, without text of its own
    assert read.decode([IM_END]) == ""


@pytest.mark.parametrize(
    ("file", "fields", "source"),
    [
        ("config.json", {"eos_token_id": MARK}, "config.json eos_token_id"),
        ("generation_config.json", {"eos_token_id": [MARK]}, "generation_config.json eos_token_id"),
        ("tokenizer_config.json", {"eos_token": "<extra_0>"}, "tokenizer_config.json eos_token"),
        ("tokenizer_config.json", {"eot_token": {"content": "<extra_0>"}}, "tokenizer_config.json eot_token"),
        ("special_tokens_map.json", {"eos_token": {"content": "<extra_0>"}}, "special_tokens_map.json eos_token"),
        ("tokenizer_config.json", {"chat_template": TURNS.replace("END", "<extra_0>")}, "chat template"),
        ("tokenizer_config.json", {"chat_template": TURNS.replace("END", " <extra_0>")}, "chat template"),
    ],
)
def test_each_file_alone_is_enough_and_is_named(file: str, fields: dict[str, Any], source: str, bare: Path):
    if not (bare / file).exists():
        (bare / file).write_text("{}")
    edit_json(bare / file, fields)
    assert source in ends(bare)[MARK]
    assert load_generator(Checkpoint(bare), torch.float32, "cpu").eos_token_ids == (TEXT_END, IM_END, MARK)


@pytest.mark.parametrize("template", [TURNS, TURNS.replace("END", ""), "{{ raise_exception('one turn only') }}"])
def test_a_template_that_writes_no_special_token_after_an_answer_adds_no_end(template: str, bare: Path):
    edit_json(bare / "tokenizer_config.json", {"chat_template": template})
    assert ends(bare).keys() == {TEXT_END, IM_END}


def test_what_a_template_writes_between_turns_is_not_what_ends_one(bare: Path):
    template = "{% for m in messages %}<extra_0>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    edit_json(bare / "tokenizer_config.json", {"chat_template": template})
    assert MARK not in ends(bare)


def test_a_word_named_as_eos_token_counts_only_where_no_id_is_given(bare: Path):
    word = TextTokenizer(Checkpoint(bare)).encode("5")[0]
    edit_json(bare / "tokenizer_config.json", {"eos_token": "5"})
    assert ends(bare)[word] == ("tokenizer_config.json eos_token",)
    edit_json(bare / "config.json", {"eos_token_id": IM_END})
    assert word not in ends(bare)
    read = TextTokenizer(Checkpoint(bare))
    assert read.decode(read.encode("25")) == "25"


def test_published_lists_stay_as_they_are(copy_of: Callable[[str], Path]):
    folder = copy_of("talker")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    llama = {TEXT_END: "<|end_of_text|>", 1: "<|eom_id|>", IM_END: "<|eot_id|>"}
    for token in tokenizer["added_tokens"]:
        if token["id"] in llama:
            del tokenizer["model"]["vocab"][token["content"]]
            token["content"] = llama[token["id"]]
            tokenizer["model"]["vocab"][token["content"]] = token["id"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    edit_json(folder / "config.json", {"eos_token_id": [0, 1, 2]})
    edit_json(folder / "generation_config.json", {"eos_token_id": [0, 1, 2]})
    edit_json(folder / "tokenizer_config.json", {"eos_token": "<|eot_id|>", "pad_token": None})
    assert tuple(ends(folder)) == (0, 1, 2)


# What a prompt begins with


BEGIN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<extra_0>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<extra_0>": {"id": "<extra_0>", "ids": [MARK], "tokens": ["<extra_0>"]}},
}


@pytest.mark.parametrize(
    ("settings", "adds", "begin", "source"),
    [
        ({"bos_token": "<extra_0>"}, False, "", "post_processor"),
        ({"bos_token": "<extra_0>"}, True, "<extra_0>", "post_processor"),
        ({}, True, "<extra_0>", "post_processor"),
        ({"bos_token": "<extra_0>", "add_bos_token": True}, False, "<extra_0>", "add_bos_token"),
        ({"bos_token": "<extra_0>", "add_bos_token": False}, True, "", "add_bos_token"),
        ({"add_bos_token": True}, False, "", "add_bos_token"),
        ({"bos_token": "<absent>", "add_bos_token": True}, False, "", "add_bos_token"),
    ],
)
def test_plain_text_begins_as_the_checkpoint_says(
    settings: dict[str, Any], adds: bool, begin: str, source: str, bare: Path
):
    edit_json(bare / "tokenizer_config.json", settings)
    if adds:
        edit_json(bare / "tokenizer.json", {"post_processor": BEGIN})
    tokenizer = TextTokenizer(Checkpoint(bare))
    assert render_turns(tokenizer, "", "1+1?").text == f"{begin}1+1?\n\n"
    assert source in tokenizer.begin_source
    assert tokenizer.encode("1+1?")[:1] != [MARK]  # `encode` itself adds nothing


def test_with_a_template_the_template_decides(bare: Path):
    begin = {"bos_token": "<extra_0>", "add_bos_token": True}
    edit_json(bare / "tokenizer_config.json", {"chat_template": "{{ messages[0].content }}", **begin})
    assert render_turns(TextTokenizer(Checkpoint(bare)), "", "1+1?").text == "1+1?"
    edit_json(bare / "tokenizer_config.json", {"chat_template": "{{ bos_token }}{{ messages[0].content }}"})
    assert render_turns(TextTokenizer(Checkpoint(bare)), "", "1+1?").text == "<extra_0>1+1?"


# GGUF files


@pytest.fixture
def gguf_parts(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Parts:
    parts = take_apart(write_gguf(tiny_checkpoints["talker"], tmp_path / "good.gguf"))
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.chat_template"):
        parts.drop(key)
    return parts


@pytest.mark.parametrize("key", ["eos", "eot", "eom"])
def test_each_key_of_a_gguf_file_is_enough(key: str, gguf_parts: Parts, tmp_path: Path):
    gguf_parts.set(f"tokenizer.ggml.{key}_token_id", MARK, T.UINT32)
    write(gguf_parts, file := tmp_path / "model.gguf")
    assert ends(file)[MARK] == (f"tokenizer.ggml.{key}_token_id",)
    assert ends(file).keys() == {TEXT_END, IM_END, MARK}


@pytest.mark.parametrize(
    ("rule", "says", "begins"),
    [("qwen2", None, False), ("qwen2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_a_gguf_file_without_a_template_begins_as_llama_cpp_takes_it(
    rule: str, says: bool | None, begins: bool, gguf_parts: Parts, tmp_path: Path
):
    gguf_parts.set("tokenizer.ggml.pre", rule)
    gguf_parts.set("tokenizer.ggml.bos_token_id", MARK, T.UINT32)
    if says is not None:
        gguf_parts.set("tokenizer.ggml.add_bos_token", says, T.BOOL)
    write(gguf_parts, file := tmp_path / "model.gguf")
    assert render_turns(TextTokenizer(Checkpoint(file)), "", "1").text == ("<extra_0>1\n\n" if begins else "1\n\n")
