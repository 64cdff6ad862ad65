"""GGUF files against the checkpoints in Hugging Face layout that they were made of."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_driver import read, release
from gguf.constants import GGMLQuantizationType, TokenType
from gguf.quants import dequantize, quantize
from gguf_files import finish, write_gguf
from plain import plain_logits
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.models.chat.turns import turn_ends
from espalier.engine.models.checkpoint import Checkpoint, Outline
from espalier.engine.models.checkpoint.files import CheckpointFiles
from espalier.engine.models.gguf.file import GgufFile
from espalier.engine.models.gguf.tokenizer import tokenizer_config, tokenizer_json
from espalier.engine.models.hub import locate
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.experiments.demo import generator_path

SAME_MODEL = [
    "qwen2-tied",
    "qwen2-untied",
    "llama3-rope",
    "qwen3",
    "qwen3-biased",
    "mistral",
    "mistral-window",
    "llama-biased",
    "llama-linear",
    "qwen2-yarn",
]
IDS = [9, 17, 30, 4, 200, 31, 8, 77, 120, 45, 46, 5]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEXTS = [
    "Tom starts with 38 coins. He finds 47 more.\n\n38+47=85\n\n",
    "it's  3.14159 \n \n  x_1 = 12345/67 → ½ ∑ Ωmega 日本語\r\n\tEND  ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "cafe\u0301 ﬁne",
    "   ",
    "",
]


def load(path: Path, load_format: LoadFormat = LoadFormat.AUTO) -> Model:
    return load_generator(Checkpoint(path, load_format), torch.float32, "cpu")


def logits(make_engine: Callable[..., Engine], model: Model) -> torch.Tensor:
    engine = make_engine(model)
    sequence = engine.open("generator", [])
    values = read(engine, sequence, IDS)
    release(engine, sequence)
    return torch.from_numpy(values)


@pytest.mark.parametrize("name", SAME_MODEL)
def test_logits_are_those_of_transformers_on_the_folder(
    name: str, tiny_checkpoints: dict[str, Path], make_engine: Callable[..., Engine], tmp_path: Path
):
    model = load(write_gguf(tiny_checkpoints[name], tmp_path / "model.gguf"))
    torch.testing.assert_close(
        logits(make_engine, model), plain_logits(tiny_checkpoints[name], IDS), rtol=1e-4, atol=1e-4
    )
    assert model.eos_token_ids == load(tiny_checkpoints[name]).eos_token_ids


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
def test_packed_weights_are_those_that_llama_cpp_means(
    kind: str, tiny_checkpoints: dict[str, Path], make_engine: Callable[..., Engine], tmp_path: Path
):
    packing = GGMLQuantizationType[kind]
    file = write_gguf(tiny_checkpoints["qwen2-tied"], tmp_path / "model.gguf", packing)
    same = shutil.copytree(tiny_checkpoints["qwen2-tied"], tmp_path / "folder")
    weights = load_file(same / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.ndim > 1 and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[packing][0] == 0:
            weights[name] = torch.from_numpy(dequantize(quantize(tensor.float().numpy(), packing), packing))
    save_file(weights, same / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(make_engine, load(file)), plain_logits(same, IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_kinds_that_only_llama_cpp_packs_are_read(kind: str, tmp_path: Path):
    packing = GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[packing]
    packed = np.random.default_rng(0).integers(0, 120, (3, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_down.weight", packed, raw_dtype=packing)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    for add in (writer.add_block_count, writer.add_head_count, writer.add_context_length, writer.add_embedding_length):
        add(8)
    writer.add_feed_forward_length(2 * values)
    writer.add_layer_norm_rms_eps(1e-6)
    finish(writer)
    file = GgufFile(tmp_path / "model.gguf")
    info = file.tensors["model.layers.0.mlp.down_proj.weight"]
    assert (info.shape, info.nbytes) == ((3, 2 * values), packed.nbytes)
    expected = gguf.GGUFReader(tmp_path / "model.gguf").tensors[0]
    found = file.read("model.layers.0.mlp.down_proj.weight").numpy()
    np.testing.assert_array_equal(found, dequantize(expected.data, packing).reshape(found.shape))


def test_a_file_in_parts_is_one_model(
    tiny_checkpoints: dict[str, Path], make_engine: Callable[..., Engine], tmp_path: Path
):
    folder = tiny_checkpoints["llama-biased"]  # whose later parts need the first one's number of heads
    first = write_gguf(folder, tmp_path / "model.gguf", tensors_a_part=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    assert parts[0] == first
    whole = plain_logits(folder, IDS)
    for part in (first, parts[1]):  # any of them names the model
        torch.testing.assert_close(logits(make_engine, load(part)), whole, rtol=1e-4, atol=1e-4)
    assert locate(str(tmp_path)) == first
    digest = Checkpoint(first).digest()
    assert digest == Checkpoint(parts[1]).digest()
    shutil.copytree(tmp_path, tmp_path / "other")
    other = tmp_path / "other" / parts[-1].name
    other.write_bytes(other.read_bytes()[:-1] + b"\x7f")
    assert Checkpoint(tmp_path / "other" / first.name).digest() != digest
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=rf"has no {parts[1].name}"):
        load(first)


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_weights_are_quantised_again_as_they_load(
    quantization: Quantization, tiny_checkpoints: dict[str, Path], make_engine: Callable[..., Engine], tmp_path: Path
):
    file = write_gguf(tiny_checkpoints["qwen2-tied"], tmp_path / "model.gguf")
    both = [
        load_generator(Checkpoint(path, quantization=quantization), torch.float32, "cpu")
        for path in (file, tiny_checkpoints["qwen2-tied"])
    ]
    assert torch.equal(*(logits(make_engine, model) for model in both))


def test_an_outline_reads_no_tensor(tiny_checkpoints: dict[str, Path], tmp_path: Path):
    file = write_gguf(tiny_checkpoints["qwen3"], tmp_path / "model.gguf")
    model = load_generator(Outline(file), torch.float32, "meta")
    assert model.config == load(tiny_checkpoints["qwen3"]).config
    assert load(file, LoadFormat.DUMMY).config == model.config


class TestTokenizers:
    def assert_same(self, found: TextTokenizer | Tokenizer, expected: Tokenizer) -> None:
        for text in TEXTS:
            ids = expected.encode(text, add_special_tokens=False).ids
            again = found.encode(text) if isinstance(found, TextTokenizer) else found.encode(text).ids
            assert again == ids, text
            if isinstance(found, TextTokenizer):
                assert found.show(ids) == expected.decode(ids, skip_special_tokens=False)

    def test_the_demo_generators(self, tmp_path: Path):
        file = write_gguf(generator_path(), tmp_path / "model.gguf", GGMLQuantizationType.BF16)
        found, expected = TextTokenizer(Checkpoint(file)), TextTokenizer(Checkpoint(generator_path()))
        plain = Tokenizer.from_file(str(generator_path() / "tokenizer.json"))
        plain.normalizer = normalizers.NFC()  # which this rule means in every published model
        self.assert_same(found, plain)
        assert found.vocabulary == expected.vocabulary
        assert found.token_bytes == expected.token_bytes
        messages = [{"role": "user", "content": "What is 2 + 3?"}]
        assert found.render_chat(messages) == expected.render_chat(messages)

    @pytest.mark.parametrize(
        ("rule", "split", "whole_words"),
        [
            ("llama-bpe", LLAMA_3, True),
            ("falcon-h1", LLAMA_3, True),
            ("dbrx", LLAMA_3, False),
            ("gpt-2", None, False),
            ("smollm", r"\p{N}", False),
        ],
    )
    def test_rules_of_words(self, rule: str, split: str | None, whole_words: bool, tmp_path: Path):
        expected = Tokenizer(models.BPE(ignore_merges=whole_words))
        words = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split != LLAMA_3)
        expected.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])
        expected.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        expected.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
        parts = json.loads(expected.to_str())["model"]
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": rule,
            "tokenizer.ggml.tokens": sorted(parts["vocab"], key=parts["vocab"].__getitem__),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in parts["merges"]],
        }
        self.assert_same(Tokenizer.from_str(json.dumps(tokenizer_json(metadata))), expected)

    @pytest.mark.parametrize("prefix", [True, False])
    def test_sentencepiece(self, prefix: bool):
        expected = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        to_space = normalizers.Replace(" ", "▁")
        parts = [normalizers.Prepend("▁"), to_space] if prefix else [to_space]
        expected.normalizer = normalizers.Sequence(parts)
        raw_bytes = [f"<0x{i:02X}>" for i in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *raw_bytes])
        expected.train_from_iterator(["Tom starts with 38 coins. He finds 47 more coins.\n"] * 9, trainer)
        state = json.loads(expected.to_str())
        state["added_tokens"] = state["added_tokens"][:3]
        expected = Tokenizer.from_str(json.dumps(state))
        vocabulary = state["model"]["vocab"]
        ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(state["model"]["merges"])))}
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        kinds = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-float(ranks.get(token, 1e6)) for token in tokens],
            "tokenizer.ggml.token_type": [
                kinds.get(token, TokenType.BYTE if token in raw_bytes else TokenType.NORMAL) for token in tokens
            ],
            "tokenizer.ggml.add_space_prefix": prefix,
        }
        found = Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))
        self.assert_same(found, expected)
        text = "Tom finds 47 \N{SNOWMAN} coins.</s>"
        ids = found.encode(text).ids
        assert found.decode(ids, skip_special_tokens=False).strip() == text

    def test_unknown_kinds_are_refused(self):
        with pytest.raises(ValueError, match="'t5'"):
            tokenizer_json({"tokenizer.ggml.model": "t5"})
        with pytest.raises(ValueError, match=r"rule 'new-rule'.*qwen2"):
            tokenizer_json(
                {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "new-rule", "tokenizer.ggml.tokens": []}
            )


def test_marks_that_have_the_type_of_words_are_taken_whole_and_told(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Converters lose types: `<|im_start|>` was spelled in letters then, in silence."""
    whole = Checkpoint(write_gguf(tiny_checkpoints["qwen2-tied"], tmp_path / "typed.gguf"))
    typed = TextTokenizer(whole)
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    prompt = typed.render_chat(chat)
    assert "<|im_start|>" in typed.added_tokens
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_types", lambda self, kinds: None)
    untyped = Checkpoint(write_gguf(tiny_checkpoints["qwen2-tied"], tmp_path / "untyped.gguf"))
    found = TextTokenizer(untyped)
    assert found.encode(prompt) == typed.encode(prompt)
    assert found.decode(found.encode(prompt)) == typed.decode(typed.encode(prompt))
    assert [end.token_id for end in turn_ends(untyped, found)] == [end.token_id for end in turn_ends(whole, typed)]
    (said,) = untyped.warnings
    assert "token_type of" in said
    assert "<|im_start|>" in said


