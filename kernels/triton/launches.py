"""Programmatic dependent launch: a kernel begins before the one before it on the stream has ended.

It prepares what depends on no other kernel, then waits. Compute capability 9.0 and later have it; graphs keep it.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch_options(dependent: bool) -> dict[str, Any]:
    """Options of a launch, if `dependent` one that does not wait for the kernel before.

    Such a kernel must call `wait_and_trigger(DEPENDENT)`; it is compiled with the constant that belongs to its launch.
    """
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


@triton.jit
def wait_and_trigger(DEPENDENT: tl.constexpr):
    """Wait until all kernels before have ended and their writes are seen; then let the next kernel begin.

    Whatever another kernel has written may be read behind this only, and nothing may be written before. A kernel that
    let the next one begin without waiting itself would break that promise for those after it.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
