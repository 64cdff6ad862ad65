"""The trial of a class of transformers: whether its decoder, run as the engine runs it, equals its own plain forward.

A model of the class, made small, gets random weights. Three sequences are computed in three mixed passes over paged KV,
the way an engine batches them, and by transformers' eager attention.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from espalier.engine.models.zoo.calls import NAME, NotRunnableError, exchange_recurrent, running
from espalier.engine.models.zoo.layers import LogitsHead, TransformersLayers, hidden_states
from espalier.engine.models.zoo.products import Groups, exchange, layers_by_input
from espalier.kernels.attention import Call, Terms
from espalier.kernels.layout import (
    AttentionBatch,
    KVLayout,
    KVShape,
    LayerKV,
    StateBatch,
    StateShape,
    StepBatch,
    kv_groups,
    state_bytes,
)
from espalier.kernels.recurrent import StateRows
from espalier.kernels.torch_backend import TorchBackend

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit."""
_PASSES = ((5, 1, 0), (6, 9, 7), (2, 3, 6))
"""New tokens of each sequence in each pass; windows of small models are shorter than what is there after the first."""
_TOKENS = 13
"""Of each sequence in the end; a block holds all of them."""
_INLINE = "it computes attention inline, not through transformers' attention interface"
_RECURRENT = ("conv_state", "recurrent_state", "ssm_state", "rwkv", "selective_scan")
"""Words of modules with recurrent layers."""
_ENLARGED = 4.0
"""Initial weights are so small that models would nearly agree with any attention."""


def require_runnable(model_class: type[Any], small: Callable[[], Any], causal: bool = True) -> bool:
    """Try a class of transformers.

    Args:
        model_class: a `PreTrainedModel`.
        small: makes a small configuration of it; see `make_small`.
        causal: whether it has a head over the vocabulary.

    Returns:
        Whether windows that its layers do not name are their configuration's; see `calls.Step`.

    Raises:
        NotRunnableError: it cannot run so; with the reason.
    """
    if getattr(model_class.config_class, "is_encoder_decoder", False):
        raise NotRunnableError("it has an encoder")
    source = inspect.getsource(sys.modules[model_class.__module__])
    reason = "its layers keep a recurrent state" if any(word in source for word in _RECURRENT) else None
    if "ALL_ATTENTION_FUNCTIONS" not in source and "update_recurrent_state" not in source:
        raise NotRunnableError(reason or _INLINE)
    try:
        config = small()
        texts, expected = _plain(random_model(model_class, config), causal)
    except Exception as error:  # whatever configurations and modelling code raise
        raise NotRunnableError(f"a small model of it does not run in transformers ({_named(error)})") from error
    differences: list[float] = []
    for config_windows in (True, False):
        try:
            found = _paged(random_model(model_class, config), texts, causal, config_windows)
        except NotRunnableError:
            raise
        except Exception as error:
            raise NotRunnableError(f"its code fails on a flat batch ({_named(error)})") from error
        differences.append(float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6)))
        if differences[-1] < TOLERANCE:
            return config_windows
    reason = reason or "its layers look at more than attention gives them"
    raise NotRunnableError(f"{reason} (logits differ by {min(differences):.0e} from its plain forward)")


