"""The trial of a class of transformers: whether its decoder, run as the engine runs it, equals its own plain forward.

A model of the class, made small, gets random weights. Three sequences of different lengths are computed in three mixed
passes over paged KV, the way an engine batches them, and each alone by transformers' eager attention.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from espalier.engine.models.zoo.attention import NAME, NotRunnableError
from espalier.engine.models.zoo.calls import kv_layers, trace
from espalier.engine.models.zoo.exchange import Groups, exchange, layers_by_input
from espalier.engine.models.zoo.experts import NAME as EXPERTS
from espalier.engine.models.zoo.heads import LogitsHead
from espalier.engine.models.zoo.layers import TransformersLayers, hidden_states
from espalier.engine.models.zoo.recurrent import exchange_recurrent
from espalier.kernels.batch import AttentionBatch, StateBatch, StepBatch
from espalier.kernels.calls import Call
from espalier.kernels.layout import KVLayout, KVShape, LayerKV, StateShape, kv_groups, state_bytes
from espalier.kernels.recurrent import StateRows
from espalier.kernels.torch_backend import TorchBackend

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit."""
_PASSES = ((5, 1, 0), (6, 9, 7), (1, 3, 6))
"""New tokens of each sequence in each pass; windows of small models are shorter than what is there after the first."""
_BLOCK = 4
_ENLARGED = 4.0
"""Initial weights are so small that models would nearly agree with any attention."""


def require_runnable(model_class: type[Any], small: Callable[[], Any], causal: bool = True) -> bool:
    """Try a class of transformers.

    Args:
        model_class: a `PreTrainedModel`.
        small: makes a small configuration of it; see `make_small`.
        causal: whether it has a head over the vocabulary.

    Returns:
        Whether windows that its layers do not name are their configuration's; see `attention.Step`.

    Raises:
        NotRunnableError: it cannot run so; with the reason.
    """
    refuse_by_kind(model_class)
    try:
        config = small()
        texts, expected = _plain(random_model(model_class, config), causal)
    except Exception as error:  # whatever configurations and modelling code raise
        raise NotRunnableError(f"a small model of it does not run in transformers ({_named(error)})") from error
    differences: list[float] = []
    for config_windows in (True, False):
        try:
            found = torch.cat(_paged(random_model(model_class, config), texts, causal, config_windows))
        except NotRunnableError:
            raise
        except Exception as error:
            reason = f"its code fails on a flat batch ({_named(error)})"
            raise NotRunnableError(reason) from error
        differences.append(float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6)))
        if differences[-1] < TOLERANCE:
            return config_windows
    reason = _other_reason(model_class) or "its layers look at more than attention gives them"
    raise NotRunnableError(f"{reason} (logits differ by {min(differences):.0e} from its plain forward)")


def refuse_by_kind(model_class: type[Any]) -> None:
    """Refuse what a class itself says it is.

    Raises:
        NotRunnableError: it has an encoder, or computes attention without the interface.
    """
    if getattr(model_class.config_class, "is_encoder_decoder", False):
        raise NotRunnableError("it has an encoder")
    source = _source(model_class)
    if "ALL_ATTENTION_FUNCTIONS" not in source and "update_recurrent_state" not in source:
        raise NotRunnableError(
            _other_reason(model_class) or "it computes attention inline, not through transformers' attention interface"
        )


def random_model(model_class: type[Any], config: Any, seed: int = 0) -> Any:
    """A model with weights so large that mistakes show; its norms and biases are not those of an identity."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval().requires_grad_(False).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(_ENLARGED)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _plain(model: Any, causal: bool) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Three texts, and what the model gives for each, alone and by eager attention."""
    random, count = torch.Generator().manual_seed(0), sum(map(sum, _PASSES))
    ids = torch.randint(4, model.get_input_embeddings().num_embeddings, (count,), generator=random)
    totals = [sum(counts) for counts in zip(*_PASSES, strict=True)]
    texts = ids.split(totals)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = [model(text[None], use_cache=False) for text in texts]
    return texts, torch.cat([(out.logits if causal else out[0])[0] for out in output])


