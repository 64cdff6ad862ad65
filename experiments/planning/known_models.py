"""Sizes of models on paper, and those that figures for GPUs are about; no checkpoint is needed for them."""

from dataclasses import dataclass

from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.families import parse_decoder_config
from espalier.engine.models.options import Quantization
from espalier.engine.models.quantization import layer_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes.

    Attributes:
        config: its decoder.
        outputs: what its head gives for a token: logits, or a PRM's labels.
        item_bytes: bytes of a weight that is not quantised, and of an element of a key or value; 2 for bfloat16.
        quantization: how the weights of the layers are kept.
        memory_bytes: bytes of all weights on the device, 0 if unknown; `weight_bytes` lacks the embedding unless it is
            tied.
    """

    name: str
    config: DecoderConfig
    outputs: int
    item_bytes: int = 2
    quantization: Quantization = Quantization.NONE
    memory_bytes: int = 0

    @property
    def parameters(self) -> int:
        """Weights that every token is multiplied with: of the layers and the head."""
        return self.config.layer_weights + self.config.hidden_size * self.outputs

    @property
    def weight_bytes(self) -> int:
        """Their bytes."""
        layer = layer_bytes(self.config, self.item_bytes, self.quantization)
        return self.config.num_layers * layer + self.item_bytes * self.config.hidden_size * self.outputs

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return self.config.kv_bytes_per_token(self.item_bytes)


def known_model(name: str, sizes: tuple[int, int, int, int, int, int, int], outputs: int) -> ModelShape:
    """A Llama-style model of these sizes: layers, hidden, inner, heads, KV heads, head dimension, vocabulary."""
    names = (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size",
    )  # fmt: skip
    others = {"model_type": "llama", "rope_theta": 1e6, "max_position_embeddings": 131_072}
    return ModelShape(name, parse_decoder_config({**dict(zip(names, sizes, strict=True)), **others}), outputs)


MODELS = {
    model.name: model
    for model in (
        known_model("Qwen2.5-0.5B", (24, 896, 4864, 14, 2, 64, 151_936), 151_936),
        known_model("Qwen2.5-1.5B", (28, 1536, 8960, 12, 2, 128, 151_936), 151_936),
        known_model("Qwen2.5-Math-PRM-7B", (28, 3584, 18_944, 28, 4, 128, 152_064), 2),
        known_model("Llama-3.2-1B", (16, 2048, 8192, 32, 8, 64, 128_256), 128_256),
        known_model("Llama-3.1-8B-PRM", (32, 4096, 14_336, 32, 8, 128, 128_256), 2),
    )
}
PAIRS = (("Qwen2.5-1.5B", "Qwen2.5-Math-PRM-7B"), ("Llama-3.2-1B", "Llama-3.1-8B-PRM"))
"""Generator and verifier."""
