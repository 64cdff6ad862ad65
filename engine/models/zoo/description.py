"""A decoder of transformers by its `config.json`: whether it can run, and the shape of its attention and products."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version

from espalier.engine.errors import CheckpointError
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.options import ModelImpl, Quantization
from espalier.engine.models.quantization import linear_bytes, quiet_imports, refining_bytes
from espalier.engine.models.text_files import shown
from espalier.engine.models.zoo.calls import NAME, NotRunnableError, attention_function, exchange_recurrent
from espalier.engine.models.zoo.layers import LogitsHead
from espalier.engine.models.zoo.products import Groups, experts_function, product_shapes
from espalier.engine.models.zoo.small import make_small
from espalier.engine.models.zoo.trial import kv_layers, require_runnable, trace_decoder, use_paged_attention
from espalier.kernels.attention import Call
from espalier.kernels.layout import StateShape
from espalier.kernels.rotary import Rotary
from espalier.kernels.torch_backend import TorchBackend

OLDEST, NEWEST = "5.20", "5.24"
"""The versions of transformers that the tests ran with: loading and attention use what is not promised to stay."""
_LOOKS_AT_THE_BATCH = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Kinds of rotary positions that change beyond a length, for all sequences of a batch: contexts end there."""
_MAX_POSITIONS = 2048
"""The context of a configuration that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(DecoderConfig):
    """The shape of a decoder that transformers runs; what its own code alone reads is left at 0.

    Attributes:
        calls: its calls of attention in a step.
        groups: its linear layers that read the same tensors.
        products: how many products it has of each shape, outputs and inputs, with the head's.
        shared_inputs: outputs of the layers of each of `groups`, and the inputs that they share.
        other_weights: elements of all other weights.
    """

    calls: tuple[Call, ...] = ()
    groups: Groups = ()
    products: tuple[tuple[tuple[int, int], int], ...] = ()
    shared_inputs: tuple[tuple[tuple[int, ...], int], ...] = ()
    other_weights: int = 0

    @property
    def layer_weights(self) -> int:
        """See `DecoderConfig`."""
        of_layers = ((*shape, count) for shape, count in self.products if self.vocab_size not in shape)
        return sum(rows * columns * count for rows, columns, count in of_layers)

    def weight_bytes(self, dtype: torch.dtype, quantization: Quantization) -> int:
        """Bytes of all weights, once products are quantised."""
        products = sum(count * linear_bytes(*shape, dtype.itemsize, quantization) for shape, count in self.products)
        products += sum(refining_bytes(*shape, dtype.itemsize, quantization) for shape in self.shared_inputs)
        return products + self.other_weights * dtype.itemsize


def text_config(raw: Mapping[str, Any], place: str) -> Any:
    """The configuration of transformers for a `config.json`, or for its text half.

    Args:
        raw: the file.
        place: where it stands, for errors.

    Raises:
        CheckpointError: transformers does not know the model type, or refuses a value.
    """
    import transformers

    kind = raw.get("model_type", "")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        known = f"is known neither to Espalier nor to transformers {transformers.__version__}; a newer one may know it"
        raise CheckpointError(f"{place}: model type {shown(kind)} {known}. Code in checkpoints is never run")
    fields = {name: value for name, value in raw.items() if name not in ("auto_map", "quantization_config")}
    fields = transformers.PreTrainedConfig._decode_special_floats(fields)  # infinity is an object in JSON
    try:
        with quietly():
            return transformers.CONFIG_MAPPING[kind].from_dict(fields).get_text_config(decoder=True)
    except Exception as error:  # transformers checks values in ways of its own for each type
        raise CheckpointError(f"{place}: transformers refuses it: {' '.join(str(error).split())[:300]}") from error


def model_class(config: Any, place: str, generates: bool) -> type[Any]:
    """The class of transformers that runs `config`: a language model's, or its decoder's alone.

    Raises:
        CheckpointError: transformers has none.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING if generates else MODEL_MAPPING
    if type(config) not in mapping:
        raise CheckpointError(f"{place}: transformers has no decoder for model type {config.model_type}")
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def describe(raw: Mapping[str, Any], place: str, generates: bool) -> TransformersConfig:
    """The shape of a decoder, after a trial of its class.

    Args:
        raw: a checkpoint's `config.json`.
        place: where it stands, for errors.
        generates: whether the checkpoint has a head over the vocabulary.

    Raises:
        CheckpointError: it cannot run so; with the reason.
    """
    register()
    config = text_config(raw, place)
    kind = model_class(config, place, generates)
    try:
        with quietly():
            config_windows = require_runnable(kind, lambda: make_small(config), causal=generates)
        return _described(config, empty_model(kind, config), generates, config_windows)
    except NotRunnableError as error:
        raise CheckpointError(f"{place}: {kind.__name__} cannot run on Espalier's attention: {error}") from error


