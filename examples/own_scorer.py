"""Score the steps of a search by a function: the fewer numbers a step invents, the better."""

import re

from espalier import Solver

PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
NUMBER = re.compile(r"\d+")


def score(problem: str, steps: list[str]) -> float:
    """Return the score in [0, 1] of the last step, after the problem and the steps before it."""
    known = {number for text in (problem, *steps[:-1]) for number in NUMBER.findall(text)}
    return 1 / (1 + len(set(NUMBER.findall(steps[-1])) - known))


def main() -> None:
    """Search with it; `espalier solve --verifier own_scorer:score` does the same from this folder."""
    with Solver(verifier=score) as solver:
        result = solver.solve(PROBLEM, algorithm="beam", beam_width=2, expansion=4, seed=7)
        for node in result.nodes[1:]:
            print(f"{node.score}  {' '.join(node.text.split())}")
        print(result.answer)


if __name__ == "__main__":
    main()
