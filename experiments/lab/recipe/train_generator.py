"""Stages `generator` and `trunk`: teach language models to read running quantities and to calculate.

The generator is small and in the end taught to read more than to calculate, so that it slips in the arithmetic. What
the verifier grows on is larger and taught both for longer.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from espalier.experiments.lab.recipe.batches import (
    BASE_CURRICULUM,
    GENERATOR_CURRICULUM,
    LONG_CURRICULUM,
    READING_CURRICULUM,
    Batch,
    Curriculum,
    RowMaker,
    generator_batch,
)
from espalier.experiments.lab.recipe.networks import (
    GENERATOR_LAYERS,
    TRUNK_LAYERS,
    generator_config,
    new_generator,
)
from espalier.experiments.lab.recipe.tokenizer import train_tokenizer
from espalier.experiments.lab.recipe.training import Progress, Schedule, fit, load_weights


@dataclass(frozen=True, slots=True)
class Phase:
    """One training of a language model.

    Attributes:
        layers: decoder layers.
        curriculum: what it is shown.
        schedule: for how long, and how fast it learns.
        seed: begins the name of every batch's seed.
        after: the phase whose weights it begins with; None for fresh ones.
    """

    layers: int
    curriculum: Curriculum
    schedule: Schedule
    seed: str
    after: str | None = None


PHASES = {
    "generator-base": Phase(
        GENERATOR_LAYERS, GENERATOR_CURRICULUM, Schedule(steps=1000, trunk=GENERATOR_LAYERS), "generator"
    ),
    "generator-reading": Phase(
        GENERATOR_LAYERS,
        READING_CURRICULUM,
        Schedule(steps=1000, trunk_lr=0.012, other_lr=1.2e-3, decay_share=0.9, warmup=20, trunk=GENERATOR_LAYERS),
        "generator-reading",
        "generator-base",
    ),
    "trunk-base": Phase(TRUNK_LAYERS, BASE_CURRICULUM, Schedule(steps=1050), "generator"),
    "trunk-long": Phase(
        TRUNK_LAYERS,
        LONG_CURRICULUM,
        Schedule(steps=700, trunk_lr=0.012, other_lr=1.2e-3, decay_share=0.9),
        "trunk-long",
        "trunk-base",
    ),
}
"""By the names of their checkpoints; two of each model, in order."""


def load_tokenizer(work_dir: Path, seed: int) -> Tokenizer:
    """Returns the work directory's tokenizer, trained first where there is none."""
    path = work_dir / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(seed)
    work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def checkpoint_path(work_dir: Path, phase: str) -> Path:
    """Returns where the training state of one of `PHASES` lives."""
    return work_dir / f"{phase}.pt"


def load_language_model(work_dir: Path, tokenizer: Tokenizer, phase: str) -> Qwen2ForCausalLM:
    """Returns a language model as one of `PHASES` left it."""
    model = _fresh(tokenizer, PHASES[phase].layers, seed=0)
    load_weights(checkpoint_path(work_dir, phase), model)
    return model.eval()


def train(work_dir: Path, seed: int, name: str, schedule: Schedule | None = None) -> Progress:
    """Goes through one of `PHASES`, or on with it; with another `schedule` than its own where one is given."""
    phase, tokenizer = PHASES[name], load_tokenizer(work_dir, seed)
    plan, maker = schedule or phase.schedule, RowMaker(tokenizer)
    model = (
        load_language_model(work_dir, tokenizer, phase.after) if phase.after else _fresh(tokenizer, phase.layers, seed)
    )

    def batch(step: int) -> Batch:
        rng = random.Random(f"{phase.seed}-{seed}-{step}")
        return generator_batch(maker, rng, plan.tokens, step / plan.steps, phase.curriculum)

    return fit(name, model, batch, plan, checkpoint_path(work_dir, name))


def _fresh(tokenizer: Tokenizer, layers: int, seed: int) -> Qwen2ForCausalLM:
    maker = RowMaker(tokenizer)
    return new_generator(generator_config(tokenizer.get_vocab_size(), maker.end, maker.pad, layers), seed)
