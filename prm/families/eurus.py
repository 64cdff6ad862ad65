"""EurusPRM-Stage1 and -Stage2: implicit process rewards from two language models.

The reward of a path is a coefficient times the difference of its log-probabilities under the PRM and under the model it
was trained from; the reward of a step is that of all tokens up to its end. Both models read the same tokens, so they
run as one decoder over one KV layout (`prm.policy_pair`). The score is the sigmoid of the reward, which keeps the order
of rewards and is 0.5 where both models agree. Rewards are clipped to `LIMIT`, and later steps continue from the clipped
value, so that a score is never 0 or 1.

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

import numpy as np
import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.decoder import Decoder
from espalier.engine.models.model import Model, language_model_head, load_trunk
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.kernels.linear import Linear
from espalier.prm.base import FamilyInfo, Sampled, StepPath, stripped_step, without_label
from espalier.prm.families.likelihood import TokenReader
from espalier.prm.policy_pair import PolicyPairDecoder, log_ratio_head

COEFFICIENT = 1e-3
LIMIT = 36.0
"""Maximum absolute reward: the sigmoid of 37 is 1 in float64, and its logit infinite."""

INFO = FamilyInfo(
    name="eurus-prm",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    score="sigmoid of 0.001 · (log p − log p of the reference), summed",
)


class EurusPrm(TokenReader):
    """The EurusPRM family; see the module."""

    info = INFO
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
        return self.model.tokenizer.encode(self.model.tokenizer.render_chat([{"role": "user", "content": problem}]))

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
            f"{INFO.name} compares two models; give the one that {checkpoint.folder} was trained from to "
            "--verifier-reference, such as Qwen/Qwen2.5-Math-7B-Instruct"
        )
    tokenizer = TextTokenizer(checkpoint)
    if TextTokenizer(reference).vocabulary != tokenizer.vocabulary:
        raise CheckpointError(f"{checkpoint.folder} and its reference {reference.folder} have different vocabularies")
    trunk, head = _load_one(checkpoint, dtype, device)
    other, other_head = _load_one(reference, dtype, device)
    digest = hashlib.sha256((checkpoint.digest() + reference.digest()).encode()).hexdigest()
    ratio = log_ratio_head(head, other_head, COEFFICIENT)
    return EurusPrm(Model(PolicyPairDecoder(trunk, other), ratio, tokenizer, (), digest))


def _load_one(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> tuple[Decoder, Linear]:
    decoder = load_trunk(checkpoint, dtype, device)
    head = language_model_head(checkpoint, decoder)
    assert isinstance(head, Linear)
    checkpoint.require_all_taken()
    return decoder, head
