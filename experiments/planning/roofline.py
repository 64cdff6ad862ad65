"""Models by their sizes, and the least time that their steps can take on a GPU: bytes, products and launches on paper.

A decode step reads every weight of the layers and of the head once, and every key and value once that its rows see; a
verifier's step multiplies. What a step takes beyond this is what software adds. Drafts gain where reading takes longer
than multiplying: the weights are read once for all tokens of a draft.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.families import parse_decoder_config
from espalier.engine.models.options import Quantization
from espalier.engine.models.quantization import layer_bytes
from espalier.engine.speculation.lengths import LENGTHS

KERNELS_OF_A_LAYER = 10
"""Norms, products, rotation, two widths of attention, gate."""
MODEL_ACCEPTANCE = 0.91
"""Share of a draft model's tokens that are what the path draws, behind tokens that are: measured at 3,264 positions of
Qwen2.5-Coder-1.5B, for which the one of 0.5B drafts, at temperature 0.7; at 0 it is 0.92."""
TREE_ACCEPTANCE = 0.24
"""The same of the tree's, where it proposes nothing, too: `bench drafts` got 1.32 tokens a step of that model."""
MIN_GAIN = 1.05
"""Drafts pay from so many times the tokens a second on, as `MeasuredLength` has it."""
_MAX_ROWS = 4096


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
"""Models that are planned, and measured on GPUs, without a checkpoint."""
PAIRS = (("Qwen2.5-1.5B", "Qwen2.5-Math-PRM-7B"), ("Llama-3.2-1B", "Llama-3.1-8B-PRM"))
"""Generator and verifier."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU.

    Attributes:
        bandwidth: bytes read or written in a second, as a large copy reaches it.
        matrix_rate: bfloat16 operations in a second, as a large product reaches it.
        kernel_seconds: the least time of a kernel within a CUDA graph.
        int8_rate: operations in a second with int8 weights, where these are multiplied as bytes; 0 where they are not.
        memory: bytes by the data sheet; 0 if unknown.
    """

    bandwidth: float
    matrix_rate: float
    kernel_seconds: float = 2e-6
    int8_rate: float = 0.0
    memory: int = 0

    def seconds(self, model: ModelShape, moved: float, tokens: int) -> float:
        """The least time to move so many bytes, and to multiply a model's weights with so many tokens."""
        as_bytes = self.int8_rate > 0 and model.quantization is Quantization.INT8
        multiplied = 2 * tokens * model.parameters / (self.int8_rate if as_bytes else self.matrix_rate)
        launches = KERNELS_OF_A_LAYER * model.config.num_layers * self.kernel_seconds
        return max(moved / self.bandwidth, multiplied, launches)


CARDS = {
    "a100": Card(1.75e12, 260e12, memory=80 * 10**9),
    "h100": Card(3.0e12, 700e12, memory=80 * 10**9),
    "h200": Card(4.3e12, 790e12, memory=141 * 10**9),
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
    return card.seconds(model, model.weight_bytes + unique * model.kv_bytes_per_token, rows * tokens)


def scoring_seconds(model: ModelShape, card: Card, tokens: int, cached: int) -> float:
    """Seconds to compute `tokens` new tokens beside `cached` ones that are read again."""
    return card.seconds(model, model.weight_bytes + (tokens + cached) * model.kv_bytes_per_token, tokens)


def tokens_of_a_pass(acceptance: float, length: int) -> float:
    """Tokens that a path gets of a step with a draft of `length` tokens, each accepted with the same probability."""
    return sum(acceptance**i for i in range(length + 1))


def pass_seconds(
    target: ModelShape, draft: ModelShape | None, card: Card, rows: int, context: int, length: int
) -> float:
    """Seconds in which `rows` paths of `context` tokens draft `length` tokens each and verify them.

    Args:
        target: the generator.
        draft: the model that drafts, a token of all paths at a time; None for drafts that take no time.
        card: the GPU.
        rows: paths, which share nothing.
        context: tokens of each.
        length: tokens of a draft; 0 for a step without.
    """
    drafting = length * decode_seconds(draft, card, rows, context, 0) if draft else 0.0
    return drafting + decode_seconds(target, card, rows, context, 0, 1 + length)


def draft_rows(
    target: ModelShape, draft: ModelShape | None, card: Card, context: int, acceptance: float, most: int
) -> dict[str, Any]:
    """Gains of drafts by the size of the batch.

    Args:
        target: see `pass_seconds`, as for all other arguments.
        draft: None for drafts from the tree.
        card: the GPU.
        context: tokens of a path.
        acceptance: the share of drafted tokens that is accepted.
        most: tokens of a draft at most.

    Returns:
        `acceptance`; `pays_up_to`, the largest batch that gains `MIN_GAIN`, 0 for none and None for every one up to
        4,096; and `batches` of 1, 2, 4 and so on paths up to the first that gains less, each with the draft that gives
        the most tokens a second.
    """
    lengths = [length for length in LENGTHS if length < most] + [most]

    def best(rows: int) -> dict[str, Any]:
        without = 1 / pass_seconds(target, None, card, rows, context, 0)
        rates = {
            length: tokens_of_a_pass(acceptance, length) / pass_seconds(target, draft, card, rows, context, length)
            for length in lengths
        }
        length = max(rates, key=lambda each: rates[each])
        if rates[length] < MIN_GAIN * without:
            length = 0
        tokens = tokens_of_a_pass(acceptance, length)
        return {
            "rows": rows,
            "draft_tokens": length,
            "tokens_of_a_pass": tokens,
            "milliseconds_without": 1e3 / without,
            "milliseconds": 1e3 * tokens / rates[length],
            "gain": rates[length] / without,
        }

    batches = [best(1)]
    while batches[-1]["draft_tokens"] and batches[-1]["rows"] < _MAX_ROWS:
        batches.append(best(2 * batches[-1]["rows"]))
    last, pays = batches[-1]["rows"], None
    if not batches[-1]["draft_tokens"]:
        between = range(last // 2 + 1, last)
        pays = last // 2 + bisect_left(between, True, key=lambda rows: not best(rows)["draft_tokens"])
    return {"acceptance": acceptance, "pays_up_to": pays, "batches": batches}
