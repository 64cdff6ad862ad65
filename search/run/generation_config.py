"""Defaults of sampling from a checkpoint's `generation_config.json`, and a warning of what is not applied."""

from collections.abc import Mapping
from typing import Any

from espalier.engine.models.text_files import require, shown

_MIN_TOP_P = 1e-9
"""top_p that keeps only the most likely token, as a configured 0 does in transformers."""


def sampling_defaults(defaults: dict[str, Any]) -> dict[str, Any]:
    """Values of `generation_config.json` for the parameters of sampling that requests leave open, or those without.

    Raises:
        CheckpointError: one of them is not a number or is out of range.
    """
    return {
        "temperature": _configured(defaults, "temperature", 0.8, 0, 10),
        "top_k": max(int(_configured(defaults, "top_k", 0, -1, 2**31 - 1)), 0),  # -1 is another word for all
        "top_p": max(_configured(defaults, "top_p", 1, 0, 1), _MIN_TOP_P),
        "min_p": _configured(defaults, "min_p", 0, 0, 1),
        "repetition_penalty": _configured(defaults, "repetition_penalty", 1, 1e-6, 100),
    }


_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    # what changes a draw in transformers or vLLM, and its values besides null that change nothing
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p", "num_beams", "guidance_scale"), (1,)),
    **dict.fromkeys(("sequence_bias", "logit_bias"), ({}, [])),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "forced_decoder_ids"), ([],)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("top_h", "watermarking_config", "dola_layers"), ()),
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "xtc_probability", "mirostat"), (0,)),
    "stop_strings": ([], ""),
    "token_healing": (False,),
}


def not_applied(defaults: Mapping[str, Any]) -> str:
    """Warn of what `generation_config.json` sets that changes draws and is not applied; empty for nothing."""
    found = {
        name: value
        for name, harmless in _NOT_APPLIED.items()
        if (value := defaults.get(name)) is not None and value not in harmless
    }
    text = " and ".join(f"{name} {shown(value)}" for name, value in found.items())
    return f"generation_config.json has {text}, which {'is' if len(found) == 1 else 'are'} not applied" if found else ""


def _configured(defaults: dict[str, Any], name: str, default: float, minimum: float, maximum: float) -> float:
    """Read a value of `generation_config.json`; the default if it is absent."""
    if (value := defaults.get(name)) is None:
        return default

    def in_range(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum

    rule = f"a number from {minimum} to {maximum}"
    return float(require("generation_config.json", name, value, rule, in_range))


Parameters = Mapping[str, float]
"""`temperature`, `top_k` and `top_p`."""
_PAIRS: tuple[tuple[Parameters, Parameters], ...] = (
    # Qwen3's model cards, "Best Practices"
    ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}),
)
"""Those for thinking, and those without."""


def sampling_for(configured: Parameters, thinks: bool) -> Parameters:
    """The parameters of a mode that differ from those in the file; empty where the file's are used.

    Args:
        configured: those of the file, others are ignored; of a checkpoint that can think and be kept from it.
        thinks: whether the model thinks in this mode.
    """
    for pair in _PAIRS:
        if any(all(configured.get(name) == value for name, value in each.items()) for each in pair):
            return {name: value for name, value in pair[not thinks].items() if configured[name] != value}
    return {}
