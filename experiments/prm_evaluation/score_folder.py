"""The folder of an evaluation of a process reward model: what scores depend on, and the scores."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.experiments.evaluation.run_folder import RunFolder, write_whole
from espalier.experiments.prm_evaluation.scoring import Scored
from espalier.experiments.prm_evaluation.solutions import Solution


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
        self.done = self._read()
        # Removes an incomplete last line, so that the next one starts on its own.
        write_whole(self._scores, "".join(_line(each) for each in self.done.values()))
        self._file = self._scores.open("a", encoding="utf-8")

    def append(self, scored: Scored) -> None:
        """Keep the scores of a solution; a refused one is not kept, so that it is tried again."""
        if not scored.refused:
            self.done[scored.unique_id] = scored
            self._file.write(_line(scored))
            self._file.flush()

    def finish(self, records: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
        """Write all `records`, which have `id` and `scores`, and the summary.

        Scores of solutions that this command was not asked for are kept behind them.
        """
        self.close()
        rows = {record["id"]: json.dumps(record) + "\n" for record in records}
        rest = [_line(self.done[name]) for name in self._steps if name in self.done and name not in rows]
        write_whole(self._scores, "".join([*rows.values(), *rest]))
        write_whole(self.folder / "summary.json", dict(summary))

    def close(self) -> None:
        """Close the file of scores."""
        self._file.close()

    def _read(self) -> dict[str, Scored]:
        lines = self._scores.read_text(encoding="utf-8", errors="replace").split("\n") if self._scores.exists() else []
        found: dict[str, Scored] = {}
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line) if line.strip() else None
                if record and record["scores"] and len(record["scores"]) == self._steps.get(record["id"]):
                    found[record["id"]] = Scored(record["id"], tuple(float(score) for score in record["scores"]))
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):
                    break
                raise EspalierError(f"{self._scores}:{number} is damaged: {error}; remove the line") from error
        return found


def _line(scored: Scored) -> str:
    return json.dumps({"id": scored.unique_id, "scores": scored.scores}) + "\n"
