"""Code of the user's own, by a name like `my_search:Widest`; its module may lie in the current folder."""

import hashlib
import inspect
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError


def load_code(name: str) -> Any:
    """Import what `MODULE:NAME` names; the module may lie in the current folder, as with `python -m`.

    Raises:
        EspalierError: there is no such module or name, or importing the module fails; the message says where.
    """
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # also that of child processes, which import the module by its name
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise EspalierError(str(error)) from error
    except Exception as error:  # whatever somebody's module does when it is imported
        raise EspalierError(f"importing {module} failed, {place_and_reason(error)}") from error


def file_digest(code: Any) -> str:
    """SHA-256 of the file that holds a class or a function, which tells two versions apart; empty without a file."""
    try:
        return hashlib.sha256(Path(inspect.getfile(code)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


def place_and_reason(error: Exception) -> str:
    """Place and reason of an error in code of the user's own: `my_search.py:3: ValueError: math domain error`."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{at.filename}:{at.lineno}: {type(error).__name__}: {' '.join(str(error).split())}"
