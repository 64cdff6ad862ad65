"""The verifier's network: a language model's trunk, widened, with layers on top that begin knowing what to compare.

A verifier on such a trunk has to notice that a token is not the one that the model expected. That is nearly all it
needs where the model knows the task well: one's first choice agreed with the oracle on 99% of the tokens that follow a
right prefix. Two things stand in the way of layers simply put on top, and both are mended here,
in the initial weights; everything after that is learned from labels.

- The trunk forgets which token it stands on, for a language model only needs the next one: a linear probe of its last
  layer reads the digit just given in 60% of the cases. So the residual stream is `EXTRA` dimensions wider, and every
  token's embedding writes a code of its own there, which no trunk layer reads or changes.
- What was expected at a position is known one position earlier. So most heads of the first added layer begin as
  previous-token heads, and one of them fetches the model's logits of the commonest solution tokens.

The stream is also scaled to a size near one: at the generator's own, about a hundred, fresh layers are not heard. The
norm before every layer makes both changes invisible to the trunk, but for the code's small share in its norms, which
the norms' weights make up for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

ADDED_LAYERS = 2
"""Layers on top of the trunk: one to compare, one to gather the comparisons of a step and of those before it."""
EXTRA = 64
"""Dimensions the stream is widened by: `COMMON` one-hot, then random, then `COMMON` for what was expected."""
COMMON = 16
"""Solution tokens that have a dimension of their own."""
CODE_NORM = math.sqrt(8.0)
"""Length of every token's code, so that its share in a norm is the same for all."""
_ONE_HOT = 2.0
_FETCHED, _FETCHED_SCALE = slice(EXTRA - COMMON, EXTRA), 1 / 6
_PREVIOUS_SHARPNESS, _PREVIOUS_FREQUENCIES = 8.0, 8
_GATE, _DOWN = 3.0, 0.5


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """Median root mean square of the generator's residual stream.

    Attributes:
        attention: Before each layer's attention.
        mlp: Before each layer's MLP.
        end: After the last layer.
    """

    attention: list[float]
    mlp: list[float]
    end: float


@torch.inference_mode()
def stream_sizes(generator: Qwen2ForCausalLM, ids: Tensor) -> StreamSizes:
    """Measures the stream on token ids [rows, length]."""
    sizes = StreamSizes([], [], 0.0)
    last: list[float] = []

    def note(into: list[float]) -> Any:
        return lambda _, inputs: into.append(inputs[0].pow(2).mean(-1).sqrt().median().item())

    hooks = [generator.model.norm.register_forward_pre_hook(note(last))]
    layers: Any = generator.model.layers
    for layer in layers:
        hooks.append(layer.input_layernorm.register_forward_pre_hook(note(sizes.attention)))
        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(note(sizes.mlp)))
    generator.model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return StreamSizes(sizes.attention, sizes.mlp, last[0])


def verifier_config(generator: Qwen2Config) -> Qwen2Config:
    """Returns the generator's shape, wider by `EXTRA` and higher by `ADDED_LAYERS`, with two labels."""
    config = Qwen2Config.from_dict(generator.to_dict())
    head_dim = generator.hidden_size // generator.num_attention_heads
    config.hidden_size = generator.hidden_size + EXTRA
    config.num_attention_heads = config.hidden_size // head_dim
    assert generator.num_key_value_heads is not None
    groups = generator.num_attention_heads // generator.num_key_value_heads
    config.num_key_value_heads = config.num_attention_heads // groups
    config.num_hidden_layers = generator.num_hidden_layers + ADDED_LAYERS
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.architectures = ["Qwen2ForTokenClassification"]
    config.num_labels = 2
    config.id2label = {0: "wrong", 1: "right"}
    config.label2id = {"wrong": 0, "right": 1}
    config.use_cache = False
    config.classifier_dropout = 0.0
    config._attn_implementation = "sdpa"
    return config


@torch.no_grad()
def new_verifier(
    generator: Qwen2ForCausalLM, common: Sequence[int], sizes: StreamSizes, seed: int
) -> Qwen2ForTokenClassification:
    """Returns a verifier whose first layers compute what the generator's do.

    Args:
        generator: Left as it is.
        common: Ids of the `COMMON` commonest solution tokens.
        sizes: Of the generator's stream.
        seed: Of the added weights.
    """
    torch.manual_seed(seed)
    verifier = Qwen2ForTokenClassification(verifier_config(generator.config))
    source: Any = generator.model
    target: Any = verifier.model
    target.embed_tokens.weight.copy_(_embeddings(source.embed_tokens.weight, common, sizes.attention[0] / sizes.end))
    target.embed_tokens.weight.requires_grad_(False)  # tiny beside the codes: an optimizer's step would drown it
    trunk = generator.config.num_hidden_layers
    for index in range(trunk):
        _copy_layer(source.layers[index], target.layers[index], sizes, index)
    for layer in target.layers[trunk:]:
        nn.init.normal_(layer.self_attn.v_proj.weight, std=0.05)
        nn.init.normal_(layer.mlp.gate_proj.weight, std=0.05)
        nn.init.normal_(layer.mlp.up_proj.weight, std=0.05)
    first = target.layers[trunk]
    unembedding = source.embed_tokens.weight[list(common)]
    _look_back(first.self_attn)
    _fetch_expected(first.self_attn, (unembedding - unembedding.mean(0)) * source.norm.weight)
    _compare(first.mlp)
    return verifier


