"""A verifier of your own: a Python function that checks the arithmetic of each step, in the place of a model."""

import re
from collections.abc import Iterable

from espalier import Solver
from espalier.prm.scorer import ScoredSearch, Scorer, ScoreSession, StepNode, StepScore

PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
EQUATION = re.compile(r"(\d+)([-+])(\d+)=(\d+)")


def arithmetic(text: str) -> float:
    """Return the share of the equations in a step that hold; 1 for a step without any."""
    right = [
        (int(one) + int(other) if sign == "+" else int(one) - int(other)) == int(result)
        for one, sign, other, result in EQUATION.findall(text.replace(" ", ""))
    ]
    return sum(right) / len(right) if right else 1.0


class ArithmeticSession(ScoreSession):
    """Scores the steps of one search."""

    def want(self, node: StepNode, in_place: bool = False) -> Iterable[StepScore]:
        """Score a step at once, from its text alone; `node.lineage()` has the steps before it."""
        return (StepScore(node, arithmetic(node.text)),)


class Arithmetic(Scorer):
    """Scores steps by their arithmetic; a run records its name."""

    name = "arithmetic"

    def begin(self, search: ScoredSearch) -> ScoreSession:
        """Start scoring a search; `search.problem` is its text."""
        return ArithmeticSession()


def main() -> None:
    """Search with the bundled generator and this verifier."""
    with Solver("demo-generator", Arithmetic()) as solver:
        result = solver.solve(PROBLEM, algorithm="beam", beam_width=4, expansion=4, seed=7)
        print(f"{result.answer}, score {result.score:.2f}, from {len(result.candidates)} paths")
        for node in result.nodes[1:]:
            print(f"  {node.score}  {' '.join(node.text.split())}")


if __name__ == "__main__":
    main()
