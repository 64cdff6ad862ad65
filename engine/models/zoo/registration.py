"""Registration of attention and experts with transformers, by name, and silence from its loading."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from espalier.engine.models.quantization import quiet_imports
from espalier.engine.models.zoo import attention, experts


def register() -> None:
    """Make the functions known to transformers; once is enough, and more often does no harm."""
    with quiet_imports():  # transformers imports torchao where it finds it
        from transformers import AttentionInterface
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(attention.NAME, attention.attention_function)
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.experts_function)


@contextmanager
def quietly() -> Iterator[None]:
    """Let transformers log nothing and show no bars: errors are raised, and models that are tried mean nothing."""
    from transformers.utils import logging as theirs

    shows, level = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    theirs.disable_progress_bar()
    theirs.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if shows:
            theirs.enable_progress_bar()
