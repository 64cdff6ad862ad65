"""A checkpoint's tensors into a model of transformers, by transformers' own conversion, and its products exchanged."""

import ctypes
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint, Outline
from espalier.engine.models.decoder import Decoder, choose_backend_for
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.engine.models.quantization import make_quantizer
from espalier.engine.models.zoo.description import TransformersConfig, empty_model, model_class, text_config
from espalier.engine.models.zoo.exchange import ExchangedLinear, Groups, exchange
from espalier.engine.models.zoo.heads import LogitsHead
from espalier.engine.models.zoo.layers import TransformersLayers
from espalier.engine.models.zoo.probe import use_paged_attention
from espalier.engine.models.zoo.registration import quietly
from espalier.kernels.backend import Backend

log = logging.getLogger("espalier.engine")
_TEXT_HALF = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?|^model\.text_model\.")
"""The beginnings of names of the text half's tensors in a checkpoint that has others, too."""
_DTYPES = {"BF16": torch.bfloat16, "BFLOAT16": torch.bfloat16, "F16": torch.float16, "FLOAT16": torch.float16}
"""Kinds of stored values that are kept in their files until a product takes them; others are read in float32."""
_MMAP_THRESHOLD = -3
"""glibc's name of the size from which blocks of memory are the system's own."""
_SHOWN = 5


def load_transformers_decoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """Build the decoder of a checkpoint from its tensors, with a language model's head.

    Raises:
        CheckpointError: tensors are missing or have other shapes, or cannot be quantised.
    """
    config = checkpoint.decoder_config
    assert isinstance(config, TransformersConfig)
    backend = choose_backend_for(checkpoint, dtype, device)
    place = checkpoint.place("config.json")
    text = text_config(checkpoint.config, place)
    generates = checkpoint.has_language_head
    kind = model_class(text, place, generates)
    log.info("%s runs by transformers' %s", checkpoint.folder, kind.__name__)
    outline = isinstance(checkpoint, Outline)
    with _frugally():
        if checkpoint.load_format is LoadFormat.DUMMY:
            model = empty_model(kind, text) if outline else _random_model(kind, text)
        else:
            model = empty_model(kind, text)
            _fill(model, checkpoint)
        decoder, head = LogitsHead.split(model) if generates else (model, None)
        if not outline:
            _exchange(decoder, checkpoint, checkpoint.quantization, backend, dtype, device, config.groups)
            if head:
                packs = checkpoint.quantization is not Quantization.NONE and backend.quantized_packer()
                of_head = Quantization.INT8 if packs else Quantization.NONE
                _exchange(head.model, checkpoint, of_head, backend, dtype, device)
            for module in (decoder, head.model) if head else (decoder,):
                _move(module, checkpoint, dtype, device)
    layers = TransformersLayers(decoder, head, config.calls, config.kv_shape, backend)
    return Decoder(config, backend, layers, _weight_bytes(decoder, head))


def _random_model(kind: type[Any], config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval().requires_grad_(False).float()
    use_paged_attention(model)
    return model


def _fill(model: Any, checkpoint: Checkpoint) -> None:
    """Give a model without memory the tensors of a checkpoint, in the dtype they are stored in.

    Those that need no conversion stay where they are, in files that are mapped into memory.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    names = _names_of_text(model, checkpoint)
    state = {name: _Lazy(checkpoint, stored) for name, stored in names.items()}
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
            info, _ = model._load_pretrained_model(model, state, None, load_config)
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
            checkpoint.ignore(stored)  # counts as used: transformers has read it


def _require_complete(model: Any, info: Any, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the checkpoint had every tensor, in its shape."""
    if wrong := sorted(info.mismatched_keys, key=str):
        name, found, expected = wrong[0]
        raise CheckpointError(
            f"{checkpoint.folder}: {name} has shape {tuple(found)}, config.json means {tuple(expected)}"
        )
    if missing := info.missing_keys - set(model.all_tied_weights_keys):
        raise CheckpointError(
            f"{checkpoint.folder} has no tensors for {_some(missing)}; is it a checkpoint of this kind?"
        )


class _Lazy:
    """A tensor of a checkpoint, read when transformers takes all of it."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name

    def __getitem__(self, whole: object) -> torch.Tensor:
        return self._checkpoint.read(self._name)


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that most of a checkpoint's weights are read in."""
    if checkpoint.stored:
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
        log.info("%d tensors of %s are not its text half's: %s", len(left), checkpoint.folder, _some(left))
        for name in left:
            checkpoint.ignore(name)
    return of_text or {name: name for name in names}


def _exchange(
    model: Any,
    checkpoint: Checkpoint,
    quantization: Quantization,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device | str,
    groups: Groups = (),
) -> None:
    quantize = make_quantizer(quantization, backend, dtype, device)

    def prepared(weight: torch.Tensor, name: str) -> torch.Tensor:
        return _finite(weight.to(device=device, dtype=dtype), name, checkpoint)

    exchange(model, backend.prepare_linear, prepared, lambda weight, name: quantize(prepared(weight, name)), groups)


def _move(model: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> None:
    """Bring what was not exchanged to the device, in the model's dtype unless its class keeps it in float32."""
    plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    kept = [re.compile(pattern) for pattern, wanted in plan.items() if wanted == torch.float32]
    for name, parameter in model.named_parameters():
        wide = any(pattern.search(name) for pattern in kept)
        moved = parameter.data.to(device=device, dtype=torch.float32 if wide else dtype)
        parameter.data = _finite(moved, name, checkpoint)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _finite(weight: torch.Tensor, name: str, checkpoint: Checkpoint) -> torch.Tensor:
    """The weight.

    Raises:
        CheckpointError: it holds values that are no numbers.
    """
    if not torch.isfinite(weight.sum(dtype=torch.float32)):
        raise CheckpointError(
            f"{checkpoint.folder}: {name} holds values that are not finite in {weight.dtype}; it is damaged, or "
            "--dtype float32 is needed".replace("torch.", "")
        )
    return weight


def _weight_bytes(decoder: Any, head: LogitsHead | None) -> int:
    total, seen = 0, set[int]()
    for model in (decoder, head.model) if head else (decoder,):
        for module in model.modules():
            if isinstance(module, ExchangedLinear) and id(module.product) not in seen:
                total += module.product.linear.nbytes
                seen.add(id(module.product))
            for products in getattr(module, "espalier_experts", ()):
                total += sum(product.nbytes for product in products)
            for parameter in module.parameters(recurse=False):
                total += 0 if id(parameter) in seen else parameter.nbytes
                seen.add(id(parameter))
    return total


@contextmanager
def _frugally() -> Iterator[None]:
    """Load with little memory beside the weights.

    Transformers converts one after another: several at a time take half as much again. glibc gives each large block
    back to the system as it is freed: by default it would keep holes as large as the model.
    """
    name, mallopt = "HF_DEACTIVATE_ASYNC_LOAD", getattr(ctypes.CDLL(None), "mallopt", None)
    before = os.environ.get(name)
    os.environ[name] = "1"
    if mallopt:
        mallopt(_MMAP_THRESHOLD, 2**18)
    try:
        yield
    finally:
        if mallopt:
            mallopt(_MMAP_THRESHOLD, 2**25)  # what it comes to by itself
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")
