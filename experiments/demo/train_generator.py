"""Stages `generator` and `trunk`: teach a language model to read running quantities and to calculate.

The generator stops early: it reads well and slips in the arithmetic. What the verifier grows on is the same model,
taught for longer.
"""

import random
from pathlib import Path

from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from espalier.experiments.demo.batches import (
    BASE_CURRICULUM,
    EXTENSION_CURRICULUM,
    Batch,
    Curriculum,
    RowMaker,
    generator_batch,
)
from espalier.experiments.demo.networks import generator_config, new_generator
from espalier.experiments.demo.tokenizer import train_tokenizer
from espalier.experiments.demo.training import Progress, Schedule, fit, load_weights

BASE_SCHEDULE = Schedule(steps=1050)
EXTENSION_SCHEDULE = Schedule(steps=150, trunk_lr=0.012, other_lr=1.2e-3, decay_share=0.9)
TRUNK_SCHEDULE = Schedule(steps=700, trunk_lr=0.012, other_lr=1.2e-3, decay_share=0.9)
PHASES = ("base", "extension", "trunk")


def load_tokenizer(work_dir: Path, seed: int) -> Tokenizer:
    """Returns the work directory's tokenizer, trained first where there is none."""
    path = work_dir / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(seed)
    work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def empty_generator(tokenizer: Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Returns an untrained generator for a tokenizer."""
    maker = RowMaker(tokenizer)
    return new_generator(generator_config(tokenizer.get_vocab_size(), maker.end, maker.pad), seed)


def generator_checkpoint(work_dir: Path, phase: str) -> Path:
    """Returns where the training state of one of `PHASES` lives."""
    return work_dir / f"generator-{phase}.pt"


def load_generator(work_dir: Path, tokenizer: Tokenizer, phase: str) -> Qwen2ForCausalLM:
    """Returns the generator as a phase left it."""
    model = empty_generator(tokenizer, seed=0)
    load_weights(generator_checkpoint(work_dir, phase), model)
    return model.eval()


def _train(
    work_dir: Path, seed: int, phase: str, plan: Schedule, curriculum: Curriculum, model: Qwen2ForCausalLM
) -> Progress:
    maker = RowMaker(load_tokenizer(work_dir, seed))

    def batch(step: int) -> Batch:
        # The base phase's seed has no name of its own.
        rng = random.Random(f"generator-{'' if phase == 'base' else phase + '-'}{seed}-{step}")
        return generator_batch(maker, rng, plan.tokens, step / plan.steps, curriculum)

    return fit(f"generator, {phase}", model, batch, plan, generator_checkpoint(work_dir, phase))


def train_base(work_dir: Path, seed: int, plan: Schedule = BASE_SCHEDULE) -> Progress:
    """Trains the generator from nothing to three-digit numbers, or goes on with it."""
    model = empty_generator(load_tokenizer(work_dir, seed), seed)
    return _train(work_dir, seed, "base", plan, BASE_CURRICULUM, model)


def train_extension(work_dir: Path, seed: int, plan: Schedule = EXTENSION_SCHEDULE) -> Progress:
    """Goes on from the base phase to longer problems and numbers."""
    model = load_generator(work_dir, load_tokenizer(work_dir, seed), "base")
    return _train(work_dir, seed, "extension", plan, EXTENSION_CURRICULUM, model)


def train_trunk(work_dir: Path, seed: int, plan: Schedule = TRUNK_SCHEDULE) -> Progress:
    """Goes on where the generator stopped, with more of the same."""
    model = load_generator(work_dir, load_tokenizer(work_dir, seed), "extension")
    return _train(work_dir, seed, "trunk", plan, EXTENSION_CURRICULUM, model)
