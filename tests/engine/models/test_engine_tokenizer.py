import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain import hf_tokenizer
from random_examples import random_examples
from tiny_models import BOXED, edit_json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.scheduling.running_samples import StepEnds
from espalier.engine.work import NO_MARKS

MESSAGES = [
    [{"role": "user", "content": "How many coins?"}],
    [{"role": "system", "content": "Be  brief.\n"}, {"role": "user", "content": "Größe {{x}} <|im_end|> \\boxed{1}"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n\n"}, {"role": "user", "content": ""}],
]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoints: dict[str, Path]) -> TextTokenizer:
    return TextTokenizer(Checkpoint(tiny_checkpoints["talker"]))


@random_examples(300)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_survives_encoding_and_decoding(tokenizer: TextTokenizer, text: str):
    ids = tokenizer.encode(text)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<extra_0>")
    if not any(mark in text for mark in special):
        assert tokenizer.decode(ids) == text


@random_examples(200)
@given(ids=st.lists(st.integers(0, 340), max_size=20))
def test_decoding_by_the_byte_table_equals_transformers(
    tokenizer: TextTokenizer, tiny_checkpoints: dict[str, Path], ids: list[int]
):
    expected = hf_tokenizer(tiny_checkpoints["talker"]).decode(
        [i for i in ids if i < tokenizer.vocab_size], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "x²·½ ≈ 𝟙\n",
        "日本語のテキスト",
        "e\u0301 \u200d\N{FAMILY}",
        "\\frac{1}{2}\n\n\\boxed{0}\t",
        "\x00\x7f",
    ],
)
def test_encoding_equals_transformers(text: str, tokenizer: TextTokenizer, tiny_checkpoints: dict[str, Path]):
    ids = tokenizer.encode(text)
    assert ids == hf_tokenizer(tiny_checkpoints["talker"]).encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_the_text_of_a_whole_is_the_join_of_its_tokens_bytes(tokenizer: TextTokenizer):
    ids = tokenizer.encode("Tom 日本 starts\n\nwith 🪙")
    assert b"".join(tokenizer.decode_bytes([i]) for i in ids).decode() == "Tom 日本 starts\n\nwith 🪙"


def test_half_a_character_is_shown_as_broken_and_not_raised(tokenizer: TextTokenizer):
    ids = tokenizer.encode("日")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_recognised_and_have_no_bytes(tokenizer: TextTokenizer):
    assert tokenizer.encode("<|im_end|>") == [tokenizer.token_id("<|im_end|>")]
    assert tokenizer.decode([0, 1, 2, 3]) == ""


def test_added_tokens_that_are_not_special_keep_their_text(tokenizer: TextTokenizer):
    (token,) = tokenizer.encode(BOXED[1])
    assert token == tokenizer.token_id(BOXED[1])
    assert tokenizer.decode([token]) == BOXED[1]


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: TextTokenizer):
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 1000]) == ""


def test_a_metaspace_tokenizer_with_byte_fallback_decodes_to_its_text(tmp_path: Path, copied: Callable[[str], Path]):
    pieces = ["<unk>", "▁Tom", "▁has", "\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    folder = copied("talker")
    tokenizer.save(str(folder / "tokenizer.json"))
    mine = TextTokenizer(Checkpoint(folder))
    euro = [4 + byte for byte in "€".encode()]
    assert mine.decode([1, 2, *euro, 3]) == " Tom has€\n"
    may_end = StepEnds(mine, mine.vocab_size).may_end(frozenset({("\n\n", (), NO_MARKS)}))
    assert np.flatnonzero(may_end).tolist() == [3, 4 + 10]


@pytest.fixture
def copied(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a tiny checkpoint's small files that a test may change."""

    def copy(name: str) -> Path:
        for file in tiny_checkpoints[name].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    return copy


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("opens_answer", [True, False])
def test_the_chat_template_renders_as_transformers_renders_it(
    messages: list[dict[str, str]], opens_answer: bool, tokenizer: TextTokenizer, tiny_checkpoints: dict[str, Path]
):
    expected = hf_tokenizer(tiny_checkpoints["talker"]).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=opens_answer
    )
    assert tokenizer.render_chat(messages, opens_answer) == expected


def test_a_template_in_the_tokenizers_configuration_is_used(copied: Callable[[str], Path]):
    folder = copied("talker")
    (folder / "chat_template.jinja").unlink()
    assert TextTokenizer(Checkpoint(folder)).chat_template is None
    edit_json(folder / "tokenizer_config.json", {"chat_template": "{{ eos_token }}{{ messages[0].content | trim }}"})
    tokenizer = TextTokenizer(Checkpoint(folder))
    assert tokenizer.chat_template is not None
    assert tokenizer.render_chat([{"role": "user", "content": " hi "}]) == "<|im_end|>hi"


def test_of_several_templates_the_default_one_is_used(copied: Callable[[str], Path]):
    folder = copied("talker")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    edit_json(folder / "tokenizer_config.json", {"chat_template": several})
    assert TextTokenizer(Checkpoint(folder)).render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    edit_json(folder / "tokenizer_config.json", {"chat_template": several[:1]})
    assert TextTokenizer(Checkpoint(folder)).chat_template is None


def test_a_template_is_told_that_there_are_no_tools(copied: Callable[[str], Path]):
    folder = copied("talker")
    (folder / "chat_template.jinja").write_text("{% if tools is not none or documents is not none %}tools{% endif %}")
    assert TextTokenizer(Checkpoint(folder)).render_chat([]) == ""


def test_a_template_that_asks_for_the_date_gets_the_same_one_every_day(copied: Callable[[str], Path]):
    folder = copied("talker")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}|{{ date_string }}")
    assert TextTokenizer(Checkpoint(folder)).render_chat([]) == "26 Jul 2024|26 Jul 2024"


def test_a_template_that_refuses_its_messages_is_a_typed_error(copied: Callable[[str], Path]):
    folder = copied("talker")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(CheckpointError, match="no system role"):
        TextTokenizer(Checkpoint(folder)).render_chat([])


def test_a_template_cannot_reach_python(copied: Callable[[str], Path]):
    folder = copied("talker")
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(CheckpointError, match="unsafe"):
        TextTokenizer(Checkpoint(folder)).render_chat([])


def test_rendering_without_a_template_is_a_typed_error(copied: Callable[[str], Path]):
    folder = copied("talker")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="no chat template"):
        TextTokenizer(Checkpoint(folder)).render_chat([])


def test_special_tokens_are_found_in_either_spelling(copied: Callable[[str], Path]):
    folder = copied("talker")
    edit_json(folder / "tokenizer_config.json", {"bos_token": {"content": "<s>", "lstrip": False}})
    tokenizer = TextTokenizer(Checkpoint(folder))
    assert tokenizer.special_token("bos_token") == "<s>"
    assert tokenizer.special_token("eos_token") == "<|im_end|>"
    assert tokenizer.special_token("sep_token") is None


def test_other_threads_go_on_while_a_text_is_encoded(tokenizer: TextTokenizer):
    text, steps = "Tom has 38 coins. " * 20_000, []
    ended, times = threading.Event(), [0.0, 0.0]

    def encode() -> None:
        times[0] = time.perf_counter()
        try:
            tokenizer.encode(text)
        finally:
            times[1] = time.perf_counter()
            ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not ended.is_set():
        steps.append(time.perf_counter())
    thread.join()
    began, took = times[0], times[1] - times[0]
    assert any(began + 0.2 * took < step < began + 0.8 * took for step in steps), "all at its begin and end"
