r"""ThinkPRM: a generative verifier that writes a rationale about each step and then answers yes or no.

Layout: one user turn with the problem, the steps as `Step 1: …` on separate lines, and the instruction; the answer
starts with `\nLet's verify step by step:`. A rationale ends at an end-of-sequence token, at `</think>`, at `Is the
solution correct?`, at a step beyond the last (`Step 4:` after three), or at its maximum length. `\nIs the solution
correct?` is appended to the text before that, and the score is P(" yes") against P(" no"), averaged over the chains.
The verdict is about the whole path, so a path's newest step gets the path's score.

The prompt, the ends of a rationale, the lead-in to the verdict, the two labels, their softmax and the mean are those of
the authors' `prm/thinkprm_api.py` and `utils/helper.py`; one greedy chain is the setting of their beam search
(`prm_temperature: 0.0`). A `prm` object in config.json overrides `chains`, `temperature` and `critique_tokens` (the
maximum tokens of a rationale).

Their verdict is a softmax, at temperature 1, over SGLang's length-normalized log-probabilities of the choices `yes` and
`no` after `Is the solution correct? `. SGLang appends each choice to the text and tokenizes it again, so that the space
becomes part of ` yes` and ` no`. It averages from the last but one token of the text before, the question mark, whose
own value is not included; what remains is the label. The values are therefore log P(" yes") and log P(" no"), and their
softmax is the one used here. A label of several tokens would be averaged over these; such a tokenizer is rejected.

Differences: a rationale's sampled tokens are kept and followed by those of the lead-in, whereas their client tokenizes
the whole text again (which may merge a full stop with the newline after it). A token that overlaps the start of an
ending text is dropped, whereas theirs is cut within it. A rationale has up to `4096` tokens, enough for the longest of
their 1,000 training examples (3,669), whereas their limit is 8172. Steps are the search's, whereas theirs are split at
the labels `Step k:`. The step beyond the last is found by number, whereas they compare numbers as strings, so that with
ten or more steps the tenth ends a rationale. As in their code, `</think>` is never part of the text before a verdict.
Source: arXiv:2504.16828, github.com/mukhal/ThinkPRM, and of github.com/sgl-project/sglang `lang/backend/
runtime_endpoint.py` (`select`, `compute_normalized_prompt_logprobs`) and how its scheduler returns the
log-probabilities of a prompt. The class is that of any generator, so the family is chosen by the flag only.
"""

import re
from dataclasses import replace
from itertools import accumulate

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, StepPath
from espalier.prm.families.settings import read_settings
from espalier.prm.generative import GenerativeFamily, RationaleSettings
from espalier.prm.heads import require_one_token

_PROMPT = (
    "You are given a math problem and a proposed step-by-step solution:\n\n[Math Problem]\n\n{problem}\n\n"
    "[Solution]\n\n{solution}\n\nReview and critique each step in the proposed solution to determine whether each step "
    "is correct. If the solution is incomplete, only verify the provided steps."
)
_OPENING = "\nLet's verify step by step:"
_QUESTION = "Is the solution correct?"
_END_OF_THOUGHT = "</think>"
_LABEL = re.compile(r"(?:## )?Step \d+:")

INFO = FamilyInfo(
    name="thinkprm",
    architectures=("Qwen2ForCausalLM",),
    score="softmax, ` yes` against ` no`; mean over the rationales",
)


class ThinkPrm(GenerativeFamily):
    """The ThinkPRM family; see the module."""

    info = INFO

    def __init__(self, model: Model, settings: RationaleSettings, verdict_ids: tuple[int, int]) -> None:
        super().__init__(model, settings)
        encode = model.tokenizer.encode
        self.verdict_ids = verdict_ids
        self.lead_ids = tuple(encode(f"\n{_QUESTION}"))
        self.max_special_tokens = len(encode("Step 100: \n"))
        self.closing_tokens = len(encode(self._text("", "{solution}").rpartition("{solution}")[2]))

    def prompt_ids(self, problem: str) -> list[int]:
        """The problem's turn up to the first step."""
        return self.model.tokenizer.encode(self._text(problem, "{solution}").rpartition("{solution}")[0])

    def text_ids(self, path: StepPath) -> tuple[int, ...]:
        """The prompt, encoded at once."""
        steps = (_LABEL.sub("", step).strip() for step in path.steps)
        solution = "\n".join(f"Step {number}: {step}" for number, step in enumerate(steps, start=1))
        return tuple(self.model.tokenizer.encode(self._text(path.problem, solution)))

    def kept(self, path: StepPath, token_ids: list[int]) -> list[int]:
        """The tokens that lie completely before the first text that ends a rationale."""
        model = self.model
        written = token_ids[:-1] if token_ids[-1] in model.eos_token_ids else token_ids
        text = model.tokenizer.decode_bytes(written)
        stops = (_QUESTION, _END_OF_THOUGHT, f"Step {len(path.steps) + 1}:")
        end = min((at for stop in stops if (at := text.find(stop.encode())) >= 0), default=len(text))
        ends = accumulate(len(model.tokenizer.decode_bytes([i])) for i in written)
        return written[: sum(at <= end for at in ends)]

    def _text(self, problem: str, solution: str) -> str:
        # Not by str.format or successive replacement: either text may contain braces.
        before, between, after = re.split(r"\{problem\}|\{solution\}", _PROMPT)
        content = f"{before}{problem}{between}{solution}{after}"
        return self.model.tokenizer.render_chat([{"role": "user", "content": content}]) + _OPENING


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> ThinkPrm:
    """Load a generator that was trained to verify.

    Raises:
        CheckpointError: the checkpoint is no generator, its `prm` object has an unknown key or value, its tokenizer has
            no single token for a label, or its context leaves no room for a rationale.
    """
    if not checkpoint.architecture.endswith("ForCausalLM"):
        raise CheckpointError(
            f"{checkpoint.folder} is a {checkpoint.architecture or 'model without architecture'}; {INFO.name} "
            "generates text and needs a *ForCausalLM; leave out --verifier-family, or give a checkpoint of that family"
        )
    settings = _settings(checkpoint)
    tokenizer = TextTokenizer(checkpoint)
    yes, no = (
        require_one_token(checkpoint, tokenizer, label, f"where {INFO.name} says its verdict")
        for label in (" yes", " no")
    )
    model = load_generator(checkpoint, dtype, device)
    if max(yes, no) >= model.config.vocab_size:
        raise CheckpointError(
            f"{checkpoint.folder} has no embedding for the token in which {INFO.name} says its verdict; is "
            "tokenizer.json the one that belongs to these weights?"
        )
    thought = tokenizer.token_id(_END_OF_THOUGHT)
    ends = {*model.eos_token_ids, *([] if thought is None or thought >= model.config.vocab_size else [thought])}
    family = ThinkPrm(replace(model, eos_token_ids=tuple(sorted(ends))), settings, (yes, no))
    if family.context <= family.closing_tokens:
        raise CheckpointError(
            f"{checkpoint.folder}: rationales of {settings.tokens} tokens leave nothing of its context of "
            f"{model.config.max_positions}; set a smaller prm.critique_tokens in its config.json"
        )
    return family


def _settings(checkpoint: Checkpoint) -> RationaleSettings:
    rule = "chains and critique_tokens, whole numbers from 1, and temperature, a number from 0"
    settings = read_settings(checkpoint, RationaleSettings, rule)
    if settings.chains > 1 and settings.temperature == 0:
        raise CheckpointError(
            f"{checkpoint.folder}: {settings.chains} rationales at temperature 0 are all the same; set prm.temperature "
            "in config.json, or prm.chains to 1"
        )
    return settings
