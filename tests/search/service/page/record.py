"""Records what the tests of the page play: event streams and traces of the bundled pair. Run it to make them anew."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from espalier.search.request import AlgorithmName, SearchRequest, SubmitOptions
from espalier.search.result import CandidateDone, Event, Finished, Started, StepDone
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.trace import trace_of

HERE = Path(__file__).parent
NAMES = {Started: "started", StepDone: "step", CandidateDone: "candidate", Finished: "result"}
PROBLEM = (
    "A market has 811 photos in stock. (a) Then 652 are sold. (b) Then 727 come back. (c) A customer takes 827. "
    "(d) A truck brings 105. (e) Then 189 come back. (f) It makes 193 more. (g) A customer takes 465. "
    "(h) A truck brings 214. How many photos does it have now?"
)
REQUESTS = {
    "beam": SearchRequest(PROBLEM, AlgorithmName.BEAM, 4, 4),
    "best-of-n": SearchRequest(PROBLEM, AlgorithmName.BEST_OF_N, 16),
}


def data_of(event: Event) -> dict[str, Any]:
    """An event as JSON; a result without what no caller gets."""
    if isinstance(event, Finished):
        return {"search_id": event.search_id, "result": event.result.to_dict()}
    return asdict(event)


def main() -> None:
    orchestrator = load_orchestrator(RuntimeSettings())
    try:
        for name, request in REQUESTS.items():
            events: list[Event] = []
            orchestrator.submit(request, events.append, SubmitOptions(report_nodes=True))
            while orchestrator.busy:
                orchestrator.step()
            lines = [f"event: {NAMES[type(event)]}\ndata: {json.dumps(data_of(event))}\n\n" for event in events]
            (HERE / f"{name}.events").write_text("".join(lines))
            last = events[-1]
            assert isinstance(last, Finished)
            (HERE / f"{name}.json").write_text(json.dumps(trace_of(last.result)) + "\n")
    finally:
        orchestrator.close()


if __name__ == "__main__":
    main()
