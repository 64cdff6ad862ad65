"""search-and-learn's own searches, unmodified, on the engines of `vllm_worker`; runs in that process.

Its package `sal` must be importable there: the folder `src` of github.com/huggingface/search-and-learn, and its
requirements datasets, accelerate, pebble, word2number and latex2sympy2 1.9.1. It gets what its own script gives it: an
`LLM` of vLLM, a configuration, and a PRM, here a token classifier that vLLM computes. Its `n` is our N*M, its
`beam_width` our M.
"""

from collections.abc import Callable, Sequence
from typing import Any

Classify = Callable[[list[list[int]]], list[Any]]
"""Returns the verifier's logits, a tensor `[tokens, 2]`, for each row of token ids."""

_DELIMITER = "\n\n"
_PROBLEMS_PER_BATCH = 25
_MAX_TOKENS = 512
_CHAT = (
    "{%- for message in messages if message['role'] != 'system' %}{{- '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- "
    "'<|im_start|>assistant\n' }}{%- endif %}"
)
"""ChatML without the system prompt, which search-and-learn always sends and the bundled generator was never taught."""


class OriginalCode:
    """search-and-learn's beam_search, dvts and best_of_n on a generator and a token classifier."""

    def __init__(
        self, generator: Any, classify: Callable[[list[list[int]]], list[Any]], folders: Sequence[str]
    ) -> None:
        """Import search-and-learn.

        Args:
            generator: the `LLM` of vLLM that samples.
            classify: see `Classify`.
            folders: generator's and verifier's, for their tokenizers.

        Raises:
            ImportError: search-and-learn, or a package that it needs, is not installed.
        """
        import transformers
        from sal import search  # pyright: ignore[reportMissingImports]
        from sal.config import Config  # pyright: ignore[reportMissingImports]

        self._config = Config
        self._approaches = {name: getattr(search, name) for name in ("beam_search", "dvts", "best_of_n")}
        tokenizer, verifier_tokenizer = (transformers.AutoTokenizer.from_pretrained(folder) for folder in folders)
        self._generator = _Generator(generator, tokenizer)
        self._prm = _TokenClassifier(classify, verifier_tokenizer)

    def search(self, approach: str, problems: Sequence[str], candidates: int, expansion: int) -> dict[str, Any]:
        """Search each problem, one at a time by beam_search, else in batches of 25.

        Returns:
            `solutions`, for each problem the texts and their last steps' scores; and `generated_tokens` and
            `verifier_tokens` of all.
        """
        size = 1 if approach == "beam_search" else _PROBLEMS_PER_BATCH
        config = self._config(
            approach=approach,
            n=candidates,
            beam_width=expansion,
            search_batch_size=size,
            temperature=1.0,
            max_tokens=_MAX_TOKENS,
            custom_chat_template=_CHAT,
        )
        self._prm.tokens = 0
        solutions: list[dict[str, Any]] = []
        generated = 0
        for first in range(0, len(problems), size):
            examples = {"problem": list(problems[first : first + size])}
            found = self._approaches[approach](examples, config, self._generator, self._prm)
            for texts, scores in zip(found["completions"], found["scores"], strict=True):
                solutions.append({"texts": texts, "scores": [each[-1] for each in scores]})
            generated += self._generator.take_count()
        return {"solutions": solutions, "generated_tokens": generated, "verifier_tokens": self._prm.tokens}


class _Generator:
    """vLLM's `LLM` as search-and-learn's searches use it; counts what it generates.

    The tokenizer is transformers' own: of vLLM's, a pool of several, only one would get search-and-learn's template.
    """

    def __init__(self, llm: Any, tokenizer: Any) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._count = 0

    def get_tokenizer(self) -> Any:
        """The generator's tokenizer."""
        return self._tokenizer

    def generate(self, *args: Any, **options: Any) -> list[Any]:
        """See vLLM."""
        outputs = self._llm.generate(*args, **options)
        self._count += sum(len(output.outputs[0].token_ids) for output in outputs)
        return outputs

    def take_count(self) -> int:
        """Tokens generated since the last call."""
        count, self._count = self._count, 0
        return count


class _TokenClassifier:
    """The interface of search-and-learn's PRM classes: the scores of each step of each text.

    Attributes:
        tokens: how many the verifier has read.
    """

    def __init__(self, classify: Classify, tokenizer: Any) -> None:
        self._classify = classify
        self._tokenizer = tokenizer
        self.tokens = 0

    def score(self, questions: list[str], outputs: list[list[str]]) -> list[list[list[float]]]:
        """For each question and each of its texts, the probability that each step is right."""
        rows, places = [], []
        for question, texts in zip(questions, outputs, strict=True):
            prompt = self._prompt_ids(question)
            for text in texts:
                ids, ends = list(prompt), []
                for step in filter(None, text.split(_DELIMITER)):
                    ids += self._encode(step) + self._encode(_DELIMITER)
                    ends.append(len(ids) - 1)
                rows.append(ids)
                places.append(ends or [len(ids) - 1])  # a text without steps is scored as it is
        self.tokens += sum(map(len, rows))
        logits = self._classify(rows)
        scores = iter(
            [of_row[ends].float().softmax(dim=-1)[:, 1].tolist() for of_row, ends in zip(logits, places, strict=True)]
        )
        return [[next(scores) for _ in texts] for texts in outputs]

    def _prompt_ids(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return self._encode(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
