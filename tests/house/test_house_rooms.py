"""Rooms have a README that names each of their files."""

import re
from collections import Counter
from pathlib import PurePosixPath

import pytest
from house_files import LAYERS, ROOT, sources

ONE_FILE_AN_ENTRY = {"prm/families", "search/algorithms"}
"""Rooms with a file for each entry of a table; their READMEs show the table."""


def rooms() -> Counter[str]:
    """Source files in each folder of the layers, `__init__.py` and `__main__.py` apart."""
    files = (PurePosixPath(name) for name in sources())
    return Counter(
        str(file.parent)
        for file in files
        if file.parts[0] in LAYERS and file.name not in ("__init__.py", "__main__.py")
    )


def listed(text: str) -> set[str]:
    """Names of files and folders that a README sets in code or links to."""
    return {name.rstrip("/").rpartition("/")[2] for name in re.findall(r"`([\w./-]+)`", text)}


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_rooms_readme_names_each_of_its_files(room: str) -> None:
    readme = ROOT / room / "README.md"
    assert readme.is_file(), f"{room} has no README.md"
    names = {PurePosixPath(name).name for name in sources() if str(PurePosixPath(name).parent) == room}
    missing = names - {"__init__.py", "__main__.py"} - listed(readme.read_text(encoding="utf-8"))
    assert not (missing and room not in ONE_FILE_AN_ENTRY), missing


def test_every_folder_of_the_layers_has_a_readme() -> None:
    folders = {name.rpartition("/")[0] for name in sources()}
    folders = {folder for folder in folders if not folder.startswith("proto/espalier")}
    assert {folder for folder in folders if not (ROOT / folder / "README.md").is_file()} == set()


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their names alone: of two with one name, it collects none but the first."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name, count in names.items() if count > 1} == set()
