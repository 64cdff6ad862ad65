"""A verifier of your own: a Python function that checks the arithmetic of each step, in the place of a model."""

import re

from espalier import Solver

PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
EQUATION = re.compile(r"(\d+)([-+])(\d+)=(\d+)")


def arithmetic(problem: str, steps: list[str]) -> float:
    """Return the share of the equations in the last step that hold; 1 for a step without any."""
    right = [
        (int(one) + int(other) if sign == "+" else int(one) - int(other)) == int(result)
        for one, sign, other, result in EQUATION.findall(steps[-1].replace(" ", ""))
    ]
    return sum(right) / len(right) if right else 1.0


def main() -> None:
    """Search with this function, as does `espalier solve --verifier own_verifier:arithmetic`."""
    with Solver("demo-generator", arithmetic) as solver:
        result = solver.solve(PROBLEM, algorithm="beam", beam_width=4, expansion=4, seed=7)
        print(f"{result.answer}, score {result.score:.2f}, from {len(result.candidates)} paths")
        for node in result.nodes[1:]:
            print(f"  {node.score}  {' '.join(node.text.split())}")


if __name__ == "__main__":
    main()
