"""Stage `verifier`: teaches layers on top of a language model's trunk to judge steps, then everything together.

Single equations in every batch give dense, independent labels, which teach arithmetic; slips made on purpose and the
generator's own at the frequency they really have teach judging in context.
"""

import random
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from espalier.experiments.demo.problems import MAX_OPERATIONS, MIN_OPERATIONS, TRAINING_OPERANDS, boxed, make_problem
from espalier.experiments.lab.recipe.batches import Batch, Row, RowMaker, collate
from espalier.experiments.lab.recipe.corruptions import judged_solution
from espalier.experiments.lab.recipe.networks import TRUNK_LAYERS
from espalier.experiments.lab.recipe.problems import training_difficulty, training_problems
from espalier.experiments.lab.recipe.samples import LabelledSample, read_samples, samples_path
from espalier.experiments.lab.recipe.train_generator import load_language_model, load_tokenizer
from espalier.experiments.lab.recipe.training import Progress, Schedule, fit, load_weights
from espalier.experiments.lab.recipe.verifier_network import COMMON, new_verifier, stream_sizes, train_trunk

LAYERS_SCHEDULE = Schedule(steps=700, new_lr=0.02, other_lr=1.5e-3, warmup=30, decay_share=0.7, trunk=TRUNK_LAYERS)
WHOLE_SCHEDULE = Schedule(
    steps=600,
    trunk_lr=0.001,
    trunk_output_lr=1e-5,  # these matrices were scaled down with the stream
    new_lr=0.003,
    other_lr=3e-4,
    warmup=30,
    decay_share=0.9,
    trunk=TRUNK_LAYERS,
)
DRILL_SHARE, SAMPLE_SHARE = 0.35, 0.45
"""Of the rows of a batch; the rest are slips made on purpose."""
STAGES = ("verifier-layers", "verifier-whole")

SamplesByLength = dict[int, list[LabelledSample]]


def _slip_row(maker: RowMaker, rng: random.Random, operations: int) -> Row:
    problem = make_problem(rng, training_difficulty(rng, operations))
    return maker.judged_steps(problem.text, *judged_solution(rng, problem), problem.steps)


def judged_batch(maker: RowMaker, rng: random.Random, tokens: int, samples: SamplesByLength) -> Batch:
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


def common_tokens(maker: RowMaker) -> list[int]:
    """Returns the ids of the `COMMON` commonest tokens of reference solutions without their letters."""
    solutions = (
        [*p.equations, boxed(p.values[-1])] for p in islice(training_problems(random.Random("common-tokens")), 200)
    )
    counts = Counter(t for steps in solutions for step in steps for t in [*maker.encode(step), maker.delimiter])
    return [token for token, _ in counts.most_common(COMMON)]


def untaught_verifier(generator: Qwen2ForCausalLM, maker: RowMaker, seed: int) -> Qwen2ForTokenClassification:
    """Returns a verifier on the generator's trunk that has seen no label yet."""
    rng = random.Random("stream-sizes")
    rows = [_slip_row(maker, rng, operations) for operations in range(MIN_OPERATIONS, MAX_OPERATIONS + 1)] * 8
    return new_verifier(generator, common_tokens(maker), stream_sizes(generator, collate(rows, maker.pad).ids), seed)


def verifier_checkpoint(work_dir: Path, stage: str) -> Path:
    """Returns where the training state of one of `STAGES` lives."""
    return work_dir / f"{stage}.pt"


def _new_verifier(work_dir: Path, seed: int) -> tuple[Qwen2ForTokenClassification, RowMaker]:
    tokenizer = load_tokenizer(work_dir, seed)
    maker = RowMaker(tokenizer)
    return untaught_verifier(load_language_model(work_dir, tokenizer, "trunk-long"), maker, seed), maker


def load_verifier(work_dir: Path, seed: int = 0) -> Qwen2ForTokenClassification:
    """Returns the verifier as trained so far."""
    model, _ = _new_verifier(work_dir, seed)
    load_weights(next(p for p in (verifier_checkpoint(work_dir, s) for s in reversed(STAGES)) if p.exists()), model)
    return model.eval()


def train_verifier(
    work_dir: Path, seed: int, layers: Schedule = LAYERS_SCHEDULE, whole: Schedule = WHOLE_SCHEDULE
) -> Progress:
    """Teaches the added layers on the frozen trunk, then all layers, or goes on with it.

    Args:
        work_dir: Holds the samples and the trunk; receives the training states.
        seed: Of weights and batches.
        layers: Schedule of the added layers alone.
        whole: Schedule of all layers.
    """
    model, maker = _new_verifier(work_dir, seed)
    samples: SamplesByLength = defaultdict(list)
    for s in read_samples(samples_path(work_dir)):
        if s.steps:
            samples[s.operations].append(s)

    def teach(stage: str, plan: Schedule) -> Progress:
        def batch(step: int) -> Batch:
            return judged_batch(maker, random.Random(f"{stage}-{seed}-{step}"), plan.tokens, samples)

        return fit(stage, model, batch, plan, verifier_checkpoint(work_dir, stage))

    first, second = STAGES
    train_trunk(model, False)
    teach(first, layers)
    train_trunk(model, True)
    return teach(second, whole)
