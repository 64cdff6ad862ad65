"""Norms and rotations of transformers' modules that are exchanged for a backend's, and those that are left alone."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from zoo_models import small_config

from espalier.engine.models.zoo.pointwise import exchange_pointwise
from espalier.engine.models.zoo.trial import random_model
from espalier.kernels.layers import rms_norm
from espalier.kernels.rotary import rotate_halves
from espalier.kernels.torch_backend import TorchBackend


class Fused(TorchBackend):
    """Has both operations, in torch, and counts their calls."""

    def __init__(self) -> None:
        self.norms = self.rotations = 0

    fuses_pointwise = True

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # type: ignore[override]
        self.norms += 1
        return rms_norm(x, weight, eps)

    def rotate_halves(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.rotations += 1
        return rotate_halves(x, cos, sin)


def decoder(kind: str) -> Any:
    config = small_config(kind)
    mapping: Any = transformers.MODEL_MAPPING
    return random_model(mapping[type(config)], config)


@pytest.mark.parametrize(
    ("kind", "norms", "rotations"),
    [
        ("llama", 2, 2),
        ("gemma2", 4, 2),  # one is added to its weights
        ("qwen3", 4, 2),  # of heads, too
        ("gpt_oss", 2, 0),  # its tables are half as wide
        ("glm4", 4, 0),  # turns neighbours, and some elements of a head only
        ("deepseek_v3", 4, 0),  # one more is of a part of what a product gives
        ("olmo", 0, 2),  # layer norms without weights
        ("starcoder2", 0, 2),  # layer norms with biases
    ],
)
def test_what_a_class_computes_decides_and_its_states_stay_the_same(kind: str, norms: int, rotations: int):
    model, backend, ids = decoder(kind), Fused(), torch.arange(4, 15)[None]
    with torch.inference_mode():
        expected = model(ids, use_cache=False)[0]
        exchange_pointwise(model, backend)
        found = model(ids, use_cache=False)[0]
    layers = model.config.num_hidden_layers
    assert (backend.norms, backend.rotations) == (layers * norms + (norms > 0), layers * rotations)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


class Other(nn.Module):
    """Looks like RMSNorm, with another place for eps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class Plain(Other):
    """RMSNorm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def test_a_norm_that_only_looks_like_one_is_left_and_another_dtype_is_the_classs_own():
    model, backend = nn.Sequential(Other(), Plain()), Fused()
    exchange_pointwise(model, backend)
    x = torch.randn(3, 8)
    model(x)
    assert backend.norms == 1
    model[1](x.double())
    assert backend.norms == 1


def test_a_backend_without_them_changes_nothing():
    model = decoder("llama")
    before = {name: module.forward for name, module in model.named_modules()}
    exchange_pointwise(model, TorchBackend())
    assert all(module.forward == before[name] for name, module in model.named_modules())
