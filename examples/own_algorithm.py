"""A search of your own: successive halving, from N·M first steps to the N best paths.

Run this file, or name it to the command line, in this folder:

espalier solve --algorithm own_algorithm:Halving:share=0.25 -N 2 -M 4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from espalier import SearchRequest, Solver
from espalier.search.algorithms.base import Expand, SearchAlgorithm, path_score, viable
from espalier.search.algorithms.beam import fill_places
from espalier.search.tree import Node

PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"


class Halving(SearchAlgorithm):
    """Keeps a share of the paths after each step, but at least N; see `base.SearchAlgorithm`."""

    @dataclass
    class Parameters:
        """Parameters of its own, given after its name."""

        share: Annotated[float, Interval(gt=0, lt=1)] = 0.5

    def __init__(self, request: SearchRequest, root: Node) -> None:
        """Start with the request, whose defaults are filled in, and the root, which holds no step."""
        self.request = request
        self.root = root
        self.share = self.parameters(request).share
        self.places = request.candidates  # N·M
        self.beam: Sequence[Node] | None = None

    def ask(self) -> list[Expand]:
        """Sample one child of every open path; of the root N·M."""
        if self.beam is None:
            return [Expand(self.root, self.places)]
        return [Expand(node, node.multiplicity) for node in self.beam if node.open]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Keep the best of what has grown and of the complete paths."""
        complete = [node for node in self.beam or [] if node.complete]
        contenders = [*complete, *filter(viable, nodes)]
        ranked = sorted(contenders, key=lambda node: (-path_score(node, self.request.aggregation), node.path))
        self.places = max(self.request.beam_width, int(self.places * self.share))
        self.beam = fill_places(ranked, self.places)

    def finished(self) -> bool:
        """True if all paths are complete."""
        return self.beam is not None and all(node.complete for node in self.beam)

    def kept(self) -> Sequence[Node]:
        """The paths that may go on or vote."""
        return self.beam or []


def main() -> None:
    """Run it from Python; MODULE:CLASS is found beside this script."""
    with Solver() as solver:
        result = solver.solve(PROBLEM, algorithm="own_algorithm:Halving", beam_width=2, expansion=4, seed=7)
        print(f"{result.configuration.algorithm}: {result.answer} of {len(result.candidates)} paths")


if __name__ == "__main__":
    main()
