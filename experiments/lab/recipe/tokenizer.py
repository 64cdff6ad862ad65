r"""The tokenizer: byte-level BPE trained on the task, with digits and the step delimiter kept apart from the rest.

Merges are learned under strict splitting rules that no merge can cross: `"\n\n"` is one token and punctuation never
glues to it, a digit is always one token, and a space belongs to the word after it. The tokenizer is then shipped with
Qwen2's own splitting rules. The merges alone decide the tokens of this task, and transformers 5 puts those rules into
the tokenizer of every `qwen2` checkpoint it loads, whatever `tokenizer.json` says: so both readings agree.
"""

import random
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from espalier.experiments.demo.problems import DELIMITER
from espalier.experiments.lab.recipe.problems import training_problems

VOCAB_SIZE = 1024
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
MAX_LENGTH = 1024

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_TRAINING_SPLIT = Regex(r"\n\n|\p{N}|\\\p{L}+| ?\p{L}+|[^\p{L}\p{N}]")
_SHIPPED_SPLIT = Regex(PRETOKENIZE_REGEX)


def _pre_tokenizer(split: Regex) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def chat_prompt(problem: str) -> str:
    """Returns the chat template's text for a user turn and the generation prompt; equals `apply_chat_template`."""
    return f"{START}user\n{problem}{END}\n{START}assistant\n"


def train_tokenizer(seed: int = 0, problems: int = 20_000) -> Tokenizer:
    """Returns a byte-level BPE tokenizer trained on problems and solutions; any UTF-8 text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(_TRAINING_SPLIT)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=20,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(f"tokenizer-{seed}")
    texts = (f"user\n{p.text}\nassistant\n{DELIMITER.join(p.steps)}" for p in training_problems(rng))
    tokenizer.train_from_iterator(islice(texts, problems), trainer)
    tokenizer.pre_tokenizer = _pre_tokenizer(_SHIPPED_SPLIT)
    assert tokenizer.token_to_id("ĊĊ") is not None, "the delimiter did not become one token"
    return tokenizer


def delimiter_id(tokenizer: Tokenizer) -> int:
    """Returns the id of the step delimiter."""
    (token,) = tokenizer.encode(DELIMITER, add_special_tokens=False).ids
    return token


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a special token.

    Raises:
        KeyError: The tokenizer has no such token.
    """
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise KeyError(token)
    return token_id


def save_tokenizer(tokenizer: Tokenizer, directory: Path, chat_template: str, max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, chat template included, as Hugging Face lays them out."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=AddedToken(END, special=True, normalized=False),
        pad_token=AddedToken(PAD, special=True, normalized=False),
        additional_special_tokens=[START],
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(str(directory), save_jinja_files=False)
