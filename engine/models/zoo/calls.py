"""Calls of transformers' modules into the engine: attention, and recurrent layers over states in the KV pool.

transformers' decoders look their attention up by the name in their configuration, and call it as

    function(module, query, key, value, attention_mask, scaling=, dropout=, **kwargs) -> (output, None)

with `query [1, heads, T, head_dim]` and `output [1, T, heads, value_dim]`. A step is a flat batch: the tokens of
several sequences side by side in one row. A decoder's calls of attention and of recurrent layers come in the same order
in every step, so a call is known by its number. The step is a context variable, for some models pass no further keyword
arguments down.

transformers' recurrent modules (Gated DeltaNet, Kimi's delta attention, Mamba, Mamba-2, short convolutions) call a few
functions of their Python module by the same names in all models: a convolution, and a scan or a delta rule over whole
sequences. Their forward passes are run here as they are, without a cache, with these functions exchanged for the
backend's, which know where the rows of a flat batch begin and where their states lie. So a module is called once for
all rows of a step, whatever they are: prompts, pieces of prompts, single tokens.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from espalier.kernels.attention import Terms
from espalier.kernels.backend import Backend
from espalier.kernels.linear import Linear
from espalier.kernels.recurrent import StateRows

NAME = "espalier"
"""The name that the function is registered by; no mask function has it, so models make no masks."""
_WITHOUT_MEANING = frozenset(("position_ids", "cache_position", "use_cache", "dropout", "scaling", "layer_idx"))
"""Keyword arguments that do not change what a token attends to, whatever their value."""


class NotRunnableError(ValueError):
    """A decoder that this attention cannot serve; the message is the reason."""


class Step(Protocol):
    """The step that calls of attention and of recurrent layers belong to.

    Attributes:
        config_windows: whether a layer of which neither call nor attribute says so has its configuration's window.
    """

    config_windows: bool

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """Attention of one call.

        Args:
            module: the layer that calls.
            query: `[T, heads, head_dim]`.
            key: `[T, kv_heads, head_dim]`.
            value: `[T, kv_heads, value_dim]`.
            terms: see `Terms`.

        Returns:
            `[T, heads, value_dim]`.
        """
        ...

    def rows(self, *shape: int) -> StateRows:
        """Places of the next recurrent call's states, whose shape for one sequence is `shape`."""
        ...


_step: ContextVar[Step] = ContextVar("espalier_step")


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Let calls on this thread belong to `step`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that is registered with transformers; see the module.

    Raises:
        NotRunnableError: an argument asks for attention of another kind.
    """
    if attention_mask is not None:
        raise NotRunnableError("it makes an attention mask of its own")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise NotRunnableError("its attention is not causal")
    step, left = _step.get(), dict(kwargs)
    scale, softcap = left.pop("scaling", None), left.pop("softcap", None)
    sinks = [left.pop(name) for name in ("s_aux", "sinks") if left.get(name) is not None]
    window = left.pop("sliding_window") if "sliding_window" in left else _window_of(module, step.config_windows)
    if unknown := [name for name, value in left.items() if value is not None and not _harmless(name, value)]:
        raise NotRunnableError(f"it passes {', '.join(unknown)} to attention, which is not known")
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    terms = Terms(scale=scale, window=window, softcap=softcap, sinks=sinks[0] if sinks else None)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, head_dim]
    return step.attend(module, q, k, v, terms)[None], None


def _harmless(name: str, value: object) -> bool:
    """True for arguments that mean nothing here: flags for other outputs come down to attention in some models."""
    return name in _WITHOUT_MEANING or name == "is_causal" or (name.startswith(("output_", "return_")) and not value)


def _window_of(module: torch.nn.Module, config_windows: bool) -> int | None:
    """The window of a layer whose model does not pass it: the layer's own attribute, or else its configuration's."""
    config: Any = getattr(module, "config", None)
    if isinstance(own := getattr(module, "sliding_window", None), int):
        return own
    if hasattr(module, "sliding_window") or config is None or not config_windows:
        return None
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and index is not None:
        return config.sliding_window if kinds[index] == "sliding_attention" else None
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


def filled_rows(shapes: Sequence[tuple[int, ...]]) -> int:
    """The multiple that the tokens of a step are filled up to, so that none depends on the rest of the step.

    The modules take a sigmoid or softplus for each token and head, `[T, heads]`, of which torch computes the last
    elements otherwise where they fill no two vectors.
    """
    return math.lcm(*(_TWO_VECTORS // math.gcd(_TWO_VECTORS, shape[0]) for shape in shapes if len(shape) == 3))


_TWO_VECTORS = 32
"""Elements of two vectors of the widest kind that torch computes with on a CPU."""


def keeps_state(module: torch.nn.Module) -> bool:
    """True for a module that keeps a recurrent state."""
    names = inspect.unwrap(type(module).forward).__code__.co_names
    return any(name.startswith("update_") and name.endswith("_state") for name in names)


def exact_layers(model: torch.nn.Module) -> frozenset[str]:
    """Names of linear layers of recurrent modules that are not quantised.

    A module reads the weights of some by itself; others have few outputs, which say what a state keeps and forgets.
    """
    found: set[str] = set()
    for parent, module in model.named_modules():
        if not keeps_state(module):
            continue
        read = _read_weights(module)
        layers = {name: layer for name, layer in module.named_children() if isinstance(layer, torch.nn.Linear)}
        width = next((layer.in_features for layer in layers.values()), 0)  # of what the module reads and gives
        for name, layer in layers.items():
            few = 2 * layer.out_features <= layer.in_features and layer.out_features != width
            if few or name in read:
                found.add(f"{parent}.{name}")
    return frozenset(found)


def exchange_recurrent(model: torch.nn.Module, backend: Backend) -> None:
    """Have every recurrent module of `model` call the backend's operations, in place.

    Raises:
        NotRunnableError: a module keeps a state in a way that is not known.
    """
    operations = _Operations(backend)
    for module in model.modules():
        if keeps_state(module):
            forward = inspect.unwrap(type(module).forward)
            known = {
                name: getattr(operations, given) for name, given in _EXCHANGED.items() if name in forward.__globals__
            }
            if not known.keys() & set(forward.__code__.co_names):
                raise NotRunnableError(f"its {type(module).__name__} keeps a recurrent state of an unknown kind")
            exchanged = with_globals(forward, known)
            read = {name: _ReadLinear(module, name, backend) for name in _read_weights(module)}
            module.forward = MethodType(exchanged, _Seen(module, read) if read else module)


def with_globals(forward: Any, given: Mapping[str, Any]) -> FunctionType:
    """A function of Python for which some global names mean something else."""
    parts = forward.__code__, {**forward.__globals__, **given}, forward.__name__, forward.__defaults__
    made = FunctionType(*parts, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _read_weights(module: torch.nn.Module) -> list[str]:
    """Names of the linear layers whose weights a module multiplies itself, instead of calling them."""
    source = inspect.getsource(inspect.unwrap(type(module).forward))
    return [name for name, _ in module.named_children() if f"self.{name}.weight @" in source]


class _Seen:
    """A module as its forward pass sees it: with other things in the place of some layers."""

    def __init__(self, module: torch.nn.Module, layers: Mapping[str, Any]) -> None:
        self._module = module
        self._layers = layers

    def __getattr__(self, name: str) -> Any:
        return self._layers[name] if name in self._layers else getattr(self._module, name)


class _ReadLinear:
    """Stands for a linear layer whose weight is read: it is multiplied by the backend's product, in any company alike.

    Attributes:
        weight: what is multiplied from the left.
    """

    def __init__(self, parent: Any, name: str, backend: Backend) -> None:
        self.weight = self
        self._parent = parent
        self._name = name
        self._backend = backend
        self._product: Linear | None = None

    @property
    def bias(self) -> torch.Tensor | None:
        """Of the layer."""
        return getattr(self._parent, self._name).bias

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, in, T]` to `[B, out, T]`, without the bias."""
        if self._product is None:  # its weight is there now
            self._product = self._backend.prepare_linear(getattr(self._parent, self._name).weight.detach())
        rows = x.transpose(1, 2).contiguous()
        return self._product(rows.flatten(0, 1)).view(*rows.shape[:2], -1).transpose(1, 2)


