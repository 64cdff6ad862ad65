"""End tokens of a turn and first tokens of a prompt, by everything that a checkpoint says; and its system prompt.

A token ends what a model generates if one of these says so. None overrules another: makers forget one place or two, and
a token that ends a text in one place means nothing else in another.

    config.json              eos_token_id, one id or a list
    generation_config.json   eos_token_id, likewise
    tokenizer_config.json    eos_token, eot_token, eom_token; eos_token of special_tokens_map.json, too. An ordinary
                             word (a full stop, a newline) counts only where no other file names an end
    chat template            the special token that it writes right after what the assistant says
    name                     a token called `<|im_end|>` or another of `END_NAMES` is one in every model that has it,
                             also where its type says that it is an ordinary word

A GGUF file has the ids as tokenizer.ggml.eos_token_id, eot_token_id and eom_token_id, and the template and token types
beside them. A token that the model has no embedding for is never drawn, and ends nothing.

What a prompt begins with is up to the chat template, which writes `bos_token` or does not. Text without a template
begins with `bos_token` where `add_bos_token` of tokenizer_config.json is true (in a GGUF file
tokenizer.ggml.add_bos_token, or what llama.cpp takes for a file without it), and where nothing says so, with what the
post-processor of tokenizer.json adds. A `bos_token` that is only named is not added: Qwen's files name one, and its
models never saw it there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from espalier.engine.errors import CheckpointError, TemplateLimitError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.options import GGUF
from espalier.engine.models.text_files import A_TEXT, require
from espalier.engine.models.tokenizer import END_NAMES, TextTokenizer

STEP_SYSTEM_PROMPT = (
    "Solve the following math problem step by step. For a short problem, use few steps. Start each step with "
    '"## Step k: " and a short title, and leave one blank line between steps. End with one line that says '
    r'"Therefore, the final answer is: $\boxed{answer}$."'
)
"""Default system prompt for instruction-tuned models: asks for steps separated by blank lines."""
_ID = "eos_token_id"
_END_FIELDS = ("eos_token", "eot_token", "eom_token")
_ANSWER = "It is 5"
"""An assistant's text where a template is asked for what comes after."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A token that ends what a model generates.

    Attributes:
        token_id: its id.
        token: as it is written; empty if the tokenizer has none of this id.
        sources: the files and fields that say so.
    """

    token_id: int
    token: str
    sources: tuple[str, ...]


def system_prompt_of(checkpoint: Checkpoint) -> str:
    """The system prompt that a checkpoint asks for, or `STEP_SYSTEM_PROMPT`.

    Raises:
        CheckpointError: `system_prompt` in its config.json is no text.
    """
    found = checkpoint.config.get("system_prompt", STEP_SYSTEM_PROMPT)
    place = checkpoint.files.place("config.json")
    return require(place, "system_prompt", found, *A_TEXT)


def turn_ends(checkpoint: Checkpoint, tokenizer: TextTokenizer) -> tuple[TurnEnd, ...]:
    """The tokens that end a turn, in order of id; see the module.

    Raises:
        CheckpointError: an eos_token_id is no id.
        TemplateLimitError: the chat template takes too much time or memory.
    """
    found: dict[int, list[str]] = {}
    by_name = ((i, "name") for i in map(tokenizer.token_id, END_NAMES) if i is not None)
    ways = _by_id(checkpoint), _by_field(checkpoint, tokenizer, found), _by_use(tokenizer), by_name
    for token_id, source in chain(*ways):
        found.setdefault(token_id, []).append(source)
    return tuple(TurnEnd(i, tokenizer.token(i), tuple(sources)) for i, sources in sorted(found.items()))


def embedded_ends(checkpoint: Checkpoint, tokenizer: TextTokenizer, vocab_size: int) -> tuple[int, ...]:
    """Ids of the tokens that end a turn and that a model with an embedding of `vocab_size` tokens can draw.

    Raises:
        CheckpointError: the ids that the configurations give are all of other weights; else see `turn_ends`.
    """
    ends = turn_ends(checkpoint, tokenizer)
    if not ends:
        checkpoint.warn(f"{checkpoint.folder} names no token that ends a turn ({_ID}): texts end at their limits")
    beyond = [end for end in ends if end.token_id >= vocab_size]
    given = [end for end in ends if any(source.endswith(_ID) for source in end.sources)] or ends
    listed = ", ".join(str(end.token_id) for end in beyond)
    why = f"beyond the embedding of {vocab_size} tokens"
    if given and all(end in beyond for end in given):
        raise CheckpointError(f"{checkpoint.folder}: its end token {listed} is {why}; is {_ID} that of these weights?")
    for end in given:
        if end in beyond:
            checkpoint.warn(f"{end.sources[0]} of {checkpoint.folder} gives {end.token_id}, which is {why}")
    return tuple(end.token_id for end in ends if end not in beyond)


def _by_id(checkpoint: Checkpoint) -> Iterator[tuple[int, str]]:
    for name in ("config.json", "generation_config.json"):
        given = (checkpoint.config if name == "config.json" else checkpoint.files.optional_json(name)).get(_ID)
        place, rule = f"{name} of {checkpoint.folder}", "an id from 0 on, or a list of them"
        for each in given if isinstance(given, list) else [] if given is None else [given]:
            yield require(place, _ID, each, rule, lambda it: type(it) is int and it >= 0), f"{name} {_ID}"


def _by_field(
    checkpoint: Checkpoint, tokenizer: TextTokenizer, known: dict[int, list[str]]
) -> Iterator[tuple[int, str]]:
    """Tokens that the tokenizer's settings name; `known` are the ends that were found before."""
    source = "tokenizer.ggml.{}_id" if checkpoint.folder.suffix == GGUF else "tokenizer_config.json {}"
    named = [(tokenizer.special_token(name), source.format(name)) for name in _END_FIELDS]
    listed = checkpoint.files.optional_json("special_tokens_map.json").get("eos_token")
    named.append((listed.get("content") if isinstance(listed, dict) else listed, "special_tokens_map.json eos_token"))
    have_end = bool(known)
    for token, source in named:
        token_id = tokenizer.token_id(token) if isinstance(token, str) else None
        if token_id is not None and (tokenizer.is_special(token_id) or not have_end):
            yield token_id, source


def _by_use(tokenizer: TextTokenizer) -> Iterator[tuple[int, str]]:
    if tokenizer.chat_template is None:
        return
    turns = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.render_chat(turns, False, enable_thinking=False)
    except TemplateLimitError:
        raise
    except CheckpointError:  # it has something against these turns; a prompt that it fails on is an error of its own
        return
    _, _, after = text.rpartition(_ANSWER)
    ids = tokenizer.encode(after.lstrip()) if after != text else []
    if ids and tokenizer.is_special(ids[0]):
        yield ids[0], "chat template"
