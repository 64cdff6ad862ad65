"""Token ids that a family relies on, looked up by text and checked where the published ones are known."""

from espalier.engine.checkpoint import Checkpoint
from espalier.engine.errors import CheckpointError
from espalier.engine.tokenizer import TextTokenizer


def require_token(checkpoint: Checkpoint, tokenizer: TextTokenizer, token: str, why: str) -> int:
    """The id of a token.

    Raises:
        CheckpointError: when the tokenizer does not have it.
    """
    if (token_id := tokenizer.token_id(token)) is None:
        raise CheckpointError(f"the tokenizer of {checkpoint.folder} has no token {token}, {why}")
    return token_id


def require_published_ids(
    checkpoint: Checkpoint, tokenizer: TextTokenizer, vocabulary: int, tokens: dict[str, int]
) -> None:
    """Check ids where the checkpoint's vocabulary is as large as the published one: another id there is another text.

    Raises:
        CheckpointError: when a token has another id than the published one.
    """
    if not vocabulary or checkpoint.config.get("vocab_size") != vocabulary:
        return
    for token, expected in tokens.items():
        if (found := tokenizer.token_id(token)) != expected:
            raise CheckpointError(
                f"the tokenizer of {checkpoint.folder} gives {token!r} the id {found}, and published checkpoints of "
                f"this family have {expected}: is tokenizer.json the one that belongs to these weights?"
            )
