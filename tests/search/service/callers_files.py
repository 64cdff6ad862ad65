"""Makes files of callers for tests of logins."""

from hashlib import sha256
from pathlib import Path


def callers_file(folder: Path, **callers: str) -> Path:
    """A file of callers whose tokens are their names, each with further lines."""
    tables = (
        f'[{name}]\ntoken_sha256 = "{sha256(name.encode()).hexdigest()}"\n{more}\n' for name, more in callers.items()
    )
    file = folder / "callers.toml"
    file.write_text("\n".join(tables))
    return file
