"""Stage `verifier`: teaches the generator's trunk, two layers taller, to judge steps.

First single equations, each judged by itself: dense, independent labels teach arithmetic, without which nothing else
is learned. Then steps in context: slips made on purpose, and the generator's own at the frequency they really have.
"""

import random
from collections import defaultdict
from pathlib import Path

from transformers import Qwen2ForTokenClassification

from espalier.experiments.demo.batches import Batch, Row, RowMaker, collate
from espalier.experiments.demo.networks import ADDED_LAYERS, GENERATOR_LAYERS, new_verifier
from espalier.experiments.demo.problems import (
    MAX_OPERATIONS,
    MIN_OPERATIONS,
    TRAINING_OPERANDS,
    make_problem,
    training_difficulty,
)
from espalier.experiments.demo.samples import LabelledSample, read_samples, samples_path
from espalier.experiments.demo.slips import judged_solution
from espalier.experiments.demo.train_generator import load_generator, load_tokenizer
from espalier.experiments.demo.training import Progress, Schedule, fit, load_weights

EQUATION_SCHEDULE = Schedule(
    steps=450, trunk_lr=0.008, new_lr=0.02, other_lr=1.5e-3, decay_share=0.6, trunk=GENERATOR_LAYERS
)
STEP_SCHEDULE = Schedule(
    steps=720,
    tokens=2048,
    trunk_lr=0.008,
    new_lr=0.014,
    other_lr=1.2e-3,
    decay_share=0.9,
    trunk=GENERATOR_LAYERS + ADDED_LAYERS,
)
EQUATION_ROW = 120
"""Tokens in a row of single equations, about ten of them."""
DRILL_SHARE, SAMPLE_SHARE = 0.5, 0.3
"""Of the rows of a step batch; the rest are slips made on purpose."""

SamplesByLength = dict[int, list[LabelledSample]]


def equation_batch(maker: RowMaker, rng: random.Random, tokens: int) -> Batch:
    """Returns rows of single equations, half of them wrong."""
    rows = [maker.judged_drill(rng, EQUATION_ROW, TRAINING_OPERANDS) for _ in range(tokens // EQUATION_ROW)]
    return collate(rows, maker.pad)


def _slip_row(maker: RowMaker, rng: random.Random, operations: int) -> Row:
    problem = make_problem(rng, training_difficulty(rng, operations))
    return maker.judged_steps(problem.text, *judged_solution(rng, problem), problem.steps)


def step_batch(maker: RowMaker, rng: random.Random, tokens: int, samples: SamplesByLength) -> Batch:
    """Returns solutions of one length of problem, judged step by step, and single equations cut to their length."""
    operations = rng.randint(MIN_OPERATIONS, MAX_OPERATIONS)
    pool = samples.get(operations, [])
    rows = [_slip_row(maker, rng, operations)]
    count = max(4, tokens // (20 + 22 * operations))
    drills = round(count * DRILL_SHARE)
    sampled = round(count * SAMPLE_SHARE) if pool else 0
    rows += [_slip_row(maker, rng, operations) for _ in range(count - drills - sampled - 1)]
    rows += [
        maker.judged_steps(s.problem, s.steps, s.right, s.reference) for s in (rng.choice(pool) for _ in range(sampled))
    ]
    length = max(len(row.ids) for row in rows)
    rows += [maker.judged_drill(rng, length, TRAINING_OPERANDS) for _ in range(drills)]
    return collate(rows, maker.pad)


def verifier_checkpoint(work_dir: Path, stage: str) -> Path:
    """Returns where a stage's training state lives; stages are `equations` and `steps`."""
    return work_dir / f"verifier-{stage}.pt"


def empty_verifier(work_dir: Path, seed: int) -> Qwen2ForTokenClassification:
    """Returns a verifier on the trained generator's trunk, not yet taught to judge."""
    return new_verifier(load_generator(work_dir, load_tokenizer(work_dir, seed)), seed)


def load_verifier(work_dir: Path, seed: int = 0) -> Qwen2ForTokenClassification:
    """Returns the verifier as trained so far."""
    model = empty_verifier(work_dir, seed)
    path = verifier_checkpoint(work_dir, "steps")
    load_weights(path if path.exists() else verifier_checkpoint(work_dir, "equations"), model)
    return model.eval()


def train_equations(work_dir: Path, seed: int, plan: Schedule = EQUATION_SCHEDULE) -> Progress:
    """Teaches the verifier to judge single equations."""
    maker = RowMaker(load_tokenizer(work_dir, seed))

    def batch(step: int) -> Batch:
        return equation_batch(maker, random.Random(f"equations-{seed}-{step}"), plan.tokens)

    path = verifier_checkpoint(work_dir, "equations")
    return fit("verifier, equations", empty_verifier(work_dir, seed), batch, plan, path)


def train_steps(work_dir: Path, seed: int, plan: Schedule = STEP_SCHEDULE) -> Progress:
    """Teaches the verifier to judge steps in context, starting from single equations."""
    maker = RowMaker(load_tokenizer(work_dir, seed))
    samples: SamplesByLength = defaultdict(list)
    for s in read_samples(samples_path(work_dir)):
        if s.steps:
            samples[s.operations].append(s)
    model = empty_verifier(work_dir, seed)
    load_weights(verifier_checkpoint(work_dir, "equations"), model)

    def batch(step: int) -> Batch:
        return step_batch(maker, random.Random(f"steps-{seed}-{step}"), plan.tokens, samples)

    return fit("verifier, steps", model, batch, plan, verifier_checkpoint(work_dir, "steps"))
