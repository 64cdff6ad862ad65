"""The operations for float32 on CPU, compiled by numba; imported only where they run.

numba caches compiled functions, and looks for changes in a function's own file only. Functions here call others of
several files, so a stale one could be linked with a new one. Each state of this folder therefore has a cache folder of
its own, with AMX and without.
"""

import ctypes
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import llvmlite.binding
from numba.core import config

_config: Any = config  # it has no attributes that a type checker could see


def _has_amx() -> bool:
    """Whether the processor has AMX for bfloat16 and the system lets this process use it; asks for the permission."""
    features = llvmlite.binding.get_host_cpu_features()
    wanted = os.environ.get("ESPALIER_AMX", "1") != "0" and platform.system() == "Linux"
    if not (wanted and features.get("amx-bf16") and features.get("avx512bw")):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # x86-64; ARCH_REQ_XCOMP_PERM; XFEATURE_XTILEDATA
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


HAS_AMX = _has_amx()
"""Whether `amx` computes products; with `ESPALIER_AMX=0` in the environment `tiles` does."""
HAS_VNNI = bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))
"""Whether the processor sums products of bytes, which `int8_linear` needs."""


def place_of_compiled(folder: Path, given: str, kind: str = "") -> str:
    """The cache folder for functions compiled from the files of `folder`: below `given`, or `folder` if that is empty.

    Functions that are compiled differently from the same files have another `kind`. Where no folder can be written,
    the result is `given` itself; if that is empty, numba finds a place of its own.
    """
    state = hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))) + kind.encode()
    ).hexdigest()[:16]
    place = (Path(given) if given else folder / "__pycache__") / state
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return given
    return str(place) if os.access(place, os.W_OK) else given


_config.CACHE_DIR = place_of_compiled(Path(__file__).parent, _config.CACHE_DIR, "amx" if HAS_AMX else "")
