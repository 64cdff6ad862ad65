"""Scores every step of many solutions, at once on the engine or by a function of the user's, and keeps the scores."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, EspalierError, InvalidRequestError, RequestTooLargeError
from espalier.engine.roles import VERIFIER
from espalier.experiments.prm_evaluation.solutions import Solution
from espalier.experiments.runs.files import append, damage_named, open_lines, read_lines, write_whole
from espalier.experiments.runs.folder import RunFolder
from espalier.prm.scorer import Scorer
from espalier.prm.scorers import names_function
from espalier.prm.scorers.own import FunctionScorer, load_own
from espalier.search.run.load import load_verifier_alone
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings, check_settings
from espalier.search.scores import ScoreRequest, ScoreResult


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a solution's steps, in [0, 1]; empty if it was `refused`, which then says why."""

    unique_id: str
    scores: tuple[float, ...] = ()
    refused: str = ""


OnScored = Callable[[Scored], None]
"""Called for each solution as it is scored or refused."""
ScoreSolutions = Callable[[Sequence[Solution], OnScored], None]


def load_scoring(
    runtime: RuntimeSettings, in_flight: int, on_bytes: Callable[[int, int], None] | None = None
) -> tuple[ScoreSolutions, dict[str, str]]:
    """Load what scores solutions: a process reward model on an engine of its own, or a function of the user's.

    Returns:
        A function that scores solutions, and everything that scores depend on: the digest of the model or the function,
        what it is scored as, and a model's dtype and device.

    Raises:
        InvalidRequestError: settings are invalid.
        CheckpointError: `--verifier` names nothing that scores the steps of given texts.
    """
    if names_function(runtime.verifier):
        check_settings(runtime)
        function = load_own(runtime.verifier)
        if not isinstance(function, FunctionScorer):
            raise CheckpointError(f"--verifier {runtime.verifier}: scores the steps of searches; give a function")
        if runtime.verify_incremental:
            raise CheckpointError(
                f"--verify-incremental: {function.name} is called with whole texts; leave the flag out"
            )
        digest = function.digests.get(VERIFIER, "")
        return partial(_score_by_function, function), {"verifier": digest, "verifier_family": function.identity}
    engine, verifier = load_verifier_alone(runtime, on_bytes)
    if verifier.needs.scores != "steps":
        raise CheckpointError(f"{verifier.name} scores whole answers only and has no scores of steps")
    model = engine.model(VERIFIER)
    return partial(score_on_engine, engine, verifier, in_flight), {
        "verifier": model.digest,
        "verifier_family": verifier.identity,
        "dtype": str(model.decoder.dtype),
        "device": model.decoder.device.type,
    }


def _score_by_function(scorer: FunctionScorer, solutions: Sequence[Solution], on_scored: OnScored) -> None:
    for solution in solutions:
        steps = list(solution.steps)
        scores = [scorer.score(solution.problem, steps[:end]) for end in range(1, len(steps) + 1)]
        on_scored(Scored(solution.unique_id, tuple(scores)))


def score_on_engine(
    engine: Engine, scorer: Scorer, in_flight: int, solutions: Sequence[Solution], on_scored: OnScored
) -> None:
    """Score solutions step by step, calling `on_scored` for each as it is finished or refused.

    At most `in_flight` of them hold KV memory at once. Every token of a solution is computed once; the full blocks of
    its problem come from the prefix cache if another solution of it was scored before. One that does not fit into the
    KV pool alone is refused.

    Raises:
        EspalierError: the device failed, or an incremental score differs from that of the whole text.
    """
    orchestrator, names = Orchestrator(engine, None, scorer, in_flight), dict[str, str]()
    try:
        for solution in solutions:
            request = ScoreRequest(solution.problem, (solution.steps,))
            try:
                names[orchestrator.submit(request)] = solution.unique_id
            except (InvalidRequestError, RequestTooLargeError) as error:
                on_scored(Scored(solution.unique_id, refused=str(error)))
        while orchestrator.busy:
            for result in orchestrator.step():
                assert isinstance(result, ScoreResult)
                on_scored(_scored(names[result.search_id], result))
    finally:
        orchestrator.close()


def _scored(name: str, result: ScoreResult) -> Scored:
    (solution,) = result.solutions
    if None in solution.step_scores:
        step = solution.step_scores.index(None) + 1
        return Scored(name, refused=result.error or f"step {step} {solution.reason}")
    return Scored(name, tuple(score for score in solution.step_scores if score is not None))


class ScoreFolder:
    """A folder with `config.json`, `scores.jsonl` and `summary.json`; running the command again resumes.

    Lines are appended as solutions are scored; `finish` writes them once more in the benchmark's order.
    """

    def __init__(
        self,
        folder: Path,
        configuration: dict[str, Any],
        solutions: Iterable[Solution],
        command: Mapping[str, Any] | None = None,
    ) -> None:
        """Open or create `folder` for the solutions of a benchmark; for `command` see `RunFolder`.

        Raises:
            EspalierError: the folder cannot be used, holds scores of another configuration, or is damaged.
        """
        self._scores = folder / "scores.jsonl"
        if self._scores.exists() and not (folder / "config.json").is_file():
            raise EspalierError(f"{folder} holds scores without a config.json; name another --out")
        RunFolder(folder, configuration, command=command)  # compares the configuration, or writes it
        self.folder = folder
        self._steps = {solution.unique_id: len(solution.steps) for solution in solutions}
        self.done: dict[str, Scored] = {}
        for place, record in read_lines(self._scores):
            with damage_named(place):
                if record["scores"] and len(record["scores"]) == self._steps.get(record["id"]):
                    self.done[record["id"]] = Scored(record["id"], tuple(map(float, record["scores"])))
        self._file = open_lines(self._scores)

    def append(self, scored: Scored) -> None:
        """Keep the scores of a solution; a refused one is not kept, so that it is tried again."""
        if not scored.refused:
            self.done[scored.unique_id] = scored
            append(self._file, _record(scored))

    def finish(self, records: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
        """Write all `records`, which have `id` and `scores`, and the summary.

        Scores of solutions that this command was not asked for are kept behind them.
        """
        self._file.close()
        rows = {record["id"]: dict(record) for record in records}
        rows |= {name: _record(self.done[name]) for name in self._steps if name in self.done and name not in rows}
        write_whole(self._scores, "".join(json.dumps(row) + "\n" for row in rows.values()))
        write_whole(self.folder / "summary.json", dict(summary))


def _record(scored: Scored) -> dict[str, Any]:
    return {"id": scored.unique_id, "scores": scored.scores}
