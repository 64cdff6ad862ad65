"""Nothing outside a decoder family's file decides by its name."""

import ast
from pathlib import PurePosixPath

from house_files import ROOT, sources

from espalier.engine.models.families import FAMILIES

OTHER_NAMES = {"engine/models/gguf", "engine/models/families.py"}
"""Rooms and files that may write such names: llama.cpp's names of architectures, and the families themselves."""


def test_only_a_familys_file_writes_its_model_type() -> None:
    names = FAMILIES.keys() | {f.with_images for f in FAMILIES.values()} - {""}
    found = {
        (file, node.value)
        for file in sources()
        if PurePosixPath(file).parts[0] in ("engine", "kernels", "prm", "search")
        and OTHER_NAMES.isdisjoint((file, str(PurePosixPath(file).parent)))
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert found == set()
