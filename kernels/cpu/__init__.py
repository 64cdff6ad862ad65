"""The operations for float32 on CPU, compiled by numba; imported only where they run."""

import ctypes
import os
import platform
from pathlib import Path

import llvmlite.binding

from espalier.kernels.compilation.compiler import Compiler


def _has_amx() -> bool:
    """True if the processor has AMX for bfloat16 and the system lets this process use it; asks for the permission."""
    features = llvmlite.binding.get_host_cpu_features()
    wanted = os.environ.get("ESPALIER_AMX", "1") != "0" and platform.system() == "Linux"
    if not (wanted and features.get("amx-bf16") and features.get("avx512bw")):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # x86-64; ARCH_REQ_XCOMP_PERM; XFEATURE_XTILEDATA
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


HAS_AMX = _has_amx()
"""True if `amx` computes products; with `ESPALIER_AMX=0` in the environment `tiles` does."""
HAS_VNNI = bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))
"""True if the processor sums products of bytes, which `int8_linear` needs."""


compiled = Compiler(Path(__file__).parent, "amx" if HAS_AMX else "")
"""`numba.njit` for functions that are kept compiled, with AMX and without apart."""