class _Operations:
    """transformers' functions over one flat batch, `[1, T, ...]`, by a backend's operations.

    They take what transformers' modules give them; what would change a result in a way that is not known here is
    refused as the class is tried, since logits differ.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def convolution(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **given: Any
    ) -> torch.Tensor:
        """`causal_conv1d_fn` of `x`, `[1, channels, T]`."""
        if (activation := given.get("activation")) not in (None, "silu", "swish"):
            raise NotRunnableError(f"its convolution has the activation {activation}, which is not known")
        rows = _step.get().rows(weight.shape[1] - 1, weight.shape[0])
        return self._backend.causal_convolution(x[0].T, weight, bias, activation is not None, rows).T[None]

    def delta_rule(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
    ) -> tuple[torch.Tensor, None]:
        """`chunk_gated_delta_rule` and `chunk_kimi_delta_attention`; all tensors are `[1, T, heads, ...]`."""
        if not given.get("use_qk_l2norm_in_kernel"):
            raise NotRunnableError("its delta rule does not normalise queries and keys")
        rows, (g, beta) = (
            _step.get().rows(value.shape[2], key.shape[3], value.shape[3]),
            (given["g"][0], given["beta"][0]),
        )
        return self._backend.gated_recurrence(query[0], key[0], value[0], g, beta, rows)[None], None

    def state_space_scan(
        self, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        """`mamba2_chunk_scan` of `x`, `[1, T, heads, head_dim]`."""
        dt = _time_step(dt, given.get("dt_bias"), given.get("dt_softplus", False))
        dt = dt.clamp(*given.get("dt_limit", (0.0, math.inf)))
        rows = _step.get().rows(x.shape[2], b.shape[3], x.shape[3])
        return self._backend.state_space_scan(x[0], dt[0], a, b[0], c[0], given.get("D"), rows)[None]

    def selective_scan(
        self, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        """`mamba_selective_scan` of `x`, `[1, channels, T]`."""
        dt = _time_step(dt[0].T, given.get("delta_bias"), given.get("delta_softplus", False))
        rows = _step.get().rows(*a.shape)
        output = self._backend.selective_scan(x[0].T, dt, a, b[0].T, c[0].T, given.get("D"), rows).T[None]
        return output if (z := given.get("z")) is None else output * F.silu(z)


def _time_step(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = dt if bias is None else dt + bias
    return F.softplus(dt) if softplus else dt


_EXCHANGED = {
    "causal_conv1d_fn": "convolution",
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "state_space_scan",
    "mamba_selective_scan": "selective_scan",
}
"""Functions that recurrent modules call by these names, and what takes their place."""
