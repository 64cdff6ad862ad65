"""Beam search as search-and-learn does it, written plainly over transformers or vLLM: the baseline of `bench search`.

Per problem, one at a time: the active beams are copied cyclically up to n candidates, each samples one continuation up
to and including a blank line, the *whole* text of every candidate is scored again, and the best n / beam_width survive.
The last iteration has no stop. Kept as there: full re-scoring, generation and scoring strictly in turn, defaults of 40
iterations and aggregation `last`, and a step cut off at its limit ends its beam as if it were complete. Left out: what
only concerns its servers.

In that tool's words `n` is our N*M and `beam_width` is our M; here they are called candidates and expansion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer

from espalier.experiments.peers.transformers_models import TransformersModels
from espalier.search.answers import extract_answer
from espalier.search.request import Vote
from espalier.search.result import Candidate
from espalier.search.voting import elect

_DELIMITER = "\n\n"
_MAX_ITERATIONS = 40
_MAX_STEP_TOKENS = 256


class Models(Protocol):
    """What runs the two models; both calls block, and take a whole batch of token ids."""

    def sample(self, rows: list[list[int]], stop_ids: Sequence[int], max_tokens: int) -> list[list[int]]:
        """One continuation of each row at temperature 1, up to and including the first of `stop_ids`."""
        ...

    def classify(self, rows: list[list[int]]) -> list[list[float]]:
        """The verifier's logits after the last token of each row: wrong, right."""
        ...


@dataclass(slots=True)
class _Beam:
    token_ids: list[int]  # sampled so far, after the prompt
    text: str
    score: float
    complete: bool


class SearchAndLearn:
    """The baseline over one generator and one token-classifier PRM."""

    def __init__(self, generator: Path, verifier: Path, models: Models | None = None) -> None:
        """Take the tokenizers from both checkpoints; `models` runs them, transformers when not given."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(generator))
        self._verifier_tokenizer: Any = AutoTokenizer.from_pretrained(str(verifier))
        self._models = models or TransformersModels(generator, verifier)
        self._stop_id = self._tokenizer.encode(_DELIMITER, add_special_tokens=False)[0]
        self.generated_tokens = 0
        self.verifier_tokens = 0

    def solve(self, problem: str, candidates: int, expansion: int) -> str:
        """The answer by weighted vote over the surviving complete beams; empty when there is none."""
        prompt = self._prompt_ids(problem)
        active, complete = [_Beam([], "", 0.0, False)], []
        for iteration in range(_MAX_ITERATIONS):
            copies = [active[i % len(active)] for i in range(candidates)]
            grown = self._generate(prompt, copies, stop=iteration < _MAX_ITERATIONS - 1)
            self._score(prompt, grown)
            survivors = sorted(grown, key=lambda beam: -beam.score)[: max(1, candidates // expansion)]
            complete += [beam for beam in survivors if beam.complete]
            active = [beam for beam in survivors if not beam.complete]
            if not active or len(complete) >= candidates // expansion:
                break
        voters = [Candidate(i, extract_answer(beam.text), beam.score, 1, ()) for i, beam in enumerate(complete)]
        best = elect(voters, Vote.WEIGHTED)
        return best.answer if best else ""

    def _prompt_ids(self, problem: str) -> list[int]:
        messages = [{"role": "user", "content": problem}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _generate(self, prompt: list[int], beams: list[_Beam], stop: bool) -> list[_Beam]:
        eos = self._tokenizer.eos_token_id
        rows = [prompt + beam.token_ids for beam in beams]
        sampled = self._models.sample(rows, [eos, self._stop_id] if stop else [eos], _MAX_STEP_TOKENS)
        grown = []
        for beam, new in zip(beams, sampled, strict=True):
            self.generated_tokens += len(new)
            ids = beam.token_ids + [i for i in new if i != eos]
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            grown.append(_Beam(ids, text, 0.0, complete=new[-1:] != [self._stop_id]))
        return grown

    def _score(self, prompt: list[int], beams: list[_Beam]) -> None:
        """Score every beam's whole text: the verifier reads the problem and all steps again."""
        separator = self._verifier_tokenizer.encode(_DELIMITER, add_special_tokens=False)
        rows = []
        for beam in beams:
            steps = [step for step in beam.text.split(_DELIMITER) if step]
            ids = [
                i for s in steps for i in [*self._verifier_tokenizer.encode(s, add_special_tokens=False), *separator]
            ]
            rows.append(prompt + ids)
        self.verifier_tokens += sum(map(len, rows))
        for beam, (wrong, right) in zip(beams, self._models.classify(rows), strict=True):
            beam.score = 1 / (1 + math.exp(wrong - right))  # the softmax's second value
