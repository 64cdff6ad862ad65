"""The training loop shared by all models: resumable, with speed and time left.

Muon for matrices, AdamW for everything else. `torch.optim.Muon` orthogonalises in bfloat16, which CPUs without bfloat16
units run several times slower than float32, and one matrix at a time. This one works in the parameters' own dtype and
on all matrices of a shape at once. Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
2024.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from espalier.experiments.lab.recipe.batches import IGNORED, Batch


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps and learning rates of one stage.

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
    """Progress of a stage; saved with every checkpoint."""

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


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Returns matrices with the same singular vectors and singular values near one.

    Args:
        matrices: [count, rows, columns].
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; for two-dimensional parameters only."""

    def __init__(
        self, params: Iterable[nn.Parameter] | list[dict[str, Any]], lr: float, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for shape, parameters in shapes.items():
                directions = torch.stack([self._direction(p, group["momentum"]) for p in parameters])
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonalise(directions), strict=True):
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Advances the momentum buffer and returns Nesterov's direction."""
        assert parameter.grad is not None
        buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        buffer.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)


def make_optimizers(
    model: nn.Module, trunk_lr: float, trunk_output_lr: float, new_lr: float, other_lr: float, trunk: int
) -> list[Any]:
    """Returns Muon over the layers' matrices and AdamW over embeddings, norms, biases and heads.

    Args:
        model: A Qwen2 model with its decoder under `model`.
        trunk_lr: Muon's rate for what reads the stream in the first `trunk` layers.
        trunk_output_lr: Muon's rate for what writes to it there.
        new_lr: Muon's rate for the layers above.
        other_lr: AdamW's rate.
        trunk: Number of layers that `trunk_lr` governs.
    """
    groups: dict[str, list[nn.Parameter]] = {"trunk": [], "trunk output": [], "new": [], "other": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = name.split(".")
        if parameter.ndim == 2 and "layers" in parts:
            index = int(parts[parts.index("layers") + 1])
            writes = parts[-2] in ("o_proj", "down_proj")
            groups["new" if index >= trunk else "trunk output" if writes else "trunk"].append(parameter)
        else:
            groups["other"].append(parameter)
    rates = (("trunk", trunk_lr), ("trunk output", trunk_output_lr), ("new", new_lr))
    matrices = [{"params": groups[name], "lr": rate} for name, rate in rates if groups[name]]
    optimizers = [
        Muon(matrices, lr=trunk_lr),
        torch.optim.AdamW(groups["other"], lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def schedule(step: int, steps: int, warmup: int, decay_share: float) -> float:
    """Returns the factor on the peak rate: linear warm-up, constant, then linear decay to nearly zero."""
    left = (steps - step) / max(1, round(steps * decay_share))
    return min(1.0, (step + 1) / max(1, warmup), max(left, 0.002))


def set_rate(optimizers: list[Any], factor: float) -> None:
    """Sets every group's rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
