"""A session of scores on an orchestrator, for tests."""

from typing import Any

from espalier.search.request import SubmitOptions
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.scores import (
    NodeScore,
    OpenNodes,
    ScoreResult,
    ScoreSessionRequest,
    SessionStep,
    SessionTurn,
    StepsScored,
)


class Session:
    """A session on an orchestrator that runs only when something is waited for."""

    def __init__(self, orchestrator: Orchestrator, request: ScoreSessionRequest) -> None:
        self.orchestrator = orchestrator
        self.scores: dict[int, NodeScore] = {}
        self.result: ScoreResult | None = None
        self.on_step = lambda: None
        self._open = OpenNodes()
        self.name = orchestrator.submit(request, self._on_event, SubmitOptions(report_nodes=True))

    def _on_event(self, event: Any) -> None:
        if isinstance(event, StepsScored):
            self.scores |= {each.node: each for each in event.scores}
        else:
            self.result = event.result

    def tell(self, *steps: tuple[int, int, str], release: tuple[int, ...] = (), last: bool = False) -> None:
        turn = SessionTurn(tuple(SessionStep(*step) for step in steps), release, last)
        self._open.take(turn)
        self.orchestrator.tell(self.name, turn)

    def score(self, *steps: tuple[int, int, str], release: tuple[int, ...] = ()) -> list[float | None]:
        self.tell(*steps, release=release)
        while not all(step[0] in self.scores for step in steps):
            assert not self.result
            self.orchestrator.step()
            self.orchestrator.engine.check_integrity()
            self.on_step()
        return [self.scores[step[0]].score for step in steps]

    def end(self) -> ScoreResult:
        self.tell(last=True)
        while self.orchestrator.busy:
            self.orchestrator.step()
        assert self.result
        return self.result