@pytest.mark.parametrize(
    ("mark", "template", "metadata", "whole", "hidden"),
    [
        ("<think>", "{{ '<think>' }}", {}, True, False),
        ("<think>", "{{ 'none' }}", {}, False, False),
        ("[INST]", "[INST] {{ messages }}", {}, True, False),
        ("<|user|>", "{{ '<|' + messages[0].role + '|>' }}", {}, True, True),
        ("<｜User｜>", "", {}, True, True),
        ("<end>", "", {"tokenizer.ggml.eot_token_id": 5}, True, True),
    ],
)
def test_a_mark_is_what_bars_a_template_or_an_id_make_one(
    mark: str, template: str, metadata: dict[str, Any], whole: bool, hidden: bool, monkeypatch: pytest.MonkeyPatch
):
    alphabet = sorted({*map(chr, range(33, 127)), "Ġ", *"ï½ľ"})
    tokens = [*alphabet[:5], mark, *alphabet[5:]]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [],
        "tokenizer.chat_template": template,
    } | metadata
    texts = {"tokenizer.json": tokenizer_json(values), "tokenizer_config.json": tokenizer_config(values)}
    checkpoint = object.__new__(Checkpoint)
    checkpoint.folder, checkpoint.warnings = Path("some.gguf"), ()
    checkpoint.files = object.__new__(CheckpointFiles)
    checkpoint.files.folder = checkpoint.folder
    monkeypatch.setattr(CheckpointFiles, "text", lambda self, name: json.dumps(texts[name]) if name in texts else None)
    tokenizer = TextTokenizer(checkpoint)
    assert (tokenizer.encode(mark) == [5]) == whole
    assert tokenizer.is_special(5) == hidden
    assert bool(checkpoint.warnings) == whole


