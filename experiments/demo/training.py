"""The training loop shared by generator and verifier: resumable, with speed and time left."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from espalier.experiments.demo.batches import IGNORED, Batch
from espalier.experiments.demo.optimizer import make_optimizers, schedule, set_rate


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast one stage trains.

    Attributes:
        steps: Optimizer steps.
        tokens: Tokens a step, padding included.
        trunk_lr: Muon's rate for the generator's layers.
        trunk_output_lr: The same for the matrices that write to the stream; None for `trunk_lr`.
        new_lr: Muon's rate for layers above them.
        other_lr: AdamW's rate for embeddings, norms, biases and heads.
        warmup: Steps of linear warm-up.
        decay_share: Last share of the steps, over which the rate falls to nearly zero.
        trunk: Number of layers that `trunk_lr` governs.
    """

    steps: int
    tokens: int = 4096
    trunk_lr: float = 0.02
    trunk_output_lr: float | None = None
    new_lr: float = 0.02
    other_lr: float = 2e-3
    warmup: int = 40
    decay_share: float = 0.6
    trunk: int = 5


@dataclass(slots=True)
class Progress:
    """How far a stage is; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    accuracy: float = float("nan")

    def observe(self, loss: float, accuracy: float, tokens: int) -> None:
        """Adds one step to the running means, which remember about fifty steps."""
        keep = min(0.98, 1 - 1 / (self.step + 1))
        self.loss = loss if self.step == 0 else keep * self.loss + (1 - keep) * loss
        self.accuracy = accuracy if self.step == 0 else keep * self.accuracy + (1 - keep) * accuracy
        self.step += 1
        self.tokens += tokens


def pick_device() -> torch.device:
    """Returns the GPU when there is one, else the CPU with denormals flushed (they slow training several times)."""
    torch.set_flush_denormal(True)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def labelled_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns logits [labelled, classes] and labels [labelled] of a batch, for either network."""
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    wanted = batch.labels != IGNORED
    head = model.score if hasattr(model, "score") else model.lm_head
    return head(hidden[wanted]), batch.labels[wanted]


def _save(path: Path, model: nn.Module, optimizers: list[Any], progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _restore(path: Path, model: nn.Module, optimizers: list[Any]) -> Progress:
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(**state["progress"])


def load_weights(path: Path, model: nn.Module) -> None:
    """Loads the weights of a training checkpoint into a model."""
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model"])


def fit(
    name: str,
    model: nn.Module,
    make_batch: Callable[[int], Batch],
    plan: Schedule,
    path: Path,
    *,
    save_every: int = 200,
    log_every: int = 20,
) -> Progress:
    """Trains to the end of the schedule, going on from the checkpoint at `path` when there is one.

    Args:
        name: Shown before every progress line.
        model: Trained in place.
        make_batch: From a step's number to its batch; must depend on nothing else.
        plan: Length and rates.
        path: Where the checkpoint lives.
        save_every: Steps between checkpoints.
        log_every: Steps between progress lines.
    """
    device = pick_device()
    model.to(device).train()
    output_lr = plan.trunk_lr if plan.trunk_output_lr is None else plan.trunk_output_lr
    optimizers = make_optimizers(model, plan.trunk_lr, output_lr, plan.new_lr, plan.other_lr, plan.trunk)
    progress = _restore(path, model, optimizers) if path.exists() else Progress()
    while progress.step < plan.steps:
        started = time.perf_counter()
        set_rate(optimizers, schedule(progress.step, plan.steps, plan.warmup, plan.decay_share))
        batch = make_batch(progress.step)
        batch = Batch(batch.ids.to(device), batch.labels.to(device))
        logits, labels = labelled_logits(model, batch)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        accuracy = (logits.detach().argmax(-1) == labels).float().mean().item()
        progress.observe(loss.item(), accuracy, batch.ids.numel())
        progress.seconds += time.perf_counter() - started
        if progress.step % log_every == 0 or progress.step == plan.steps:
            _report(name, progress, plan.steps)
        if progress.step % save_every == 0 or progress.step == plan.steps:
            _save(path, model, optimizers, progress)
            path.with_suffix(".json").write_text(json.dumps({**asdict(progress), "schedule": asdict(plan)}, indent=2))
    model.eval()
    return progress


def _report(name: str, progress: Progress, steps: int) -> None:
    per_step = progress.seconds / progress.step
    left = (steps - progress.step) * per_step
    print(
        f"{name} {progress.step}/{steps}  loss {progress.loss:.4f}  accuracy {progress.accuracy:.4f}  "
        f"{progress.tokens / progress.seconds:,.0f} tokens/s  left {left / 60:.1f} min",
        flush=True,
    )
