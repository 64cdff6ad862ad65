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

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Self

import numpy as np
import torch
from pydantic import ConfigDict, Field

from espalier.engine.errors import CheckpointError
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.roles import VERIFIER
from espalier.engine.work import Done, Generate, Generated, Sampling, Score, stream_key
from espalier.prm.base import FamilyInfo, PrmFamily, Sampled, ScoreInput, StepPath
from espalier.prm.heads import read_settings, require_causal_lm, require_one_token
from espalier.prm.limits import PathLimits, RationaleLimits
from espalier.prm.scorer import StepNode, StepScore, steps_with_text
from espalier.prm.verifier import NodeState, VerifierSession

_PROMPT = (
    "You are given a math problem and a proposed step-by-step solution:\n\n[Math Problem]\n\n{problem}\n\n"
    "[Solution]\n\n{solution}\n\nReview and critique each step in the proposed solution to determine whether each step "
    "is correct. If the solution is incomplete, only verify the provided steps."
)
_OPENING = "\nLet's verify step by step:"
_QUESTION = "Is the solution correct?"
_END_OF_THOUGHT = "</think>"
_LABEL = re.compile(r"(?:## )?Step \d+:")


@dataclass(frozen=True, slots=True)
class RationaleSettings:
    """Settings of the generation of rationales.

    Attributes:
        tokens: maximum tokens of a rationale; a longer one is cut off and judged as it is.
        chains: rationales per path; the score is the mean of their verdicts.
        temperature: softmax temperature; 0 is greedy.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    tokens: Annotated[int, Field(alias="critique_tokens", ge=1)] = 4096
    chains: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0


@dataclass(slots=True, eq=False)
class _Rationales:
    """State of the rationales of one path.

    Attributes:
        text: sequence of the path's text, shared by all rationales.
        unwritten: number of rationales still being generated.
        extra_tokens: tokens generated and computed so far.
        scores: verdicts so far, in order of arrival.
    """

    node: StepNode
    path: StepPath
    text: KVSequence
    unwritten: int
    extra_tokens: int
    scores: list[float] = field(default_factory=list)


class RationaleSession(VerifierSession["ThinkPrm"]):
    """Scores each path by rationales.

    A node's sequence is a fork of the root and adds no tokens. Its text, rationales and verdicts use separate
    sequences, released with its score. A rationale ends in tokens that its verdict must not see, so its kept prefix is
    computed again on a fork of the text.
    """

    @classmethod
    def bounds(cls, family: "ThinkPrm", limits: PathLimits) -> PathLimits:
        """Bounds with rationales: each is generated once and read once, after the text of a path."""
        text = min(limits.prompt_tokens + limits.path_tokens + family.closing_tokens, family.context)
        path = text + family.rationales_cost
        rationales = RationaleLimits(text, family.settings.chains, family.rationale_tokens)
        return replace(limits, path_tokens=path, step_tokens=path, rationales=rationales)

    def _submit(self, node: StepNode, parent: KVSequence, state: NodeState, max_tokens: int) -> int | None:
        family, search, path = self._family, self._search, self._path(steps_with_text(node))
        ids = family.text_ids(path)
        family.model.require_embedded(VERIFIER, ids)
        if len(ids) > family.context or len(ids) + family.rationales_cost > max_tokens:
            return None
        state.sequence = self._continued(parent, state)
        text = self._engine.open(VERIFIER, list(ids), search.salt, search.owner)
        samplings = family.samplings(search.seed, path)
        self._opened.add(text)
        rationales = _Rationales(node, path, text, len(samplings), len(ids))
        work = Generate(search.owner, text, samplings, family.settings.tokens, delimiter="", tag=rationales)
        self._engine.submit(work)
        return 0

    def _take(self, done: Done) -> Iterable[StepScore]:
        if isinstance(done, Generated):
            self._read_verdict(done)
            return ()
        if done.work.tag is None:  # the problem
            return self._finish(StepScore(self._search.root))
        rationales, chains = done.work.tag
        self._release_opened(done.work.sequence)
        rationales.scores += [self._family.evidence(done.values, None, Sampled())] * chains
        if len(rationales.scores) < self._family.settings.chains:
            return ()
        # fsum is exact, so the order of arrival does not matter.
        mean = math.fsum(rationales.scores) / len(rationales.scores)
        return self._finish(StepScore(rationales.node, mean, rationales.extra_tokens))

    def _read_verdict(self, done: Generated) -> None:
        """Compute the kept prefix of a rationale and the lead-in to its verdict, after the text."""
        rationales: _Rationales = done.work.tag
        kept = self._family.kept(rationales.path, done.token_ids)
        self._engine.release(done.sequence)
        (sequence,) = self._forks(rationales.text, 1)
        rationales.unwritten -= len(done.indices)
        if not rationales.unwritten:
            self._release_opened(rationales.text)
        ids = (*kept, *self._family.lead_ids)
        rationales.extra_tokens += done.own_tokens + len(ids)
        tag = rationales, len(done.indices)
        self._engine.submit(Score(self._search.owner, sequence, ids, (len(ids) - 1,), tag=tag))


class ThinkPrm(PrmFamily):
    """The ThinkPRM family; see the module.

    The KV of a path does not serve its next step, because the prompt continues between the steps and the rationale.
    Every step is therefore scored from the whole text, on sequences that are released with its score.

    Attributes:
        settings: how rationales are generated.
        closing_tokens: maximum tokens between the last step and the rationale.
        lead_ids: ids fed after a rationale; the verdict is the next token.
        verdict_ids: ids of yes and no.
    """

    info = FamilyInfo(
        "thinkprm", ("Qwen2ForCausalLM",), score="softmax, ` yes` against ` no`; mean over the rationales"
    )
    costly = True
    session = RationaleSession

    def __init__(self, model: Model, settings: RationaleSettings, verdict_ids: tuple[int, int]) -> None:
        encode = model.tokenizer.encode
        self.model = model
        self.settings = settings
        self.verdict_ids = verdict_ids
        self.lead_ids = tuple(encode(f"\n{_QUESTION}"))
        self.max_special_tokens = len(encode("Step 100: \n"))
        self.closing_tokens = len(encode(self._text("", "{solution}").rpartition("{solution}")[2]))

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a generator that was trained to verify.

        Raises:
            CheckpointError: the checkpoint is no generator, its `prm` object has an unknown key or value, its tokenizer
                has no single token for a label, or its context leaves no room for a rationale.
        """
        require_causal_lm(checkpoint, cls.info.name, "generates text")
        rule = "chains and critique_tokens, whole numbers from 1, and temperature, a number from 0"
        settings = read_settings(checkpoint, RationaleSettings, rule)
        if settings.chains > 1 and settings.temperature == 0:
            raise CheckpointError(
                f"{checkpoint.folder}: {settings.chains} rationales at temperature 0 are all the same; set "
                "prm.temperature in config.json, or prm.chains to 1"
            )
        tokenizer = TextTokenizer(checkpoint)
        yes, no = (
            require_one_token(checkpoint, tokenizer, label, f"where {cls.info.name} says its verdict")
            for label in (" yes", " no")
        )
        model = load_generator(checkpoint, dtype, device)
        if max(yes, no) >= model.config.vocab_size:
            raise CheckpointError(
                f"{checkpoint.folder} has no embedding for the token in which {cls.info.name} says its verdict; is "
                "tokenizer.json the one that belongs to these weights?"
            )
        thought = tokenizer.token_id(_END_OF_THOUGHT)
        ends = {*model.eos_token_ids, *([] if thought is None or thought >= model.config.vocab_size else [thought])}
        family = cls(replace(model, eos_token_ids=tuple(sorted(ends))), settings, (yes, no))
        if family.context <= family.closing_tokens:
            raise CheckpointError(
                f"{checkpoint.folder}: rationales of {settings.tokens} tokens leave nothing of its context of "
                f"{model.config.max_positions}; set a smaller prm.critique_tokens in its config.json"
            )
        return family

    @property
    def identity(self) -> str:
        """The name and the rationale settings."""
        return f"{self.name} {self.settings}"

    @property
    def context(self) -> int:
        """Maximum tokens of a path's text: the model's context minus one rationale and its verdict."""
        return super().context - self.rationale_tokens

    @property
    def rationales_cost(self) -> int:
        """Maximum tokens of a path's rationales, each counted twice: to generate it and to read its verdict."""
        return 2 * self.settings.chains * self.rationale_tokens

    @property
    def rationale_tokens(self) -> int:
        """Maximum tokens of one rationale and the lead-in to its verdict."""
        return self.settings.tokens + len(self.lead_ids)

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

    def samplings(self, seed: int, path: StepPath) -> tuple[Sampling, ...]:
        """Sampling of each rationale, which depends only on the request's seed and the path's text."""
        text = "\x1f".join((path.problem, *path.steps))
        return tuple(
            Sampling(self.settings.temperature, key=stream_key(seed, text, (i,))) for i in range(self.settings.chains)
        )

    def read(self, path: StepPath) -> ScoreInput:
        """The path's text and the lead-in to a verdict, without a rationale between them."""
        ids = (*self.text_ids(path), *self.lead_ids)
        return ScoreInput(ids, (len(ids) - 1,), full_path=True)

    def evidence(self, values: np.ndarray, before: float | None, sampled: Sampled) -> float:
        """Probability of yes: the softmax of the logits of yes and no."""
        yes, no = (float(values[0, i]) for i in self.verdict_ids)
        return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))

    def _text(self, problem: str, solution: str) -> str:
        # Not by str.format or successive replacement: either text may contain braces.
        before, between, after = re.split(r"\{problem\}|\{solution\}", _PROMPT)
        content = f"{before}{problem}{between}{solution}{after}"
        return self.chat(content) + _OPENING