def random_model(model_class: type[Any], config: Any) -> Any:
    """A model with weights so large that mistakes show; its norms and biases are not those of an identity."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval().requires_grad_(False).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(_ENLARGED)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _plain(model: Any, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts, `[3, _TOKENS]`, and what the model gives for each token of them, by eager attention."""
    size, vocabulary = (len(_PASSES[0]), _TOKENS), model.get_input_embeddings().num_embeddings
    texts = torch.randint(4, vocabulary, size, generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = model(texts, use_cache=False)
    return texts, (output.logits if causal else output[0]).flatten(0, 1)


def _paged(model: Any, texts: torch.Tensor, causal: bool, config_windows: bool) -> torch.Tensor:
    """The output of the model for each token of the texts, computed in `_PASSES` over a block for each text."""
    backend = TorchBackend()
    use_paged_attention(model)
    base, head = LogitsHead.split(model) if causal else (model, None)
    exchange_recurrent(base, backend)
    calls, states, products = trace_decoder(base, torch.arange(3), config_windows)
    exchange(base, backend, _as_is, products)
    if causal:
        exchange(model, backend, _as_is)
    steps = backend.prepare_calls(calls, torch.float32, torch.device("cpu"))
    layers = TransformersLayers(base, head, calls, steps, states)
    groups = kv_groups(kv_layers(calls))
    layer_kvs = _layer_kvs(groups, len(texts))
    elements = state_bytes((*states, (base.get_input_embeddings().embedding_dim,))) // 4
    memory = torch.full((len(texts) * elements,), float("nan"))  # of the texts' recurrent states
    done, places, found = torch.zeros(len(texts), dtype=torch.int64), list[torch.Tensor](), list[torch.Tensor]()
    for counts in torch.tensor(_PASSES):
        rows = counts.nonzero().flatten()
        counts, before = counts[rows], done[rows]
        starts = torch.cat((counts[:0].new_zeros(1), counts.cumsum(0)))
        row_of = torch.arange(len(rows)).repeat_interleave(counts)
        positions = torch.arange(len(row_of)) + (before - starts[:-1])[row_of]
        batch = AttentionBatch(
            query_starts=starts.int(),
            row_sequences=row_of.int(),
            context_lengths=(before + counts).int(),
            block_tables=rows[:, None].int(),
            write_slabs=torch.zeros_like(positions),
            write_slots=rows[row_of],
            write_offsets=positions,
            write_rows=None,
        )
        batch = replace(batch, others=(batch,) * (len(groups) - 1))
        targets = rows * elements
        kept = StateRows(memory, starts, torch.where(before > 0, targets, -1), targets)
        of_step = StateBatch(kept, targets[:0]) if states else None
        ids = texts[rows[row_of], positions]
        hidden = layers.forward(StepBatch(ids, positions, batch, states=of_step), layer_kvs)
        found.append(head(hidden) if head else hidden)
        places.append(rows[row_of] * _TOKENS + positions)
        done[rows] += counts
    return torch.cat(found)[torch.cat(places).argsort()]


class Tracer:
    """The step that finds out which calls a decoder makes; it has no rows, and gives zeros.

    Attributes:
        calls: those of attention made so far.
        states: the shape of one sequence's state, for each recurrent call made so far.
        config_windows: see `calls.Step`.
    """

    def __init__(self, config_windows: bool) -> None:
        self.config_windows = config_windows
        self.calls: list[Call] = []
        self.states: list[StateShape] = []
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []  # kept, so that no memory is used twice

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """See `calls.Step`."""
        tokens, heads, key_dim = query.shape
        if len(key) != tokens or len(value) != tokens:
            raise NotRunnableError("its attention reads keys of other tokens than its queries are of")
        if heads % key.shape[1] or key.shape[1] != value.shape[1]:
            others = f"{key.shape[1]} key and {value.shape[1]} value heads"
            raise NotRunnableError(f"{heads} query heads cannot share {others}")
        slot = next((i for i, kv in enumerate(self._written) if _same(kv[0], key) and _same(kv[1], value)), None)
        writes = slot is None
        if slot is None:
            slot = len(self._written)
            self._written.append((key, value))
        call = Call(heads, key.shape[1], key_dim, value.shape[-1], terms.window, slot, writes)
        self.calls.append(call)
        return query.new_zeros(tokens, heads, value.shape[-1])

    def rows(self, *shape: int) -> StateRows:
        """See `calls.Step`."""
        self.states.append(shape)
        none = torch.empty(0, dtype=torch.int64)
        return StateRows(torch.empty(0), torch.zeros(1, dtype=torch.int64), none, none)


def trace_decoder(
    decoder: Any, positions: torch.Tensor, config_windows: bool
) -> tuple[tuple[Call, ...], tuple[StateShape, ...], Groups]:
    """A record of a decoder's step: its calls of attention, the states it keeps, and layers that read the same tensor.

    Args:
        decoder: before its products are exchanged; its recurrent layers are.
        positions: of a few tokens, on its device; their ids are the same numbers.
        config_windows: see `calls.Step`.

    Raises:
        NotRunnableError: there are neither calls nor states, or a call asks for attention of another kind.
    """
    tracer = Tracer(config_windows)
    with torch.inference_mode(), running(tracer):
        groups = layers_by_input(decoder, lambda: hidden_states(decoder, positions, positions))
    if not tracer.calls and not tracer.states:
        raise NotRunnableError("its layers do not call transformers' attention interface")
    return tuple(tracer.calls), tuple(tracer.states), groups


def kv_layers(calls: tuple[Call, ...]) -> tuple[KVShape, ...]:
    """Shape of each KV layer's keys and values, with the window of the calls that read it."""
    windows: dict[int, list[int | None]] = {}
    for call in calls:
        windows.setdefault(call.slot, []).append(call.window)
    widest = {slot: None if None in its else max(window for window in its if window) for slot, its in windows.items()}
    return tuple(
        KVShape(call.kv_heads, call.key_dim, call.value_dim, widest[call.slot]) for call in calls if call.writes
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if both are the same memory read in the same way; tensors without memory have a storage, too."""
    storages = (each.untyped_storage()._cdata for each in (one, other))  # pyright: ignore[reportPrivateUsage]
    places = ((each.storage_offset(), each.shape, each.stride()) for each in (one, other))
    return len(set(storages)) == 1 and len(set(places)) == 1


def _layer_kvs(groups: Mapping[KVShape, list[int]], blocks: int) -> list[LayerKV]:
    """Keys and values of every layer, in memory that holds nothing yet: one slab of `blocks` for each KV group."""
    found: dict[int, LayerKV] = {}
    for group, (shape, layers) in enumerate(groups.items()):
        elements = blocks * len(layers) * shape.elements * _TOKENS
        sizes = (len(layers), shape.kv_heads, shape.key_dim, _TOKENS, torch.float32, 4 * elements)
        layout = KVLayout(*sizes, shape.value_dim, group)
        slab = torch.full((elements,), float("nan")).view(torch.uint8)
        found |= {layer: layout.layer_view(slab, place) for place, layer in enumerate(layers)}
    return [found[layer] for layer in sorted(found)]


def use_paged_attention(model: Any) -> None:
    """Have a model's layers call the engine's attention and experts.

    Raises:
        NotRunnableError: its class computes attention inline.
    """
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise NotRunnableError(str(error)) from error
    if model.config._attn_implementation != NAME:
        raise NotRunnableError(_INLINE)
    # Else it looks for padding in each step, and waits for the device; some configurations take no None in other ways.
    vars(model.config)["pad_token_id"] = None
    if model._can_set_experts_implementation():
        model.set_experts_implementation(NAME)


def _as_is(weight: torch.Tensor, *_: object) -> torch.Tensor:
    return weight
