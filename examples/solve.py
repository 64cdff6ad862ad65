"""Solve a problem in this process with the bundled models: one search, then several at a time with two algorithms."""

from espalier import SearchRequest, Solver
from espalier.search.request import AlgorithmName

PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"


def main() -> None:
    """Load both models once, and run searches with them."""
    with Solver() as solver:
        result = solver.solve(PROBLEM, algorithm="beam", beam_width=2, expansion=2, seed=7)
        print(f"{result.answer}, score {result.score:.2f}, {result.usage.generated_tokens} tokens sampled")
        for candidate in result.candidates:
            print(f"  {candidate.score:.2f}  {candidate.answer}  {' '.join(candidate.text.split())}")

        searches = (AlgorithmName.MAJORITY, AlgorithmName.BEST_OF_N)
        requests = [SearchRequest(PROBLEM, algorithm, beam_width=4) for algorithm in searches]
        for each in solver.solve_many(requests):
            print(f"{each.configuration.algorithm}: {each.answer} in {each.usage.seconds:.2f} s")


if __name__ == "__main__":
    main()
