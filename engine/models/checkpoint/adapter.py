"""LoRA adapters in PEFT's layout, merged into a checkpoint's weights as they are read.

W' = W + s B A, with A [r, in], B [out, r] and s = alpha / r, or alpha / sqrt(r) of rank-stabilised LoRA (Hu et al.,
2021; Kalajdzievski, 2023). With a magnitude m for each output (DoRA; Liu et al., 2024) the rows of W' are scaled to
length m. An embedding [vocabulary, hidden] has A [r, vocabulary] and B [hidden, r], and lengths are its columns'.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint.files import CheckpointFiles
from espalier.engine.models.text_files import AN_OBJECT, are_texts, parse_object, read_text, require, shown
from espalier.engine.models.weights import TensorInfo, open_weight_file

_CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the files of an adapter's weights, one of which it has."""
_PART = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.default)?(\.weight)?"
)
_PREFIX = "base_model.model."
_SAVED = re.compile(r"\.(modules_to_save(\.default)?|base_layer|original_module)(?=\.)")
"""In names of weights that are stored whole: of a module trained so, of one that is changed besides, or of the base."""
_NOT_READ = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
"""Options of PEFT that change what is added, or where."""
_NEW_BASES = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Ways to begin that change the base's weights, too, so that the adapter does not fit the published ones."""
_MERGE = "merge it where it was trained, and load the whole model"
_MAX_ALPHA = 1e30
_TOKENIZER = "tokenizer.json"
_HEADS = {"TOKEN_CLS": "ForTokenClassification", "SEQ_CLS": "ForSequenceClassification"}


