"""What a call of transformers' attention means, and which linear layers share a product."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from espalier.engine.models.zoo.calls import attention_function, running
from espalier.engine.models.zoo.products import exchange, layers_by_input
from espalier.kernels.attention import Terms
from espalier.kernels.recurrent import StateRows
from espalier.kernels.torch_backend import TorchBackend

KINDS = ["sliding_attention", "full_attention"]


class Recorder:
    """A step that notes what it is asked for."""

    def __init__(self, config_windows: bool = True) -> None:
        self.config_windows = config_windows
        self.terms: list[Terms] = []

    def attend(self, module: nn.Module, query: Any, key: Any, value: torch.Tensor, terms: Terms) -> torch.Tensor:
        self.terms.append(terms)
        return value

    def rows(self, *shape: int) -> StateRows:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("config", "layer", "window"),
    [
        ({"sliding_window": 7}, {}, 7),
        ({"sliding_window": 7, "use_sliding_window": True}, {}, 7),
        ({"sliding_window": 7, "use_sliding_window": False}, {}, None),
        ({"sliding_window": None}, {}, None),
        ({"use_sliding_window": True}, {}, None),
        ({}, {}, None),
        ({"sliding_window": 7, "layer_types": KINDS}, {"layer_idx": 0}, 7),
        ({"sliding_window": 7, "layer_types": KINDS}, {"layer_idx": 1}, None),
        ({"sliding_window": 7, "layer_types": KINDS}, {}, 7),
        ({"sliding_window": 7, "layer_types": [], "use_sliding_window": False}, {"layer_idx": 0}, None),
        ({"sliding_window": 7}, {"layer_idx": 1}, 7),
        ({"sliding_window": 7}, {"sliding_window": 3}, 3),
        ({"sliding_window": 7}, {"sliding_window": None}, None),
        (None, {}, None),
    ],
)
def test_a_layer_whose_model_passes_no_window_has_its_own_or_its_configurations(
    config: dict[str, Any] | None, layer: dict[str, Any], window: int | None
):
    module, states = nn.Module(), torch.zeros(1, 2, 3, 4)
    for name, value in (layer | ({} if config is None else {"config": SimpleNamespace(**config)})).items():
        setattr(module, name, value)
    for config_windows in (True, False):
        step = Recorder(config_windows)
        with running(step):
            attention_function(module, states, states, states, None)
        told = config_windows or "sliding_window" in layer
        assert [terms.window for terms in step.terms] == [window if told else None]


class Repeating(nn.Module):
    """`one`, `other`, `twice` and a router read the same tensor, and `twice` one more."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.twice, self.router = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.one(x) + self.twice(x) + self.other(x) + self.router(x)
        return first + self.twice(first)


def test_layers_that_read_one_tensor_and_no_other_share_a_product():
    model, x = Repeating().requires_grad_(False), torch.randn(3, 4)
    groups = layers_by_input(model, lambda: model(x))
    assert groups == (("one", "other"),)
    expected = model(x)
    exchange(model, TorchBackend(), lambda weight, *_: weight, groups)
    assert model.one.product is model.other.product  # type: ignore[union-attr]
    torch.testing.assert_close(model(x), expected)
