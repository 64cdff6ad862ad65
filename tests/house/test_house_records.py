"""No two records with the same ten fields: one of them is a part of the other, or both are one."""

import ast
from itertools import combinations

from house_files import ROOT, sources

MAX_ALIKE = 9
"""Fields of the same name in two records that share no base: more is one thing described twice."""


def records() -> dict[str, set[str]]:
    """The fields of each dataclass and pydantic model, by file and name; those of its bases are not among them."""
    found: dict[str, set[str]] = {}
    for name in sources():
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and is_record(node):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                found[f"{name}:{node.name}"] = {field.id for field in fields if isinstance(field, ast.Name)}
    return found


def is_record(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
    return any(mark.startswith(("dataclass", "BaseModel", "_Table", "NamedTuple")) for mark in marks)


def test_no_two_records_have_the_same_ten_fields():
    found = records()
    assert len(found) > 150, "the search for records finds too few"
    alike = {
        (one, other): sorted(found[one] & found[other])
        for one, other in combinations(found, 2)
        if len(found[one] & found[other]) > MAX_ALIKE
    }
    assert alike == {}