class TestFaults:
    def test_a_file_cut_or_changed_anywhere_is_an_error_of_ours(
        self, tiny_checkpoints: dict[str, Path], tmp_path: Path
    ):
        whole = write_gguf(tiny_checkpoints["qwen2-tied"], tmp_path / "whole.gguf").read_bytes()
        file = tmp_path / "cut.gguf"
        for length in [*range(0, 200, 7), *range(200, len(whole) - 1, len(whole) // 150)]:
            file.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match=r"cut\.gguf"):
                load(file)
        draw = np.random.default_rng(0)
        for _ in range(150):
            changed = bytearray(whole)
            for at in draw.integers(4, 3000, 3):
                changed[at] = draw.integers(256)
            file.write_bytes(changed)
            try:
                load_generator(Outline(file), torch.float32, "meta")
            except CheckpointError:
                continue

    def test_what_is_no_model(self, tmp_path: Path, tiny_checkpoints: dict[str, Path]):
        file = tmp_path / "model.gguf"
        file.write_bytes(b"something else entirely")
        with pytest.raises(CheckpointError, match="is not a GGUF file"):
            Checkpoint(file)
        file.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(16))
        with pytest.raises(CheckpointError, match="version 9"):
            Checkpoint(file)
        finish(gguf.GGUFWriter(file, "qwen2"))
        with pytest.raises(CheckpointError, match=r"token_embd"):
            Checkpoint(file)
        write_gguf(tiny_checkpoints["qwen2-tied"], file)
        with pytest.raises(CheckpointError, match=r"--load-format safetensors"):
            Checkpoint(file, LoadFormat.SAFETENSORS)

    def test_a_folder_of_several(self, tmp_path: Path):
        for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf"):
            (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=r"several GGUF files: a-Q4_K_M.gguf, a-Q8_0.gguf; name one"):
            locate(str(tmp_path))
        assert locate(str(tmp_path / "a-Q8_0.gguf")) == tmp_path / "a-Q8_0.gguf"
