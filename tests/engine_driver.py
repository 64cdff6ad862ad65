"""Driving an engine by hand: run to the end, read logits, generate."""

import dataclasses
from collections.abc import Iterable

import numpy as np
import torch

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Model
from espalier.engine.work import Done, Generate, Generated, Sampling, Score, Scored


def drain(engine: Engine) -> list[Done]:
    """Step until nothing is left, checking the pool after each step."""
    done: list[Done] = []
    while engine.busy:
        done += engine.step()
        engine.check_integrity()
    return done


def read(
    engine: Engine, sequence: KVSequence, token_ids: list[int], score_positions: list[int] | None = None
) -> np.ndarray:
    """Append tokens and return what the head gives at each of them, or at `score_positions`."""
    at = tuple(range(len(token_ids))) if score_positions is None else tuple(score_positions)
    engine.submit(Score("reader", sequence, tuple(token_ids), at))
    (done,) = drain(engine)
    assert isinstance(done, Scored)
    return done.values


def generate(
    engine: Engine, sequence: KVSequence, *samplings: Sampling, tokens: int = 8, **work: object
) -> list[Generated]:
    """Sample children of one sequence; in order of index, those drawn alike once."""
    engine.submit(Generate("sampler", sequence, samplings, tokens, **work))
    done = [d for d in drain(engine) if isinstance(d, Generated)]
    return sorted(done, key=lambda d: d.indices)


def release(engine: Engine, *sequences: KVSequence) -> None:
    for sequence in sequences:
        engine.release(sequence)


def scripted(model: Model, script: Iterable[int | tuple[int, ...]]) -> Model:
    """`model` with a head of its own: each call gives the script's next token, or one of several equally likely."""
    tokens = iter(script)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(hidden.shape[0], model.config.vocab_size)
        chosen = next(tokens)
        logits[:, list(chosen) if isinstance(chosen, tuple) else chosen] = 100.0
        return logits

    return dataclasses.replace(model, head=head)
