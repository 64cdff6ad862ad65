"""Random checkpoints whose steps all have the same length, in tokens of either model."""

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DELIMITER = "\n\n"


def write_pair(
    folder: Path, seed: int, step_tokens: int, generator: tuple[int, int, int], verifier: tuple[int, int, int]
) -> tuple[Path, Path]:
    """Write a generator whose steps are `step_tokens` tokens, a blank line included, and a verifier with random scores.

    A step is a letter and a digit for each place, like `a3b7c0`: the letter says the place, so the next token's
    distribution follows from the last token alone; the digit is random. A score depends on the last step alone, through
    sliding windows: siblings' scores resemble each other no more than others.

    A shape is layers, key-value heads and head size.
    """
    tokenizer = _tokenizer()
    places = step_tokens - 1
    assert 1 <= places <= len(LETTERS)
    torch.manual_seed(seed)
    talker = Qwen2ForCausalLM(_config(tokenizer, generator)).eval()
    _chain(talker, tokenizer, places)
    judge_config = _config(tokenizer, verifier)
    judge_config.num_labels = 2
    judge_config.use_sliding_window, judge_config.max_window_layers = True, 0
    judge_config.sliding_window = max(2, step_tokens // verifier[0])
    judge_config.layer_types = ["sliding_attention"] * verifier[0]
    judge = Qwen2ForTokenClassification(judge_config).eval()
    with torch.no_grad():
        for parameter in judge.parameters():
            parameter.normal_(std=0.5)
    paths = folder / "generator", folder / "verifier"
    for model, path in zip((talker, judge), paths, strict=True):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    config = paths[1] / "config.json"
    prm = {"prm": {"prompt": "raw", "step_separator": DELIMITER, "score": "p1"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | prm))
    return paths


def problem_of(tokens: int) -> str:
    """A problem of as many tokens."""
    return "".join(f"{LETTERS[i % 26]}{i // 26 % 10}" for i in range(tokens))


def _config(tokenizer: PreTrainedTokenizerFast, shape: tuple[int, int, int]) -> Qwen2Config:
    layers, kv_heads, head_dim = shape
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=4 * head_dim,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )


def _chain(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, places: int) -> None:
    """Make the next token depend on the last one only: attention and MLP add nothing to the residual stream."""
    ids = [[tokenizer.convert_tokens_to_ids(f"{LETTERS[i]}{digit}") for digit in range(10)] for i in range(places)]
    ids.append([tokenizer.convert_tokens_to_ids("ĊĊ")])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        for place, tokens in enumerate(ids):
            following = ids[(place + 1) % len(ids)]
            for token in tokens:
                model.model.embed_tokens.weight[token, place] = 1.0
            for token in following:
                model.lm_head.weight[token, place] = 10.0


def _tokenizer() -> PreTrainedTokenizerFast:
    words = [f"{letter}{digit}" for letter in LETTERS for digit in range(10)]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[a-z][0-9]|\n\n"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1 + 256 + len(words) + 1,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*words, DELIMITER] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
