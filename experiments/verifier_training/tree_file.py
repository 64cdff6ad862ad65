r"""The file of rollouts: JSON Lines, a problem a line, its sampled solutions as one tree of steps; and trainers' forms.

    {"format": 1, "problem_id": "gsm8k/17", "problem": "…", "answer": "72", "refused": "",
     "prompt_token_ids": [151644, …],
     "steps": [{"parent": null, "text": "## Step 1: …\n\n", "token_ids": [565, …], "log_probabilities": [-0.02, …],
                "samples": 16, "end": null, "answer": null, "right": null,
                "continuations": 8, "continuations_right": 5, "value": 0.54}, …]}

- `steps` come after their parents; `parent` is an index into `steps`, null for a first step.
- A step that several solutions drew, token for token, is one step with their number in `samples`.
- `text` is what `token_ids` say, the blank line after the step with it, an end token without.
- `log_probabilities` are those of the tokens under the model at temperature 1.
- `end` says why a solution ends with this step: `eos`, `boxed` (a boxed answer and a blank line), or `length`; null
  where it goes on. `answer` and `right` are those of a solution that ends here; one that was cut off has no answer and
  is wrong.
- `continuations` were sampled from the step's end to the end of the text; `continuations_right` of them are right.
- `value` is the label: see `search.run.rollout`.
- `refused` says why a problem has no steps.

So a path from a first step to one with an `end` is a solution: `prompt_token_ids` and the `token_ids` along it are the
tokens as they were sampled, and their log-probabilities belong to them, as reinforcement learning needs. Beside
`NAME.jsonl` lies `NAME.json` with everything that the samples depend on.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.experiments.runs.files import append, damage_named, read_lines, write_whole
from espalier.search.rollout import StepRecord

_FORMAT = 1
_HEADING = re.compile(r"(?:#+\s*)?Step\s*\d+\s*:\s*")
_MARK = "ки"


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """The solutions of one problem; see this module."""

    problem_id: str
    problem: str
    answer: str
    prompt_token_ids: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    refused: str = ""

    @property
    def outcomes(self) -> tuple[int, int]:
        """Number of right solutions, and of all."""
        ends = [step for step in self.steps if step.end]
        return sum(step.samples for step in ends if step.right), sum(step.samples for step in ends)

    def lineage(self, index: int) -> list[int]:
        """Indices of the steps from a first one to `index`."""
        path: list[int] = []
        at: int | None = index
        while at is not None:
            path.append(at)
            at = self.steps[at].parent
        return path[::-1]


def claim(path: Path, configuration: dict[str, Any]) -> None:
    """Write the file beside `path` that says what its rollouts depend on, unless it holds rollouts of another kind.

    Raises:
        EspalierError: they cannot be read or written, or hold rollouts of another configuration.
    """
    beside = path.with_suffix(".json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else configuration
    except (OSError, ValueError) as error:
        raise EspalierError(f"cannot use {path} for rollouts: {error}") from error
    names = found.keys() | configuration.keys()
    if differing := sorted(name for name in names if found.get(name) != configuration.get(name)):
        raise EspalierError(
            f"{path} holds rollouts with another {', '.join(differing)}; name another --out, or take the same again"
        )
    if path.exists() and not beside.is_file():
        raise EspalierError(f"{path} is there and no {beside.name} that says what it holds; name another --out")
    write_whole(beside, configuration)


def write_tree(stream: FileIO, tree: TreeRecord) -> None:
    """Append one problem to a stream of `open_lines`."""
    values = asdict(tree)
    for step in values["steps"]:
        step.pop("continuation_answers", None)  # their grades are enough
    append(stream, {"format": _FORMAT} | values, ensure_ascii=False)


def read_trees(path: Path) -> Iterator[TreeRecord]:
    """The problems of a file of rollouts, none if it is not there; an incomplete last line is skipped.

    Raises:
        EspalierError: a line is damaged, or the file cannot be read.
    """
    for place, read in read_lines(path):
        with damage_named(place):
            if read.pop("format") != _FORMAT:
                raise ValueError(f"it has another format than {_FORMAT}")
            steps = [StepRecord(**step) for step in read.pop("steps")]
            tree = TreeRecord(**read, steps=steps)
        yield tree


def write_trl(path: Path, trees: Iterable[TreeRecord]) -> None:
    """Write TRL's stepwise supervision: `prompt`, `completions` and `labels`.

    A step is right where its value is above 0: a solution or a continuation that goes through it ends right, as in
    Math-Shepherd's hard estimation. A solution that was drawn several times is written once; steps without text are
    left out.
    """
    _write(path, ({"prompt": p, "completions": steps, "labels": right} for p, steps, right in _solutions(trees)))


def write_math_shepherd(path: Path, trees: Iterable[TreeRecord]) -> None:
    """Write Math-Shepherd's `input`, with a mark behind each step, and `label`, with + or - in its place.

    See `write_trl`.
    """

    def record(problem: str, steps: list[str], right: list[bool]) -> dict[str, Any]:
        texts = [f"Step {k}: {_HEADING.sub('', step, count=1)} " for k, step in enumerate(steps, start=1)]
        marks = {"input": [_MARK] * len(texts), "label": ["+" if each else "-" for each in right]}
        return {
            key: f"{problem} " + "\n".join(map("".join, zip(texts, its, strict=True))) for key, its in marks.items()
        }

    _write(path, (record(*solution) for solution in _solutions(trees)))


def _solutions(trees: Iterable[TreeRecord]) -> Iterator[tuple[str, list[str], list[bool]]]:
    """Problem, steps and whether they are right, of every solution with a text."""
    for tree in trees:
        for index, last in enumerate(tree.steps):
            if last.end:
                path = [tree.steps[at] for at in tree.lineage(index) if tree.steps[at].text.strip()]
                if path:
                    yield tree.problem, [step.text.strip() for step in path], [step.value > 0 for step in path]


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
