"""Likelihood of a solution under another language model as its score: `likelihood`, `likelihood-ratio`; not trained.

`likelihood` is the geometric mean of the probabilities of a path's tokens, up to and with a step, under the verifier:
exp of their mean log-probability. `likelihood-ratio` divides it by the same mean under the generator, which sampling
gives with each step: with r that ratio the score is r / (1 + r), so 0.5 where both models find the path equally likely.
What both find likely is then no evidence, such as a phrase that every solution has. Means, not sums: a sum prefers
short solutions.

Layout: the prompt that the verifier would solve the problem from as a generator, with the system prompt that its
checkpoint asks for, else the one that asks for steps; then the steps as they were sampled. A step that does not end its
line is followed by a blank line before the next one. The log-probability of a step's first token needs the hidden state
of the token before it, so the last token of a path is fed with the next step. The verifier reads texts, so its tokens
need not be the generator's; each mean is over its own tokens, and the generator's has the end of the answer too.

Source: scoring with a language model's log-likelihood is as old as these; the ratio to the model that sampled is the
expert and amateur of contrastive decoding (Li et al., arXiv:2210.15097), over whole steps.
"""

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Self

import numpy as np
import torch

from espalier.engine.models.chat.template import render_with_system
from espalier.engine.models.chat.turns import system_prompt_of
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.prm.base import FamilyInfo, PrmFamily, Sampled, ScoreInput, StepPath
from espalier.prm.heads import log_probability_head
from espalier.prm.path_evidence import PathEvidence, sigmoid


class TokenReader(PrmFamily):
    """A family that reads every token of a solution; see the module.

    Attributes:
        fed_again: tokens at the end of the prompt that are fed with the first step; all of them but one are read.
    """

    rounding = 1e-9  # a path's log-probabilities are summed step by step or at once
    fed_again: int = 1

    def prompt_ids(self, problem: str) -> list[int]:
        """The prompt without its last tokens."""
        return self.whole_prompt_ids(problem)[: -self.fed_again]

    def read(self, path: StepPath) -> ScoreInput:
        """Feed the token before the step and the step without its last token; each is read for the token after it."""
        step = self.step_ids(path, len(path.steps) - 1)
        before = self.whole_prompt_ids(path.problem)[-self.fed_again :]
        if len(path.steps) > 1:
            before = self.step_ids(path, len(path.steps) - 2)[-1:]
        ids, targets = (*before, *step[:-1]), (*before[1:], *step)
        return ScoreInput(ids, tuple(range(len(ids))), targets=targets)

    def full_path(self, path: StepPath) -> ScoreInput:
        """The whole path at once, which needs no evidence of the steps before."""
        prompt = self.whole_prompt_ids(path.problem)
        ids = (*prompt, *(i for index in range(len(path.steps)) for i in self.step_ids(path, index)))
        start = len(prompt) - self.fed_again
        return ScoreInput(ids[:-1], tuple(range(start, len(ids) - 1)), full_path=True, targets=ids[start + 1 :])

    @abstractmethod
    def whole_prompt_ids(self, problem: str) -> list[int]:
        """All token ids before the first step."""

    @abstractmethod
    def step_ids(self, path: StepPath, index: int) -> list[int]:
        """Token ids of a path's step, which do not depend on what follows."""


class SolutionReader(TokenReader):
    """The layout of a generator; see the module."""

    max_special_tokens = 3  # a blank line, and the token before the step

    def __init__(self, model: Model, system_prompt: str) -> None:
        self.model = model
        self._system_prompt = system_prompt

    def whole_prompt_ids(self, problem: str) -> list[int]:
        """The prompt that the problem would be solved from."""
        tokenizer = self.model.tokenizer
        if tokenizer.chat_template is not None:
            turn = {"role": "user", "content": problem}
            text = render_with_system(tokenizer.render_chat, self._system_prompt, [turn], enable_thinking=False)
        else:
            system = f"{self._system_prompt}\n\n" if self._system_prompt else ""
            text = f"{tokenizer.begin}{system}{problem}\n\n"
        return tokenizer.encode(text)

    def step_ids(self, path: StepPath, index: int) -> list[int]:
        """Ids of a path's step, with the blank line that the step before it lacks; not what follows a last step."""
        text = path.steps[index]
        begins = index > 0 and not path.steps[index - 1].endswith("\n")
        return self.model.tokenizer.encode("\n\n" * begins + text)

    def evidence(self, values: np.ndarray, before: PathEvidence | None, sampled: Sampled) -> PathEvidence:
        """The path's evidence with its newest step: log-probabilities, and the logit of a head where there is one."""
        read = Sampled(math.fsum(values[:, 0].tolist()), len(values))
        of_head = sigmoid(float(values[-1, 1])) if values.shape[1] > 1 else 0.0
        step = PathEvidence.of_step(read, sampled, of_head)
        return before.and_then(step) if before else step


class Likelihood(SolutionReader):
    """The likelihood family; see the module."""

    info = FamilyInfo("likelihood", ("*ForCausalLM",), score="exp of the mean log-probability of the path's tokens")

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a language model that says how likely solutions are.

        Raises:
            CheckpointError: the checkpoint is no generator.
        """
        model = load_generator(checkpoint, dtype, device)
        model = replace(model, head=log_probability_head(model.head), eos_token_ids=())
        return cls(model, system_prompt_of(checkpoint))

    def score(self, evidence: PathEvidence) -> float:
        """The geometric mean of the probabilities of the path's tokens."""
        return math.exp(evidence.read.mean)


class LikelihoodRatio(Likelihood):
    """The family of likelihood ratios; see the module."""

    info = FamilyInfo(
        "likelihood-ratio",
        ("*ForCausalLM",),
        score="r / (1 + r), r that of `likelihood` over that of the generator, from sampling",
        of_sampling=True,
    )

    def score(self, evidence: PathEvidence) -> float:
        """The ratio of the geometric means, as a share of its sum with 1."""
        return 1.0 / (1.0 + math.exp(min(evidence.sampled.mean - evidence.read.mean, 700.0)))
