"""Parts of a checkpoint's model in its `LoadCache`, as they are once they are loaded.

Kept are int8 weights of files, for backends that can begin with them; nothing else would be loaded faster.
"""

import hashlib

import torch

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.load_cache import LoadCache, code_state
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.kernels.backend import Backend
from espalier.kernels.kept import Kept

_USED, _WARNINGS = "taken", "warnings"
"""Facts of what is kept: the tensors it was made of, and what was odd about them."""


def read_kept(checkpoint: Checkpoint, part: str, backend: Backend, dtype: torch.dtype) -> Kept | None:
    """The weights that `keep` was given in this process or an earlier one; their tensors then count as used.

    Args:
        checkpoint: whose part it is.
        part: of the model.
        backend: the one that runs it.
        dtype: of the weights that are not quantised.
    """
    cache = _cache_for(checkpoint, backend)
    if cache is None or (kept := cache.read(_entry(checkpoint, part, dtype))) is None:
        return None
    for name in kept.facts[_USED]:
        checkpoint.mark_used(name)
    for text in kept.facts[_WARNINGS]:
        checkpoint.warn(text)
    return kept


def keep(
    checkpoint: Checkpoint, part: str, backend: Backend, dtype: torch.dtype, kept: Kept, used_before: frozenset[str]
) -> None:
    """Keep a part of the model for later processes, if there is a cache.

    Args:
        checkpoint: see `read_kept`.
        part: see `read_kept`.
        backend: see `read_kept`.
        dtype: see `read_kept`.
        kept: what it is made of.
        used_before: the tensors that counted as used before it was made.
    """
    if cache := _cache_for(checkpoint, backend):
        used = {_USED: sorted(checkpoint.used - used_before), _WARNINGS: list(checkpoint.warnings)}
        cache.write(_entry(checkpoint, part, dtype), kept._replace(facts={**kept.facts, **used}))


def _cache_for(checkpoint: Checkpoint, backend: Backend) -> LoadCache | None:
    of_files = checkpoint.quantization is Quantization.INT8 and checkpoint.load_format is not LoadFormat.DUMMY
    return checkpoint.load_cache if of_files and backend.keeps_int8 else None


def _entry(checkpoint: Checkpoint, part: str, dtype: torch.dtype) -> str:
    """The name of an entry: a hash of the checkpoint's files, of what becomes of them, and of the code for that."""
    of = f"{checkpoint.digest()} {part} {dtype} {checkpoint.decoder_config.impl} {code_state()}"
    return hashlib.sha256(of.encode()).hexdigest()[:32]
