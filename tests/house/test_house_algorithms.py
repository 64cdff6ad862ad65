"""No algorithm's name outside its folder: code elsewhere asks an algorithm's class for what it declares."""

import ast
from collections.abc import Iterator

import pytest
from house_files import ROOT, sources

from espalier.search.request import AlgorithmName

MEMBERS = {name.name for name in AlgorithmName}
# Of names that are also words of other settings (a device may be `auto`), only the member tells an algorithm.
STRINGS = {str(name) for name in AlgorithmName} - {"auto"}
ROOM = "search/algorithms/"
BENCHMARKS = "experiments/lab/bench/"  # chooses what to measure, by name


def decisions(tree: ast.AST) -> Iterator[str]:
    """Comparisons, memberships, cases and tables by an algorithm's name."""
    groups = {}  # names of tuples and the like that list algorithms
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Tuple | ast.List | ast.Set):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            groups |= {t.id: node.value for t in targets if isinstance(t, ast.Name)}
    for node in ast.walk(tree):
        looked_at: list[ast.AST] = []
        match node:
            case ast.Compare(left=left, comparators=others):
                looked_at = [left, *others]
                looked_at += [groups[n.id] for n in looked_at if isinstance(n, ast.Name) and n.id in groups]
            case ast.MatchValue(value=value):
                looked_at = [value]
            case ast.Dict(keys=keys):
                looked_at = [key for key in keys if isinstance(key, ast.Attribute)]
        if any(map(is_algorithm, looked_at)):
            yield f"{getattr(node, 'lineno', '?')}: {ast.unparse(node)[:80]}"


def is_algorithm(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="AlgorithmName"), attr=name):
            return name in MEMBERS
        case ast.Constant(value=str(text)):
            return text in STRINGS
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return any(map(is_algorithm, items))
    return False


def test_nothing_outside_their_folder_decides_by_an_algorithms_name():
    found = {}
    for name in sources():
        if name.startswith((ROOM, BENCHMARKS)):
            continue
        if lines := list(decisions(ast.parse((ROOT / name).read_text(encoding="utf-8")))):
            found[name] = lines
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "request.algorithm is AlgorithmName.BEAM",
        "request.algorithm in (AlgorithmName.BEAM, AlgorithmName.DVTS)",
        "ALL = (AlgorithmName.BEAM,)\nrequest.algorithm in ALL",
        'cell["algorithm"] == "beam"',
        'if name not in {"best-of-n"}: pass',
        "match name:\n    case AlgorithmName.MCTS: pass",
        "match name:\n    case 'greedy' | 'chain': pass",
        "WIDTHS = {AlgorithmName.BEAM: 4}",
    ],
)
def test_the_search_finds_every_way_to_decide(text: str):
    assert list(decisions(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "algorithm = AlgorithmName.BEAM",
        "device == 'auto'",
        "ALGORITHMS[name].growth is Growth.BEST",
        "f(AlgorithmName)",
    ],
)
def test_the_search_lets_defaults_and_declarations_pass(text: str):
    assert not list(decisions(ast.parse(text)))
