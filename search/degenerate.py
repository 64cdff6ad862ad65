"""Telling a path that has stopped saying anything new."""

from collections.abc import Sequence

_ALIKE = 3


def is_degenerate(steps: Sequence[str]) -> bool:
    """Whether the last of `steps`, the texts of a path from its first, leads nowhere.

    It does where it is blank, or repeats the step before it word for word for the second time in a row: a generator
    that has said the same three times goes on saying it.
    """
    last = steps[-1].split()
    return not last or (len(steps) >= _ALIKE and all(step.split() == last for step in steps[-_ALIKE:]))
