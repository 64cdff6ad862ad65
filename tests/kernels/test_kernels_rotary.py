import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from espalier.kernels.rotary import apply_rotary, attention_factor, inverse_frequencies, rotary_table

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3 of Llama-3.2-1B": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn of Qwen2.5": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    "yarn with its own limits": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn with a given factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.1,
    },
    "llama3 within a few tokens": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def transformers_rotary(head_dim: int, theta: float, scaling: dict) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 500_000.0), (128, 10_000.0), (80, 1_000_000.0)])
def test_inverse_frequencies_equal_transformers(head_dim: int, theta: float, scaling: dict):
    rotary = transformers_rotary(head_dim, theta, scaling)
    torch.testing.assert_close(inverse_frequencies(head_dim, theta, scaling), rotary.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor(scaling) == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize("given", [{}, {"factor": 8.0}, {"attention_factor": 1.3}], ids=str)
def test_longrope_equals_transformers_within_the_length_it_was_trained_at(given: dict):
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1 + i / 7 for i in range(24)],
        "long_factor": [2 + i / 3 for i in range(24)],
        "original_max_position_embeddings": 4096,
        **given,
    }
    rotary = transformers_rotary(48, 10_000.0, scaling)
    torch.testing.assert_close(inverse_frequencies(48, 10_000.0, scaling), rotary.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor({"factor": 131_072 / 4096} | scaling) == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize("dims", [2, 10, 16])
def test_a_part_of_each_head_turns_and_the_rest_stays(dims: int):
    x, positions = torch.randn(5, 3, 16), torch.tensor([0, 1, 17, 4095, 9])
    cos, sin = rotary_table(inverse_frequencies(dims, 10_000.0, None), positions)
    turned = apply_rotary(x, cos, sin)
    assert torch.equal(turned[..., dims:], x[..., dims:])
    assert torch.equal(turned[..., :dims], apply_rotary(x[..., :dims], cos, sin))
    assert not torch.equal(turned[1:, ..., :dims], x[1:, ..., :dims])


def test_no_scaling_is_the_default_rule():
    plain = inverse_frequencies(64, 10_000.0, None)
    assert torch.equal(plain, inverse_frequencies(64, 10_000.0, {"rope_type": "default"}))
    assert attention_factor(None) == 1.0


@pytest.mark.parametrize("name", ["llama3 of Llama-3.2-1B", "yarn of Qwen2.5"])
def test_rotated_heads_equal_transformers_at_far_positions(name: str):
    rotary = transformers_rotary(64, 500_000.0, SCALINGS[name])
    positions = torch.tensor([0, 1, 17, 4095, 100_000])
    x = torch.randn(5, 3, 64)
    cos, sin = rotary_table(rotary.inv_freq, positions, attention_factor(SCALINGS[name]))
    their_cos, their_sin = rotary(x[None], positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], their_cos, their_sin)
    torch.testing.assert_close(apply_rotary(x, cos, sin), expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_rotation_keeps_the_dtype_and_computes_in_float32():
    x = torch.randn(3, 2, 8).bfloat16()
    cos, sin = rotary_table(inverse_frequencies(8, 10_000.0, None), torch.tensor([5, 900, 90_000]))
    rotated = apply_rotary(x, cos, sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rotary(x.float(), cos, sin).bfloat16())


def test_an_unknown_rope_type_is_named():
    with pytest.raises(ValueError, match="'ntk' is not supported"):
        inverse_frequencies(64, 10_000.0, {"rope_type": "ntk"})
