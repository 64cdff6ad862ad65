"""A checkpoint's tensors into a model of transformers, by transformers' own conversion, and its products exchanged."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint, Outline
from espalier.engine.models.decoder import Decoder, choose_backend_for
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.engine.models.quantization import make_quantizer
from espalier.engine.models.text_files import some
from espalier.engine.models.zoo.calls import exact_layers, exchange_recurrent
from espalier.engine.models.zoo.description import (
    TransformersConfig,
    empty_model,
    model_class,
    quietly,
    text_config,
)
from espalier.engine.models.zoo.layers import LogitsHead, TransformersLayers, decoder_name
from espalier.engine.models.zoo.pointwise import exchange_pointwise
from espalier.engine.models.zoo.products import ExchangedLinear, exchange
from espalier.engine.models.zoo.trial import use_paged_attention
from espalier.kernels.backend import Backend
from espalier.kernels.layers import UnsupportedShapeError

log = logging.getLogger("espalier.engine")
_TEXT_HALF = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?|^model\.text_model\.")
"""The beginnings of names of the text half's tensors in a checkpoint that has others, too."""
_DTYPES = {"BF16": torch.bfloat16, "BFLOAT16": torch.bfloat16, "F16": torch.float16, "FLOAT16": torch.float16}
"""Kinds of stored values that are kept in their files until a product takes them; others are read in float32."""


def load_transformers_decoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """Build the decoder of a checkpoint from its tensors, with a language model's head.

    Raises:
        CheckpointError: tensors are missing or have other shapes, or cannot be quantised.
    """
    config = checkpoint.decoder_config
    assert isinstance(config, TransformersConfig)
    backend = choose_backend_for(checkpoint, dtype, device)
    try:
        steps = backend.prepare_calls(config.calls, dtype, torch.device(device))
    except UnsupportedShapeError as error:
        raise CheckpointError(f"{checkpoint.folder} cannot be run on {device}: {error}; --device cpu can") from error
    place = checkpoint.files.place("config.json")
    text = text_config(checkpoint.config, place)
    generates = checkpoint.has_language_head
    kind = model_class(text, place, generates)
    log.info("%s runs by transformers' %s", checkpoint.folder, kind.__name__)
    outline, dummy = isinstance(checkpoint, Outline), checkpoint.load_format is LoadFormat.DUMMY
    model = _random_model(kind, text) if dummy and not outline else empty_model(kind, text)
    prefix = f"{decoder_name(model)}." if generates else ""
    exchanged = None if outline else _exchange_of(model, prefix, checkpoint, backend, dtype, device)
    if not dummy:
        with _one_by_one():
            _fill(model, checkpoint, exchanged)
    if exchanged:
        exchanged()
    decoder, head = LogitsHead.split(model) if generates else (model, None)
    if not outline:
        for module in (decoder, head.model) if head else (decoder,):
            _move(module, checkpoint, dtype, device)
    exchange_recurrent(decoder, backend)
    if not outline:
        exchange_pointwise(decoder, backend)
    layers = TransformersLayers(decoder, head, config.calls, steps, config.state_shapes[:-1])
    return Decoder(config, backend, layers, _weight_bytes(decoder, head))


