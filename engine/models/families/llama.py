"""Llama and Mistral (Touvron et al., 2023; Jiang et al., 2023): what other families differ from.

Mistral has no biases, and one window for all layers.
"""

from espalier.engine.models.config import Fields, NativeConfig, read_config, read_window
from espalier.engine.models.families.base import Family


def _read_llama(fields: Fields) -> NativeConfig:
    biased = fields.flag("attention_bias")
    return read_config(fields, attention_bias=biased, out_bias=biased)


def _read_mistral(fields: Fields) -> NativeConfig:
    return read_config(fields, windows=(read_window(fields),) * fields.count("num_hidden_layers"))


LLAMA = Family("llama", "Llama", _read_llama)
MISTRAL = Family("mistral", "Mistral", _read_mistral)
