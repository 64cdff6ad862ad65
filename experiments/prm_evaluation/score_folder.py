"""The folder of an evaluation of a process reward model: what scores depend on, and the scores."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.experiments.prm_evaluation.scoring import Scored
from espalier.experiments.prm_evaluation.solutions import Solution
from espalier.experiments.runs.folder import RunFolder, write_whole
from espalier.experiments.runs.jsonl import append, damage_named, open_lines, read_lines


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
