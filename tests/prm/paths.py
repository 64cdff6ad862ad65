"""Texts to score, and driving a session by hand over them."""

from typing import Any

from engine_driver import drain

from espalier.engine.engine import Engine
from espalier.engine.work import Scored
from espalier.prm.scorer import ScoredSearch, ScoreStatus, StepScore
from espalier.prm.verifier import Verifier, VerifierSession
from espalier.search.tree import Node

PROBLEM = "Tom starts with 38 coins. He finds 47 more.\nHow many has he?"
STEPS = {
    "one step": ["38+47=85\n\n"],
    "two steps": ["38+47=85\n\n", "\\boxed{85}"],
    "eight steps": [f"## Step {i}: add\n{i}+{i}={2 * i}\n\n" for i in range(1, 9)],
    "an empty line inside": ["First\n\n\nthen 3\n\n", "So\n \nthe answer\n\n"],
    "trailing and leading newlines": ["\n\nFirst\n\n\n\n", "Second", "Third\n"],
    "unicode": ["Größe: 3·4 = 12 ≈ 𝟙𝟚\n\n", "日本語のステップ 🪙\n\n"],
    "latex": ["\\[ \\frac{1}{2} \\cdot \\sqrt{x} = 3 \\]\n\n", "$$\\boxed{\\frac{3}{4}}$$\n\n"],
    "spaces around": ["  a step \n\n", "\tanother\t\n\n"],
    "punctuation before the delimiter": ["It is 85.\n\n", "Is it?\n\n", "So $85$.\n\n\n"],
    "a cyrillic tag inside": ["The word ки is a word ки here\n\n", "the next\n\n"],
}


def opened(
    engine: Engine, verifier: Verifier, problem: str = PROBLEM, owner: str = "me", **search: Any
) -> tuple[VerifierSession[Any], Node]:
    """A session of the problem, and the root of its tree; nothing is computed."""
    root = Node(0, None, ())
    session = verifier.begin(ScoredSearch(engine, owner, root, problem, verifier.prompt(problem), **search))
    assert isinstance(session, VerifierSession)
    return session, root


def begin(
    engine: Engine, verifier: Verifier, problem: str = PROBLEM, **search: Any
) -> tuple[VerifierSession[Any], Node]:
    """A session of the problem, its root computed."""
    session, root = opened(engine, verifier, problem, **search)
    session.prefill()
    (done,) = drain(engine)
    assert isinstance(done, Scored)
    assert list(session.take(done)) == [StepScore(root)]
    return session, root


def child(parent: Node, text: str) -> Node:
    """A node for the next step of a path."""
    return Node(parent.node_id + 1, parent, (*parent.path, 0), text)


def want(session: VerifierSession[Any], node: Node, in_place: bool = False) -> StepScore:
    """Hand in a node whose parent is scored; what is known of it then."""
    (step,) = session.want(node, in_place)
    assert step.node is node
    return step


def settle(engine: Engine, session: VerifierSession[Any]) -> dict[Node, float]:
    """Run until every step that is being scored has its score, and every check is done."""
    scores: dict[Node, float] = {}
    while engine.busy:
        for done in engine.step():
            for step in session.take(done):
                assert step.score is not None
                scores[step.node] = step.node.score = step.score
        engine.check_integrity()
    assert not session.pending
    return scores


def score_step(engine: Engine, session: VerifierSession[Any], parent: Node, text: str, in_place: bool = False) -> Node:
    """Score the next step of a path and nothing else."""
    node = child(parent, text)
    assert want(session, node, in_place).status is ScoreStatus.PENDING
    assert list(settle(engine, session)) == [node]
    return node


def score_path(
    engine: Engine, session: tuple[VerifierSession[Any], Node], steps: list[str], in_place: bool = False
) -> list[float]:
    """Score all steps of a path one after the other, then release it."""
    scoring, root = session
    path = [root]
    for text in steps:
        path.append(score_step(engine, scoring, path[-1], text, in_place))
    for node in path:
        scoring.release(node)
    assert scoring.sequences() == []
    return [node.score for node in path[1:] if node.score is not None]


def score_answer(engine: Engine, verifier: Verifier, steps: list[str]) -> float:
    """The score of a whole answer, by a family that scores no steps."""
    session, node = begin(engine, verifier, score_final_only=True)
    for text in steps[:-1]:
        node = child(node, text)
        assert list(session.skip(node)) == [StepScore(node)]
    score = score_step(engine, session, node, steps[-1]).score
    assert score is not None
    session.close()
    return score
