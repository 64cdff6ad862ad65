r"""ThinkPRM: a generative verifier, which writes a rationale of each step and then answers yes or no.

Layout: one turn of the user with the problem, the steps as `Step 1: …` on lines of their own, and the instruction;
then, at the beginning of the answer, `\nLet's verify step by step:`. A rationale ends where the model ends it, at
`</think>`, at `Is the solution correct?`, at a step that there is not (`Step 4:` after three), or at its longest;
`\nIs the solution correct?` is put after what came before that, and the score is P(" yes") against P(" no"), the mean
over the chains. It judges the path as a whole, and a path's newest step has the path's score.

The prompt, the ends of a rationale, the verdict's lead-in, the two labels, their softmax and the mean are those of the
authors' `prm/thinkprm_api.py` and `utils/helper.py`; one greedy chain is their beam search's setting (`prm_temperature:
0.0`). A `prm` object in config.json sets others: `chains`, `temperature` and `critique_tokens`.

Their verdict is a softmax, at temperature 1, over SGLang's length-normalised log-probabilities of the choices `yes` and
`no` after `Is the solution correct? `. SGLang appends each choice to the text and tokenises that anew, so that the
space becomes part of ` yes` and ` no`. It averages over the tokens from the last but one of the text before, the
question mark, whose own value is not among them: what is left is the label. So the numbers are log P(" yes") and log
P(" no"), and their softmax is the one here. A label of several tokens would be averaged over these; a tokenizer that
has one is refused.

What differs: a rationale's own tokens are kept as they were drawn, and the lead-in's follow them, where their client
tokenises the whole text anew (a full stop and the newline after it are then one token). Of a token that reaches into
one of the texts that end a rationale nothing is kept, where theirs is cut within it. `4096` tokens a rationale, which
the longest of the 1,000 they trained on (3,669) fits in, where their limit is 8172. Steps are the search's, where
theirs are what stands between labels `Step k:`; the step that there is not is found by number, where they
compare the numbers as texts, so that of ten steps and more the tenth ends a rationale. They also put
`</think>` in no verdict's text, and so does this.
Source: arXiv:2504.16828, github.com/mukhal/ThinkPRM, and of github.com/sgl-project/sglang `lang/backend/
runtime_endpoint.py` (`select`, `compute_normalized_prompt_logprobs`) and how its scheduler gives back the
log-probabilities of a prompt. The class is any generator's, so the flag alone chooses it.
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
from espalier.prm.generative import GenerativeVerifier, RationaleSettings

_PROMPT = (
    "You are given a math problem and a proposed step-by-step solution:\n\n[Math Problem]\n\n{problem}\n\n"
    "[Solution]\n\n{solution}\n\nReview and critique each step in the proposed solution to determine whether each step "
    "is correct. If the solution is incomplete, only verify the provided steps."
)
_OPENING = "\nLet's verify step by step:"
_QUESTION = "Is the solution correct?"
_END_OF_THOUGHT = "</think>"
_LABEL = re.compile(r"(?:## )?Step \d+:")
_USUAL = {"chains": 1, "temperature": 0.0, "critique_tokens": 4096}

INFO = FamilyInfo(
    name="thinkprm",
    models="launch/ThinkPRM-1.5B, -7B, -14B",
    architectures=("Qwen2ForCausalLM",),
    head="`lm_head`",
    layout="chat template, the problem, `Step {number}: {step}` a line and the instruction; then a critique is written",
    score_positions="`Is the solution correct?` after the critique",
    score="softmax, ` yes` against ` no`; mean over the critiques",
    source="arXiv:2504.16828 and github.com/mukhal/ThinkPRM",
    incremental=False,
)


class ThinkPrm(GenerativeVerifier):
    """See the module."""

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
        """The prompt, encoded as one."""
        steps = (_LABEL.sub("", step).strip() for step in path.steps)
        solution = "\n".join(f"Step {number}: {step}" for number, step in enumerate(steps, start=1))
        return tuple(self.model.tokenizer.encode(self._text(path.problem, solution)))

    def kept(self, path: StepPath, token_ids: list[int]) -> list[int]:
        """The tokens wholly before the first of the texts that end a rationale."""
        model = self.model
        written = token_ids[:-1] if token_ids[-1] in model.eos_token_ids else token_ids
        text = model.tokenizer.decode_bytes(written)
        stops = (_QUESTION, _END_OF_THOUGHT, f"Step {len(path.steps) + 1}:")
        end = min((at for stop in stops if (at := text.find(stop.encode())) >= 0), default=len(text))
        ends = accumulate(len(model.tokenizer.decode_bytes([i])) for i in written)
        return written[: sum(at <= end for at in ends)]

    def _text(self, problem: str, solution: str) -> str:
        # Not by str.format and not one after the other: either text may hold braces.
        before, between, after = re.split(r"\{problem\}|\{solution\}", _PROMPT)
        content = f"{before}{problem}{between}{solution}{after}"
        return self.model.tokenizer.render_chat([{"role": "user", "content": content}]) + _OPENING


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> ThinkPrm:
    """Load a generator that was trained to verify.

    Raises:
        CheckpointError: when it is no generator, its `prm` object has an unknown key or value, its tokenizer has no
            single token for a label, or its context leaves no room for a rationale.
    """
    if not checkpoint.architecture.endswith("ForCausalLM"):
        raise CheckpointError(
            f"{checkpoint.folder} is a {checkpoint.architecture or 'model without architecture'}; {INFO.name} writes "
            "and so is a *ForCausalLM: leave out --verifier-family, or give the checkpoint it is meant for"
        )
    settings = _settings(checkpoint)
    tokenizer = TextTokenizer(checkpoint)
    yes, no = (_label_id(checkpoint, tokenizer, label) for label in (" yes", " no"))
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
    given = _USUAL | checkpoint.config.get("prm", {})
    chains, temperature, tokens = given["chains"], given["temperature"], given["critique_tokens"]
    whole = all(isinstance(value, int) and value >= 1 for value in (chains, tokens))
    if set(given) != set(_USUAL) or not whole or not isinstance(temperature, int | float) or temperature < 0:
        raise CheckpointError(
            f"{checkpoint.folder}: the prm object of config.json has chains and critique_tokens, whole numbers from 1, "
            "and temperature, a number from 0"
        )
    if chains > 1 and temperature == 0:
        raise CheckpointError(
            f"{checkpoint.folder}: {chains} rationales at temperature 0 are all the same; set prm.temperature in "
            "config.json, or prm.chains to 1"
        )
    return RationaleSettings(tokens, chains, float(temperature))


def _label_id(checkpoint: Checkpoint, tokenizer: TextTokenizer, label: str) -> int:
    ids = tokenizer.encode(label)
    if len(ids) != 1:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.folder} has no single token for {label!r}, where {INFO.name} says its "
            "verdict; is tokenizer.json the one that belongs to these weights?"
        )
    return ids[0]
