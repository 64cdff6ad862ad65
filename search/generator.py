"""The generator's side of a search: its prompt, its sampling defaults, and the generation of steps."""

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, NoEmbeddingError, RequestTooLargeError, name_tokens
from espalier.engine.model import Model
from espalier.engine.sampling import Sampling
from espalier.engine.sequence import Sequence
from espalier.engine.tokenizer import TextTokenizer
from espalier.engine.turns import GENERATOR
from espalier.engine.work import Generate

STEP_SYSTEM_PROMPT = (
    "Solve the following math problem step by step. For a short problem, use few steps. Start each step with "
    '"## Step k: " and a short title, and leave one blank line between steps. End with one line that says '
    r'"Therefore, the final answer is: $\boxed{answer}$."'
)
"""Asks an instruction-tuned model for steps that end in a blank line, which is where a step ends."""


def render_prompt(tokenizer: TextTokenizer, system_prompt: str, problem: str) -> str:
    """What a generator continues: the chat template's text, or plain text and a blank line without a template.

    A template that takes no system message (Mistral's, Gemma's) gets it at the beginning of the problem. One that lets
    the model think aloud first (Qwen3's) is told not to: steps of a solution are searched and scored, not thoughts.

    Raises:
        CheckpointError: when the template refuses the problem too.
    """
    before = f"{system_prompt}\n\n" if system_prompt else ""
    if not tokenizer.has_chat_template:
        return f"{tokenizer.special_token('bos_token') or ''}{before}{problem}\n\n"
    if system_prompt:
        messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": problem}]
        with suppress(CheckpointError):
            return tokenizer.render_chat(messages, enable_thinking=False)
    return tokenizer.render_chat([{"role": "user", "content": before + problem}], enable_thinking=False)


class Generator:
    """Renders problems for one generator and asks the engine for steps."""

    def __init__(self, engine: Engine, system_prompt: str, defaults: dict[str, Any]) -> None:
        """Make a generator.

        Args:
            engine: the engine that holds the generator's model.
            system_prompt: text of the system message; empty for none.
            defaults: the checkpoint's `generation_config.json`.

        Raises:
            CheckpointError: when the model has no embedding for what stands around every problem.
        """
        self._engine = engine
        self.system_prompt = system_prompt
        try:
            self.prompt_ids("2")
        except NoEmbeddingError as error:
            raise CheckpointError(
                f"the generator has no embedding for {name_tokens(error.tokens)}, which its chat template or the "
                "system prompt puts into every prompt; is tokenizer.json the one that belongs to these weights?"
            ) from None
        self.temperature = float(defaults.get("temperature") or 0.8)
        self.top_k = int(defaults.get("top_k") or 0)
        self.top_p = float(defaults.get("top_p") or 1.0)
        self.min_p = float(defaults.get("min_p") or 0.0)

    @property
    def model(self) -> Model:
        """The generator's model."""
        return self._engine.model(GENERATOR)

    def open(self, owner: Hashable, problem: str, salt: bytes = b"") -> tuple[Sequence, int]:
        """A generator sequence of `owner` that holds the prompt, and its length in tokens; `salt` as in `Engine.open`.

        Raises:
            RequestTooLargeError: when the prompt leaves no room for an answer.
        """
        ids = self.prompt_ids(problem)
        limit = self.model.config.max_positions
        if len(ids) >= limit:
            raise RequestTooLargeError(f"the prompt has {len(ids)} tokens and the generator's context is {limit}")
        return self._engine.open(GENERATOR, ids, salt, owner), len(ids)

    def prompt_ids(self, problem: str) -> list[int]:
        """The prompt's token ids; see `render_prompt`.

        Raises:
            NoEmbeddingError: when it holds tokens that the model has no embedding for.
        """
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode(render_prompt(tokenizer, self.system_prompt, problem))
        self.model.require_embedded(GENERATOR, ids)
        return ids

    def generate(
        self, owner: Hashable, parent: Sequence, samplings: tuple[Sampling, ...], max_tokens: int, in_place: bool
    ) -> Generate:
        """Queue one step for each sampling, and return the work that was queued; see `Generate`."""
        work = Generate(owner, parent, samplings, max_tokens, in_place=in_place)
        self._engine.submit(work)
        return work
