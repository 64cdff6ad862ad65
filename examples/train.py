"""Train a generator on its own right solutions: a server samples them as trees, and goes on with the new weights.

Rejection sampling (one round of expert iteration, STaR) on the bundled generator. Start a server that may reload from a
folder, and give both:

    espalier serve --verifier '' --reload-folder checkpoints
    python examples/train.py 127.0.0.1:50051 checkpoints
"""

import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from espalier import SearchClient
from espalier.experiments.demo import generator_path
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.experiments.runs.statistics import paired_bootstrap_interval
from espalier.search.rollout import RolloutResult

PROBLEMS, SOLUTIONS = 768, 16
"""Problems that are trained on, and solutions sampled of each."""
EPOCHS, BATCH, LEARNING_RATE, WARMUP = 5, 64, 6e-4, 10
"""Passes over all solutions, solutions of a step of the optimiser, its rate, and steps until that is reached."""
HELD_OUT, SAMPLES = 200, 8
"""Problems on which the generator is measured, and solutions of each."""
IN_FLIGHT = 32

Solution = tuple[tuple[int, ...], list[int]]
"""Tokens of the prompt, and those behind it."""


def sample(client: SearchClient, solutions: int, seed: int, problem: Problem) -> RolloutResult:
    """Return a tree of solutions; the same for the same weights."""
    return client.rollout(problem.problem, solutions=solutions, golds=(problem.answer,), max_tokens=400, seed=seed)


def share_right(tree: RolloutResult) -> float:
    """Return the share of a tree's solutions that are right."""
    ends = [step for step in tree.steps if step.end]
    return sum(step.samples for step in ends if step.right) / sum(step.samples for step in ends)


def right_solutions(tree: RolloutResult) -> Iterator[Solution]:
    """Yield the right solutions of a tree, each once; none of a problem that is always solved."""
    for end in tree.steps if share_right(tree) < 1 else ():
        if end.right:
            tokens, step = end.token_ids, end
            while step.parent is not None:
                step = tree.steps[step.parent]
                tokens = step.token_ids + tokens
            yield tree.prompt_token_ids, tokens


def loss_of(model: torch.nn.Module, batch: Sequence[Solution]) -> torch.Tensor:
    """Return the mean of minus the log-probabilities of the tokens behind the prompts."""
    longest = max(len(prompt) + len(tokens) for prompt, tokens in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    targets = torch.full((len(batch), longest), -100)  # where nothing is learned
    for row, (prompt, tokens) in enumerate(batch):
        ids[row, : len(prompt) + len(tokens)] = torch.tensor([*prompt, *tokens])
        targets[row, len(prompt) : len(prompt) + len(tokens)] = torch.tensor(tokens)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


def train(model: torch.nn.Module, solutions: list[Solution]) -> None:
    """Learn the solutions by AdamW, at a rate that falls to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    order = random.Random(0)
    steps = EPOCHS * -(-len(solutions) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1 - 0.9 * step / steps)
    )
    for _ in range(EPOCHS):
        order.shuffle(solutions)
        for start in range(0, len(solutions), BATCH):
            optimizer.zero_grad()
            loss_of(model, solutions[start : start + BATCH]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


def main(endpoint: str, folder: Path) -> None:
    """Train, and print what the generator has gained on problems that it was not trained on."""
    model = AutoModelForCausalLM.from_pretrained(generator_path(), dtype=torch.float32)
    training, held_out = load_benchmark("demo-training", PROBLEMS), load_benchmark("demo", HELD_OUT)
    with SearchClient(endpoint) as client, ThreadPoolExecutor(IN_FLIGHT) as pool:

        def measure() -> list[float]:
            return [share_right(tree) for tree in pool.map(partial(sample, client, SAMPLES, 1), held_out)]

        before = measure()
        print(f"before: {sum(before) / HELD_OUT:.1%} of {HELD_OUT} x {SAMPLES} solutions are right", flush=True)
        trees = pool.map(partial(sample, client, SOLUTIONS, 0), training)
        found = [solution for tree in trees for solution in right_solutions(tree)]
        print(f"learning {len(found)} right solutions", flush=True)
        train(model, found)
        checkpoint = folder / "trained"
        shutil.copytree(generator_path(), checkpoint, dirs_exist_ok=True)  # its tokenizer and all
        model.save_pretrained(checkpoint)
        print(f"reloaded: {client.reload(checkpoint.name).digest[:12]}", flush=True)
        after = measure()
    gained = [new - old for old, new in zip(before, after, strict=True)]
    interval = paired_bootstrap_interval(gained)
    assert interval
    low, high = (100 * bound for bound in interval)
    print(f"after: {sum(after) / HELD_OUT:.1%}; {100 * sum(gained) / HELD_OUT:+.1f} points ({low:+.1f} to {high:+.1f})")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
