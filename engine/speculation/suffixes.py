"""Drafts from what was said before: in the prompt, on the path, by siblings and cousins in the tree."""

from collections.abc import Hashable, Sequence

import numpy as np

from espalier.engine.memory.sequences import SequenceTable
from espalier.engine.scheduling.requests import RunningRequest
from espalier.engine.work import Generated

_LEAST, _LONGEST = 2, 16
"""Last tokens of a branch that stand somewhere before, at least; more than the other number do not count."""
_REMEMBERED = 2**16
"""Tokens of finished steps that are kept of one owner, the last ones."""
_BETWEEN = -1
"""Stands between texts that do not follow one another; nobody says it."""


class SuffixDrafter:
    """Proposes what followed where the last tokens of a branch stood before, the longest match first, then the latest.

    It looks at the branch's own sequence, at steps being sampled and at finished ones of its owner, pruned ones too;
    never at another owner's.
    """

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._said: dict[Hashable, np.ndarray] = {}  # by owner: finished steps, each with the tokens before it

    def propose(self, branches: Sequence[RunningRequest], most: Sequence[int]) -> list[list[int]]:
        """See `Drafter`."""
        table = self._table
        steps: dict[Hashable, list[np.ndarray]] = {}
        for branch in branches:
            step = table.tokens[branch.row, max(0, branch.start - _LONGEST) : table.lengths[branch.row]]
            steps.setdefault(branch.work.owner, []).extend((step, np.array([_BETWEEN])))
        nothing = np.empty(0, dtype=np.int32)
        before = {owner: np.concatenate((self._said.get(owner, nothing), *its)) for owner, its in steps.items()}
        drafts: list[list[int]] = []
        for branch, count in zip(branches, most, strict=True):
            own = table.tokens[branch.row, : table.lengths[branch.row]]
            drafts.append(followers(np.concatenate((before[branch.work.owner], own)), own[-_LONGEST:], count))
        return drafts

    def learn(self, finished: Sequence[Generated]) -> None:
        """See `Drafter`."""
        if not finished:
            return
        for one in finished:
            table, row, owner = self._table, one.sequence.row, one.work.owner
            first = table.lengths[row] - len(one.token_ids) - _LONGEST
            step = table.tokens[row, max(0, first) : table.lengths[row]]
            said = self._said.get(owner, step[:0])
            self._said[owner] = np.concatenate((said, step, np.array([_BETWEEN], dtype=np.int32)))[-_REMEMBERED:]
        live = self._table.owners()
        self._said = {owner: said for owner, said in self._said.items() if owner in live}


def followers(text: np.ndarray, last: np.ndarray, most: int) -> list[int]:
    """Tokens that followed where the longest end of some tokens stands in a text, the last such place.

    Args:
        text: int32 `[T]`, tokens; `_BETWEEN` is none.
        last: int32 `[L]`, whose end is sought.
        most: how many tokens are given at most.

    Returns:
        Those tokens; empty where fewer than `_LEAST` of the sought ones stand anywhere before others.
    """
    places = np.flatnonzero(text[:-1] == last[-1])
    places = places[text[places + 1] != _BETWEEN]
    found, matched = places, 1
    while len(places) and matched < len(last):
        places = places[places >= matched]
        places = places[text[places - matched] == last[-1 - matched]]
        if len(places):
            found, matched = places, matched + 1
    if matched < _LEAST:
        return []
    first = int(found[-1]) + 1
    following = text[first : first + most].tolist()
    return following[: following.index(_BETWEEN)] if _BETWEEN in following else following
