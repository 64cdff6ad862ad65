"""RLHFlow's Llama3.1-8B-PRM-Deepseek-Data and -Mistral-Data: a language model that answers each step with `+` or `-`.

Layout: a chat whose first user turn is the problem, a space and the first step; every further user turn is one step,
and the assistant's turns are `+`. A step's score is read at the last token of the assistant's header, before the `+`:
softmax over the logits of `+` and `-`. The `+` itself is fed with the next step. The class and the vocabulary are those
of any Llama 3, so the family is chosen by the flag only.

Source: github.com/RLHFlow/RLHF-Reward-Modeling, `math-rm/prm_evaluate.py`: one chat per step, closed by `+` and the end
of the turn, read three tokens before its end, which is the header's last token. Difference: blanks around a problem are
stripped, as the template does with turns.
"""

from typing import Self

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, PrmFamily, ScoreInput, StepPath
from espalier.prm.heads import ScoringHead, load_scoring_model, probability_of, require_published_ids, require_token

_GOOD, _BAD = "+", "-"
_IDS = {_GOOD: 10, _BAD: 12, "<|start_header_id|>": 128006, "<|eot_id|>": 128009, "ĊĊ": 271}
_PROBLEM, _STEP, _NEXT = "the problem", "a step", "the next"  # placeholders that locate the template's own text


class RlhFlow(PrmFamily):
    """The RLHFlow family; see the module."""

    info = FamilyInfo("rlhflow", ("LlamaForCausalLM",), score="softmax, `+`")

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a causal language model as a process reward model.

        Raises:
            CheckpointError: a token or the head is missing, or the chat template has another structure.
        """
        tokenizer = TextTokenizer(checkpoint)
        token_ids = [require_token(checkpoint, tokenizer, token, "whose logits are read") for token in (_GOOD, _BAD)]
        require_published_ids(checkpoint, tokenizer, 128256, _IDS)
        head = ScoringHead(probability_of(0), token_ids=token_ids)
        return cls(load_scoring_model(checkpoint, tokenizer, dtype, device, head))

    def __init__(self, model: Model) -> None:
        """Find the text that the chat template puts around a turn.

        Raises:
            CheckpointError: the template does not render a longer chat by appending to a shorter one.
        """
        self.model = model
        first = self._chat(_PROBLEM, (_STEP,))
        second = self._chat(_PROBLEM, (_STEP, _NEXT))
        self._head, _, self._close = first.partition(f"{_PROBLEM} {_STEP}")
        opening, _, close = second.removeprefix(first).partition(_NEXT)
        if not second.startswith(first) or close != self._close or not self._close or _GOOD not in opening:
            raise CheckpointError("the chat template of this verifier does not append turn to turn; rlhflow needs that")
        self._open = opening
        encode = model.tokenizer.encode
        self.max_special_tokens = len(encode(self._open)) + len(encode(self._close))

    def prompt_ids(self, problem: str) -> list[int]:
        """The start of the user's first turn, which the first step continues."""
        return self.model.tokenizer.encode(self._head + problem.strip())

    def read(self, path: StepPath) -> ScoreInput:
        """The user's turn and the assistant's header; the first step is encoded with the problem.

        Templates of this kind strip turns; stripping here makes both renderings agree for any template.
        """
        if len(path.steps) == 1:
            return self.full_path(path)
        ids = self.model.tokenizer.encode(self._open + path.steps[-1].strip() + self._close)
        return ScoreInput(tuple(ids), (len(ids) - 1,))

    def full_path(self, path: StepPath) -> ScoreInput:
        """The chat as rendered by the template, encoded at once."""
        ids = self.model.tokenizer.encode(self._chat(path.problem.strip(), tuple(map(str.strip, path.steps))))
        return ScoreInput(tuple(ids), (len(ids) - 1,), full_path=True)

    def _chat(self, problem: str, steps: tuple[str, ...]) -> str:
        messages = [{"role": "user", "content": f"{problem} {steps[0]}"}]
        for step in steps[1:]:
            messages += [{"role": "assistant", "content": _GOOD}, {"role": "user", "content": step}]
        return self.model.tokenizer.render_chat(messages)
