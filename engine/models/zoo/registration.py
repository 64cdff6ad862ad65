"""Registration of attention and experts with transformers, by name, and silence from its loading."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from packaging.version import Version

from espalier.engine.errors import CheckpointError
from espalier.engine.models.quantization import quiet_imports
from espalier.engine.models.zoo import attention, experts

OLDEST, NEWEST = "5.20", "5.24"
"""The versions of transformers that the tests ran with: loading and attention use what is not promised to stay."""


def register() -> None:
    """Make the functions known to transformers; once is enough, and more often does no harm.

    Raises:
        CheckpointError: this version of transformers was not tested.
    """
    _require_tested(version("transformers"))
    with quiet_imports():  # transformers imports torchao where it finds it
        from transformers import AttentionInterface
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(attention.NAME, attention.attention_function)
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.experts_function)


def _require_tested(found: str) -> None:
    release = Version(found).release[:2]
    if not Version(OLDEST).release <= release <= Version(NEWEST).release:
        raise CheckpointError(
            f"transformers {found} is installed; decoders run by the code of {OLDEST} to {NEWEST}, which were tested: "
            f"pip install 'transformers=={NEWEST}.*', or take a model that native code runs"
        )


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