def train_trunk(verifier: Qwen2ForTokenClassification, wanted: bool) -> None:
    """Lets the generator's layers learn, or leaves them out of the training, which is then nearly twice as fast."""
    for layer in verifier.model.layers[:-ADDED_LAYERS]:
        layer.requires_grad_(wanted)


def _embeddings(trunk: Tensor, common: Sequence[int], size: float) -> Tensor:
    """Returns the trunk's embeddings, each of root mean square `size`, with the tokens' codes beside them."""
    rows = torch.arange(len(common))
    scattered = nn.functional.normalize(torch.randn(trunk.shape[0], EXTRA - 2 * COMMON), dim=1) * CODE_NORM
    scattered[list(common)] *= math.sqrt(CODE_NORM**2 - _ONE_HOT**2) / CODE_NORM
    one_hot = torch.zeros(trunk.shape[0], COMMON)
    one_hot[list(common), rows] = _ONE_HOT
    room = torch.zeros(trunk.shape[0], COMMON)
    scaled = trunk / trunk.pow(2).mean(1, keepdim=True).sqrt().clamp_min(1e-6) * size
    return torch.cat([scaled, one_hot, scattered, room], 1)


def _put(target: Tensor, source: Tensor, factor: float = 1.0) -> None:
    """Writes `source * factor` into the top left corner of `target`, zeros elsewhere."""
    target.zero_()
    target[tuple(slice(length) for length in source.shape)] = source * factor


def _copy_layer(source: Any, target: Any, sizes: StreamSizes, index: int) -> None:
    narrow, wide = source.input_layernorm.weight.shape[0], target.input_layernorm.weight.shape[0]
    for name, size in (
        ("input_layernorm", sizes.attention[index] / sizes.end),
        ("post_attention_layernorm", sizes.mlp[index] / sizes.end),
    ):
        widened = math.sqrt((size**2 * narrow + CODE_NORM**2) / wide)
        _put(getattr(target, name).weight, getattr(source, name).weight, widened / size)
        getattr(target, name).weight[narrow:] = 1.0
    for name in ("q_proj", "k_proj", "v_proj"):
        _put(getattr(target.self_attn, name).weight, getattr(source.self_attn, name).weight)
        _put(getattr(target.self_attn, name).bias, getattr(source.self_attn, name).bias)
    _put(target.self_attn.o_proj.weight, source.self_attn.o_proj.weight, 1 / sizes.end)
    _put(target.mlp.gate_proj.weight, source.mlp.gate_proj.weight)
    _put(target.mlp.up_proj.weight, source.mlp.up_proj.weight)
    _put(target.mlp.down_proj.weight, source.mlp.down_proj.weight, 1 / sizes.end)


def _look_back(attention: Any) -> None:
    """Makes all heads but those of the last KV head attend to the previous position.

    Their queries and keys are constants, the query turned back by one position: the rotary embedding does the rest.
    """
    config, dim, sharp = attention.config, attention.head_dim, _PREVIOUS_SHARPNESS
    turns = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)[:_PREVIOUS_FREQUENCIES]
    query, key = torch.zeros(dim), torch.zeros(dim)
    key[:_PREVIOUS_FREQUENCIES] = sharp
    query[:_PREVIOUS_FREQUENCIES] = sharp * turns.cos()
    query[dim // 2 : dim // 2 + _PREVIOUS_FREQUENCIES] = -sharp * turns.sin()
    kv_heads = config.num_key_value_heads - 1
    heads = kv_heads * attention.num_key_value_groups
    for projection, vector, count in ((attention.q_proj, query, heads), (attention.k_proj, key, kv_heads)):
        projection.weight[: count * dim] = 0
        projection.bias[: count * dim] = vector.repeat(count)


def _fetch_expected(attention: Any, unembedding: Tensor) -> None:
    """Makes the first head move the generator's logits `unembedding @ stream` into the stream's last dimensions."""
    count, narrow = unembedding.shape
    _put(attention.v_proj.weight[:count], unembedding, _FETCHED_SCALE)
    attention.v_proj.bias.zero_()
    room = attention.o_proj.weight[narrow:][_FETCHED]
    attention.o_proj.weight[:, :count] = 0
    room.zero_()
    room[:, :count] = torch.eye(COMMON, count)


def _compare(mlp: Any) -> None:
    """Makes the first units multiply a token's own dimension with what was expected of it, and add up the products."""
    wide = mlp.gate_proj.weight.shape[1]
    narrow, rows = wide - EXTRA, torch.arange(COMMON)
    mlp.gate_proj.weight[:COMMON] = 0
    mlp.up_proj.weight[:COMMON] = 0
    mlp.gate_proj.weight[rows, narrow + rows] = _GATE
    mlp.up_proj.weight[rows, wide - COMMON + rows] = 1.0
    mlp.down_proj.weight[:, :COMMON] = nn.functional.normalize(torch.randn(wide, 1), dim=0) * _DOWN
