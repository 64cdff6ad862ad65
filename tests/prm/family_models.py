"""Small random checkpoints of every family's class, in the files that published ones come in."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_models import edit_json, edit_tensors, randomize
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

LLAMA_TEMPLATE = (
    "{{- bos_token }}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + "
    "'\\n\\n<|eot_id|>' }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
JUDGED = {"letters": 5, "criteria": ["It adds up.", "It ends well."], "repeats": 3}
_LLAMA_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_CORPUS = (
    "Tom starts with 38 coins. He finds 47 more. How many has he?",
    "Step 1: 38 + 47 = 85 ки",
    "Step 2: add the numbers, so the answer is \\boxed{85} ки",
    "\\frac{1}{2} \\cdot \\sqrt{x} = - 3 ки",
) * 4


def write_families(root: Path, tiny: dict[str, Path]) -> dict[str, Path]:
    """Write a checkpoint of each family under `root`, by name; `tiny` are those of `tiny_models`."""
    llama = _with_llama_tokenizer(tiny["qwen2-tied"], root / "tokenizer-llama")
    return {
        "qwen2.5-math-prm": tiny["math-prm"],
        "reasonflux-prm": _reasonflux(root / "reasonflux", tiny["math-prm"]),
        "skywork-o1-open-prm": _skywork(root / "skywork", tiny["qwen2-tied"]),
        "rlhflow": _llama(root / "rlhflow", llama),
        "versaprm": _versaprm(root / "versaprm", llama),
        "math-shepherd": _math_shepherd(root / "math-shepherd"),
        "token-classifier": tiny["classifier"],
        "chat-classifier": tiny["chat-classifier"],
        "pure": tiny["classifier"],
        "outcome": _outcome(root / "outcome", llama),
        "value-guided": _value_guided(root / "value-guided", tiny["math-prm"]),
        "universal-prm": _universal(root / "universal", tiny["math-prm"]),
        "eurus-prm": tiny["qwen2-untied"],
        "thinkprm": write_thinkprm(root / "thinkprm", tiny["qwen2-untied"]),
        "yes-no": _yes_no(root / "yes-no", tiny["talker"]),
        "judge": _judge(root / "judge", tiny["talker"]),
        "likelihood": (likely := _likelihood(root / "likelihood", tiny["qwen2-untied"])),
        "likelihood-ratio": likely,
        "eurus-reference": _reference(root / "eurus-reference", tiny["qwen2-untied"]),
    }


def _reasonflux(folder: Path, math_prm: Path) -> Path:
    """The same class with another rotary base, and a template that puts in a system message of its own."""
    shutil.copytree(math_prm, folder)
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", {"rope_parameters": config["rope_parameters"] | {"rope_theta": 1_000_000.0}})
    template = (folder / "chat_template.jinja").read_text()
    own = "{% if messages[0].role != 'system' %}\n<|im_start|>system\nYou help.<|im_end|>\n{% endif %}\n"
    (folder / "chat_template.jinja").write_text(own + template)
    return folder


def _skywork(folder: Path, generator: Path) -> Path:
    """A tied causal model with a value head beside it."""
    shutil.copytree(generator, folder)
    torch.manual_seed(21)
    head = {"v_head.summary.weight": 0.3 * torch.randn(1, 32), "v_head.summary.bias": 0.3 * torch.randn(1)}
    edit_tensors(folder / "model.safetensors", head)
    edit_json(folder / "config.json", {"architectures": ["Qwen2ForPrmModel"]})
    return folder


def _universal(folder: Path, math_prm: Path) -> Path:
    shutil.copytree(math_prm, folder)
    torch.manual_seed(22)
    gone = dict.fromkeys(("score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias"))
    edit_tensors(folder / "model.safetensors", {**gone, "score.weight": 0.3 * torch.randn(1, 40)})
    edit_json(folder / "config.json", {"architectures": ["UniversalModel"]})
    return folder


def _value_guided(folder: Path, math_prm: Path) -> Path:
    """Three labels without biases, and the marks of R1's turns."""
    shutil.copytree(math_prm, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(28)
    grown = {"model.embed_tokens.weight": 0.3 * torch.randn(tokenizer.get_vocab_size(), 40)}
    gone = dict.fromkeys(("score.0.bias", "score.2.bias", "lm_head.weight"))
    head = {**gone, "score.2.weight": 0.3 * torch.randn(3, 40)}
    edit_tensors(folder / "model.safetensors", {**grown, **head})
    changes = {"architectures": ["Qwen2ForClassifier"], "vocab_size": tokenizer.get_vocab_size(), "num_labels": 3}
    edit_json(folder / "config.json", changes)
    return folder


def _reference(folder: Path, prm: Path) -> Path:
    """A model of the PRM's shape with other weights."""
    config = AutoConfig.from_pretrained(prm)
    assert isinstance(config, Qwen2Config)
    randomize(Qwen2ForCausalLM(config), 23).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(prm / name, folder / name)
    return folder


def write_thinkprm(folder: Path, source: Path, **settings: float) -> Path:
    """A generator with the two labels as tokens, whose rationales are short and often end in `</think>`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    tokenizer.add_tokens([" yes", " no", "</think>"])
    config = AutoConfig.from_pretrained(source)
    assert isinstance(config, Qwen2Config)
    config.max_position_embeddings = 1024
    model = randomize(Qwen2ForCausalLM(config), 27)
    with torch.no_grad():  # a large constant in the residual stream, through which the head favours one token
        model.model.embed_tokens.weight[:, 0] = 6.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("</think>"), 0] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "config.json", {"prm": {"critique_tokens": 20, **settings}})
    return folder


def _yes_no(folder: Path, talker: Path) -> Path:
    """A generator of some steps, with the two answers as tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(talker)
    tokenizer.add_tokens(["Yes", "No"])
    model = Qwen2ForCausalLM.from_pretrained(talker)
    torch.manual_seed(28)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[-2:] = 0.3 * torch.randn(2, model.config.hidden_size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _judge(folder: Path, talker: Path) -> Path:
    """A generator that is asked two things, three times each."""
    shutil.copytree(talker, folder)
    edit_json(folder / "config.json", {"prm": JUDGED, "max_position_embeddings": 1024})
    return folder


def _likelihood(folder: Path, generator: Path) -> Path:
    """A generator with a system prompt of its own."""
    shutil.copytree(generator, folder)
    edit_json(folder / "config.json", {"system_prompt": "Use steps."})
    return folder


def _with_llama_tokenizer(source: Path, folder: Path) -> PreTrainedTokenizerFast:
    """The tiny byte-level tokenizer with Llama 3's special tokens and the shape of its template."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_LLAMA_SPECIAL)})
    tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    tokenizer.chat_template = LLAMA_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _llama_config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def _llama(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    randomize(LlamaForCausalLM(_llama_config(len(tokenizer))), 24).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _versaprm(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A vocabulary in which a space and four newlines are one token, as in Llama 3's."""
    texts = [f"{text} \n\n\n\nso \n\n" for text in _CORPUS]
    retrained = tokenizer.train_new_from_iterator(texts, len(tokenizer), show_progress=False)
    assert retrained.tokenize("a \n\n\n\nb \n\nc") == ["a", "ĠĊĊĊĊ", "b", "ĠĊĊ", "c"]
    return _llama(folder, retrained)


def _outcome(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    config = _llama_config(len(tokenizer))
    config.num_labels = 1
    randomize(LlamaForSequenceClassification(config), 25).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _math_shepherd(folder: Path) -> Path:
    """A SentencePiece-like vocabulary."""
    tokenizer = _metaspace_tokenizer()
    model = randomize(LlamaForCausalLM(_llama_config(len(tokenizer))), 26)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "config.json", {"architectures": ["MistralForCausalLM"], "model_type": "mistral"})
    return folder


def _metaspace_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    every_byte = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *every_byte], show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if "0x" not in token["content"]]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    # As published: spaces become a mark by a normalizer, one is put before each text, and nothing splits words.
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert tokenizer.encode("a ки + -").tokens[-3:] == ["▁ки", "▁+", "▁-"], "as Mistral's vocabulary has them"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors."""
    return load_file(folder / "model.safetensors")
