"""Small random checkpoints in genuine Hugging Face layout, written by transformers itself."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_architectures import architectures
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen2Model,
)

CHAT_TEMPLATE = """\
{% for message in messages %}
    {% if message.content is string %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

BOXED = ("\\boxed{0}", "\\boxed{1}", "\\boxed{2}")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<extra_0>")
_CORPUS = (
    "Tom starts with 38 coins. He finds 47 more.\n\n38+47=85\n\nThen he loses 12 of them.\n\n85-12=73\n\n",
    "## Step 1: add the numbers\n\nThe total is 5.\n\n## Step 2: check\n\nSo the answer is $5$.\nNothing is left.\n\n",
    "\\frac{1}{2} \\cdot \\sqrt{x} = \\text{half of the root}\n\n\\boxed{7}\n\n",
) * 4


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with blank lines as one token, ChatML, and answers that are single added tokens."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens(list(BOXED))
    assert len(tokenizer.encode("\n\n").ids) == 1
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def write_all(root: Path) -> dict[str, Path]:
    """Write every checkpoint under `root`; returns their folders by name."""
    tokenizer = train_tokenizer()
    vocab = len(tokenizer) + 5  # padded, as published vocabularies are: ids exist that mean nothing
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    shared = {
        "vocab_size": vocab,
        "eos_token_id": eos,
        "bos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }

    def qwen2(**shape: object) -> Qwen2Config:
        return Qwen2Config(**{**shared, "max_position_embeddings": 512, "rope_theta": 10_000.0, **shape})

    def save(name: str, model: PreTrainedModel, extra: Mapping[str, object] | None = None) -> Path:
        folder = root / name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if extra:
            edit_json(folder / "config.json", extra)
        return folder

    tied = qwen2(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    untied = qwen2(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=1_000_000.0,
        tie_word_embeddings=False,
    )
    llama = LlamaConfig(
        **shared,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,  # not hidden_size / heads
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    verifier = qwen2(
        hidden_size=40, intermediate_size=64, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1
    )
    folders = {
        "qwen2-tied": save("qwen2-tied", randomize(Qwen2ForCausalLM(tied), 1)),
        "qwen2-untied": save("qwen2-untied", randomize(Qwen2ForCausalLM(untied), 2)),
        "llama3-rope": save("llama3-rope", randomize(LlamaForCausalLM(llama), 3)),
        "talker": save("talker", _talkative(randomize(Qwen2ForCausalLM(untied), 4), tokenizer)),
    }
    for seed, (name, (kind, config)) in enumerate(architectures(shared).items(), start=10):
        folders[name] = save(name, randomize(kind(config), seed))
    verifier.num_labels = 2
    classifier = randomize(Qwen2ForTokenClassification(verifier), 5)
    folders["classifier"] = save("classifier", classifier)
    chat = {"prm": {"prompt": "chat", "step_separator": "\n\n", "score": "p1"}}
    folders["chat-classifier"] = save("chat-classifier", classifier, chat)
    folders["math-prm"] = _write_math_prm(save("math-prm", randomize(Qwen2Model(verifier), 6)))
    return folders


def edit_json(file: Path, changes: Mapping[str, object]) -> None:
    """Merge `changes` into a JSON file; None removes a key."""
    merged = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))


def edit_tensors(file: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Merge `changes` into a safetensors file; None removes a tensor."""
    merged = {**load_file(file), **changes}
    save_file({k: v.contiguous() for k, v in merged.items() if v is not None}, file, metadata={"format": "pt"})


def disturb(folder: Path, seed: int = 1, share: float = 0.3) -> Path:
    """Change all weights of a checkpoint, each by about a share of its tensor's usual size, as training on does."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    changed = dict[str, torch.Tensor | None]()
    for name, tensor in sorted(load_file(file).items()):
        noise = torch.randn(tensor.shape, generator=generator)
        changed[name] = (tensor.float() + share * tensor.float().std(correction=0) * noise).to(tensor.dtype)
    edit_tensors(file, changed)
    return folder


def randomize(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Every parameter random, biases and norms too: a test against zeros and ones would miss a swapped pair."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name:
                parameter.add_(1.0)
    return model.eval()


def _talkative(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Make blank lines, ends and boxed answers frequent, so that searches have steps, ends and votes.

    Dimension 0 of the residual stream is a large constant, through which the head adds a bias to chosen tokens.
    """
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 6.0
        head = model.lm_head.weight
        head.mul_(0.5)
        head[:, 0] = 0.0
        head[tokenizer.convert_tokens_to_ids("ĊĊ"), 0] = 2.2
        head[tokenizer.convert_tokens_to_ids("<|im_end|>"), 0] = 1.4
        for token in (*BOXED, "1", "2"):
            head[tokenizer.convert_tokens_to_ids(token), 0] = 1.5
    return model


def _write_math_prm(folder: Path) -> Path:
    """Turn a saved trunk into the layout of Qwen2.5-Math-PRM: a prefixed trunk, a two-layer head, an unused LM head."""
    torch.manual_seed(7)
    file = folder / "model.safetensors"
    trunk = load_file(file)
    hidden, vocab = trunk["norm.weight"].shape[0], trunk["embed_tokens.weight"].shape[0]
    tensors = {f"model.{name}": tensor for name, tensor in trunk.items()} | {
        "score.0.weight": 0.2 * torch.randn(hidden, hidden),
        "score.0.bias": 0.2 * torch.randn(hidden),
        "score.2.weight": 0.2 * torch.randn(2, hidden),
        "score.2.bias": 0.2 * torch.randn(2),
        "lm_head.weight": torch.zeros(vocab, hidden),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    edit_json(folder / "config.json", {"architectures": ["Qwen2ForProcessRewardModel"]})
    return folder
