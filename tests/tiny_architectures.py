"""Configurations of every kind of decoder that the engine knows, small; transformers makes the models."""

from collections.abc import Mapping

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
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
        "qwen2-yarn": (
            Qwen2ForCausalLM,
            make(Qwen2Config, **_rope("yarn", factor=4.0, original_max_position_embeddings=32)),
        ),
    }