def empty_model(kind: type[Any], config: Any) -> Any:
    """A model without memory for its weights, in float32, that calls the engine's attention."""
    with torch.device("meta"):
        model = kind(config).eval().requires_grad_(False).float()
    use_paged_attention(model)
    exchange_recurrent(model, TorchBackend())
    return model


def _described(config: Any, model: Any, generates: bool, config_windows: bool) -> TransformersConfig:
    shapes = Counter(product_shapes(model))
    products = sum(rows * columns * count for (rows, columns), count in shapes.items())
    elements = sum(parameter.numel() for parameter in model.parameters())  # those of a tied head once
    tied = bool(generates and getattr(config, "tie_word_embeddings", False))
    pairs = [(source, name) for name, source in (model.all_tied_weights_keys if tied else {}).items()]
    decoder = LogitsHead.split(model)[0] if generates else model
    vocabulary, hidden = decoder.get_input_embeddings().weight.shape
    calls, states, groups = _traced(decoder, config_windows)
    layers, modules = kv_layers(calls), dict(decoder.named_modules())
    return TransformersConfig(
        vocab_size=vocabulary,
        hidden_size=getattr(config, "hidden_size", hidden),
        intermediate_size=max((max(pair) for pair in shapes if vocabulary not in pair), default=0),
        num_layers=len(layers),
        num_heads=max((call.heads for call in calls), default=0),
        num_kv_heads=max((layer.kv_heads for layer in layers), default=0),
        head_dim=max((max(layer.key_dim, layer.value_dim) for layer in layers), default=0),
        rotaries=tuple(
            Rotary(float(rope.get("rope_theta") or 0), None if rope.get("rope_type", "default") == "default" else rope)
            for rope in _ropes(config)
        ),
        max_positions=_max_positions(config),
        tied=tied,
        kv_layers=layers,
        state_shapes=(*states, (hidden,)) if states else (),
        impl=ModelImpl.TRANSFORMERS,
        **({"tied_names": pairs[0]} if pairs else {}),
        calls=calls,
        groups=groups,
        products=tuple(sorted(shapes.items())),
        shared_inputs=tuple(
            (tuple(modules[name].out_features for name in names), modules[names[0]].in_features) for names in groups
        ),
        other_weights=elements - products + (vocabulary * hidden if tied else 0),
    )


def _traced(decoder: Any, config_windows: bool) -> tuple[tuple[Call, ...], tuple[StateShape, ...], Groups]:
    """The same as `trace_decoder`, for a decoder without memory for its weights."""
    some = torch.arange(3)
    try:
        return trace_decoder(decoder, some.to("meta"), config_windows)
    except NotRunnableError:
        raise
    except Exception:  # some code reads values as it goes: give it zeros, one for each weight
        for module in decoder.modules():
            for name, parameter in module.named_parameters(recurse=False):
                zeros = torch.zeros(()).expand(parameter.shape)
                setattr(module, name, torch.nn.Parameter(zeros, requires_grad=False))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
        return trace_decoder(decoder, some, config_windows)


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """Every set of rotary parameters of a configuration: one, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        nested = [inner for inner in rope.values() if isinstance(inner, dict)]
        yield from nested or [rope]


def _max_positions(config: Any) -> int:
    longest = getattr(config, "max_position_embeddings", None) or _MAX_POSITIONS
    for rope in _ropes(config):
        if name := _LOOKS_AT_THE_BATCH.get(rope.get("rope_type", "default")):
            longest = min(longest, int(rope.get(name) or getattr(config, name, None) or longest))
    return longest


def register() -> None:
    """Make the functions known to transformers; once is enough, and more often does no harm.

    Raises:
        CheckpointError: this version of transformers was not tested.
    """
    found, tested = version("transformers"), (Version(OLDEST).release, Version(NEWEST).release)
    if not tested[0] <= Version(found).release[:2] <= tested[1]:
        install = f"pip install 'transformers=={NEWEST}.*', or take a model that native code runs"
        raise CheckpointError(f"transformers {found} is installed; tested are {OLDEST} to {NEWEST}: {install}")
    with quiet_imports():  # transformers imports torchao where it finds it
        from transformers import AttentionInterface
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(NAME, attention_function)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_function)


@contextmanager
def quietly() -> Iterator[None]:
    """Let transformers log nothing and show no bars: errors are raised, and models that are tried mean nothing."""
    from transformers.utils import logging as theirs

    shows, level = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    theirs.disable_progress_bar()
    theirs.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if shows:
            theirs.enable_progress_bar()
