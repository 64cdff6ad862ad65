"""Any chat model as a verifier: after each step it is asked whether the solution is right so far, and P(yes) is read.

Layout: the chat template's user turn is the problem, and the assistant's the steps, each with the blank line after it,
as a generator writes them. The assistant's turn is then closed, the user asks, and the score is read at the last token
before the answer: the softmax over the logits of `Yes` and `No`. From the end of the assistant's turn on, all tokens
are probe tokens: they are fed on a fork of the path and not kept, so no later step sees a question.

Nothing in a checkpoint says that it is to be asked this, so the family is chosen by the flag only, or by `--verifier
self`, which asks the generator itself on the same weights. Source: P(True) of Kadavath et al., Language Models (Mostly)
Know What They Know (arXiv:2207.05221), asked of a partial solution; the wording is Espalier's.
"""

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, PrmFamily, ScoreInput, StepPath, stripped_step
from espalier.prm.heads import load_scoring_model, probability_of, require_one_token, stacked_head, take_token_rows

_QUESTION = "Is this solution right so far, its last step included? Answer with one word: Yes or No."
_YES, _NO = "Yes", "No"
_ANSWERED = "which the model answers with; give --verifier a model of its own, or confidence"
_SOLUTION = "the steps of the solution"  # a placeholder that locates the template's own text

INFO = FamilyInfo(
    name="yes-no",
    models="any instruction-tuned *ForCausalLM with a chat template; the generator itself as `--verifier self`",
    architectures=("*ForCausalLM",),
    head="`lm_head` rows of `Yes`, `No`",
    layout="chat template, the steps as the assistant's turn, a blank line after each; then the user asks",
    score_positions="last token of the header after the question, which is not kept",
    score="softmax, `Yes`",
    source="P(True) of arXiv:2207.05221, asked of a partial solution",
)


class YesNo(PrmFamily):
    """The yes-no family; see the module."""

    info = INFO

    def __init__(self, model: Model) -> None:
        """Find the text that the chat template puts before the steps and after them.

        Raises:
            CheckpointError: there is no chat template, or it does not render a chat of three turns.
        """
        self.model = model
        before, after = self._around("2")
        if not before or _QUESTION not in after:
            raise CheckpointError(f"the chat template of this model leaves out a turn of three; {INFO.name} needs them")
        self._probe_ids = tuple(model.tokenizer.encode(after))
        self.max_probe_tokens = len(self._probe_ids)
        self.max_special_tokens = 1 + self.max_probe_tokens

    def prompt_ids(self, problem: str) -> list[int]:
        """The problem's turn, and the opening of the assistant's."""
        return self.model.tokenizer.encode(self._around(problem)[0])

    def read(self, path: StepPath) -> ScoreInput:
        """The step with its blank line, the question as a probe, and the place of the answer."""
        ids = self.model.tokenizer.encode(stripped_step(path.steps[-1]) + "\n\n")
        end = len(ids) + len(self._probe_ids) - 1
        return ScoreInput((*ids, *self._probe_ids), (end,), num_probe_tokens=len(self._probe_ids))

    def full_path(self, path: StepPath) -> ScoreInput:
        """The answer so far, encoded at once."""
        answer = "".join(stripped_step(step) + "\n\n" for step in path.steps)
        ids = [*self.prompt_ids(path.problem), *self.model.tokenizer.encode(answer), *self._probe_ids]
        return ScoreInput(tuple(ids), (len(ids) - 1,), num_probe_tokens=len(self._probe_ids), full_path=True)

    def _around(self, problem: str) -> tuple[str, str]:
        """The chat before the assistant's turn and after it, up to the place of the model's answer."""
        turns = (("user", problem), ("assistant", _SOLUTION), ("user", _QUESTION))
        messages = [{"role": role, "content": content} for role, content in turns]
        before, _, after = self.model.tokenizer.render_chat(messages, enable_thinking=False).rpartition(_SOLUTION)
        return before, after


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> YesNo:
    """Load a causal language model with the rows of its head that answer.

    Raises:
        CheckpointError: the checkpoint is no generator, or it has no chat template, or no single token for an answer.
    """
    if not checkpoint.architecture.endswith("ForCausalLM"):
        raise CheckpointError(
            f"{checkpoint.folder} is a {checkpoint.architecture or 'model without architecture'}; {INFO.name} asks a "
            "language model and needs a *ForCausalLM"
        )
    tokenizer = TextTokenizer(checkpoint)
    token_ids = _answers(checkpoint, tokenizer)
    return YesNo(load_scoring_model(checkpoint, tokenizer, dtype, device, probability_of(0), token_ids=token_ids))


def require_askable(checkpoint: Checkpoint) -> None:
    """Check, without reading weights, that a generator can be asked about its own steps.

    Raises:
        CheckpointError: it has no chat template, or no single token for an answer.
    """
    _answers(checkpoint, TextTokenizer(checkpoint))


def of_generator(checkpoint: Checkpoint, generator: Model) -> YesNo:
    """The family on the weights of a generator that is loaded already.

    Args:
        checkpoint: the generator's.
        generator: its model.

    Raises:
        CheckpointError: it has no chat template, or no single token for an answer.
    """
    rows = take_token_rows(checkpoint, generator.decoder, _answers(checkpoint, generator.tokenizer))
    head = stacked_head([rows], probability_of(0))
    return YesNo(Model(generator.decoder, head, generator.tokenizer, (), checkpoint.digest()))


def _answers(checkpoint: Checkpoint, tokenizer: TextTokenizer) -> list[int]:
    if not tokenizer.has_chat_template:
        raise CheckpointError(
            f"{checkpoint.folder} has no chat template, so it cannot be asked whether a step is right; give "
            "--verifier a model of its own, or confidence"
        )
    return [require_one_token(checkpoint, tokenizer, text, _ANSWERED) for text in (_YES, _NO)]