def _paged(model: Any, texts: tuple[torch.Tensor, ...], causal: bool, config_windows: bool) -> list[torch.Tensor]:
    """The model's outputs for each text, computed in `_PASSES` over blocks."""
    backend = TorchBackend()
    use_paged_attention(model)
    base, head = LogitsHead.split(model) if causal else (model, None)
    exchange_recurrent(base, backend)
    calls, states, products = trace_decoder(base, torch.arange(3), config_windows)
    exchange(base, backend, _as_is, _as_is, products)
    if causal:
        exchange(model, backend, _as_is, _as_is)
    layers = TransformersLayers(base, head, calls, backend.prepare_calls(calls, torch.device("cpu")), states)
    blocks = -(-max(map(len, texts)) // _BLOCK)
    groups = kv_groups(kv_layers(calls))
    layer_kvs = _layer_kvs(groups, len(texts) * blocks)
    kept = _States((*states, (base.get_input_embeddings().embedding_dim,)), len(texts))
    done, found = [0] * len(texts), [[] for _ in texts]
    for counts in _PASSES:
        rows = [s for s, count in enumerate(counts) if count]
        positions = torch.cat([torch.arange(done[s], done[s] + counts[s]) for s in rows])
        token_ids = torch.cat([texts[s][done[s] : done[s] + counts[s]] for s in rows])
        batch = _batch([counts[s] for s in rows], [done[s] for s in rows], rows, blocks)
        batch = replace(batch, others=(batch,) * (len(groups) - 1))
        of_rows = kept.of_step(rows, [done[s] for s in rows], batch.query_starts) if states else None
        hidden = layers.forward(StepBatch(token_ids, positions, batch, states=of_rows), layer_kvs)
        given = head(hidden) if head else hidden
        for s, part in zip(rows, given.split([counts[s] for s in rows]), strict=True):
            found[s].append(part)
            done[s] += counts[s]
    return [torch.cat(parts) for parts in found]


class _States:
    """Recurrent states of texts, one after another in memory of their own."""

    def __init__(self, shapes: tuple[StateShape, ...], texts: int) -> None:
        self._elements = state_bytes(shapes) // 4
        self._memory = torch.full((texts * self._elements,), float("nan"))

    def of_step(self, texts: list[int], done: list[int], spans: torch.Tensor) -> StateBatch:
        """The states of a step that goes on with `texts`, of which `done` tokens are computed."""
        targets = torch.tensor(texts) * self._elements
        sources = torch.where(torch.tensor(done) > 0, targets, -1)
        return StateBatch(StateRows(self._memory, spans.long(), sources, targets), targets[:0])


def trace_decoder(
    decoder: Any, positions: torch.Tensor, config_windows: bool
) -> tuple[tuple[Call, ...], tuple[StateShape, ...], Groups]:
    """A record of a decoder's step: its calls of attention, the states it keeps, and layers that read the same tensor.

    Args:
        decoder: before its products are exchanged; its recurrent layers are.
        positions: of a few tokens, on its device; their ids are the same numbers.
        config_windows: see `attention.Step`.

    Raises:
        NotRunnableError: see `trace`.
    """
    found: list[tuple[tuple[Call, ...], tuple[StateShape, ...]]] = []

    def run() -> None:
        found.append(trace(lambda: hidden_states(decoder, positions, positions), config_windows))

    groups = layers_by_input(decoder, run)
    return *found[0], groups


def _layer_kvs(groups: Mapping[KVShape, list[int]], blocks: int) -> list[LayerKV]:
    """Keys and values of every layer, in memory that holds nothing yet: one slab of `blocks` for each KV group."""
    found: dict[int, LayerKV] = {}
    for group, (shape, layers) in enumerate(groups.items()):
        elements = blocks * len(layers) * shape.elements * _BLOCK
        sizes = (len(layers), shape.kv_heads, shape.key_dim, _BLOCK, torch.float32, 4 * elements)
        layout = KVLayout(*sizes, shape.value_dim, group)
        slab = torch.full((elements,), float("nan")).view(torch.uint8)
        found |= {layer: layout.layer_view(slab, place) for place, layer in enumerate(layers)}
    return [found[layer] for layer in sorted(found)]


def _batch(counts: list[int], done: list[int], sequences: list[int], blocks: int) -> AttentionBatch:
    """A batch of new tokens of sequences whose blocks lie one after another, `blocks` for each."""
    tables = torch.tensor([[s * blocks + b for b in range(blocks)] for s in sequences], dtype=torch.int32)
    row_sequences = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    positions = torch.cat([torch.arange(n, n + count) for n, count in zip(done, counts, strict=True)])
    return AttentionBatch(
        query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
        row_sequences=row_sequences.int(),
        context_lengths=torch.tensor([n + count for n, count in zip(done, counts, strict=True)], dtype=torch.int32),
        block_tables=tables,
        write_slabs=torch.zeros_like(positions),
        write_slots=tables[row_sequences, positions // _BLOCK].long(),
        write_offsets=positions % _BLOCK,
        write_rows=None,
    )


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
        raise NotRunnableError("it computes attention inline, not through transformers' attention interface")
    # Else it looks for padding in each step, and waits for the device; some configurations take no None in other ways.
    vars(model.config)["pad_token_id"] = None
    if model._can_set_experts_implementation():
        model.set_experts_implementation(EXPERTS)


def _as_is(weight: torch.Tensor, *_: object) -> torch.Tensor:
    return weight


def _other_reason(model_class: type[Any]) -> str | None:
    """The likely cause of a failed trial, from the source of the class's module."""
    source = _source(model_class)
    if any(word in source for word in ("conv_state", "recurrent_state", "ssm_state", "rwkv", "selective_scan")):
        return "its layers keep a recurrent state"
    return None


def _source(model_class: type[Any]) -> str:
    return inspect.getsource(sys.modules[model_class.__module__])
