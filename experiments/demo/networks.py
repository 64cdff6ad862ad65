"""The two networks, built from transformers' own Qwen2 modules."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from espalier.experiments.demo.tokenizer import MAX_LENGTH

GENERATOR_LAYERS = 5
ADDED_LAYERS = 2
"""Layers the verifier has on top of the generator's trunk. Without them it does not learn to judge."""


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


def new_verifier(generator: Qwen2ForCausalLM, seed: int) -> Qwen2ForTokenClassification:
    """Returns a verifier: the generator's trunk, new layers on top that start as the identity, and a two-label head."""
    torch.manual_seed(seed)
    config = Qwen2Config.from_dict(generator.config.to_dict())
    config.num_hidden_layers = GENERATOR_LAYERS + ADDED_LAYERS
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.architectures = ["Qwen2ForTokenClassification"]
    config.num_labels = 2
    config.id2label = {0: "wrong", 1: "right"}
    config.label2id = {"wrong": 0, "right": 1}
    config.use_cache = False
    config.classifier_dropout = 0.0
    config._attn_implementation = "sdpa"
    verifier = Qwen2ForTokenClassification(config)
    missing = verifier.model.load_state_dict(generator.model.state_dict(), strict=False)
    assert not missing.unexpected_keys, missing.unexpected_keys
    for layer in verifier.model.layers[GENERATOR_LAYERS:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return verifier