def is_adapter(folder: Path) -> bool:
    """True if a folder holds an adapter and no model."""
    return (folder / _CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """The name of the model that an adapter changes: a folder beside it, or else what its configuration says.

    Raises:
        CheckpointError: the configuration does not say.
    """
    name: Any = _read_config(folder).get("base_model_name_or_path")
    rule = "the name of a model; or give BASE+ADAPTER"
    require(str(folder / _CONFIG), "base_model_name_or_path", name, rule, lambda it: isinstance(it, str) and it != "")
    return str(folder / name) if (folder / name).is_dir() else name


class Adapter:
    """One adapter over the tensors of a checkpoint's files: what it adds to weights, and the weights that it replaces.

    Attributes:
        file: its weights.
        tensors: shape and place of every tensor of the checkpoint, by name; with those replaced after `replace`.
        aliases: tensors that begin as another one, by which name that is stored.
        transposed: names of weights that are `[in, out]`.
    """

    def __init__(self, folder: Path, files: CheckpointFiles) -> None:
        """Open an adapter's folder, to be merged into the weights of `files`.

        Raises:
            CheckpointError: it is missing or damaged, or of a kind that is not read.
        """
        self.folder = folder
        self.tensors = files.tensors
        self.aliases: dict[str, str] = {}
        self._files = files
        self._config = _read_config(folder)
        self._require_readable()
        found = [folder / name for name in WEIGHTS if (folder / name).is_file()]
        if not found:
            raise CheckpointError(f"{folder} has no {' and no '.join(WEIGHTS)}; is the download complete?")
        self.file = found[0]
        self._added = open_weight_file(self.file)
        self._parts = dict[str, dict[str, str]]()
        own, self._of_base = dict[str, str](), dict[str, str]()  # names of what is stored whole, by the base's name
        self.transposed = frozenset[str]()
        names = self._config.get("modules_to_save") or []
        place, rule = str(folder / _CONFIG), "a list of names"
        to_save = tuple(require(place, "modules_to_save", names, rule, lambda it: are_texts(it) and all(it)))
        for name in self._added.tensors:
            plain = name.removeprefix(_PREFIX)
            if match := _PART.fullmatch(plain):
                self._parts.setdefault(f"{match['module']}.weight", {})[match["part"]] = name
            else:
                saved = _SAVED.sub("", plain)
                owned = ".modules_to_save." in plain or saved.rpartition(".")[0].endswith(to_save)
                (own if owned and ".original_module." not in plain else self._of_base)[saved] = name
        self._own = frozenset(own)
        self._whole = self._of_base | own

    @property
    def replaced(self) -> dict[str, TensorInfo]:
        """Weights that it stores whole, by the name in the base checkpoint."""
        return {name: self._added.tensors[stored] for name, stored in self._whole.items()}

    @property
    def architecture_suffix(self) -> str | None:
        """The end of the class name of the model with the adapter's own head; None if it has none."""
        return _HEADS.get(str(self._config.get("task_type")))

    def tie(self, embedding: str, head: str) -> bool:
        """Do to an embedding and a head that share one matrix in the files what PEFT does to them.

        What is added to a module, or stored for it by `modules_to_save`, is that module's alone, unless
        `ensure_weight_tying` says that the other follows. A matrix that is stored for the base is both modules'.

        Args:
            embedding: the weight's name.
            head: the weight's name.

        Returns:
            True where the head is another matrix than the embedding from now on.

        Raises:
            CheckpointError: what is to follow cannot, or PEFT itself does not have it follow.
        """
        both = embedding, head
        if not any(name in self._parts or name in self._whole for name in both):
            return False
        if self._follow_each_other(embedding, head):
            self.tensors = {name: info for name, info in self.tensors.items() if name != head}
            return False
        self.tensors = {**self.tensors, head: self.tensors[embedding]}
        self.aliases[head] = embedding
        return True

    def _follow_each_other(self, embedding: str, head: str) -> bool:
        """True if what is done to one of the two is done to both, under the embedding's name alone; see `tie`."""
        both = embedding, head
        for stored in [self._of_base[name] for name in both if name in self._of_base]:
            for name in both:
                if name not in self._own:
                    self._whole[name] = stored
        alone = [name for name in both if name in self._parts or name in self._own]
        with_lengths = [name for name in alone if "lora_magnitude_vector" in self._parts.get(name, ())]
        if (alone and not self._config.get("ensure_weight_tying")) or with_lengths == list(both):
            return False
        if alone and (with_lengths or not embedding.endswith("embed_tokens.weight")):
            cause = "use_dora" if with_lengths else f"the names {embedding} and {head}"
            said = "ensure_weight_tying is true, which PEFT ignores with"
            raise CheckpointError(f"{self.folder / _CONFIG}: {said} {cause}; {_MERGE}")
        for of_names in cast("tuple[dict[str, Any], ...]", (self._parts, self._whole)):
            of_head = of_names.pop(head, None)
            if alone == [head] and of_head is not None:  # which PEFT trains as the embedding's
                of_names[embedding] = of_head
        return True

    def require_fit(self) -> None:
        """Raise CheckpointError where the adapter changes what is not there, or is of another shape."""
        if unknown := sorted(self._parts.keys() - self.tensors.keys()):
            raise CheckpointError(f"{self.file} changes {unknown[0]}, which {self._files.folder} does not have")
        for name, info in self.replaced.items():
            if name in self.tensors and (found := self.tensors[name].shape) != info.shape:
                shapes = f"{name} has shape {info.shape}, and that of {self._files.folder} {found}"
                raise CheckpointError(f"{self.file}: {shapes}; was the base resized when it was trained? {_MERGE}")

    def unknown_tokens(self) -> str | None:
        """A warning if the adapter's folder has a tokenizer with tokens that the base's does not have."""
        place = self.folder / _TOKENIZER
        if (text := read_text(place)) is None:
            return None
        its = _tokens(parse_object(place, text))
        if not (more := sorted(its - _tokens(self._files.optional_json(_TOKENIZER)))):
            return None
        return (
            f"{place} has tokens that {self._files.folder} has not: {shown(more)}; the base's tokenizer is used, which "
            "reads them as text"
        )

    def replace(self) -> None:
        """Take in the weights that the adapter stores whole."""
        self.tensors = {**self.tensors, **self.replaced}

    def read(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor as it is to be used; see `WeightFile.read`."""
        if (whole := self._whole.get(name)) is None:
            weight = self._files.read(self.aliases.get(name, name), room)
        else:
            weight = self._added.read(whole)
        return self._merged(name, weight) if name in self._parts else weight

    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A weight of the base, `[out, in]` or one of `transposed`, with what the adapter adds; float32.

        Raises:
            CheckpointError: shapes do not fit, a part is missing, or one is not finite.
        """
        parts = {part: self._added.read(tensor).float() for part, tensor in self._parts[name].items()}
        embeds = "lora_embedding_A" in parts
        turned = embeds or name in self.transposed
        try:
            a, b = (parts.pop(f"lora_embedding_{side}" if embeds else f"lora_{side}") for side in "AB")
            magnitude = parts.pop("lora_magnitude_vector") if self._config.get("use_dora") else None
            added = (b @ a).mul_(self._scale(name.removesuffix(".weight"), len(a)))
            merged = weight.float() + (added.T if turned else added)
            if magnitude is not None:
                lengths = merged.norm(dim=0 if turned else 1, keepdim=True)
                merged *= magnitude.view(lengths.shape) / lengths
        except KeyError as error:
            raise CheckpointError(f"{self.file}: what is added to {name} lacks {error}") from error
        except RuntimeError as error:
            raise CheckpointError(f"{self.file}: what is added to {name} does not fit it: {error}") from error
        if parts:
            raise CheckpointError(f"{self.file}: {next(iter(parts))} of {name} is not used by {_CONFIG}")
        if merged.shape != weight.shape:
            raise CheckpointError(f"{self.file}: {tuple(merged.shape)} is added to {name} of {tuple(weight.shape)}")
        if not merged.isfinite().all() and weight.isfinite().all():
            raise CheckpointError(f"{self.file}: what is added to {name} is not finite; it is damaged")
        return merged

    def _scale(self, module: str, rank: int) -> float:
        place = self.folder / _CONFIG
        alpha = _by_pattern(place, "alpha_pattern", self._config, module, self._config.get("lora_alpha", 8))
        ranked = _by_pattern(place, "rank_pattern", self._config, module, self._config.get("r", rank))
        require(str(place), f"lora_alpha of {module}", alpha, "a finite number", _is_finite)
        if type(ranked) is not int or ranked != rank or not rank:
            raise CheckpointError(f"{place} means rank {shown(ranked)} for {module}, its weights have rank {rank}")
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _require_readable(self) -> None:
        place, config = self.folder / _CONFIG, self._config
        if (kind := config.get("peft_type")) != "LORA":
            raise CheckpointError(f"{place}: peft_type is {shown(kind)}; read is LORA")
        if given := [name for name in _NOT_READ if config.get(name)]:
            raise CheckpointError(f"{place}: {given[0]} is {shown(config[given[0]])}, which is not read")
        if config.get("bias", "none") != "none":
            raise CheckpointError(f"{place}: bias is {shown(config['bias'])}; only none is read")
        if str(begun := config.get("init_lora_weights", True)).startswith(_NEW_BASES):
            raise CheckpointError(f"{place}: init_lora_weights {begun} changed the base's weights, too; {_MERGE}")


def _tokens(tokenizer: Mapping[str, Any]) -> set[str]:
    """All tokens of a `tokenizer.json`, as far as they can be read."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    listed = [each.get("content") for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    return {text for text in (*listed, *(vocabulary if isinstance(vocabulary, dict) else ())) if isinstance(text, str)}


def _by_pattern(place: Path, field: str, config: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that is the end of a module's name, as PEFT looks it up."""
    patterns = require(str(place), field, config.get(field) or {}, *AN_OBJECT)
    for pattern, value in patterns.items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        except re.error as error:
            raise CheckpointError(f"{field} in {place} has {shown(pattern)}, which is no pattern: {error}") from error
    return default


def _read_config(folder: Path) -> dict[str, Any]:
    if (text := read_text(folder / _CONFIG)) is None:
        raise CheckpointError(f"{folder} has no {_CONFIG}; is it a LoRA adapter in PEFT's layout?")
    return parse_object(folder / _CONFIG, text)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_ALPHA
