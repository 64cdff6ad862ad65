"""Recurrent modules of transformers over a flat batch, states in one memory: equal to their own plain forward."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from espalier.engine.models.zoo.calls import exchange_recurrent, filled_rows, running
from espalier.engine.models.zoo.description import register
from espalier.engine.models.zoo.layers import hidden_states
from espalier.engine.models.zoo.products import exchange
from espalier.engine.models.zoo.small import make_small
from espalier.engine.models.zoo.trial import Tracer, random_model, use_paged_attention
from espalier.kernels.attention import Terms
from espalier.kernels.cpu.backend import CpuBackend
from espalier.kernels.recurrent import StateRows
from espalier.kernels.torch_backend import TorchBackend

PASSES = ((5, 1, 0), (6, 9, 7), (1, 3, 6), (2, 1, 1))
"""New tokens of each sequence in each step: prompts, pieces of prompts and single tokens side by side."""
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 61, "pad_token_id": None}
_DELTA = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_MAMBA_2 = _SMALL | {
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "num_hidden_layers": 3,
}
_ZAMBA = _SMALL | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_next": _DELTA,
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 8},
    "kimi_linear": {},
    "bailing_hybrid": {},
    "nemotron_h": {},
    "granitemoehybrid": _MAMBA_2 | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4},
    "bamba": _MAMBA_2 | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA_2 | {"mamba_d_ssm": 64, "head_dim": 8},
    "mamba2": _SMALL | {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "num_hidden_layers": 2},
    "zamba2": _ZAMBA | {"n_mamba_heads": 8, "mamba_d_state": 16, "mamba_ngroups": 2, "chunk_size": 8},
    "zamba": _ZAMBA | {"n_mamba_heads": 2, "mamba_dt_rank": 8},
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm3": {},
}
"""Model types, and what makes a small model of them beside what `make_small` does."""
INDEPENDENT = [name for name in CONFIGS if name not in ("zamba", "mamba", "falcon_mamba", "jamba")]
"""All but those of the first Mamba, which multiply by products of torch that depend on how many tokens there are."""


def small_model(model_type: str) -> Any:
    """A random model of this type with a head over the vocabulary."""
    register()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config_class, given = CONFIG_MAPPING[model_type], CONFIGS[model_type]
    own = given.keys() >= {"hidden_size"}
    config = config_class(**given) if own else make_small(config_class(**given))
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return random_model(model_class, config)


class Steps:
    """Steps of a few sequences: attention over keys kept in lists, states in one memory, each in a place of its own."""

    config_windows = True

    def __init__(self, sequences: int) -> None:
        self.memory = torch.full((1 << 20,), float("nan"))
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._used = 0
        self.done = [0] * sequences

    def begin(self, sequences: list[int], counts: list[int]) -> None:
        """The step that `counts` new tokens of `sequences` are computed in."""
        self._rows, self._spans = sequences, torch.tensor([0, *counts]).cumsum(0)
        self._attended = self._recurred = 0

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        output = query.new_zeros(*query.shape[:2], value.shape[-1])
        for row, start, end in zip(self._rows, self._spans, self._spans[1:], strict=False):
            place = (self._attended, row)
            before = self._kept.get(place, (key[:0], value[:0]))
            k, v = torch.cat((before[0], key[start:end])), torch.cat((before[1], value[start:end]))
            self._kept[place] = k, v
            for t in range(int(end - start)):  # one by one, so that a token's bits do not depend on how many come
                seen = len(k) - int(end - start) + t + 1
                first = max(0, seen - (terms.window or seen))
                parts = query[start + t, :, None], k[first:seen].transpose(0, 1), v[first:seen].transpose(0, 1)
                q, own_k, own_v = (part[None] for part in parts)
                one = F.scaled_dot_product_attention(q, own_k, own_v, scale=terms.scale, enable_gqa=True)
                output[start + t] = one[0, :, 0]
        self._attended += 1
        return output

    def rows(self, *shape: int) -> StateRows:
        sources, targets = [], []
        for row in self._rows:
            place = (self._recurred, row)
            sources.append(self._places.get(place, -1))
            if place not in self._places:
                self._places[place], self._used = self._used, self._used + torch.Size(shape).numel()
            targets.append(self._places[place])
        self._recurred += 1
        return StateRows(self.memory, self._spans, torch.tensor(sources), torch.tensor(targets))


def some_texts() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(4, 61, (sum(counts),), generator=random) for counts in zip(*PASSES, strict=True)]


def prepared(model: Any, backend: TorchBackend) -> Any:
    """The model with its products, attention and recurrent layers exchanged."""
    use_paged_attention(model)
    exchange(model, backend, lambda weight, *_: weight)
    exchange_recurrent(model, backend)
    return model


def in_steps(model: Any, texts: list[torch.Tensor], passes: Sequence[Sequence[int]], filled: int) -> list[torch.Tensor]:
    """Hidden states of each text, computed side by side; steps are filled up to a multiple of `filled` tokens."""
    steps, found = Steps(len(texts)), [[] for _ in texts]
    for counts in passes:
        rows = [row for row, count in enumerate(counts) if count]
        positions = [torch.arange(steps.done[row], steps.done[row] + counts[row]) for row in rows]
        ids = [texts[row][which] for row, which in zip(rows, positions, strict=True)]
        total = sum(counts)
        ids, positions = (F.pad(torch.cat(each), (0, -total % filled)) for each in (ids, positions))
        steps.begin(rows, [counts[row] for row in rows])
        with torch.inference_mode(), running(steps):
            hidden = hidden_states(model.base_model, ids, positions)
        for row, part in zip(rows, hidden[:total].split([counts[row] for row in rows]), strict=True):
            found[row].append(part)
            steps.done[row] += counts[row]
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize(
    ("model_type", "backend"),
    [*((name, TorchBackend()) for name in CONFIGS), *((name, CpuBackend()) for name in INDEPENDENT)],
)
def test_texts_in_pieces_side_by_side_equal_the_plain_forward_of_each(model_type: str, backend: TorchBackend):
    model, texts = small_model(model_type), some_texts()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = torch.cat([model.base_model(text[None], use_cache=False)[0][0] for text in texts])
    found = torch.cat(in_steps(prepared(model, backend), texts, PASSES, 7))
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("model_type", INDEPENDENT)
def test_a_text_has_the_same_bits_alone_and_in_other_pieces(model_type: str):
    model, texts = prepared(small_model(model_type), CpuBackend()), some_texts()
    filled = 32  # vectors of torch are full then, however few heads and experts these small models have
    beside = in_steps(model, texts, PASSES, filled)
    for text, expected in zip(texts, beside, strict=True):
        for pieces in ([len(text)], [1] * len(text), [2, len(text) - 2]):
            (alone,) = in_steps(model, [text], [[count] for count in pieces], filled)
            assert torch.equal(alone, expected)


def test_tracing_finds_the_states_of_a_model_without_memory():
    model = small_model("qwen3_next").to("meta")
    use_paged_attention(model)
    exchange_recurrent(model, TorchBackend())
    tracer = Tracer(config_windows=True)
    ids = torch.arange(3, device="meta")
    with torch.inference_mode(), running(tracer):
        hidden_states(model.base_model, ids, ids)
    channels = 2 * 4 * 16 + 8 * 16
    assert tracer.states == [(3, channels), (8, 16, 16)] * 2
    assert filled_rows(tracer.states) == 4
    assert filled_rows([(3, 90), (30, 16, 16), (24, 8, 8)]) == 16
    assert filled_rows([(2, 64)]) == 1
