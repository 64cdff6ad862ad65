"""Configurations of every kind of decoder that the engine knows, small; transformers makes the models."""

from collections.abc import Mapping

from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def _rope(kind: str, **parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


def architectures(shared: Mapping[str, object]) -> dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]]:
    """Model class and configuration by name; windows are shorter than a block, a chunk of prefill, and most texts."""

    def make(kind: type[PreTrainedConfig], **options: object) -> PreTrainedConfig:
        return kind(**{**shared, **_SHAPE, **options})  # type: ignore[arg-type]

    return {
        "qwen3": (Qwen3ForCausalLM, make(Qwen3Config, head_dim=16, tie_word_embeddings=True)),
        "qwen3-biased": (Qwen3ForCausalLM, make(Qwen3Config, head_dim=12, attention_bias=True)),
        "mistral": (MistralForCausalLM, make(MistralConfig, sliding_window=None, head_dim=24)),
        "mistral-window": (MistralForCausalLM, make(MistralConfig, sliding_window=5)),
        "qwen2-late-window": (
            Qwen2ForCausalLM,
            make(Qwen2Config, use_sliding_window=True, sliding_window=3, max_window_layers=1),
        ),
        "qwen3-mixed-window": (
            Qwen3ForCausalLM,
            make(
                Qwen3Config,
                head_dim=8,
                use_sliding_window=True,
                sliding_window=6,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
        ),
        "llama-biased": (LlamaForCausalLM, make(LlamaConfig, attention_bias=True)),
        "llama-linear": (LlamaForCausalLM, make(LlamaConfig, **_rope("linear", factor=4.0))),
        "llama-dynamic": (LlamaForCausalLM, make(LlamaConfig, **_rope("dynamic", factor=4.0))),
        "gemma3": (
            Gemma3ForCausalLM,
            make(
                Gemma3TextConfig,
                head_dim=12,
                sliding_window=5,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                query_pre_attn_scalar=20,
                rope_parameters={
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                },
            ),
        ),
        "gemma3-biased": (
            Gemma3ForCausalLM,
            make(Gemma3TextConfig, head_dim=16, sliding_window=3, attention_bias=True, tie_word_embeddings=False),
        ),
        "phi3": (Phi3ForCausalLM, make(Phi3Config, sliding_window=7)),
        "phi3-longrope": (
            Phi3ForCausalLM,
            make(
                Phi3Config,
                num_attention_heads=2,
                num_key_value_heads=1,
                tie_word_embeddings=True,
                original_max_position_embeddings=128,
                **_rope(
                    "longrope",
                    partial_rotary_factor=0.75,
                    short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 3.0],
                    long_factor=[2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
                ),
            ),
        ),
        "qwen2-yarn": (
            Qwen2ForCausalLM,
            make(Qwen2Config, **_rope("yarn", factor=4.0, original_max_position_embeddings=32)),
        ),
    }
