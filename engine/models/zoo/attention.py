"""Espalier's paged attention as an attention function of transformers, and the step that a decoder's calls belong to.

transformers' decoders look their attention up by the name in their configuration, and call it as

    function(module, query, key, value, attention_mask, scaling=, dropout=, **kwargs) -> (output, None)

with `query [1, heads, T, head_dim]` and `output [1, T, heads, value_dim]`. A step is a flat batch: the tokens of
several sequences side by side in one row. A decoder's calls of attention and of recurrent layers come in the same order
in every step, so a call is known by its number. The step is a context variable, for some models pass no further keyword
arguments down.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from espalier.kernels.attention import Terms
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


def state_rows(*shape: int) -> StateRows:
    """Places of the states of a recurrent call, by the step that it belongs to; see `Step.rows`."""
    return _step.get().rows(*shape)


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
