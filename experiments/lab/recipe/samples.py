"""Stage `sample`: what the generator itself says, every step labelled by the oracle."""

import json
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from espalier.experiments.demo.problems import LEVELS, Problem, make_problem
from espalier.experiments.lab.recipe.oracle import BeamPath, beam_search, make_engine

_CHUNK = 50
"""Problems sampled between two progress lines, and between two writes."""
SOLUTIONS = 8
"""Of each problem, at most."""


@dataclass(frozen=True, slots=True)
class LabelledSample:
    """One sampled solution: steps without delimiters, whether each is right, and the reference solution's steps."""

    problem: str
    operations: int
    steps: list[str]
    right: list[bool]
    reference: list[str]


def _sampled_problems(rng: random.Random, count: int) -> list[Problem]:
    """Returns training problems of the benchmark's difficulties."""
    difficulties = [difficulty for level in LEVELS.values() for difficulty in level]
    return [make_problem(rng, rng.choice(difficulties)) for _ in range(count)]


def samples_path(work_dir: Path) -> Path:
    """Returns where the labelled samples are kept."""
    return work_dir / "samples.jsonl"


def read_samples(path: Path) -> list[LabelledSample]:
    """Returns the samples written so far."""
    if not path.exists():
        return []
    return [LabelledSample(**sample) for line in path.read_text("utf-8").splitlines() for sample in json.loads(line)]


def _chosen(rng: random.Random, problem: Problem, paths: Iterable[BeamPath]) -> list[LabelledSample]:
    """Returns up to `SOLUTIONS` of the different paths, drawn at random."""
    different = list({path.steps: path for path in paths if path.steps}.values())
    chosen = rng.sample(different, min(SOLUTIONS, len(different)))
    reference = problem.steps
    return [
        LabelledSample(problem.text, len(problem.operands), list(path.steps), list(path.labels), reference)
        for path in chosen
    ]


def draw_samples(work_dir: Path, pair: Path, seed: int, problems: int = 4000) -> int:
    """Samples solutions of training problems, going on after those already written; returns how many problems.

    A verifier meets whole solutions in best-of-N, and in a beam search the different steps that follow the same right
    ones. So each second problem is sampled whole and each other by a beam search that the oracle prunes.
    """
    engine = make_engine(pair)
    path = samples_path(work_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    first = done = len(path.read_text("utf-8").splitlines()) if path.exists() else 0
    started = time.perf_counter()
    while done < problems:
        rng = random.Random(f"sample-{seed}-{done}")
        chunk = _sampled_problems(rng, min(_CHUNK, problems - done))
        shape = {"beam_width": SOLUTIONS, "expansion": 1} if done // _CHUNK % 2 else {"beam_width": 4, "expansion": 4}
        beams = beam_search(engine, chunk, seed=seed * 1_000_003 + done, **shape)
        chosen = [_chosen(rng, p, [*b.kept, *b.pruned]) for p, b in zip(chunk, beams, strict=True)]
        with path.open("a", encoding="utf-8") as file:  # a line for each problem
            file.writelines(json.dumps([asdict(sample) for sample in samples]) + "\n" for samples in chosen)
        done += len(chunk)
        left = (problems - done) * (time.perf_counter() - started) / (done - first)
        print(f"sample {done}/{problems} problems  left {left / 60:.1f} min", flush=True)
    return done
