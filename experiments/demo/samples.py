"""Stage `sample`: the generator's own solutions, every step labelled by the oracle."""

import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from espalier.experiments.demo.batches import RowMaker
from espalier.experiments.demo.export import TEMPERATURE, load_exported_generator, load_exported_tokenizer
from espalier.experiments.demo.oracle import label_steps
from espalier.experiments.demo.problems import LEVELS, Problem, make_problem
from espalier.experiments.demo.sampling import sample
from espalier.experiments.demo.tokenizer import chat_prompt
from espalier.experiments.demo.training import pick_device

CHUNK = 50
"""Problems sampled between two progress lines, and between two writes."""


@dataclass(frozen=True, slots=True)
class LabelledSample:
    """One sampled solution: steps without delimiters, whether each is right, and the reference solution's steps."""

    problem: str
    operations: int
    steps: list[str]
    right: list[bool]
    reference: list[str]


def split_steps(tokenizer: Tokenizer, ids: Sequence[int], delimiter: int) -> list[str]:
    """Returns the texts between delimiters; an empty tail is dropped, special tokens vanish."""
    steps: list[list[int]] = [[]]
    for token in ids:
        if token == delimiter:
            steps.append([])
        else:
            steps[-1].append(token)
    texts = [tokenizer.decode(step) for step in steps]
    return texts if texts[-1] else texts[:-1]


def sample_solutions(
    model: Qwen2ForCausalLM, maker: RowMaker, problems: Sequence[Problem], copies: int, seed: int, temperature: float
) -> list[list[LabelledSample]]:
    """Samples `copies` whole solutions of each problem and labels their steps."""
    prompts = [maker.encode(chat_prompt(problem.text)) for problem in problems for _ in range(copies)]
    drawn = sample(model, prompts, stops=frozenset({maker.end}), temperature=temperature, seed=seed)
    results: list[list[LabelledSample]] = []
    for index, problem in enumerate(problems):
        solutions = [
            split_steps(maker.tokenizer, ids, maker.delimiter) for ids in drawn[index * copies : (index + 1) * copies]
        ]
        results.append(
            [
                LabelledSample(
                    problem.text,
                    len(problem.operands),
                    steps,
                    label_steps(problem.start, problem.operands, steps),
                    problem.steps,
                )
                for steps in solutions
            ]
        )
    return results


def _sampled_problems(rng: random.Random, count: int) -> list[Problem]:
    """Returns training problems of the benchmark's difficulties."""
    difficulties = [difficulty for level in LEVELS.values() for difficulty in level]
    return [make_problem(rng, rng.choice(difficulties)) for _ in range(count)]


def samples_path(work_dir: Path) -> Path:
    """Returns where the labelled samples are kept."""
    return work_dir / "samples.jsonl"


def _write(path: Path, samples: Iterable[LabelledSample]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for s in samples:
            file.write(json.dumps(asdict(s)) + "\n")


def read_samples(path: Path) -> list[LabelledSample]:
    """Returns the samples written so far."""
    if not path.exists():
        return []
    return [LabelledSample(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def draw_samples(work_dir: Path, pair: Path, seed: int, problems: int = 2000, copies: int = 8) -> int:
    """Samples solutions of training problems, going on after those already written; returns how many there are."""
    device = pick_device()
    model: Any = load_exported_generator(pair)
    model.to(device)
    maker = RowMaker(load_exported_tokenizer(pair))
    path = samples_path(work_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = len(read_samples(path)) // copies
    first = done
    started = time.perf_counter()
    while done < problems:
        chunk = _sampled_problems(random.Random(f"sample-{seed}-{done}"), min(CHUNK, problems - done))
        drawn = sample_solutions(model, maker, chunk, copies, seed * 1_000_003 + done, TEMPERATURE)
        _write(path, (s for solutions in drawn for s in solutions))
        done += len(chunk)
        speed = (done - first) / (time.perf_counter() - started)
        solved = sum(all(s.right) and len(s.steps) == s.operations + 1 for group in drawn for s in group)
        print(
            f"sample {done}/{problems} problems  solved {solved / (len(chunk) * copies):.2f}  "
            f"{speed * copies:.0f} solutions/s  left {(problems - done) / speed / 60:.1f} min",
            flush=True,
        )
    return done * copies
