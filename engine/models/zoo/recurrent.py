"""Recurrent layers of transformers' models, over states in the KV pool.

transformers' recurrent modules (Gated DeltaNet, Kimi's delta attention, Mamba, Mamba-2, short convolutions) call a few
functions of their Python module by the same names in all models: a convolution, and a scan or a delta rule over whole
sequences. Their forward passes are run here as they are, without a cache, with these functions exchanged for the
backend's, which know where the rows of a flat batch begin and where their states lie. So a module is called once for
all rows of a step, whatever they are: prompts, pieces of prompts, single tokens.

As with attention, a decoder's calls come in the same order in every step, so that a call is known by its number; which
states a step's calls read is in a context variable.
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

from espalier.engine.models.zoo.attention import NotRunnableError
from espalier.kernels.backend import Backend
from espalier.kernels.linear import Linear
from espalier.kernels.recurrent import StateRows


class RecurrentStep(Protocol):
    """The step that calls of recurrent modules belong to."""

    def rows(self, *shape: int) -> StateRows:
        """Places of the next call's states, whose shape for one sequence is `shape`."""
        ...


_step: ContextVar[RecurrentStep] = ContextVar("espalier_recurrent_step")


@contextmanager
def running_recurrent(step: RecurrentStep) -> Iterator[None]:
    """Let calls of recurrent modules on this thread belong to `step`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


class RecurrentTracer:
    """The step that finds out which states a decoder keeps; it has no rows, and results are zeros.

    Attributes:
        shapes: of the state of each call made so far, for one sequence.
    """

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def rows(self, *shape: int) -> StateRows:
        """See `RecurrentStep`."""
        self.shapes.append(shape)
        none = torch.empty(0, dtype=torch.int64)
        return StateRows(torch.empty(0), torch.zeros(1, dtype=torch.int64), none, none)


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
    return any(name.startswith("update_") and name.endswith("_state") for name in _code_of(module).co_names)


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
            parts = forward.__code__, forward.__globals__ | known, forward.__name__, forward.__defaults__
            exchanged = FunctionType(*parts, forward.__closure__)
            exchanged.__kwdefaults__ = forward.__kwdefaults__
            read = {name: _ReadLinear(module, name, backend) for name in _read_weights(module)}
            module.forward = MethodType(exchanged, _Seen(module, read) if read else module)


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


def _code_of(module: torch.nn.Module) -> Any:
    return inspect.unwrap(type(module).forward).__code__


class _Operations:
    """transformers' functions over one flat batch, `[1, T, ...]`, by a backend's operations.

    They take what transformers' modules give them; what would change a result in a way that is not known here is
    refused as the class is tried, since logits differ.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def convolution(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """`causal_conv1d_fn` of `x`, `[1, channels, T]`."""
        if activation not in (None, "silu", "swish"):
            raise NotRunnableError(f"its convolution has the activation {activation}, which is not known")
        rows = _step.get().rows(weight.shape[1] - 1, weight.shape[0])
        return self._backend.causal_convolution(x[0].T, weight, bias, activation is not None, rows).T[None]

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """`chunk_gated_delta_rule` and `chunk_kimi_delta_attention`; all tensors are `[1, T, heads, ...]`."""
        if not use_qk_l2norm_in_kernel:
            raise NotRunnableError("its delta rule does not normalise queries and keys")
        rows = _step.get().rows(value.shape[2], key.shape[3], value.shape[3])
        return self._backend.gated_recurrence(query[0], key[0], value[0], g[0], beta[0], rows)[None], None

    def state_space_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> torch.Tensor:
        """`mamba2_chunk_scan` of `x`, `[1, T, heads, head_dim]`."""
        dt = _time_step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        rows = _step.get().rows(x.shape[2], b.shape[3], x.shape[3])
        return self._backend.state_space_scan(x[0], dt[0], a, b[0], c[0], D, rows)[None]

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """`mamba_selective_scan` of `x`, `[1, channels, T]`."""
        dt = _time_step(dt[0].T, delta_bias, delta_softplus)
        rows = _step.get().rows(*a.shape)
        output = self._backend.selective_scan(x[0].T, dt, a, b[0].T, c[0].T, D, rows).T[None]
        return output if z is None else output * F.silu(z)


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
