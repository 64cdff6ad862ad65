"""Electing one answer from complete paths."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from espalier.search.request import SPELLING, Vote
from espalier.search.result import Candidate
from espalier.search.voting.answers import canonical, is_number, spelled
from espalier.search.voting.equivalence import Grouping
from espalier.search.voting.reading import marks_agree, read


def elect(candidates: list[Candidate], vote: Vote, group_of: Callable[[str], str] = canonical) -> Candidate | None:
    """The candidate whose answer wins; None when no candidate has an answer.

    Answers with the same `group_of` vote together, 18 with 18 cm and 5 with x = 5. But where a group holds 18 cm and
    18 m, nobody can tell which of them the bare 18 means, and each of the three votes for itself.
    Candidates without an answer never win. Ties go to the higher-scored path, then to the earlier candidate, so the
    order of `candidates` must not depend on timing. Weighted and majority return the best-scored path of the winning
    answer.
    """
    answered = [c for c in candidates if c.answer]
    if not answered:
        return None
    if vote is Vote.NAIVE:
        return max(answered, key=_score)
    winner = max(_groups(answered, group_of), key=lambda group: (_weight(group, vote), max(map(_score, group))))
    return max(winner, key=_score)


def _groups(candidates: list[Candidate], group_of: Callable[[str], str]) -> list[list[Candidate]]:
    of_value: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        of_value[group_of(candidate.answer)].append(candidate)
    groups: list[list[Candidate]] = []
    for group in of_value.values():
        readings = [read(candidate.answer) for candidate in group]
        of_mark: dict[str, list[Candidate]] = defaultdict(list)
        apart = not marks_agree(readings)
        for candidate, reading in zip(group, readings, strict=True):
            of_mark[reading.mark if apart else ""].append(candidate)
        groups += of_mark.values()
    return groups


def is_decided(candidates: Sequence[Candidate], vote: Vote) -> bool:
    """Whether one spelling of an answer outweighs all others together, whichever of these mean the same."""
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.answer:
            groups[spelled(candidate.answer)].append(candidate)
    weights = sorted((_weight(group, vote) for group in groups.values()), reverse=True)
    return not weights or weights[0] > math.fsum(weights[1:])


def _weight(group: list[Candidate], vote: Vote) -> float:
    if vote is Vote.MAJORITY:
        return float(sum(c.multiplicity for c in group))
    return math.fsum(_score(c) * c.multiplicity for c in group)


def _score(candidate: Candidate) -> float:
    return 0.0 if candidate.score is None else candidate.score


class Ballot:
    """Groups the answers of a search's candidates and elects one.

    Answers whose values are spelled alike, by `canonical`, are of one group from the start. The spellings are then
    taken in the order in which they first occur among the candidates, each by the first of its answers, and each joins
    the first earlier group whose first answer it equals, or founds one. Whether it does is asked of a grouping, with
    the earlier answer first, each pair once at most, and never of two plain numbers. A grouping says yes only to equal
    values, and may miss some: therefore the order may matter, and which question is answered first does not.

    Names and units are told apart last, by `voting.elect`.

    A vote of one path, `naive`, has no groups and asks nothing; nor does one where a spelling outweighs all others.
    """

    def __init__(self, candidates: Sequence[Candidate], vote: Vote, grouping: Grouping) -> None:
        """Begin; `candidates` in order of their paths."""
        self.candidates = tuple(candidates)
        self._vote = vote
        self._grouping = grouping
        self._answers: dict[str, str] = {}
        for candidate in self.candidates:
            if candidate.answer:
                self._answers.setdefault(canonical(candidate.answer), candidate.answer)
        self._group_of: dict[str, str] = {}
        asks = vote is not Vote.NAIVE and not is_decided(self.candidates, vote)
        self._unplaced = deque(self._answers if asks else ())
        self._asked: list[tuple[str, Future[bool]]] | None = None
        self._name = SPELLING

    @property
    def grader(self) -> str:
        """What the groups were told apart by: the grouping's name where it had to be asked."""
        return self._name

    def settled(self) -> bool:
        """Whether every answer has its group; asks what there is to ask next where not. Never waits."""
        while self._unplaced:
            key = self._unplaced[0]
            if self._asked is None:
                self._asked = self._ask(key)
            for group, future in self._asked:
                if not future.done():
                    return False
                if _says_yes(future):
                    self._group_of[key] = group
                    break
            else:
                self._group_of[key] = key
            self._unplaced.popleft()
            self._asked = None
        return True

    @property
    def waits_for(self) -> "list[Future[bool]]":
        """The questions that are not answered yet."""
        return [future for _, future in self._asked or () if not future.done()]

    def settle_by_spelling(self) -> None:
        """Leave it at that: only answers that are spelled alike are of one group."""
        self._unplaced.clear()
        self._group_of.clear()
        self._asked = None
        self._name = SPELLING

    def elect(self) -> Candidate | None:
        """The candidate whose answer wins once the vote is settled; see `voting.elect`."""
        return elect(list(self.candidates), self._vote, self._group)

    def _group(self, answer: str) -> str:
        key = canonical(answer)
        return self._group_of.get(key, key)

    def _ask(self, key: str) -> "list[tuple[str, Future[bool]]]":
        """Ask of all earlier groups at once: an answer like none of them takes one turn, not one for each."""
        asked: list[tuple[str, Future[bool]]] = []
        for group in dict.fromkeys(self._group_of.values()):
            if is_number(group) and is_number(key):
                continue
            if (future := self._grouping.ask(self._answers[group], self._answers[key])) is not None:
                self._name = self._grouping.name
                asked.append((group, future))
        return asked


def _says_yes(future: "Future[bool]") -> bool:
    return not future.cancelled() and future.exception() is None and future.result()
