"""The system prompt of a model that solves problems, and chats rendered with one."""

from collections.abc import Mapping, Sequence
from typing import Any

from espalier.engine.models.chat.arrangement import render_conversation
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.text_files import require
from espalier.engine.models.tokenizer import TextTokenizer

STEP_SYSTEM_PROMPT = (
    "Solve the following math problem step by step. For a short problem, use few steps. Start each step with "
    '"## Step k: " and a short title, and leave one blank line between steps. End with one line that says '
    r'"Therefore, the final answer is: $\boxed{answer}$."'
)
"""Default system prompt for instruction-tuned models: asks for steps separated by blank lines."""


def system_prompt_of(checkpoint: Checkpoint) -> str:
    """The system prompt that a checkpoint asks for, or `STEP_SYSTEM_PROMPT`.

    Raises:
        CheckpointError: `system_prompt` in its config.json is no text.
    """
    found = checkpoint.config.get("system_prompt", STEP_SYSTEM_PROMPT)
    return require(
        checkpoint.files.place("config.json"), "system_prompt", found, "text", lambda text: isinstance(text, str)
    )


def render_with_system(
    tokenizer: TextTokenizer, system_prompt: str, messages: Sequence[Mapping[str, Any]], **switches: bool
) -> str:
    """Render messages through the chat template, behind a system message unless `system_prompt` is empty.

    If the template takes no system message (Mistral, Gemma), the system prompt is put before the first thing that the
    user says; see `arrangement`.

    Args:
        tokenizer: has the chat template.
        system_prompt: text of the system message.
        messages: with a role and content each; one at least is the user's.
        switches: variables of the template.

    Raises:
        TemplateLimitError: the template takes too much time or memory.
        CheckpointError: the template rejects the messages without a system message too.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return render_conversation(tokenizer, [*system, *messages], **switches).text
