"""A language model's head: all that its class does to the hidden states to give logits."""

from typing import Any

import torch
from torch import nn


class _Outputs(tuple[torch.Tensor, ...]):
    """A decoder's output with hidden states alone; other attributes are None."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _GivenStates(nn.Module):
    """Stands where a class has its decoder, with the decoder's numbers, and gives back the states that it is given."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        for name, value in vars(decoder).items():
            if isinstance(value, int | float) and name not in vars(self):
                setattr(self, name, value)

    @property
    def decoder(self) -> "_GivenStates":
        """Itself: some classes call a part of their decoder."""
        return self

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _Outputs:
        """`inputs_embeds`, as hidden states."""
        return _Outputs((inputs_embeds,))


class LogitsHead:
    """Hidden states `[R, hidden]` to logits `[R, vocabulary]`, with a class's caps, factors and biases."""

    def __init__(self, model: Any) -> None:
        """Keep `model`, a language model of transformers whose decoder was taken out."""
        self.model = model

    @classmethod
    def split(cls, model: Any) -> tuple[Any, "LogitsHead"]:
        """The decoder of a language model, and its head without the decoder."""
        name = decoder_name(model)
        decoder = getattr(model, name)
        setattr(model, name, _GivenStates(decoder))
        return decoder, cls(model)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        with torch.inference_mode():
            return self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]


def decoder_name(model: Any) -> str:
    """The attribute of a language model of transformers that holds its decoder."""
    return model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