def _random_model(kind: type[Any], config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval().requires_grad_(False).float()
    use_paged_attention(model)
    return model


def _exchange_of(
    model: Any, prefix: str, checkpoint: Checkpoint, backend: Backend, dtype: torch.dtype, device: torch.device | str
) -> Callable[..., None]:
    """Exchanges the products of a model that have their weights, but for those `waiting`; see `exchange`.

    Args:
        model: a module of transformers.
        prefix: what names of its decoder's modules begin with.
        checkpoint: says how to quantise.
        backend: has the products.
        dtype: of the model.
        device: where weights go.

    Raises:
        CheckpointError: see `make_quantizer`.
    """
    config = checkpoint.decoder_config
    assert isinstance(config, TransformersConfig)
    quantised = checkpoint.quantization is not Quantization.NONE
    exact = exact_layers(model) if quantised else frozenset[str]()
    of_head = Quantization.INT8 if quantised and backend.quantized_packer() else Quantization.NONE
    quantize = make_quantizer(checkpoint.quantization, backend, dtype, device)
    quantize_head = make_quantizer(of_head, backend, dtype, device)
    rest = (tuple(each for name in names if (each := prefix + name) not in exact) for names in config.groups)

    def ready(weight: torch.Tensor, name: str, refined: int | None) -> torch.Tensor:
        prepared = _finite(_of_its_own(weight, dtype, device), name, checkpoint)
        if refined is None or name in exact:
            return prepared
        return (quantize if name.startswith(prefix) else quantize_head)(prepared, refined)

    return partial(exchange, model, backend, ready, tuple(names for names in rest if names))


def _fill(model: Any, checkpoint: Checkpoint, exchanged: Callable[..., None] | None) -> None:
    """Give a model without memory the tensors of a checkpoint, in the dtype they are stored in.

    Those that need no conversion stay where they are, in files that are mapped into memory. Others are read layer by
    layer, and exchanged before the next.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.pytorch_utils import Conv1D

    if checkpoint.adapter:
        transposed = (f"{name}.weight" for name, module in model.named_modules() if type(module) is Conv1D)
        checkpoint.adapter.transposed = frozenset(transposed)
    names = _names_of_text(model, checkpoint)
    embedding = _last_part(next(n for n, m in model.named_modules() if m is model.get_input_embeddings()))
    parts: dict[str, dict[str, _Lazy]] = {"": {}, embedding: {}}  # a head is unquantised while there is least beside it
    for name, stored in names.items():
        layer = re.search(r"\.(\d+)\.", name)
        part = layer[1] if layer else embedding if _last_part(name.removesuffix(".weight")) == embedding else ""
        parts.setdefault(part, {})[name] = _Lazy(checkpoint, stored)
    dtype = _stored_dtype(checkpoint)
    for parameter in model.parameters():  # buffers stay in float32: they are computed, not stored
        parameter.data = parameter.data.to(dtype)
    outline = isinstance(checkpoint, Outline)
    mapping: Any = get_model_conversion_mapping(model)
    load_config = LoadStateDictConfig(
        device_map={"": "meta" if outline else "cpu"}, dtype=dtype, weight_mapping=mapping, ignore_mismatched_sizes=True
    )
    try:
        with quietly():
            tied = model.all_tied_weights_keys
            tied = {name.removesuffix(".weight") for name in (*tied, *tied.values())}
            info, _ = model._load_pretrained_model(model, parts.pop(""), None, load_config)
            for state in parts.values():
                if exchanged:
                    exchanged(waiting=tied)
                _load_more(model, state, load_config, info)
            model._adjust_missing_and_unexpected_keys(info)
            _require_complete(model, info, checkpoint)
            if outline:
                model.tie_weights()
            else:
                info = model._finalize_model_loading(model, load_config, info)
    except RuntimeError as error:  # weights that could not be converted
        raise CheckpointError(f"{checkpoint.folder} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    for name, stored in names.items():
        if name not in info.unexpected_keys:
            checkpoint.mark_used(stored)  # counts as used: transformers has read it


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _load_more(model: Any, state: dict[str, "_Lazy"], load_config: Any, info: Any) -> None:
    """Load some more tensors, and add what transformers says of them to `info`."""
    held = set(model.state_dict())
    more, _ = model._load_pretrained_model(model, state, None, load_config)
    info.missing_keys -= held - more.missing_keys
    for name in ("unexpected_keys", "mismatched_keys", "conversion_errors"):
        getattr(info, name).update(getattr(more, name))


def _require_complete(model: Any, info: Any, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the checkpoint had every tensor, in its shape."""
    if wrong := sorted(info.mismatched_keys, key=str):
        name, found, expected = wrong[0]
        shapes = f"shape {tuple(found)}, config.json means {tuple(expected)}"
        raise CheckpointError(f"{checkpoint.folder}: {name} has {shapes}")
    if missing := info.missing_keys - set(model.all_tied_weights_keys):
        missed = some(missing)
        raise CheckpointError(f"{checkpoint.folder} has no tensors for {missed}; is it a checkpoint of this kind?")


@dataclass(frozen=True, slots=True)
class _Lazy:
    """A tensor of a checkpoint, read when transformers takes all of it."""

    checkpoint: Checkpoint
    name: str

    def __getitem__(self, whole: object) -> torch.Tensor:
        return self.checkpoint.read(self.name)


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that most of a checkpoint's weights are read in."""
    if checkpoint.files.stored:
        return torch.float32
    kinds = [_DTYPES.get(info.kind.upper(), torch.float32) for info in checkpoint.tensors.values()]
    return max(set(kinds), key=kinds.count, default=torch.float32)


def _names_of_text(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """The checkpoint's names of the tensors that the model is to be given, by transformers' names of them.

    In a checkpoint with images or sound, these are the text half's; others count as read.
    """
    names = [name for name in checkpoint.tensors if not checkpoint.follows_from_config(name)]
    if "text_config" not in checkpoint.config:
        return {name: name for name in names}
    prefix = f"{model.base_model_prefix}." if hasattr(model, "lm_head") else ""
    of_text: dict[str, str] = {}
    for name in names:
        if head := re.search(r"(^|\.)(lm_head\..*)$", name):
            of_text[head[2]] = name
        elif _TEXT_HALF.match(name):
            of_text[prefix + _TEXT_HALF.sub("", name)] = name
    left = set(names) - set(of_text.values())
    if left and of_text:
        checkpoint.ignore(left)
    return of_text or {name: name for name in names}


def _move(model: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> None:
    """Bring what was not exchanged to the device, in the model's dtype unless its class keeps it in float32."""
    plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    kept = [re.compile(pattern) for pattern, wanted in plan.items() if wanted == torch.float32]
    moved: dict[int, torch.nn.Parameter] = {}  # so that what is tied stays tied
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if (found := moved.get(id(parameter))) is None:
                full = f"{module_name}.{name}"
                wide = any(pattern.search(full) for pattern in kept)
                weight = _of_its_own(parameter.data, torch.float32 if wide else dtype, device)
                found = torch.nn.Parameter(_finite(weight, full, checkpoint), requires_grad=False)
                moved[id(parameter)] = moved[id(found)] = found
            setattr(module, name, found)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _of_its_own(buffer, buffer.dtype, device))


def _of_its_own(weight: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A weight in memory of its own: files that are mapped may be written over while the model runs."""
    moved = weight.to(device=device, dtype=dtype)
    return moved.clone() if moved.data_ptr() == weight.data_ptr() else moved


def _finite(weight: torch.Tensor, name: str, checkpoint: Checkpoint) -> torch.Tensor:
    """The weight.

    Raises:
        CheckpointError: it holds values that are no numbers.
    """
    if not torch.isfinite(weight.sum(dtype=torch.float32)):
        what = f"{name} holds values that are not finite in {str(weight.dtype).removeprefix('torch.')}"
        raise CheckpointError(f"{checkpoint.folder}: {what}; it is damaged, or --dtype float32 is needed")
    return weight


def _weight_bytes(decoder: Any, head: LogitsHead | None) -> int:
    total, seen = 0, set[int]()
    for model in (decoder, head.model) if head else (decoder,):
        for module in model.modules():
            if isinstance(module, ExchangedLinear) and id(module.product) not in seen:
                total += module.product.linear.nbytes
                seen.add(id(module.product))
            total += sum(products.nbytes for products in getattr(module, "espalier_experts", ()))
            for parameter in module.parameters(recurse=False):
                total += 0 if id(parameter) in seen else parameter.nbytes
                seen.add(id(parameter))
    return total


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Have transformers convert one tensor after another: several at a time take half as much memory again."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
