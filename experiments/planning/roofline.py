"""The least time that a step, and a round of a search, can take on a GPU: bytes, products and launches on paper.

A decode step reads every weight of the layers and of the head once, and every key and value once that its rows see; a
verifier's step multiplies. What a step takes beyond this is what software adds.
"""

from dataclasses import dataclass

from espalier.engine.models.options import Quantization
from espalier.experiments.planning.known_models import ModelShape

KERNELS_OF_A_LAYER = 10
"""Norms, products, rotation, two widths of attention and their merge, gate."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU.

    Attributes:
        bandwidth: bytes read or written in a second, as a large copy reaches it.
        matrix_rate: bfloat16 operations in a second, as a large product reaches it.
        kernel_seconds: the least time of a kernel within a CUDA graph.
        int8_rate: operations in a second with int8 weights, where these are multiplied as bytes; 0 where they are not.
    """

    bandwidth: float
    matrix_rate: float
    kernel_seconds: float = 2e-6
    int8_rate: float = 0.0

    def rate_of(self, model: ModelShape) -> float:
        """Operations in a second of products with a model's weights."""
        as_bytes = self.int8_rate > 0 and model.quantization is Quantization.INT8
        return self.int8_rate if as_bytes else self.matrix_rate


CARDS = {
    "a100": Card(1.75e12, 260e12),
    "h100": Card(3.0e12, 700e12),
    "h200": Card(4.3e12, 790e12),
}
"""A100 and H100 (80 GB, SXM): nine tenths of the data sheet's bandwidth or less; H200: measured."""


def decode_seconds(model: ModelShape, card: Card, rows: int, context: int, shared: int, tokens: int = 1) -> float:
    """Seconds of a decode step.

    Args:
        model: its sizes, in bfloat16.
        card: the GPU.
        rows: sequences.
        context: tokens of each sequence.
        shared: of these, how many are the same blocks for all rows.
        tokens: computed of each sequence; more than one where drafts are verified.
    """
    unique = shared + rows * (context - shared)
    moved = model.weight_bytes + unique * model.kv_bytes_per_token
    multiplied = 2 * rows * tokens * model.parameters / card.rate_of(model)
    launches = KERNELS_OF_A_LAYER * model.config.num_layers * card.kernel_seconds
    return max(moved / card.bandwidth, multiplied, launches)


def scoring_seconds(model: ModelShape, card: Card, tokens: int, cached: int) -> float:
    """Seconds to compute `tokens` new tokens beside `cached` ones that are read again."""
    moved = model.weight_bytes + (tokens + cached) * model.kv_bytes_per_token
    launches = KERNELS_OF_A_LAYER * model.config.num_layers * card.kernel_seconds
    return max(moved / card.bandwidth, 2 * tokens * model.parameters / card.rate_of(model), launches)
