"""The weights of all layers of a decoder, in the order that products read them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from espalier.kernels.cpu.products.int8_linear import GROUP, Int8Weight, int8_of_kept, kept_int8
from espalier.kernels.cpu.products.linear import PANEL, pack, room_for_weights
from espalier.kernels.layers import DecoderSpec, LayerWeights
from espalier.kernels.linear import Kept


class StackedWeights(NamedTuple):
    """Weights of all L layers, in panels as `linear.pack` makes them; as arrays, those in panels are flat.

    With weights in int8 those in panels are `Int8Weight`, and as arrays `Int8Panels`.

    Attributes:
        norms: `[L, 2, hidden]`, before attention and before the MLP; `[L, 4, hidden]` where results of both are
            normalised, too.
        head_norms: `[L, 2, head_dim]`, of queries and keys; `[L, 0, head_dim]` without.
        qkv_bias: `[L, rows of qkv, filled up to whole panels]`.
        out_bias: `[L, hidden]`; `[L, 0]` without. Where attention's result is normalised, it is what the product begins
            with: `[L, hidden, filled up to whole panels]`, zeros without.
        qkv: `[L, panel, hidden, PANEL]`.
        out: `[L, panel, heads * head_dim, PANEL]`.
        gate_up: `[L, panel, hidden, PANEL]`, up's panels after gate's.
        down: `[L, panel, inner, PANEL]`.
    """

    norms: Any
    head_norms: Any
    qkv_bias: Any
    out_bias: Any
    qkv: Any
    out: Any
    gate_up: Any
    down: Any


def run_in_one_call(layer: LayerWeights) -> bool:
    """True if weights of this form can be stacked: those in float32, and those in int8 without rows to fill up."""
    if isinstance(layer.qkv, Int8Weight):
        return not any(weight.shape[1] % GROUP for weight in (layer.qkv, layer.out, layer.down))
    return isinstance(layer.qkv, torch.Tensor)


class StackedLayers:
    """The weights of all layers, each kind in one piece of memory.

    Attributes:
        packed: the weights.
        int8: whether they are in int8, else in float32.
        inner: the MLP's width, before it is filled up to whole panels.
        refined: panels of qkv that are refined; see `Int8Weight`.
        arrays: what compiled code reads: `StackedWeights` of arrays, those in panels flat or `Int8Panels`.
    """

    def __init__(self, packed: StackedWeights, inner: int) -> None:
        """Have weights that are packed; see `load`, and `of_kept`."""
        self.packed, self.inner = packed, inner
        self.int8 = isinstance(packed.qkv, Int8Weight)
        self.refined = packed.qkv.refined if isinstance(packed.qkv, Int8Weight) else 0
        self.arrays = StackedWeights(*(_as_array(whole) for whole in packed))

    @classmethod
    def load(cls, count: int, load: Callable[[int], LayerWeights], spec: DecoderSpec) -> "StackedLayers":
        """Pack the weights of `count` layers, which `load` gives one by one, so that copies replace originals."""
        first = load(0)
        packed = StackedWeights(*(_room(count, part) for part in _pack(first, spec)))
        for index in range(count):
            for whole, part in zip(packed, _pack(load(index) if index else first, spec), strict=True):
                _of_each(lambda whole, part, index=index: whole[index].copy_(part), whole, part)
        return cls(packed, first.down.shape[1])

    @classmethod
    def of_kept(cls, kept: Kept) -> "StackedLayers":
        """The layers whose weights `kept` gave."""
        tensors, facts = kept
        packed = (
            tensors[name] if name in tensors else int8_of_kept(tensors, facts, name) for name in StackedWeights._fields
        )
        return cls(StackedWeights(*packed), facts["inner"])

    def kept(self) -> Kept | None:
        """All weights, for `of_kept`; None where they are not in int8."""
        if not self.int8:
            return None
        tensors = dict[str, torch.Tensor]()
        facts: dict[str, Any] = {"inner": self.inner}
        for name, part in self.packed._asdict().items():
            if isinstance(part, Int8Weight):
                its = kept_int8(part, name)
                tensors, facts = {**tensors, **its.tensors}, {**facts, **its.facts}
            else:
                tensors[name] = part
        return Kept(tensors, facts)


def _pack(layer: LayerWeights, spec: DecoderSpec) -> StackedWeights:
    bias = torch.zeros(layer.qkv.shape[0]) if layer.qkv_bias is None else layer.qkv_bias
    of_heads = [norm for norm in (layer.query_norm, layer.key_norm) if norm is not None]
    post = [norm for norm in (layer.attention_post_norm, layer.mlp_post_norm) if norm is not None]
    out_bias = torch.empty(0) if layer.out_bias is None else layer.out_bias
    if post:
        out_bias = F.pad(out_bias, (0, -(-layer.out.shape[0] // PANEL) * PANEL - len(out_bias)))
    around = StackedWeights(
        norms=torch.stack((layer.attention_norm, layer.mlp_norm, *post)),
        head_norms=torch.stack(of_heads) if of_heads else torch.empty(0, spec.head_dim),
        qkv_bias=F.pad(bias, (0, -len(bias) % PANEL)),
        out_bias=out_bias,
        qkv=layer.qkv,
        out=layer.out,
        gate_up=layer.gate_up,
        down=layer.down,
    )
    if isinstance(layer.qkv, Int8Weight):
        return around
    return around._replace(
        qkv=pack(layer.qkv),
        out=pack(layer.out),
        gate_up=torch.cat([pack(half) for half in layer.gate_up.chunk(2)]),
        down=pack(F.pad(layer.down, (0, -layer.down.shape[1] % PANEL))),  # as wide as gate's and up's panels
    )


def _of_each(function: Callable[..., Any], *parts: Any) -> Any:
    """Apply `function` to parts that are tensors, or to the tensors of each `Int8Weight`."""
    if not isinstance(parts[0], Int8Weight):
        return function(*parts)
    values, scales = (function(*(getattr(part, name) for part in parts)) for name in ("values", "scales"))
    return Int8Weight(parts[0].shape, values, scales, parts[0].refined)


def _room(count: int, part: Any) -> Any:
    """Memory for what is packed of `count` layers."""
    return _of_each(lambda tensor: room_for_weights(count, *tensor.shape, dtype=tensor.dtype), part)


def _as_array(whole: Any) -> Any:
    if isinstance(whole, Int8Weight):
        return whole.panels
    return whole.numpy() if whole.dim() < 4 else whole.view(-1).numpy()
