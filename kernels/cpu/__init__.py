"""CPU paths of the operations, compiled by numba; imported only where they run.

numba keeps what it has compiled, and looks for changes in a function's own file only. Functions here are made of
several files, and two of different states would be linked into one program: so each state of this folder has a place
of its own, and so has what is compiled with AMX.
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
    """Whether the processor has AMX for bfloat16 and the system lets this process use it, which is asked for here."""
    features = llvmlite.binding.get_host_cpu_features()
    wanted = os.environ.get("ESPALIER_AMX", "1") != "0" and platform.system() == "Linux"
    if not (wanted and features.get("amx-bf16") and features.get("avx512bw")):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # x86-64; ARCH_REQ_XCOMP_PERM; XFEATURE_XTILEDATA
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


HAS_AMX = _has_amx()
"""Whether products are taken by `amx`; `ESPALIER_AMX=0` in the environment leaves them to `tiles`."""


def place_of_compiled(folder: Path, given: str, kind: str = "") -> str:
    """Where what is compiled from the files of `folder` is kept: below `given`, below `folder` where that is empty.

    What is compiled differently from the same files is of another `kind`. `given` itself where nothing can be written
    there; where that is empty, numba finds a place for itself.
    """
    state = hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))) + kind.encode()
    ).hexdigest()[:16]
    place = (Path(given) if given else folder / "__pycache__") / state
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return given
    return str(place) if os.access(place, os.W_OK) else given


_config.CACHE_DIR = place_of_compiled(Path(__file__).parent, _config.CACHE_DIR, "amx" if HAS_AMX else "")
