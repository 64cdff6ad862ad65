"""search-and-learn's searches, reimplemented on transformers or vLLM: the baseline of `bench search`.

- beam search, one problem at a time: the active beams are repeated cyclically up to n candidates, each samples one
  continuation up to and including a blank line, the *whole* text of every candidate is scored again, and the best
  n / beam_width are kept. The last iteration has no stop string.
- dvts, 25 problems at a time: each has n / beam_width independent beams; each samples beam_width continuations and
  continues from the one with the best score.
- best-of-n, 25 problems at a time: n whole solutions per problem, all scored.

As in the original: full re-scoring, strict alternation of generation and scoring, defaults of 40 iterations and
aggregation `last`, and a step cut off at its limit completes its beam. Left out: everything about its servers.

search-and-learn's `n` is our N*M and its `beam_width` is our M; here they are called candidates and expansion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer

from espalier.experiments.lab.bench.baselines.transformers_models import TransformersModels
from espalier.experiments.lab.bench.baselines.vllm_process import VllmProcess
from espalier.search.grading.answers import extract_answer
from espalier.search.request import AlgorithmName, Vote
from espalier.search.result import Candidate
from espalier.search.voting.vote import select

_DELIMITER = "\n\n"
_MAX_ITERATIONS = 40
_MAX_STEP_TOKENS = 256
_MAX_TOKENS = 2048
_PROBLEMS_PER_BATCH = 25


_ORIGINAL_NAMES = {
    AlgorithmName.BEAM: "beam_search",
    AlgorithmName.DVTS: "dvts",
    AlgorithmName.BEST_OF_N: "best_of_n",
}


class Models(Protocol):
    """Runs the two models; both calls block, and take a whole batch of token ids."""

    def sample(self, rows: list[list[int]], stop_ids: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Sample one continuation per row at temperature 1, up to and including the first of `stop_ids`."""
        ...

    def classify(self, rows: list[list[int]]) -> list[list[float]]:
        """Return the verifier's logits after the last token of each row: wrong, right."""
        ...


@dataclass(slots=True)
class _Beam:
    token_ids: list[int]  # sampled so far, without the prompt
    text: str
    score: float
    complete: bool


class Peer(Protocol):
    """A contestant of `bench search`.

    Attributes:
        generated_tokens: tokens sampled so far.
        verifier_tokens: tokens that the verifier has read so far.
    """

    generated_tokens: int
    verifier_tokens: int

    def solve_all(
        self, problems: Sequence[str], algorithm: AlgorithmName, candidates: int, expansion: int
    ) -> list[str]:
        """Solve each problem by a weighted vote over its complete beams; an answer is empty without any.

        Args:
            problems: the problems' texts.
            algorithm: beam, dvts or best-of-n.
            candidates: samples per problem at a time, search-and-learn's `n`.
            expansion: continuations per beam, search-and-learn's `beam_width`; not used by best-of-n.
        """
        ...


