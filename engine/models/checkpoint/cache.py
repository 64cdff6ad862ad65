"""Parts of a checkpoint's model in a `LoadCache`, as they are once they are loaded."""

import hashlib
from typing import TYPE_CHECKING

import torch

from espalier.engine.models.load_cache import LoadCache, code_state
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.kernels.backend import Backend
from espalier.kernels.kept import Kept

if TYPE_CHECKING:
    from espalier.engine.models.checkpoint import Checkpoint

_TAKEN, _WARNINGS = "taken", "warnings"
"""Facts of what is kept: the tensors it was made of, and what was odd about them."""


class KeptParts:
    """What is kept of one checkpoint: int8 weights of files, for backends that can begin with them; else nothing."""

    def __init__(self, checkpoint: "Checkpoint", cache: LoadCache | None) -> None:
        of_files = checkpoint.quantization is Quantization.INT8 and checkpoint.load_format is not LoadFormat.DUMMY
        self._cache = cache if of_files else None
        self._checkpoint = checkpoint

    def read(self, part: str, backend: Backend, dtype: torch.dtype) -> Kept | None:
        """The weights that `write` was given in this process or an earlier one; their tensors then count as used.

        Args:
            part: of the model.
            backend: the one that runs it.
            dtype: of the weights that are not quantised.
        """
        if not self._cache or not backend.keeps_int8 or (kept := self._cache.read(self._entry(part, dtype))) is None:
            return None
        for name in kept.facts[_TAKEN]:
            self._checkpoint.mark_used(name)
        for text in kept.facts[_WARNINGS]:
            self._checkpoint.warn(text)
        return kept

    def write(self, part: str, backend: Backend, dtype: torch.dtype, kept: Kept, used_before: frozenset[str]) -> None:
        """Keep a part of the model for later processes.

        Args:
            part: see `read`.
            backend: see `read`.
            dtype: see `read`.
            kept: what it is made of.
            used_before: the tensors that counted as used before it was made.
        """
        if self._cache and backend.keeps_int8:
            used = {_TAKEN: sorted(self._checkpoint.used - used_before), _WARNINGS: list(self._checkpoint.warnings)}
            self._cache.write(self._entry(part, dtype), kept._replace(facts={**kept.facts, **used}))

    def _entry(self, part: str, dtype: torch.dtype) -> str:
        """The name of an entry: a hash of the checkpoint's files, of what becomes of them, and of the code for that."""
        checkpoint = self._checkpoint
        of = f"{checkpoint.digest()} {part} {dtype} {checkpoint.decoder_config.impl} {code_state()}"
        return hashlib.sha256(of.encode()).hexdigest()[:32]
