"""What transformers learns of Espalier: the names of its functions for attention and experts."""

from espalier.engine.models.zoo import attention, experts


def register() -> None:
    """Make the functions known to transformers; once is enough, and more often does no harm."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(attention.NAME, attention.attention_function)
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.experts_function)
