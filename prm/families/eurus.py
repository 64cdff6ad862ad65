"""EurusPRM-Stage1 and -Stage2: implicit process rewards from two language models.

The reward of a path is a coefficient times the difference of its log-probabilities under the PRM and under the model it
was trained from; the reward of a step is that of all tokens up to its end. Both models read the same tokens, so they
run as one decoder over one KV layout, and their hidden states are concatenated. The score is the sigmoid of the reward,
which keeps the order of rewards and is 0.5 where both models agree. Rewards are clipped to `LIMIT`, and later steps
continue from the clipped value, so that a score is never 0 or 1.

Layout: the problem as the user's turn, then `Step 1: …`; each step includes the blank line after it. The
log-probability of a step's first token needs the hidden state of the token before it, so the last token of a path is
fed with the next step. As in the authors' code, the last token of the assistant's header counts as part of the first
step; it is the same for all paths of a problem.

Source: the usage on the model card of PRIME-RL/EurusPRM-Stage2; arXiv:2412.01981 and arXiv:2502.01456; the coefficient
is theirs. Differences: their code ends a step one token after its blank line (two, if a tokenizer merges the line with
the full stop before it), and the last step with the end of the turn, so a step's reward would depend on what follows;
here it ends with the blank line. Their rewards are the sums, without the sigmoid.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.decoder import Decoder
from espalier.engine.models.model import Head, Model, language_model_head, load_trunk
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.kernels.layers import Layers
from espalier.kernels.layout import LayerKV, StepBatch
from espalier.kernels.linear import Linear
from espalier.prm.base import FamilyInfo, Sampled, StepPath, stripped_step, without_label
from espalier.prm.families.likelihood import TokenReader
from espalier.prm.heads import log_probability_head

COEFFICIENT = 1e-3
LIMIT = 36.0
"""Maximum absolute reward: the sigmoid of 37 is 1 in float64, and its logit infinite."""


class PolicyPairLayers(Layers):
    """Runs the layers of two decoders on the same tokens; the KV layout has the first one's layers first."""

    def __init__(self, first: Decoder, second: Decoder) -> None:
        self.first = first
        self.second = second
        self.outer = first.layers.outer

    def __len__(self) -> int:
        return len(self.first.layers) + len(self.second.layers)

    def states_of(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One part: the states of two decoders stand side by side."""
        return (states,)

    @torch.inference_mode()
    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """See `Layers`; returns `[T, hidden size of the first + of the second]`."""
        return torch.cat([one.forward(step, kvs) for one, kvs in self._with_layers(layer_kvs)], dim=-1)

    def warm_up(self, layer_kvs: Sequence[LayerKV], decodes: bool, states: torch.Tensor | None = None) -> None:
        """See `Layers`."""
        for one, kvs in self._with_layers(layer_kvs):
            one.warm_up(kvs, decodes, states)

    def release(self, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None = None) -> None:
        """See `Layers`."""
        for one, kvs in self._with_layers(layer_kvs):
            one.release(kvs, states)

    def _with_layers(self, layer_kvs: Sequence[LayerKV]) -> tuple[tuple[Layers, Sequence[LayerKV]], ...]:
        layers = self.first.config.num_layers
        return (self.first.layers, layer_kvs[:layers]), (self.second.layers, layer_kvs[layers:])


def policy_pair(first: Decoder, second: Decoder) -> Decoder:
    """Join two decoders.

    Raises:
        CheckpointError: their KV shapes or vocabulary sizes differ.
    """
    one, other = first.config, second.config
    for name in ("num_kv_heads", "head_dim", "vocab_size"):
        if getattr(one, name) != getattr(other, name):
            raise CheckpointError(
                f"the verifier's {name} is {getattr(one, name)}, its reference's is {getattr(other, name)}; give "
                "--verifier-reference the model that the verifier was trained from"
            )
    config = replace(
        one,
        num_layers=one.num_layers + other.num_layers,
        kv_layers=one.kv_layers + other.kv_layers,
        max_positions=min(one.max_positions, other.max_positions),
    )
    return Decoder(config, first.backend, PolicyPairLayers(first, second), first.weight_bytes + second.weight_bytes)


def log_ratio_head(first: Linear, second: Linear, coefficient: float) -> Head:
    """`coefficient` times the difference of a target token's log-probabilities, first model minus second."""
    width = first.in_features
    one, other = log_probability_head(first), log_probability_head(second)

    def head(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        of_first, of_second = hidden[:, :width].contiguous(), hidden[:, width:].contiguous()
        return coefficient * (one(of_first, targets) - other(of_second, targets))

    return head


class EurusPrm(TokenReader):
    """The EurusPRM family; see the module."""

    info = FamilyInfo(
        "eurus-prm",
        ("Qwen2ForCausalLM", "Qwen2Model"),
        score="sigmoid of 0.001 · (log p − log p of the reference), summed",
    )
    fed_again = 2  # the last token of the assistant's header counts as part of the first step

    def __init__(self, model: Model) -> None:
        self.model = model
        self.max_special_tokens = 1 + len(
            model.tokenizer.encode("Step 100: \n\n")
        )  # plus the header's last token in the first step

    def evidence(self, values: np.ndarray, before: float | None, sampled: Sampled) -> float:
        """The clipped reward: that of the previous step plus the log-ratios of this step's tokens."""
        reward = math.fsum(values[:, 0].tolist()) + (before or 0.0)
        return max(min(reward, LIMIT), -LIMIT)  # this order keeps NaN

    def score(self, evidence: float) -> float:
        """Sigmoid of the reward."""
        return 1.0 / (1.0 + math.exp(-evidence))

    def whole_prompt_ids(self, problem: str) -> list[int]:
        """The problem's turn and the opening of the assistant's turn."""
        return self.chat_ids(problem)

    def step_ids(self, path: StepPath, index: int) -> list[int]:
        """The step with its label and a blank line."""
        label = f"Step {index + 1}:"
        return self.model.tokenizer.encode(f"{label} {without_label(stripped_step(path.steps[index]), label)}\n\n")


def load(
    checkpoint: Checkpoint, reference: Checkpoint | None, dtype: torch.dtype, device: torch.device | str
) -> EurusPrm:
    """Load a PRM and its reference model.

    Raises:
        CheckpointError: the reference model is missing or does not match.
    """
    if reference is None:
        raise CheckpointError(
            f"{EurusPrm.info.name} compares two models; give the one that {checkpoint.folder} was trained from to "
            "--verifier-reference, such as Qwen/Qwen2.5-Math-7B-Instruct"
        )
    tokenizer = TextTokenizer(checkpoint)
    if TextTokenizer(reference).vocabulary != tokenizer.vocabulary:
        raise CheckpointError(f"{checkpoint.folder} and its reference {reference.folder} have different vocabularies")
    trunk, head = _load_one(checkpoint, dtype, device)
    other, other_head = _load_one(reference, dtype, device)
    digest = hashlib.sha256((checkpoint.digest() + reference.digest()).encode()).hexdigest()
    ratio = log_ratio_head(head, other_head, COEFFICIENT)
    return EurusPrm(Model(policy_pair(trunk, other), ratio, tokenizer, (), digest))


def _load_one(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> tuple[Decoder, Linear]:
    decoder = load_trunk(checkpoint, dtype, device)
    head = language_model_head(checkpoint, decoder)
    assert isinstance(head, Linear)
    checkpoint.require_all_taken()
    return decoder, head
