"""A checkpoint, a folder in Hugging Face layout or a GGUF file: configuration, tensors, and that each is used."""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.adapter import Adapter
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.families import GENERATOR_CLASSES, family_of, impl_of, parse_decoder_config
from espalier.engine.models.load_cache import LoadCache, code_state
from espalier.engine.models.options import GGUF, LoadFormat, ModelImpl, Quantization
from espalier.engine.models.stored.base import StoredFormat
from espalier.engine.models.stored.formats import stored_format
from espalier.engine.models.stored.packed import PackedWeights
from espalier.engine.models.text_files import parse_object, read_text, require, shown
from espalier.engine.models.weights import (
    TensorInfo,
    WeightFile,
    open_weight_file,
    parts_of,
    small_files,
    weight_files,
)
from espalier.kernels.backend import Backend
from espalier.kernels.kept import Kept

if TYPE_CHECKING:
    from espalier.engine.models.gguf.file import GgufFile

log = logging.getLogger("espalier.engine")
_OPEN_FILES = 2
"""Shards that are open at once: a layer may lie across two. Closing one frees its memory."""
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Buffers saved in old checkpoints; they follow from config.json, so nothing reads them."""
_DUMMY_STD = 0.02
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_EMBEDDINGS = [f"{before}{_EMBEDDING}" for before in ("model.", "", "model.language_model.", "language_model.model.")]
"""The last two are of checkpoints with images."""
_TOKENIZER = "tokenizer.json"
_TAKEN, _WARNINGS = "taken", "warnings"
"""Facts of what is kept: the tensors it was made of, and what was odd about them."""
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
        config: `config.json` as it stands, or as a GGUF file's metadata mean it.
        tensors: shape and place of every tensor in the weight files, by name; empty with `LoadFormat.DUMMY`.
        quantization: how the decoder's weights are to be kept.
        batch_invariant: whether a request must have the same bits in any batch.
        model_impl: which code is to run the decoder.
        warnings: what is odd about it, and was decided; also logged.
    """

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
        self.warnings: tuple[str, ...] = ()
        self._open: dict[Path, WeightFile] = {}
        self.config = self._read_json("config.json")
        self.quantization = quantization
        self.batch_invariant = batch_invariant
        self.model_impl = model_impl
        self.load_format = load_format
        self._load_cache = load_cache
        self._on_bytes = on_bytes
        self.tensors: dict[str, TensorInfo] = {}
        self._packed: PackedWeights | None = None
        self._weight_files = [] if load_format is LoadFormat.DUMMY else weight_files(folder, load_format)
        for file in self._weight_files:
            self._add_tensors(self._file(file))
        if self.stored and self.tensors:
            files = {name: info.file for name, info in self.tensors.items()}
            self._packed = PackedWeights(self.stored, self.tensors, lambda name: self._file(files[name]).read(name))
            self.tensors = self._packed.tensors
        self._taken: set[str] = set()
        self._adapter: Adapter | None = None
        self._aliases: dict[str, str] = {}
        if adapter:
            self._adapt(Adapter(adapter))

    @property
    def architecture(self) -> str:
        """The model class that `config.json` names; empty where it names none.

        Raises:
            CheckpointError: when it is no name.
        """
        names, rule = self.config.get("architectures") or [""], "a list of class names"
        require(self.place("config.json"), "architectures", names, rule, _is_list_of_texts)
        return names[0]

    @cached_property
    def stored(self) -> StoredFormat | None:
        """The layout of weights that are stored quantised; None where they are not.

        Raises:
            CheckpointError: it is not one of those that are read.
        """
        return stored_format(self.config, self.place("config.json"))

    @cached_property
    def decoder_config(self) -> DecoderConfig:
        """The decoder's shape by `config.json`; untied where the files hold another head than the embedding.

        Raises:
            CheckpointError: see `parse_decoder_config`, and `zoo.description.describe`.
        """
        place = self.place("config.json")
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
    def adapter(self) -> Path | None:
        """The folder of the LoRA adapter that is merged into its weights, or None."""
        return self._adapter.folder if self._adapter else None

    def transpose(self, names: Iterable[str]) -> None:
        """Have an adapter know of weights that are stored `[in, out]`."""
        if self._adapter:
            self._adapter.transposed = frozenset(names)

    @property
    def has_language_head(self) -> bool:
        """True if it is a language model's, whatever it is used as."""
        return self.architecture.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))

    def place(self, name: str) -> str:
        """A small file as errors call it."""
        return f"the metadata of {self.folder}" if self.folder.suffix == GGUF else f"{name} of {self.folder}"

    def object(self, name: str) -> dict[str, Any]:
        """An object that `config.json` may hold, such as `prm`; empty when it is absent.

        Raises:
            CheckpointError: when it is something else.
        """
        found = self.config.get(name)
        return require(self.place("config.json"), name, {} if found is None else found, "an object", _is_object)

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
        if shape is None and (shape := self.shape(name)) is None:
            raise self._no_tensor(name)
        if name in self.tensors and self.folder.suffix == GGUF and not torch.empty(0, device=device).is_meta:
            self._require(name, shape)
            stored = self._read(name)
            out = stored.to(device, dtype)  # values that were expanded are nobody else's: they need no copy
            self._finish(name, stored, out)
            return out
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
        stored = self._read(name, out if suits else None)
        if stored.data_ptr() != out.data_ptr():
            out.copy_(stored)
        self._finish(name, stored, out)

    def read(self, name: str) -> torch.Tensor:
        """One tensor as it is stored, on the host; its bytes may be the file's, so it must not be written to.

        Raises:
            CheckpointError: it holds no weights.
        """
        self._require(name, self.tensors[name].shape)
        return self._read(name)

    def follows_from_config(self, name: str) -> bool:
        """True for what nothing reads: buffers that old checkpoints hold, and biases of zeros beside packed weights."""
        return _COMPUTED.search(name) is not None or (self._packed is not None and self._packed.is_empty_bias(name))

    def ignore(self, name: str) -> None:
        """Count a tensor as used without reading it."""
        self._count(name)

    @property
    def taken(self) -> frozenset[str]:
        """Names of the tensors that count as used so far."""
        return frozenset(self._taken)

    def kept(self, part: str, backend: Backend, dtype: torch.dtype) -> Kept | None:
        """The weights that `keep` was given in this process or an earlier one; the same tensors then count as used.

        Args:
            part: of the model.
            backend: the one that runs it.
            dtype: of the weights that are not quantised.
        """
        cache = self._cache_for(backend)
        if cache is None or (kept := cache.read(self._entry(part, dtype))) is None:
            return None
        for name in kept.facts[_TAKEN]:
            self._count(name)
        for text in kept.facts[_WARNINGS]:
            self.warn(text)
        return kept

    def keep(self, part: str, backend: Backend, dtype: torch.dtype, kept: Kept, taken: frozenset[str]) -> None:
        """Keep a part of the model for later processes, if there is a cache.

        Args:
            part: see `kept`.
            backend: see `kept`.
            dtype: see `kept`.
            kept: what it is made of.
            taken: the tensors that counted as used before it was made.
        """
        if cache := self._cache_for(backend):
            facts = {**kept.facts, _TAKEN: sorted(self._taken - taken), _WARNINGS: list(self.warnings)}
            cache.write(self._entry(part, dtype), kept._replace(facts=facts))

    def _cache_for(self, backend: Backend) -> LoadCache | None:
        """The cache, if these are weights that it saves time for: int8 ones, of files."""
        of_files = self.quantization is Quantization.INT8 and self.load_format is not LoadFormat.DUMMY
        return self._load_cache if of_files and backend.keeps_int8 else None

    def _entry(self, part: str, dtype: torch.dtype) -> str:
        """The name of an entry: a hash of the checkpoint's files, of what becomes of them, and of the code for that."""
        of = f"{self.digest()} {part} {dtype} {self.decoder_config.impl} {code_state()}"
        return hashlib.sha256(of.encode()).hexdigest()[:32]

    def require_all_taken(self) -> None:
        """Raise CheckpointError when a tensor of the checkpoint was neither taken nor ignored; closes its files."""
        for name in self.tensors.keys() - self._taken:
            if name in self._aliases or self.follows_from_config(name):  # some verifiers read no head
                self._count(name)
        self._open.clear()
        if left := sorted(set(self.tensors) - self._taken):
            some = ", ".join(left[:5]) + (", …" if len(left) > 5 else "")
            file = self._adapter.file if self._adapter and self._adapter.replaced.keys() >= set(left) else self.folder
            raise CheckpointError(f"{file} holds {len(left)} tensors that {self.architecture} does not use: {some}")

    def optional_json(self, name: str) -> dict[str, Any]:
        """The JSON file `name` of the folder, or an empty dictionary when it is absent."""
        return {} if (text := self.text(name)) is None else parse_object(self.folder / name, text)

    def text(self, name: str) -> str | None:
        """The text of the small file `name`, such as `tokenizer.json`, or None when it is absent.

        Raises:
            CheckpointError: when it cannot be read as text, or cannot be made of a GGUF file's metadata.
        """
        if self.folder.suffix == GGUF:
            return cast("GgufFile", self._file(parts_of(self.folder)[0])).text(name)
        return read_text(self.folder / name)

    def warn(self, text: str) -> None:
        """Say once what is odd about the checkpoint and was decided; the text names the file and the field."""
        if text not in self.warnings:
            self.warnings += (text,)
            self._log_warning(text)

    def digest(self) -> str:
        """sha256 over all files that results depend on, and over the kind of quantisation.

        The files are configuration, tokenizer, chat template and, except with dummy weights, the weight files, in order
        of name. A weight file in the hub's cache is a link to a blob named by its sha256, so it is not read for this.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        dummy = self.load_format is LoadFormat.DUMMY
        total = hashlib.sha256(f"{self.quantization} {dummy}".encode())
        adapter = [*small_files(self._adapter.folder), self._adapter.file] if self._adapter else []
        for file in small_files(self.folder) + self._weight_files + adapter:
            blob = file.resolve().name
            known = re.fullmatch(r"[0-9a-f]{64}", blob) is not None
            total.update(f"\n{file.name} {blob if known else _file_digest(file)}".encode())
        return total.hexdigest()

    def _log_warning(self, text: str) -> None:
        log.warning("%s", text)

    def _add_tensors(self, file: WeightFile) -> None:
        for name in self.tensors.keys() & file.tensors.keys():
            files = self.tensors[name].file, file.tensors[name].file.name
            raise CheckpointError(f"{name} is in {files[0]} and in {files[1]}; one belongs to another checkpoint")
        self.tensors.update(file.tensors)

    def _holds_another_head(self) -> bool:
        """True if the files hold a head with other values than the embedding's."""
        embedding = self.decoder_prefix + _EMBEDDING
        if embedding not in self.tensors or _HEAD not in self.tensors:
            return False
        if self.shape(embedding) != self.shape(_HEAD):
            return True
        # Most differ from the beginning; packed ones take long to read whole.
        if not self._adapter and not self._packed:
            one, other = (self._file(self.tensors[each].file).first_rows(each, _ROWS) for each in (embedding, _HEAD))
            if not torch.equal(one.float(), other.float()):
                return True
        parts = (self._read(name).split(_ROWS) for name in (embedding, _HEAD))
        return not all(torch.equal(one.float(), other.float()) for one, other in zip(*parts, strict=True))

    def _adapt(self, adapter: Adapter) -> None:
        """Take an adapter's own tensors in, and the class that its head makes of the model."""
        if suffix := adapter.architecture_suffix:
            self.config["architectures"] = [re.sub(r"For\w+$", "", self.architecture) + suffix]
        if self.load_format is not LoadFormat.DUMMY:
            self._tie(adapter)
            if unknown := sorted(adapter.changed - self.tensors.keys()):
                raise CheckpointError(f"{adapter.file} changes {unknown[0]}, which {self.folder} does not have")
            for name, info in adapter.replaced.items():
                if (found := self.shape(name)) not in (None, info.shape):
                    raise CheckpointError(
                        f"{adapter.file}: {name} has shape {info.shape}, and that of {self.folder} {found}; was the "
                        "base resized when it was trained? Merge it there, and load the whole model"
                    )
            self._warn_of_tokens(adapter)
        self._adapter = adapter
        self.tensors = self.tensors | adapter.replaced

    def _tie(self, adapter: Adapter) -> None:
        """Have a tied head follow what an adapter does to the embedding, or be a matrix of its own."""
        reached = adapter.changed | adapter.replaced.keys()
        config = self.decoder_config if self.has_language_head else None
        if config is None or not config.tied:
            return
        embedding, head = config.tied_names
        if self.decoder_prefix:
            embedding = self.decoder_prefix + _EMBEDDING
        no_tie = embedding not in self.tensors or (head in self.tensors and self._holds_another_head())
        if no_tie or reached.isdisjoint((embedding, head)):
            return
        if not adapter.tie(embedding, head):
            self.tensors = {name: info for name, info in self.tensors.items() if name != head}
            return
        self.tensors = self.tensors | {head: self.tensors[embedding]}
        self._aliases[head] = embedding
        self.decoder_config = replace(config, tied=False)
        self.warn(
            f"{adapter.file} changes {embedding} or {head}, which {self.folder} ties, and not both alike; each has "
            "what the adapter says of it, as in PEFT"
        )

    def _warn_of_tokens(self, adapter: Adapter) -> None:
        """Say it if an adapter's folder has a tokenizer with tokens that the base's does not have."""
        if (text := read_text(adapter.folder / _TOKENIZER)) is None:
            return
        its = _tokens(parse_object(adapter.folder / _TOKENIZER, text))
        if more := sorted(its - _tokens(self.optional_json(_TOKENIZER))):
            self.warn(
                f"{adapter.folder / _TOKENIZER} has tokens that {self.folder} has not: {shown(more)}; the base's "
                "tokenizer is used, which reads them as text"
            )

    def _read(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor as it is to be used; see `WeightFile.read`."""
        if not self._adapter:
            return self._read_base(name, room)
        weight = self._adapter.read(name) if name in self._adapter.replaced else self._read_base(name, room)
        return self._adapter.merge(name, weight) if name in self._adapter.changed else weight

    def _read_base(self, name: str, room: torch.Tensor | None) -> torch.Tensor:
        stored = self._aliases.get(name, name)
        if self._packed and stored in self._packed.parts:
            return self._packed.read(stored)
        return self._file(self.tensors[name].file).read(stored, room)

    def _finish(self, name: str, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Count a tensor as used, if `out`, its values as they are taken, are numbers."""
        if not math.isfinite(out.sum(dtype=torch.float32)):
            self._require_finite(name, stored, out)
        self._count(name)

    def _count(self, name: str) -> None:
        if self._on_bytes and name in self.tensors and name not in self._taken:
            self._on_bytes(self.tensors[name].nbytes)
        self._taken.add(name)

    def _require(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.tensors:
            raise self._no_tensor(name)
        if (found := self.tensors[name].shape) != shape:
            raise CheckpointError(f"{self.folder}: {name} has shape {found}, config.json means {shape}")
        if not (info := self.tensors[name]).numbers:
            raise CheckpointError(
                f"{info.file}: {name} holds values of type {info.kind}, which are no weights; is it stored quantised?"
            )

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

    def _no_tensor(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.folder} has no tensor {name!r}; is it a checkpoint of this kind?")

    def _read_json(self, name: str) -> dict[str, Any]:
        if (text := self.text(name)) is None:
            raise CheckpointError(f"{self.folder} has no {name}; is it a Hugging Face checkpoint?")
        return parse_object(self.folder / name, text)

    def _file(self, path: Path) -> WeightFile:
        """The weight file at `path`, opened; the least recently used one is closed to make room."""
        file = self._open.pop(path, None)
        if file is None:
            while len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            file = _open_gguf(path) if path.suffix == GGUF else open_weight_file(path)
        self._open[path] = file
        return file


def _tokens(tokenizer: Mapping[str, Any]) -> set[str]:
    """All tokens of a `tokenizer.json`, as far as they can be read."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    told = [each.get("content") for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    return {text for text in (*told, *(vocabulary if isinstance(vocabulary, dict) else ())) if isinstance(text, str)}


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _open_gguf(path: Path) -> "GgufFile":
    from espalier.engine.models.gguf.file import GgufFile

    return GgufFile(path)


def _fill_with_noise(name: str, out: torch.Tensor) -> None:
    """Small random values, the same for the same name; ones for the factors of a norm, as trained models have."""
    if name.endswith("norm.weight"):
        out.fill_(1.0)
        return
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    out.normal_(std=_DUMMY_STD, generator=torch.Generator(out.device).manual_seed(seed))


def _file_digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


class Outline(Checkpoint):
    """A checkpoint that reads names and shapes and no values, for models on the `meta` device.

    It finds missing, unused and misshapen tensors as a loaded checkpoint does, without reading them. Only a head beside
    a tied embedding is compared with it.
    """

    def _log_warning(self, text: str) -> None:
        """Nothing: who makes an outline shows its warnings."""

    def take_into(self, name: str, out: torch.Tensor) -> None:
        """Check that the tensor exists and has the shape of `out`; see `Checkpoint`."""
        if self.load_format is not LoadFormat.DUMMY:
            self._require(name, tuple(out.shape))
        self._count(name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the stored one's shape, without values; see `Checkpoint`."""
        return torch.empty(self.tensors[name].shape, device="meta")

    def digest(self) -> str:
        """Empty: a digest would need all weights to be read."""
        return ""
