"""Sizes of the models that figures for GPUs are about; no checkpoint is needed for them."""

from dataclasses import dataclass

from espalier.engine.models.options import Quantization
from espalier.engine.models.quantization import linear_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes.

    Attributes:
        outputs: what its head gives for a token: logits, or a PRM's labels.
        item_bytes: bytes of a weight that is not quantised, and of an element of a key or value; 2 for bfloat16.
        quantization: how the weights of the layers are kept.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    outputs: int
    item_bytes: int = 2
    quantization: Quantization = Quantization.NONE

    @property
    def parameters(self) -> int:
        """Weights that every token is multiplied with: of the layers and the head."""
        heads = self.heads + 2 * self.kv_heads
        layer = self.hidden * self.head_dim * (heads + self.heads) + 3 * self.hidden * self.inner
        return self.layers * layer + self.hidden * self.outputs

    @property
    def weight_bytes(self) -> int:
        """Their bytes."""
        attended = self.heads * self.head_dim
        weights = (
            (attended + 2 * self.kv_heads * self.head_dim, self.hidden), (self.hidden, attended),
            (2 * self.inner, self.hidden), (self.hidden, self.inner),
        )  # fmt: skip
        layer = sum(linear_bytes(*weight, self.item_bytes, self.quantization) for weight in weights)
        return self.layers * layer + self.item_bytes * self.hidden * self.outputs

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return self.item_bytes * 2 * self.layers * self.kv_heads * self.head_dim


MODELS = {
    model.name: model
    for model in (
        ModelShape("Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 128, 151_936, 151_936),
        ModelShape("Qwen2.5-Math-PRM-7B", 28, 3584, 18_944, 28, 4, 128, 152_064, 2),
        ModelShape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128_256, 128_256),
        ModelShape("Llama-3.1-8B-PRM", 32, 4096, 14_336, 32, 8, 128, 128_256, 2),
    )
}
PAIRS = (("Qwen2.5-1.5B", "Qwen2.5-Math-PRM-7B"), ("Llama-3.2-1B", "Llama-3.1-8B-PRM"))
"""Generator and verifier."""