class SearchAndLearn:
    """The baseline on one generator and one token-classifier PRM."""

    def __init__(self, generator: Path, verifier: Path, models: Models | None = None) -> None:
        """Load the tokenizers of both checkpoints; `models` runs them, by default transformers."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(generator))
        self._verifier_tokenizer: Any = AutoTokenizer.from_pretrained(str(verifier))
        self._models = models or TransformersModels(generator, verifier)
        self._stop_id = self._tokenizer.encode(_DELIMITER, add_special_tokens=False)[0]
        self.generated_tokens = 0
        self.verifier_tokens = 0

    def solve_all(
        self, problems: Sequence[str], algorithm: AlgorithmName, candidates: int, expansion: int
    ) -> list[str]:
        """See `Peer`."""
        if algorithm is AlgorithmName.BEAM:
            return [self.solve(problem, candidates, expansion) for problem in problems]
        search = self._dvts if algorithm is AlgorithmName.DVTS else self._best_of_n
        batches = [problems[i : i + _PROBLEMS_PER_BATCH] for i in range(0, len(problems), _PROBLEMS_PER_BATCH)]
        return [answer for batch in batches for answer in search(batch, candidates, expansion)]

    def solve(self, problem: str, candidates: int, expansion: int) -> str:
        """Solve one problem by beam search; see `solve_all`."""
        prompt = self._prompt_ids(problem)
        active, complete = [_Beam([], "", 0.0, False)], []
        for iteration in range(_MAX_ITERATIONS):
            copies = [active[i % len(active)] for i in range(candidates)]
            grown = self._generate([prompt] * len(copies), copies, stop=iteration < _MAX_ITERATIONS - 1)
            self._score([prompt] * len(grown), grown)
            survivors = sorted(grown, key=lambda beam: -beam.score)[: max(1, candidates // expansion)]
            complete += [beam for beam in survivors if beam.complete]
            active = [beam for beam in survivors if not beam.complete]
            if not active or len(complete) >= candidates // expansion:
                break
        return _vote(complete)

    def _dvts(self, problems: Sequence[str], candidates: int, expansion: int) -> list[str]:
        prompts = [self._prompt_ids(problem) for problem in problems]
        trees = [(i, _Beam([], "", 0.0, False)) for i in range(len(problems)) for _ in range(candidates // expansion)]
        for iteration in range(_MAX_ITERATIONS):
            active = [k for k, (_, beam) in enumerate(trees) if not beam.complete]
            if not active:
                break
            copies = [trees[k] for k in active for _ in range(expansion)]
            of_each = [prompts[i] for i, _ in copies]
            grown = self._generate(of_each, [beam for _, beam in copies], stop=iteration < _MAX_ITERATIONS - 1)
            self._score(of_each, grown)
            for place, k in enumerate(active):
                children = grown[place * expansion : (place + 1) * expansion]
                trees[k] = trees[k][0], max(children, key=lambda beam: beam.score)
        return [_vote([beam for j, beam in trees if j == i and beam.complete]) for i in range(len(problems))]

    def _best_of_n(self, problems: Sequence[str], candidates: int, _: int) -> list[str]:
        prompts = [prompt for problem in problems for prompt in [self._prompt_ids(problem)] * candidates]
        empty = [_Beam([], "", 0.0, False) for _ in prompts]
        grown = self._generate(prompts, empty, stop=False, max_tokens=_MAX_TOKENS)
        self._score(prompts, grown)
        return [_vote(grown[i : i + candidates]) for i in range(0, len(grown), candidates)]

    def _prompt_ids(self, problem: str) -> list[int]:
        messages = [{"role": "user", "content": problem}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _generate(
        self, prompts: list[list[int]], beams: list[_Beam], stop: bool, max_tokens: int = _MAX_STEP_TOKENS
    ) -> list[_Beam]:
        eos = self._tokenizer.eos_token_id
        rows = [prompt + beam.token_ids for prompt, beam in zip(prompts, beams, strict=True)]
        sampled = self._models.sample(rows, [eos, self._stop_id] if stop else [eos], max_tokens)
        grown = []
        for beam, new in zip(beams, sampled, strict=True):
            self.generated_tokens += len(new)
            ids = beam.token_ids + [i for i in new if i != eos]
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            grown.append(_Beam(ids, text, 0.0, complete=new[-1:] != [self._stop_id]))
        return grown

    def _score(self, prompts: list[list[int]], beams: list[_Beam]) -> None:
        """Score every beam's whole text: the verifier reads the problem and all steps again."""
        separator = self._verifier_tokenizer.encode(_DELIMITER, add_special_tokens=False)
        rows = []
        for prompt, beam in zip(prompts, beams, strict=True):
            steps = [step for step in beam.text.split(_DELIMITER) if step]
            ids = [
                i for s in steps for i in [*self._verifier_tokenizer.encode(s, add_special_tokens=False), *separator]
            ]
            rows.append(prompt + ids)
        self.verifier_tokens += sum(map(len, rows))
        for beam, (wrong, right) in zip(beams, self._models.classify(rows), strict=True):
            beam.score = 1 / (1 + math.exp(wrong - right))  # softmax probability of `right`


class OriginalSearchAndLearn:
    """search-and-learn's own code, unmodified, in vLLM's process; its solutions' answers are read and voted on here."""

    def __init__(self, vllm: VllmProcess) -> None:
        """Use a `vllm` whose settings name the folder of search-and-learn."""
        self._vllm = vllm
        self.generated_tokens = 0
        self.verifier_tokens = 0

    def solve_all(
        self, problems: Sequence[str], algorithm: AlgorithmName, candidates: int, expansion: int
    ) -> list[str]:
        """See `Peer`."""
        found = self._vllm.original_search(_ORIGINAL_NAMES[algorithm], problems, candidates, expansion)
        self.generated_tokens += found["generated_tokens"]
        self.verifier_tokens += found["verifier_tokens"]
        return [
            _vote([_Beam([], text, score, True) for text, score in zip(each["texts"], each["scores"], strict=True)])
            for each in found["solutions"]
        ]


def _vote(beams: list[_Beam]) -> str:
    """The answer with the largest sum of scores; empty without answers."""
    voters = [Candidate(i, extract_answer(beam.text), beam.score, 1, ()) for i, beam in enumerate(beams)]
    best = select(voters, Vote.WEIGHTED).best
    return best.answer if best else ""
