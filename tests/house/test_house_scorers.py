"""A search knows no kind of scorer: it sees the contract alone."""

import ast

from house_files import ROOT, sources

CONTRACT = {"espalier.prm.scorer", "espalier.prm.limits"}
LOADERS = {"search/run/settings.py", "search/run/load.py"}
"""Name the scorer that is asked for, and make it."""

REQUESTS = {"ScoreRequest", "ScoreSessionRequest", "ResolvedScores", "ScoreResult", "RunningScoreSession"}
"""What is asked for, resolved, run and given back, as of a search; none of them is a scorer or its session."""


def searches() -> list[str]:
    return [name for name in sources() if name.startswith("search/run/") and name not in LOADERS]


def test_searches_import_the_contract_of_scoring_and_no_scorer():
    imported = {
        (name, node.module)
        for name in searches()
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("espalier.prm")
    }
    assert {module for _, module in imported} == CONTRACT, imported


def test_searches_do_not_tell_scorers_or_sessions_apart():
    for name in searches():
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            kinds = node.args if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" else ()
            told = [ast.unparse(kind).removeprefix("scores.") for kind in kinds] + (
                [ast.unparse(node.subject)] if isinstance(node, ast.Match) else []
            )
            kinds_of_scorers = [text for text in told if "scor" in text.lower() or "session" in text.lower()]
            assert not set(kinds_of_scorers) - REQUESTS, (name, told)
