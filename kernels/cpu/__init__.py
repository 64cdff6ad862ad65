"""CPU paths of the operations, compiled by numba; imported only where they run.

numba keeps what it has compiled, and looks for changes in a function's own file only. Functions here are made of
several files, and two of different states would be linked into one program: so each state of this folder has a place
of its own.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from numba.core import config

_config: Any = config  # it has no attributes that a type checker could see


def place_of_compiled(folder: Path, given: str) -> str:
    """Where what is compiled from the files of `folder` is kept: below `given`, below `folder` where that is empty.

    `given` itself where nothing can be written there; where that is empty, numba finds a place for itself.
    """
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()[:16]
    place = (Path(given) if given else folder / "__pycache__") / state
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return given
    return str(place) if os.access(place, os.W_OK) else given


_config.CACHE_DIR = place_of_compiled(Path(__file__).parent, _config.CACHE_DIR)
