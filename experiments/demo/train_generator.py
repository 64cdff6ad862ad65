"""Stage `generator`: teaches a language model to read running quantities and to calculate, mostly right."""

import random
from pathlib import Path

from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from espalier.experiments.demo.batches import Batch, Curriculum, RowMaker, generator_batch
from espalier.experiments.demo.networks import generator_config, new_generator
from espalier.experiments.demo.tokenizer import train_tokenizer
from espalier.experiments.demo.training import Progress, Schedule, fit, load_weights

GENERATOR_SCHEDULE = Schedule(steps=1500)


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


def generator_checkpoint(work_dir: Path) -> Path:
    """Returns where the generator's training state lives."""
    return work_dir / "generator.pt"


def load_generator(work_dir: Path, tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """Returns the generator as trained so far."""
    model = empty_generator(tokenizer, seed=0)
    load_weights(generator_checkpoint(work_dir), model)
    return model.eval()


def train_generator(work_dir: Path, seed: int, plan: Schedule = GENERATOR_SCHEDULE) -> Progress:
    """Trains the generator, or goes on with it, and returns how far it got."""
    tokenizer = load_tokenizer(work_dir, seed)
    maker = RowMaker(tokenizer)
    curriculum = Curriculum()

    def batch(step: int) -> Batch:
        rng = random.Random(f"generator-{seed}-{step}")
        return generator_batch(maker, rng, plan.tokens, step / plan.steps, curriculum)

    return fit("generator", empty_generator(tokenizer, seed), batch, plan, generator_checkpoint(work_dir))
