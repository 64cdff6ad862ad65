"""A policy and its reference model as one decoder: they share KV blocks, and their hidden states are concatenated."""

from dataclasses import replace

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.decoder import Decoder
from espalier.engine.models.model import Head
from espalier.kernels.batch import StepBatch
from espalier.kernels.layout import LayerKV
from espalier.kernels.linear import Linear
from espalier.prm.heads import log_probability_head


class PolicyPairDecoder(Decoder):
    """Runs two decoders on the same tokens; the KV layout has the first one's layers first."""

    def __init__(self, first: Decoder, second: Decoder) -> None:
        """Join two decoders.

        Raises:
            CheckpointError: their KV shapes or vocabulary sizes differ.
        """
        one, other = first.config, second.config
        for name in ("num_kv_heads", "head_dim", "vocab_size"):
            if getattr(one, name) != getattr(other, name):
                raise CheckpointError(
                    f"the verifier's {name} is {getattr(one, name)}, its reference's is {getattr(other, name)}; give "
                    "--verifier-reference the model that the verifier was trained from"
                )
        self.first = first
        self.second = second
        self.backend = first.backend
        self.embedding = first.embedding
        self.weight_bytes = first.weight_bytes + second.weight_bytes
        self.config = replace(
            one,
            num_layers=one.num_layers + other.num_layers,
            kv_layers=one.kv_layers + other.kv_layers,
            max_positions=min(one.max_positions, other.max_positions),
        )

    def states_of(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One part: the states of two decoders stand side by side."""
        return (states,)

    @torch.inference_mode()
    def forward(self, step: StepBatch, layer_kvs: list[LayerKV]) -> torch.Tensor:
        """See `Decoder.forward`; returns `[T, hidden size of the first + of the second]`."""
        return torch.cat([one.forward(step, kvs) for one, kvs in self._with_layers(layer_kvs)], dim=-1)

    def warm_up(self, layer_kvs: list[LayerKV], decodes: bool) -> None:
        """See `Decoder.warm_up`."""
        for one, kvs in self._with_layers(layer_kvs):
            one.warm_up(kvs, decodes)

    def release(self, layer_kvs: list[LayerKV]) -> None:
        """See `Decoder.release`."""
        for one, kvs in self._with_layers(layer_kvs):
            one.release(kvs)

    def _with_layers(self, layer_kvs: list[LayerKV]) -> tuple[tuple[Decoder, list[LayerKV]], ...]:
        layers = self.first.config.num_layers
        return (self.first, layer_kvs[:layers]), (self.second, layer_kvs[layers:])


def log_ratio_head(first: Linear, second: Linear, coefficient: float) -> Head:
    """`coefficient` times the difference of a target token's log-probabilities, first model minus second."""
    width = first.in_features
    one, other = log_probability_head(first), log_probability_head(second)

    def head(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        of_first, of_second = hidden[:, :width].contiguous(), hidden[:, width:].contiguous()
        return coefficient * (one(of_first, targets) - other(of_second, targets))

    return head
