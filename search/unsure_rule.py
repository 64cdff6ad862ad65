"""The `stop_unsure` of a request: when paths that the generator is unsure of are stopped."""

import re
from dataclasses import dataclass

DEFAULT_GROUP = 2048
"""Tokens of a group, and of the tail of a path, over which confidence is averaged."""
_FORM = "takes first:K,keep:P or first:K,keep:P,group:T, as in first:16,keep:90"
_TEXT = re.compile(r"first:(?P<first>\d{1,4}),keep:(?P<keep>\d{1,2})(?:,group:(?P<group>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class UnsureRule:
    """The condition for stopping a path.

    Attributes:
        first: number of paths that run to their ends before there is a bar.
        keep: the share of them that is above the bar, in percent.
        group: tokens over which the confidence is averaged; a shorter path is one group once it has ended.
    """

    first: int
    keep: int
    group: int = DEFAULT_GROUP


def read_unsure_rule(text: str) -> UnsureRule:
    """Read a rule like `first:16,keep:90`.

    Raises:
        ValueError: it is no rule, or a number is out of range.
    """
    if not (found := re.fullmatch(_TEXT, text)):
        raise ValueError(f"{_FORM}; is {text[:40]!r}")
    rule = UnsureRule(int(found["first"]), int(found["keep"]), int(found["group"] or DEFAULT_GROUP))
    if not (rule.first >= 2 and rule.keep >= 1 and 1 <= rule.group <= 2**15):
        raise ValueError(f"first is at least 2, keep from 1 to 99, group from 1 to {2**15}; is {text!r}")
    return rule
