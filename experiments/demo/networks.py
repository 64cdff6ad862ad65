"""The generator's network, built from transformers' own Qwen2 modules."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from espalier.experiments.demo.tokenizer import MAX_LENGTH

GENERATOR_LAYERS = 5


def generator_config(vocab_size: int, end_id: int, pad_id: int) -> Qwen2Config:
    """Returns the shape of the generator, about 4 million parameters."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=GENERATOR_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )


def new_generator(config: Qwen2Config, seed: int) -> Qwen2ForCausalLM:
    """Returns a freshly initialised generator."""
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    return Qwen2ForCausalLM(config)
