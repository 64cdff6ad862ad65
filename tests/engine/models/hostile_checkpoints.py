"""Checkpoints that are damaged, contradict themselves or mean harm, each a change to a good one, and what is right.

    for case in CASES:
        case.damage(folder)     # a copy of the good checkpoint `case.base`

`case.outcome` is `refused` (by an error of ours), `warned` or `same` (neither, and the text of the good one). An error
or a warning names all of `case.named`: the file, and the field or the tensor.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from hostile_changes import (
    CONFIG,
    GENERATION,
    SETTINGS,
    TEMPLATE,
    TOKENIZER,
    WEIGHTS,
    Change,
    Hostile,
    edited,
    fifo,
    filled,
    in_turn,
    inserted,
    linked,
    made_folder,
    named_tensor,
    set_fields,
    without,
    written,
)
from hostile_weights import CASES as WEIGHT_CASES

# config.json

_NUMBERS: dict[str, tuple[Any, ...]] = {
    "vocab_size": (0, 2**31, "338"),
    "hidden_size": (-32, 10**9),
    "intermediate_size": (0, 10**12),
    "num_hidden_layers": (10**9, 1e9, True, "2", [2]),
    "num_attention_heads": (0, 3, 10**9),
    "num_key_value_heads": (0, 3),
    "head_dim": (0, 7, 10**6, True),
    "max_position_embeddings": (0, 10**18, "512", True),
    "rms_norm_eps": (0, -1e-6, "1e-6", True),
}
_ROPES: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_theta": -10_000.0},
    "rope_type": {"rope_type": ["yarn"]},
    "factor": {"rope_type": "linear", "factor": -2.0},
    "high_freq_factor": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0},
    "beta_fast": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "32"},
    "attention_factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": "big"},
    "mscale": {"rope_type": "yarn", "factor": 2.0, "mscale": [1]},
    "truncate": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"},
    "rope_theta for yarn": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
    "full_attention": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
}
_OTHERS: dict[str, Any] = {
    "tie_word_embeddings": "true",
    "use_sliding_window": "false",
    "mlp_bias": 0,
    "hidden_act": ["silu"],
    "model_type": {"name": "qwen2"},
    "architectures": "Qwen2ForCausalLM",
    "rope_scaling": [2.0],
    "system_prompt": 7,
}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 16}

IN_CONFIG = [
    *(
        Hostile(f"{name} is {value!r}", set_fields(CONFIG, **{name: value}), (CONFIG, name))
        for name, values in _NUMBERS.items()
        for value in values
    ),
    *(
        Hostile(f"rope: {name}", set_fields(CONFIG, rope_parameters=rope), (CONFIG, name.split(" ", maxsplit=1)[0]))
        for name, rope in _ROPES.items()
        if name != "rope_type"
    ),
    Hostile("rope type is a list", set_fields(CONFIG, rope_parameters=_ROPES["rope_type"]), (CONFIG, "rope type")),
    *(
        Hostile(
            f"{name} is {value!r}", set_fields(CONFIG, **{name: value}), (CONFIG, name.replace("hidden_act", "act"))
        )
        for name, value in _OTHERS.items()
        if name != "model_type"
    ),
    Hostile("model_type is an object", set_fields(CONFIG, model_type={"a": 1}), (CONFIG, "model type")),
    Hostile("model_type is another's", set_fields(CONFIG, model_type="llama"), (".bias", "does not use")),
    Hostile("architectures are empty names", set_fields(CONFIG, architectures=[7]), (CONFIG, "architectures")),
    Hostile(
        "architectures and model_type differ",
        set_fields(CONFIG, architectures=["Qwen3ForCausalLM"]),
        (CONFIG, "architectures"),
        "warned",
    ),
    Hostile(
        "two rope types",
        set_fields(CONFIG, rope_scaling={"type": "linear", "factor": 2.0}),
        (CONFIG, "rope_scaling", "rope_parameters"),
    ),
    Hostile(
        "layer_types too few", set_fields(CONFIG, **_WINDOWED, layer_types=["full_attention"]), (CONFIG, "layer_types")
    ),
    Hostile(
        "layer_types unknown",
        set_fields(CONFIG, **_WINDOWED, layer_types=["linear_attention"] * 2),
        (CONFIG, "layer_types"),
    ),
    Hostile("layers fewer than stored", set_fields(CONFIG, num_hidden_layers=1), ("model.layers.1", "does not use")),
    Hostile("layers more than stored", set_fields(CONFIG, num_hidden_layers=3), ("model.layers.2",)),
    Hostile("another head_dim than stored", set_fields(CONFIG, head_dim=16), ("q_proj", "shape")),
    Hostile("fewer words than stored", set_fields(CONFIG, vocab_size=300), ("embed_tokens", "shape")),
    Hostile("no hidden_size", without(CONFIG, "hidden_size"), (CONFIG, "hidden_size")),
    Hostile("no model_type", without(CONFIG, "model_type"), (CONFIG, "model type")),
    Hostile(
        "quantised by a method", set_fields(CONFIG, quantization_config={"quant_method": "gptq"}), ("GPTQ", "none")
    ),
    Hostile("quantised by nonsense", set_fields(CONFIG, quantization_config="yes"), ("yes", "quantised")),
    Hostile("eps is NaN", inserted(CONFIG, '"rms_norm_eps_": NaN, '), (CONFIG, "NaN")),
    Hostile("theta is infinite", set_fields(CONFIG, rope_parameters={"rope_theta": 1e999}), (CONFIG, "Infinity")),
    Hostile("theta overflows", inserted(CONFIG, '"rope_theta": 1e999, '), (CONFIG, "rope_theta")),
    Hostile("a number of 5,000 digits", inserted(CONFIG, f'"x": {"9" * 5000}, '), (CONFIG,)),
    Hostile("a key twice", inserted(CONFIG, '"hidden_size": 64, '), (CONFIG, "hidden_size")),
    Hostile("nested without end", written(CONFIG, '{"a":' * 100_000), (CONFIG,)),
    Hostile("an array", written(CONFIG, "[]"), (CONFIG,)),
    Hostile("text", written(CONFIG, '"config"'), (CONFIG,)),
    Hostile("nothing", written(CONFIG, ""), (CONFIG,)),
    Hostile("not UTF-8", written(CONFIG, b"\xff\xfe\x00"), (CONFIG,)),
    Hostile("UTF-16", lambda folder: (folder / CONFIG).write_text((folder / CONFIG).read_text(), "utf-16"), (CONFIG,)),
    Hostile(
        "a byte order mark",
        lambda folder: (folder / CONFIG).write_text((folder / CONFIG).read_text(), "utf-8-sig"),
        outcome="same",
    ),
    Hostile("a folder", made_folder(CONFIG), (CONFIG,)),
    Hostile("a link to itself", linked(CONFIG, CONFIG), (CONFIG,)),
    Hostile("a link to nowhere", linked(CONFIG, "gone.json"), (CONFIG,)),
    Hostile("a pipe", fifo(CONFIG), (CONFIG,)),
    Hostile("without end", linked(CONFIG, "/dev/zero"), (CONFIG,)),
    Hostile("none", lambda folder: (folder / CONFIG).unlink(), (CONFIG,)),
]

# generation_config.json

IN_GENERATION = [
    *(
        Hostile(f"eos_token_id is {value!r}", set_fields(GENERATION, eos_token_id=value), (GENERATION, "eos_token_id"))
        for value in ("2", 2.0, True, -1, [[2]], {"id": 2})
    ),
    *(
        Hostile(f"{name} is {value!r}", set_fields(GENERATION, **{name: value}), (GENERATION, name), values=True)
        for name, value in {"temperature": "hot", "top_p": 7, "top_k": True, "min_p": [0]}.items()
    ),
    Hostile("an end beyond the embedding", set_fields(GENERATION, eos_token_id=[2, 999_999]), ("999999",), "warned"),
    Hostile("an array of settings", written(GENERATION, "[]"), (GENERATION,)),
    Hostile("settings as a folder", made_folder(GENERATION), (GENERATION,)),
    Hostile("no settings", lambda folder: (folder / GENERATION).unlink(), outcome="same"),
]

# tokenizer.json


def _added(edit: Callable[[dict[str, Any]], object]) -> Change:
    return edited(TOKENIZER, lambda read: edit(read["added_tokens"][-1]))


def _set(*path: Any, value: Any) -> Change:
    def edit(read: Any) -> None:
        for key in path[:-1]:
            read = read[key]
        read[path[-1]] = value

    return edited(TOKENIZER, edit)


def _normalizer(*steps: dict[str, Any]) -> Change:
    return _set("normalizer", value={"type": "Sequence", "normalizers": list(steps)})


_DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_ALONE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}, "single": []}
_FIXED = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}

IN_TOKENIZER = [
    Hostile("an added token's id is 1e9", _added(lambda token: token.update(id=10**9)), (TOKENIZER, "1000000000")),
    Hostile(
        "an added token's id is another's", _added(lambda token: token.update(id=7)), (TOKENIZER, "id 7"), "warned"
    ),
    Hostile("an added token's id is text", _added(lambda token: token.update(id="x")), (TOKENIZER,)),
    Hostile("an added token's id is negative", _added(lambda token: token.update(id=-1)), (TOKENIZER,)),
    Hostile("an added token without text", _added(lambda token: token.update(content=None)), (TOKENIZER,)),
    Hostile("added tokens are no list", _set("added_tokens", value={"a": 1}), (TOKENIZER,)),
    Hostile("a word's id is 1e9", _set("model", "vocab", "far", value=10**9), (TOKENIZER, "vocab", "far")),
    Hostile("a word's id is negative", _set("model", "vocab", "far", value=-5), (TOKENIZER,)),
    Hostile("a word's id is a fraction", _set("model", "vocab", "far", value=1.5), (TOKENIZER,)),
    Hostile("a word's id is true", _set("model", "vocab", "far", value=True), (TOKENIZER,)),
    Hostile("two words of one id", _set("model", "vocab", "far", value=5), (TOKENIZER, "vocab"), "warned"),
    Hostile(
        "a word twice", inserted(TOKENIZER, '"model": {"vocab": {"a": 1, "a": 2}}, '), (TOKENIZER, "a is given twice")
    ),
    Hostile("a merge of no words", _set("model", "merges", value=[["q", "zzz"]]), (TOKENIZER,)),
    Hostile("an unknown model", _set("model", "type", value="Oracle"), (TOKENIZER,)),
    Hostile("an unknown rule", _set("pre_tokenizer", value={"type": "Magic"}), (TOKENIZER,)),
    Hostile("a pattern that is none", _set("pre_tokenizer", value=_SPLIT | {"pattern": {"Regex": "(("}}), (TOKENIZER,)),
    Hostile(
        "a pattern that takes forever",
        _set("pre_tokenizer", value=_SPLIT | {"pattern": {"Regex": "([a-z ]|[a-z ][a-z ])+Q[0-9]"}}),
        (TOKENIZER,),
    ),
    Hostile(
        "a table of characters that is none",
        _normalizer({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        (TOKENIZER,),
    ),
    Hostile("text that doubles thirty times", _normalizer(*[_DOUBLE] * 30), (TOKENIZER, "normalizer")),
    Hostile(
        "text that grows at once",
        _normalizer({"type": "Replace", "pattern": {"String": " "}, "content": "x" * 10**6}),
        (TOKENIZER, "normalizer"),
    ),
    Hostile(
        "a post-processor that drops the text", _set("post_processor", value=_ALONE), (TOKENIZER, "post_processor")
    ),
    Hostile("words varied for training", _set("model", "dropout", value=0.9), (TOKENIZER, "dropout"), "warned"),
    Hostile(
        "texts cut to two tokens",
        _set("truncation", value={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}),
        outcome="same",
    ),
    Hostile(
        "texts cut with a stride that panics",
        _set("truncation", value={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 9}),
        outcome="same",
    ),
    Hostile(
        "texts padded to 1e8 tokens", _set("padding", value=_FIXED | {"strategy": {"Fixed": 10**8}}), outcome="same"
    ),
    Hostile("a prefix of words that panics", _set("model", "continuing_subword_prefix", value="##"), (TOKENIZER,)),
    Hostile("an empty tokenizer", written(TOKENIZER, "{}"), (TOKENIZER,)),
    Hostile("an array of words", written(TOKENIZER, "[]"), (TOKENIZER,)),
    Hostile("bytes for a tokenizer", written(TOKENIZER, os.urandom(64) + b"\xff"), (TOKENIZER,)),
    Hostile("a tokenizer that is a link to itself", linked(TOKENIZER, TOKENIZER), (TOKENIZER,)),
    Hostile("no tokenizer", lambda folder: (folder / TOKENIZER).unlink(), (TOKENIZER,)),
    Hostile(
        "an end that is no special token",
        edited(TOKENIZER, lambda read: [t.update(special=False) for t in read["added_tokens"] if t["id"] == 2]),
        outcome="same",
    ),
    Hostile(
        "an end that is an ordinary word",
        edited(
            TOKENIZER,
            lambda read: read.update(added_tokens=[t for t in read["added_tokens"] if t["content"] != "<|im_end|>"]),
        ),
        outcome="same",
    ),
]

# tokenizer_config.json

IN_SETTINGS = [
    *(
        Hostile(f"{name} is {value!r}", set_fields(SETTINGS, **{name: value}), (SETTINGS, name))
        for name, value in {
            "eos_token": 2,
            "bos_token": {"content": 7},
            "pad_token": ["<|endoftext|>"],
            "added_tokens_decoder": [1],
            "add_bos_token": "yes",
            "extra_special_tokens": "<|im_start|>",
        }.items()
    ),
    Hostile(
        "a token that is text", set_fields(SETTINGS, added_tokens_decoder={"1": 5}), (SETTINGS, "added_tokens_decoder")
    ),
    Hostile(
        "a chat template that is a number",
        in_turn(lambda folder: (folder / TEMPLATE).unlink(), set_fields(SETTINGS, chat_template=5)),
        (SETTINGS, "chat_template"),
    ),
    Hostile(
        "chat templates without a default",
        in_turn(
            lambda folder: (folder / TEMPLATE).unlink(),
            set_fields(SETTINGS, chat_template=[{"name": "tools", "template": "x"}, 5]),
        ),
        (SETTINGS, "chat_template"),
        "warned",
    ),
    Hostile("a special token that is not there", set_fields(SETTINGS, pad_token="<absent>"), outcome="same"),
    Hostile("a special token that is a word", set_fields(SETTINGS, pad_token="a"), outcome="same"),
    Hostile("settings in an array", written(SETTINGS, "[]"), (SETTINGS,)),
]

# The chat template


def _template(source: str) -> Change:
    return written(TEMPLATE, source)


_ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}" + "{% endfor %}" * 2
)
_NESTED = "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
_DOUBLING = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"

IN_TEMPLATE = [
    *(
        Hostile(f"template: {name}", _template(source), (TEMPLATE, *named))
        for name, (source, *named) in {
            "raises": ("{{ raise_exception('no prompts here') }}", "no prompts here"),
            "divides by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
            "never ends": (_ENDLESS, "of computing"),
            "adds list to number": ("{{ [] + 1 }}", "TypeError"),
            "multiplies text": ("{{ 'a' * 10**10 }}", "MiB"),
            "doubles text": (_DOUBLING, "more than"),
            "doubles a list": (_NESTED, "more than"),
            "pads text": ("{{ '%1000000000d' % 7 }}", "MiB"),
            "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
            "is no template": ("{% for m in messages %}", "line 1"),
            "names an unknown tag": ("{% magic %}", "line 1"),
            "nests too deep": ("{{ " + "(" * 4000 + "1" + ")" * 4000 + " }}", "RecursionError"),
            "reaches for Python": ("{{ messages.__class__.__mro__ }}", "unsafe"),
            "includes a file": ("{% include '/etc/passwd' %}", "loader"),
            "asks for what is not there": ("{{ messages[0].nothing.at.all }}", "nothing"),
            "writes for ever": ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "MiB"),
            "is too long": ("x" * (2**20 + 1), "characters"),
        }.items()
    ),
    Hostile("template: not UTF-8", written(TEMPLATE, b"\xff{{ messages }}"), (TEMPLATE,)),
    Hostile("template: a folder", made_folder(TEMPLATE), (TEMPLATE,)),
    Hostile(
        "template: writes 20 MB",
        _template("{% for i in range(2100) %}{{ 'a' * 9999 }}{% endfor %}"),
        (TEMPLATE, "characters"),
    ),
]

# Verifiers

IN_VERIFIERS = [
    *(
        Hostile(f"verifier: prm is {value!r}", set_fields(CONFIG, prm=value), (CONFIG, "prm"), base="classifier")
        for value in ("raw", [1], 7)
    ),
    Hostile("verifier: prm.prompt", set_fields(CONFIG, prm={"prompt": ["chat"]}), ("prm.prompt",), base="classifier"),
    Hostile(
        "verifier: a separator of 5",
        set_fields(CONFIG, prm={"step_separator": 5}),
        ("step_separator",),
        base="classifier",
    ),
    Hostile(
        "verifier: NaN in its head",
        named_tensor("score.weight", filled(float("nan"))),
        (WEIGHTS, "score.weight"),
        base="classifier",
        values=True,
    ),
    Hostile(
        "verifier: NaN in an embedding",
        named_tensor("model.embed_tokens.weight", filled(float("nan"))),
        (WEIGHTS, "embed_tokens.weight"),
        "warned",
        base="classifier",
        values=True,
    ),
    Hostile("verifier: three labels", named_tensor("score.weight", torch.zeros(3, 40)), ("labels",), base="classifier"),
    Hostile("verifier: no head", named_tensor("score.weight", None), ("score.weight",), base="classifier"),
    Hostile(
        "verifier: a theta of text",
        set_fields(CONFIG, rope_parameters={"rope_theta": "1e6"}),
        (CONFIG, "rope_theta"),
        base="math-prm",
    ),
    Hostile("verifier: a template that never ends", _template(_ENDLESS), (TEMPLATE, "of computing"), base="math-prm"),
    Hostile(
        "verifier: layers of 1e9",
        set_fields(CONFIG, num_hidden_layers=10**9),
        (CONFIG, "num_hidden_layers"),
        base="math-prm",
    ),
]

CASES = [
    *IN_CONFIG,
    *IN_GENERATION,
    *IN_TOKENIZER,
    *IN_SETTINGS,
    *IN_TEMPLATE,
    *WEIGHT_CASES,
    *IN_VERIFIERS,
]
