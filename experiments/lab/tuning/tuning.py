"""Tunes a trunk's last layers and a linear head at the ends of steps, on kept states that enter the layers.

Only matrices of low rank beside the layers' products are trained (LoRA; Hu et al., 2021), by transformers' own code in
float32, a tree at a time: a mask lets each token see its path, so that what paths share is computed once. The loss of a
problem is the cross-entropy of its steps' values plus a pairwise logistic loss: of two of its solutions, the right one
should have the higher mean of the head's logits over its steps. Problems whose solutions are all right, or all wrong,
rank nothing and are left out.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from espalier.engine.errors import CheckpointError, EspalierError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.experiments.lab.tuning.entering import KeptStates, TreeStates
from espalier.experiments.runs.files import replacing, write_whole
from espalier.experiments.verifier_training.features import LAST, Readings
from espalier.experiments.verifier_training.training import LinearHead, Pairs, solution_pairs

log = logging.getLogger("espalier.training")
RANK = 16
_LEARNING_RATE = 3e-4
_PENALTY = 1e-2
"""Of the head that tuning begins with; see `training.LinearHead`."""
_PROBLEMS_A_STEP = 4
_MAX_EPOCHS, _PATIENCE = 12, 2
_MAX_TOKENS = 16_384
"""Trees of more are left out: a mask has a byte for each pair of tokens, and attention four or more."""
_KINDS = "full_attention", "sliding_attention"
"""Kinds of layers that can be tuned, as configurations name them."""
_DIFFERENCE = 0.3
"""Largest difference of states of the layers run by themselves from the engine's, relative to them; int8 rounds."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the teaching problems, as it is recorded.

    Attributes:
        loss: mean over the teaching problems, during the pass; None before the first.
        choosing_loss: mean over the choosing problems, after it.
        choosing_auc: share of pairs of their solutions in which the right one has the higher mean.
    """

    number: int
    loss: float | None
    choosing_loss: float
    choosing_auc: float

    def __str__(self) -> str:
        taught = "before tuning" if self.loss is None else f"loss {self.loss:.4f}"
        return f"epoch {self.number}: {taught}, choosing problems {self.choosing_loss:.4f}, AUC {self.choosing_auc:.3f}"


class _LowRank(nn.Module):
    """A linear layer and what is added to it: nothing at first."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        device = linear.weight.device
        self.a = nn.Parameter(torch.empty(RANK, linear.in_features, device=device))
        self.b = nn.Parameter(torch.empty(linear.out_features, RANK, device=device))
        self.begin()

    def begin(self) -> None:
        """Add nothing: `a` is random, `b` is zeros."""
        nn.init.kaiming_uniform_(self.a, math.sqrt(5))
        nn.init.zeros_(self.b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`."""
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b)


class LastLayers(nn.Module):
    """The last layers of a checkpoint with its last norm, as modules of transformers with matrices of low rank.

    Attributes:
        first: number of the first of them in the checkpoint.
        count: how many there are.
    """

    def __init__(self, checkpoint: Checkpoint, count: int, device: torch.device | str = "cpu") -> None:
        """Read the weights, in float32.

        Raises:
            CheckpointError: it has fewer layers, or an adapter; or transformers runs no such layers, or their weights
                have other names.
        """
        super().__init__()
        from espalier.engine.models.zoo.description import model_class, text_config

        if checkpoint.adapter:
            raise CheckpointError(
                f"--tune: the trunk has the adapter {checkpoint.adapter.folder}; merge it, or leave it out"
            )
        place = checkpoint.files.place("config.json")
        config = text_config(checkpoint.config, place)
        kind = model_class(config, place, generates=False)
        total: int = config.num_hidden_layers
        if not 0 < count < total:
            raise CheckpointError(f"--tune {count}: {checkpoint.folder} has {total} layers; give 1 to {total - 1}")
        self.first, self.count = total - count, count
        self._checkpoint = checkpoint
        values = config.to_dict()
        lists = {name: each for name, each in values.items() if isinstance(each, list | tuple)}
        values |= {name: each[-count:] for name, each in lists.items() if len(each) == total}  # one value a layer
        no_tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        values |= {"num_hidden_layers": count, "vocab_size": 1, **no_tokens}  # the embedding is not used
        config = type(config).from_dict(values)
        config._attn_implementation = "sdpa"
        self._config = config
        self._kinds = set(getattr(config, "layer_types", None) or _KINDS[:1])
        if unknown := self._kinds.difference(_KINDS):
            raise CheckpointError(f"--tune: layers of {min(unknown)}, as {checkpoint.folder} has, cannot be tuned")
        self.model = kind(config).float().to(device).eval().requires_grad_(False)
        if not isinstance(getattr(self.model, "layers", None), nn.ModuleList):
            raise CheckpointError(f"--tune: the layers of {kind.__name__} are no list, so the last cannot be tuned")
        for name, parameter in self.model.named_parameters():
            if name.startswith("embed_"):
                continue
            stored = self._stored(name)
            if stored not in checkpoint:
                raise CheckpointError(
                    f"--tune: {checkpoint.folder} has no tensor {stored}, which its layers are made of"
                )
            parameter.copy_(checkpoint.take(stored, torch.float32, device, tuple(parameter.shape)))
        for module in list(self.model.layers.modules()):
            for child, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(module, child, _LowRank(linear))

    def begin(self, seed: int) -> None:
        """Begin again with nothing added, and random weights of a seed."""
        torch.manual_seed(seed)
        for module in self.model.modules():
            if isinstance(module, _LowRank):
                module.begin()

    def _stored(self, name: str) -> str:
        """A module's or a tensor's name in the checkpoint."""
        head, _, rest = name.partition("layers.")
        if head or not rest:
            return self._checkpoint.decoder_prefix + name
        number, _, rest = rest.partition(".")
        return f"{self._checkpoint.decoder_prefix}layers.{self.first + int(number)}.{rest}"

    def forward(self, tree: TreeStates) -> torch.Tensor:
        """States after the last norm of a tree's tokens, `[T, hidden]`."""
        device = self.model.norm.weight.device
        states, positions, sees = (each.to(device) for each in (tree.states, tree.positions, tree.sees))
        window = getattr(self._config, "sliding_window", None)
        within = sees & (positions[:, None] - positions < window) if window else sees
        full = sees if getattr(self._config, "layer_types", None) else within
        masks = dict(zip(_KINDS, (full, within), strict=True))
        mask: Any = {kind: masks[kind][None, None] for kind in self._kinds}
        out = self.model(
            inputs_embeds=states[None],
            attention_mask=mask if len(mask) > 1 else next(iter(mask.values())),
            position_ids=positions[None],
            use_cache=False,
        )
        return out[0][0]

    def write(self, folder: Path, base: str) -> None:
        """Write what is added as an adapter in PEFT's layout, for the model of the name `base`."""
        pairs = {name: module for name, module in self.model.named_modules() if isinstance(module, _LowRank)}
        tensors = {
            f"base_model.model.{self._stored(name)}.lora_{side}.weight": matrix.detach().cpu().contiguous()
            for name, module in pairs.items()
            for side, matrix in (("A", module.a), ("B", module.b))
        }
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": RANK,
            "lora_alpha": RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
            "layers_to_transform": list(range(self.first, self.first + self.count)),
            "inference_mode": True,
        }
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "adapter_model.safetensors") as partial:
            save_file(tensors, partial)
        write_whole(folder / "adapter_config.json", config)


class _Problem:
    """One problem to tune on or to choose by, and the loss of it."""

    def __init__(self, number: int, readings: Readings, kept: KeptStates) -> None:
        self._number = number
        self._kept = kept
        self.rows = rows = np.flatnonzero(readings.problems == number)
        self.pairs = _shifted(solution_pairs(readings, [number]), int(rows[0]))
        parents = readings.parents[rows] - rows[0]
        on_path = np.eye(len(rows), dtype=np.float32)
        for row, above in enumerate(parents.tolist()):
            if above >= 0:
                on_path[row] += on_path[above]
        self.mean = torch.from_numpy(on_path / on_path.sum(1, keepdims=True))
        self.values = torch.from_numpy(readings.values[rows])
        self.samples = torch.from_numpy(readings.samples[rows]).float()

    def tree(self) -> TreeStates:
        return self._kept.tree(self._number)

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The loss of the steps' logits, `[S]`."""
        each = F.binary_cross_entropy_with_logits(logits, self.values, reduction="none")
        means, pairs = self.mean @ logits, self.pairs
        margins = means[torch.from_numpy(pairs.better)] - means[torch.from_numpy(pairs.worse)]
        ranking = (F.softplus(-margins) * torch.from_numpy(pairs.weights).float()).sum()
        return (each * self.samples).sum() / self.samples.sum() + ranking

    def ahead(self, logits: torch.Tensor) -> float:
        found = self.pairs.share_ahead((self.mean @ logits.sigmoid()).numpy())
        assert found is not None
        return found


def _shifted(pairs: Pairs, first: int) -> Pairs:
    return Pairs(pairs.better - first, pairs.worse - first, pairs.weights)


class Tuner:
    """Tunes layers and a head, epoch by epoch; every epoch is saved, and an interrupted tuning goes on from there."""

    def __init__(
        self,
        layers: LastLayers,
        readings: Readings,
        kept: KeptStates,
        parts: tuple[Sequence[int], Sequence[int]],
        saved: Path,
        identity: str,
        seed: int,
    ) -> None:
        """Begin, or go on.

        Args:
            layers: what they add is begun again.
            readings: of the trunk as it is.
            kept: the states that enter the layers, of the same trees.
            parts: problems that teach, and that choose the epoch.
            saved: file of the state after each epoch.
            identity: of the trunk, its layers and the trees: a state of another is not gone on from.
            seed: of the first weights, and the order of problems.

        Raises:
            EspalierError: no problem has right and wrong solutions in both parts, or the layers run by themselves give
                other states than they do in the model.
        """
        layers.begin(seed)
        self.epochs: list[Epoch] = []
        self._layers = layers
        self._seed = seed
        self._saved = saved
        self._identity = f"{identity} {RANK} {_LEARNING_RATE} {_PROBLEMS_A_STEP} {seed}"
        self._teach, self._choose = (list(_problems(part, readings, kept)) for part in parts)
        if not self._teach or not self._choose:
            raise EspalierError(
                "--tune: too few problems have right and wrong solutions; sample more problems, or more of each (-N)"
            )
        self._require_same(self._teach[0], readings)
        self._head = LinearHead.fit(readings, LAST, np.asarray(parts[0]), _PENALTY)
        low_rank = [parameter for name, parameter in layers.named_parameters() if name.endswith((".a", ".b"))]
        for parameter in low_rank:
            parameter.requires_grad_(True)
        self._trained = [*low_rank, *self._head.linear.parameters()]
        self._optimizer = torch.optim.AdamW(self._trained, lr=_LEARNING_RATE, weight_decay=0.01)
        self._best = self._snapshot()
        self._go_on()

    @property
    def problems(self) -> dict[str, int]:
        """Number of problems by their use."""
        return {"teach": len(self._teach), "choose": len(self._choose)}

    @property
    def epoch_problems(self) -> int:
        """Number of problems that the next epoch goes through."""
        return len(self._choose) + (len(self._teach) if self.epochs else 0)

    @property
    def best(self) -> Epoch:
        """The epoch whose weights are taken."""
        return min(self.epochs, key=lambda epoch: epoch.choosing_loss)

    @property
    def done(self) -> bool:
        """Return whether no epoch is to follow: the choosing problems' loss rises, or there were enough."""
        losses = [epoch.choosing_loss for epoch in self.epochs]
        return len(losses) > _MAX_EPOCHS or (len(losses) > 1 and len(losses) - 1 - int(np.argmin(losses)) >= _PATIENCE)

    def run_epoch(self, on_problem: Callable[[], None]) -> Epoch:
        """Teach once on all problems, the first time not at all, and see how the choosing ones fare; saves the state.

        Args:
            on_problem: called for each problem that is done.
        """
        number, loss = len(self.epochs), None
        if number:
            order = np.random.default_rng([self._seed, number]).permutation(len(self._teach))
            losses: list[float] = []
            for batch in np.array_split(order, math.ceil(len(order) / _PROBLEMS_A_STEP)):
                self._optimizer.zero_grad()
                for index in batch.tolist():
                    one = self._teach[index]
                    its = one.loss(self._logits(one.tree()))
                    (its / len(batch)).backward()
                    losses.append(float(its.detach()))
                    on_problem()
                torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
                self._optimizer.step()
            loss = float(np.mean(losses))
        choosing, ahead = [], []
        with torch.no_grad():
            for one in self._choose:
                logits = self._logits(one.tree())
                choosing.append(float(one.loss(logits)))
                ahead.append(one.ahead(logits))
                on_problem()
        epoch = Epoch(number, loss, float(np.mean(choosing)), float(np.mean(ahead)))
        if all(epoch.choosing_loss < before.choosing_loss for before in self.epochs):
            self._best = self._snapshot()
        self.epochs.append(epoch)
        self._save()
        return epoch

    def finish(self) -> nn.Linear:
        """Give the layers the weights of the best epoch; returns the head trained with them."""
        self._load(self._best)
        return self._head.of_plain_states()

    def _logits(self, tree: TreeStates) -> torch.Tensor:
        head = self._head
        states = self._layers(tree)[tree.ends.to(head.mean.device)]
        return head(states)[:, 0]

    def _require_same(self, one: _Problem, readings: Readings) -> None:
        """Raise CheckpointError if the layers, with nothing added, do not give the states that were read."""
        tree = one.tree()
        with torch.no_grad():
            found = self._layers(tree)[tree.ends].cpu().numpy()
        expected = readings.states_of(LAST)[one.rows]
        difference = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
        if not np.median(difference) < _DIFFERENCE:
            raise CheckpointError(
                f"--tune: run by themselves, the last {self._layers.count} layers give other states than in the model "
                f"(by {100 * np.median(difference):.0f}%), so that this kind of model cannot be tuned"
            )

    def _snapshot(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._trained]

    def _load(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._trained, values, strict=True):
                parameter.copy_(value)

    def _save(self) -> None:
        state = {
            "identity": self._identity,
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "now": self._snapshot(),
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
        }
        self._saved.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._saved) as partial:
            torch.save(state, partial)

    def _go_on(self) -> None:
        """Take up the state that was saved, if it is this tuning's."""
        if not self._saved.is_file():
            return
        state = torch.load(self._saved, weights_only=True)
        if state["identity"] != self._identity:
            return
        self.epochs = [Epoch(**epoch) for epoch in state["epochs"]]
        self._load(state["now"])
        self._best = state["best"]
        self._optimizer.load_state_dict(state["optimizer"])


def identity_of(trunk: str, first: int, files: Sequence[Path]) -> str:
    """Digest of what a tuning depends on: the trunk's, its first layer to tune, and the files, named by theirs."""
    return hashlib.sha256(json.dumps([trunk, first, [file.name for file in files]]).encode()).hexdigest()


def _problems(numbers: Sequence[int], readings: Readings, kept: KeptStates) -> Iterator[_Problem]:
    """Those of the problems that have right and wrong solutions, and no tree that is too large."""
    for number in numbers:
        one, tokens = _Problem(int(number), readings, kept), kept.tokens(int(number))
        if tokens > _MAX_TOKENS:
            log.warning("a tree of %s tokens tunes nothing: it has more than %s", f"{tokens:,}", f"{_MAX_TOKENS:,}")
        elif len(one.pairs.weights):
            yield one
