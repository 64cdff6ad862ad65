"""Ask a server: events of one search as they arrive, then many searches at a time; start one with `espalier serve`."""

import sys

from espalier import SearchClient
from espalier.search.result import Finished, StepDone

PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"


def main(endpoint: str) -> None:
    """Run searches on the server at `endpoint`, HOST:PORT."""
    with SearchClient(endpoint) as client:
        for event in client.solve_stream(PROBLEM, beam_width=2, expansion=2, seed=7):
            match event:
                case StepDone():
                    print(f"depth {event.depth}: {event.scored} scored, {len(event.kept)} kept")
                case Finished():
                    print(f"answer {event.result.answer}")

        problems = [PROBLEM.replace("38", str(coins)) for coins in (24, 60)]
        for result in client.solve_many(problems, concurrency=2, algorithm="best-of-n", beam_width=4):
            print(result.answer)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
