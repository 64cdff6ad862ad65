"""Beam search as search-and-learn does it, written plainly on transformers: the baseline of `bench search`.

Per problem, one at a time: the active beams are copied cyclically up to n candidates, each samples one continuation up
to and including a blank line, the *whole* text of every candidate is scored again, and the best n / beam_width survive.
The last iteration has no stop. Kept as there: full re-scoring, generation and scoring strictly in turn, defaults of 40
iterations and aggregation `last`. Left out: what only concerns its servers.

In that tool's words `n` is our N*M and `beam_width` is our M; here they are called candidates and expansion.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from espalier.search.answers import extract_answer
from espalier.search.request import Vote
from espalier.search.result import Candidate
from espalier.search.voting import elect

_DELIMITER = "\n\n"
_MAX_ITERATIONS = 40
_MAX_STEP_TOKENS = 256


@dataclass(slots=True)
class _Beam:
    token_ids: list[int]  # sampled so far, after the prompt
    text: str
    score: float
    complete: bool


class SearchAndLearn:
    """The baseline over one generator and one token-classifier PRM, both run by transformers."""

    def __init__(self, generator: Path, verifier: Path) -> None:
        """Load both checkpoints in float32 on CPU."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(generator), padding_side="left")
        self._generator: Any = AutoModelForCausalLM.from_pretrained(str(generator), dtype=torch.float32).eval()
        self._verifier_tokenizer: Any = AutoTokenizer.from_pretrained(str(verifier), padding_side="right")
        self._verifier: Any = AutoModelForTokenClassification.from_pretrained(str(verifier), dtype=torch.float32).eval()
        self._stop_id = self._tokenizer.encode(_DELIMITER, add_special_tokens=False)[0]
        self.generated_tokens = 0
        self.verifier_tokens = 0

    @torch.inference_mode()
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
        inputs = self._padded([prompt + beam.token_ids for beam in beams], left=True)
        eos = self._tokenizer.eos_token_id
        output = self._generator.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=_MAX_STEP_TOKENS,
            eos_token_id=[eos, self._stop_id] if stop else [eos],
            pad_token_id=self._tokenizer.pad_token_id,
        )
        grown = []
        for beam, row in zip(beams, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            new = _until(row, {eos, self._stop_id} if stop else {eos})
            self.generated_tokens += len(new)
            ids = beam.token_ids + [i for i in new if i != eos]
            grown.append(_Beam(ids, self._tokenizer.decode(ids, skip_special_tokens=True), 0.0, new[-1:] == [eos]))
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
        logits = self._verifier(**self._padded(rows, left=False)).logits
        for beam, row, values in zip(beams, rows, logits, strict=True):
            beam.score = torch.softmax(values[len(row) - 1], dim=-1)[1].item()

    def _padded(self, rows: list[list[int]], left: bool) -> dict[str, torch.Tensor]:
        width = max(map(len, rows))
        pad = self._tokenizer.pad_token_id
        fill = [[pad] * (width - len(row)) for row in rows]
        ids = [f + r if left else r + f for f, r in zip(fill, rows, strict=True)]
        mask = [
            [0] * len(f) + [1] * len(r) if left else [1] * len(r) + [0] * len(f)
            for f, r in zip(fill, rows, strict=True)
        ]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def _until(token_ids: list[int], stops: set[int]) -> list[int]:
    """The ids up to and including the first stop."""
    for i, token_id in enumerate(token_ids):
        if token_id in stops:
            return token_ids[: i + 1]
    return token_ids
