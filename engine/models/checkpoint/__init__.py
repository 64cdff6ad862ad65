"""A checkpoint, a folder in Hugging Face layout or a GGUF file: configuration, tensors, and that each is used.

`files` holds what is stored, `adapter` what is merged into it. Tensors count as used as they are taken; nothing else
changes once a checkpoint is open.
"""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint.adapter import Adapter
from espalier.engine.models.checkpoint.files import CheckpointFiles, digest_of
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.families import GENERATOR_CLASSES, family_of, impl_of, parse_decoder_config
from espalier.engine.models.load_cache import LoadCache
from espalier.engine.models.options import LoadFormat, ModelImpl, Quantization
from espalier.engine.models.text_files import are_texts, require, some
from espalier.engine.models.weights import TensorInfo, small_files

log = logging.getLogger("espalier.engine")
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Buffers saved in old checkpoints; they follow from config.json, so nothing reads them."""
_DUMMY_STD = 0.02
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_EMBEDDINGS = [f"{before}{_EMBEDDING}" for before in ("model.", "", "model.language_model.", "language_model.model.")]
"""The last two are of checkpoints with images."""
_HOST = torch.device("cpu")
_ROWS = 4096
"""Rows that are compared at a time."""


class Checkpoint:
    """One folder with `config.json` and weights, single or sharded, safetensors or `.bin`; or one GGUF file.

    Tensors are taken one at a time, straight to the device, from files mapped into memory: the host never holds more
    than the shards a layer lies in. `require_all_taken` fails where a tensor was not taken: a tensor that nothing uses
    means that the model was built wrongly.

    Attributes:
        folder: the checkpoint's folder, or its GGUF file.
        files: what it holds, without its adapter.
        config: `config.json` as it stands, or as a GGUF file's metadata mean it, with the class that an adapter names.
        adapter: the LoRA adapter that is merged into the weights as they are read; None without.
        load_cache: keeps parts of the model for the next load; see `decoder`.
        quantization: how the decoder's weights are to be kept.
        batch_invariant: whether a request must have the same bits in any batch.
        model_impl: which code is to run the decoder.
        warnings: what is odd about it, and was decided; also logged.
    """

    _level = logging.WARNING

    def __init__(
        self,
        folder: Path,
        load_format: LoadFormat = LoadFormat.AUTO,
        quantization: Quantization = Quantization.NONE,
        on_bytes: Callable[[int], None] | None = None,
        batch_invariant: bool = False,
        adapter: Path | None = None,
        model_impl: ModelImpl = ModelImpl.AUTO,
        load_cache: LoadCache | None = None,
    ) -> None:
        """Open `folder`, reading names and shapes from every weight file, and no tensor.

        Args:
            folder: the checkpoint.
            load_format: which files to read.
            quantization: how to keep the decoder's weights.
            on_bytes: called with the size of each tensor once it is read or ignored; the sizes add up to `nbytes`.
            batch_invariant: whether a request must have the same bits in any batch, on every device.
            adapter: folder of a LoRA adapter that is merged into the weights as they are read; see `adapter`.
            model_impl: which code is to run the decoder.
            load_cache: keeps weights as they are once they are loaded, where a backend can begin with them.

        Raises:
            CheckpointError: when its configuration or weights are missing or unreadable.
        """
        self.folder = folder
        self.load_format = load_format
        self.quantization = quantization
        self.batch_invariant = batch_invariant
        self.model_impl = model_impl
        self.load_cache = load_cache
        self.warnings: tuple[str, ...] = ()
        self.files = CheckpointFiles(folder, load_format)
        self.config = self.files.config
        self.adapter: Adapter | None = None
        self._tensors: CheckpointFiles | Adapter = self.files
        self._used: set[str] = set()
        self._on_bytes = on_bytes
        self._digest = ""
        if adapter:
            self._adapt(Adapter(adapter, self.files))

    @property
    def architecture(self) -> str:
        """The model class that `config.json` names; empty where it names none.

        Raises:
            CheckpointError: when it is no name.
        """
        names = self.config.get("architectures") or [""]
        require(self.files.place("config.json"), "architectures", names, "a list of class names", are_texts)
        return names[0]

    @property
    def has_language_head(self) -> bool:
        """True if it is a language model's, whatever it is used as."""
        return self.architecture.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))

    @cached_property
    def decoder_config(self) -> DecoderConfig:
        """The decoder's shape by `config.json`; untied where the files hold another head than the embedding.

        Raises:
            CheckpointError: see `parse_decoder_config`, and `zoo.description.describe`.
        """
        place = self.files.place("config.json")
        if impl_of(self.config, self.model_impl) is ModelImpl.TRANSFORMERS:
            from espalier.engine.models.zoo.description import describe  # transformers takes seconds to import

            return describe(self.config, place, self.has_language_head)
        config, kind = parse_decoder_config(self.config, place), self.config["model_type"]
        family = family_of(kind)
        if family and self.architecture in GENERATOR_CLASSES and self.architecture != family.generator_class:
            self.warn(f"architectures in {place} says {self.architecture}; its model_type {kind} decides")
        if config.tied and self._holds_another_head():
            self.warn(
                f"tie_word_embeddings in {place} is true, and lm_head.weight is not the embedding; each is used as "
                "it is stored, as in transformers 5"
            )
            return replace(config, tied=False)
        return config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and place of every tensor in the weight files, by name; empty with `LoadFormat.DUMMY`."""
        return self._tensors.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def decoder_prefix(self) -> str:
        """Prefix of the names of the decoder's tensors; empty where there is no embedding."""
        return next((name.removesuffix(_EMBEDDING) for name in _EMBEDDINGS if name in self.tensors), "")

    def __contains__(self, name: str) -> bool:
        """True if the files hold a tensor of this name; never with dummy weights, though any name can be taken."""
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or None when the checkpoint has none of this name."""
        return self.tensors[name].shape if name in self.tensors else None

    def take(
        self, name: str, dtype: torch.dtype, device: torch.device | str, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Read one tensor.

        Args:
            name: the tensor's name.
            dtype: the dtype to convert it to.
            device: where to put it.
            shape: the shape it must have; needed for dummy weights.

        Raises:
            CheckpointError: when the checkpoint has no tensor of this name, or it has another shape.
        """
        if shape is None:
            shape = self._require(name).shape
        out = torch.empty(shape, dtype=dtype, device=device)
        self.take_into(name, out)
        return out

    def take_into(self, name: str, out: torch.Tensor) -> None:
        """Read one tensor into `out`, a tensor of its shape, converting it to its dtype.

        Raises:
            CheckpointError: when the checkpoint has no tensor of this name, or it has another shape.
        """
        if self.load_format is LoadFormat.DUMMY:
            _fill_with_noise(name, out)
            return
        self._require(name, tuple(out.shape))
        suits = out.dtype == torch.float32 and out.device == _HOST and out.is_contiguous()
        stored = self._tensors.read(name, out if suits else None)
        if stored.data_ptr() != out.data_ptr():
            out.copy_(stored)
        if not math.isfinite(out.sum(dtype=torch.float32)):
            self._require_finite(name, stored, out)
        self.mark_used(name)

    def read(self, name: str) -> torch.Tensor:
        """One tensor as it is stored, on the host; its bytes may be the file's, so it must not be written to.

        Raises:
            CheckpointError: it holds no weights.
        """
        self._require(name)
        return self._tensors.read(name)

    def follows_from_config(self, name: str) -> bool:
        """True for what nothing reads: buffers that old checkpoints hold, and biases of zeros beside packed weights."""
        packed = self.files.packed
        return _COMPUTED.search(name) is not None or (packed is not None and packed.is_empty_bias(name))

    def ignore(self, others: Collection[str]) -> None:
        """Count tensors as used that are of another half than the text's, such as images'."""
        log.info("%d tensors of %s are not its text half's: %s", len(others), self.folder, some(others))
        for name in others:
            self.mark_used(name)

    def mark_used(self, name: str) -> None:
        """Count a tensor as used, whether it was read or not."""
        if self._on_bytes and name in self.tensors and name not in self._used:
            self._on_bytes(self.tensors[name].nbytes)
        self._used.add(name)

    @property
    def used(self) -> frozenset[str]:
        """Names of the tensors that count as used so far."""
        return frozenset(self._used)

    def require_all_taken(self) -> None:
        """Raise CheckpointError when a tensor of the checkpoint was neither taken nor ignored; closes its files."""
        aliases = self.adapter.aliases if self.adapter else {}
        for name in self.tensors.keys() - self._used:
            if name in aliases or self.follows_from_config(name):  # some verifiers read no head
                self.mark_used(name)
        self.files.close()
        if left := sorted(self.tensors.keys() - self._used):
            file = self.adapter.file if self.adapter and self.adapter.replaced.keys() >= set(left) else self.folder
            unused = f"{len(left)} tensors that {self.architecture} does not use"
            raise CheckpointError(f"{file} holds {unused}: {some(left)}")

    def warn(self, text: str) -> None:
        """Say once what is odd about the checkpoint and was decided; the text names the file and the field."""
        if text not in self.warnings:
            self.warnings += (text,)
            log.log(self._level, "%s", text)

    def digest(self) -> str:
        """sha256 over all files that results depend on, and over the kind of quantisation.

        The files are configuration, tokenizer, chat template and, except with dummy weights, the weight files, in order
        of name.
        """
        if not self._digest:
            adapter = [*small_files(self.adapter.folder), self.adapter.file] if self.adapter else []
            kind = f"{self.quantization} {self.load_format is LoadFormat.DUMMY}"
            self._digest = digest_of(kind, (*small_files(self.folder), *self.files.weights, *adapter))
        return self._digest

    def _holds_another_head(self) -> bool:
        """True if the files hold a head with other values than the embedding's."""
        embedding = self.decoder_prefix + _EMBEDDING
        if not self.tensors.keys() >= {embedding, _HEAD}:
            return False
        first, second = self._tensors.read(embedding), self._tensors.read(_HEAD)
        if first.shape != second.shape:
            return True
        rows = zip(first.split(_ROWS), second.split(_ROWS), strict=True)  # most that differ do so in the first ones
        return not all(torch.equal(one.float(), other.float()) for one, other in rows)

    def _adapt(self, adapter: Adapter) -> None:
        """Merge an adapter into the tensors, and name the class that its head makes of the model."""
        if suffix := adapter.architecture_suffix:
            self.config["architectures"] = [re.sub(r"For\w+$", "", self.architecture) + suffix]
        self.adapter = adapter
        if self.load_format is not LoadFormat.DUMMY:
            config = self.decoder_config if self.has_language_head else None
            if config and config.tied:
                embedding, head = config.tied_names
                embedding = self.decoder_prefix + _EMBEDDING if self.decoder_prefix else embedding
                if embedding in self.tensors and not self._holds_another_head() and adapter.tie(embedding, head):
                    self.decoder_config = replace(config, tied=False)
                    self.warn(
                        f"{adapter.file} changes {embedding} or {head}, which {self.folder} ties, and not both alike; "
                        "each has what the adapter says of it, as in PEFT"
                    )
            adapter.require_fit()
            if text := adapter.unknown_tokens():
                self.warn(text)
        adapter.replace()
        self._tensors = adapter

    def _require(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
        """A tensor's entry, if it holds weights, of this shape where one is given."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}; is it a checkpoint of this kind?")
        info = self.tensors[name]
        if shape not in (None, info.shape):
            raise CheckpointError(f"{self.folder}: {name} has shape {info.shape}, config.json means {shape}")
        if not info.numbers:
            raise CheckpointError(f"{info.file}: {name} is of type {info.kind}, no weights; is it stored quantised?")
        return info

    def _require_finite(self, name: str, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Refuse values that are no numbers; in an untied embedding they harm only texts with these tokens, so warn."""
        if not (bad := int((~out.isfinite()).sum())):
            return
        what = f"{self.tensors[name].file}: {name} holds {bad} values that are not finite"
        if stored.float().isfinite().all():
            what += f" in {out.dtype}, which is too small for them; use --dtype float32".replace("torch.", "")
        else:
            what += "; it is damaged, download it again"
        if name not in _EMBEDDINGS or self.decoder_config.tied:
            raise CheckpointError(what)
        self.warn(what)


def _fill_with_noise(name: str, out: torch.Tensor) -> None:
    """Small random values, the same for the same name; ones for the factors of a norm, as trained models have."""
    if name.endswith("norm.weight"):
        out.fill_(1.0)
        return
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    out.normal_(std=_DUMMY_STD, generator=torch.Generator(out.device).manual_seed(seed))


class Outline(Checkpoint):
    """A checkpoint that reads names and shapes and no values, for models on the `meta` device.

    It finds missing, unused and misshapen tensors as a loaded checkpoint does, without reading them. Only a head beside
    a tied embedding is compared with it. Who makes it shows its warnings.
    """

    _level = logging.DEBUG

    def take_into(self, name: str, out: torch.Tensor) -> None:
        """Check that the tensor exists and has the shape of `out`; see `Checkpoint`."""
        if self.load_format is not LoadFormat.DUMMY:
            self._require(name, tuple(out.shape))
        self.mark_used(name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the stored one's shape, without values; see `Checkpoint`."""
        return torch.empty(self.tensors[name].shape, device="meta")

    def digest(self) -> str:
        """Empty: a digest would need all weights to be read."""
        return ""
