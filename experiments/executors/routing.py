"""Choice of the worker that gets a search: plain data, without any process."""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from espalier.engine.stats import RoleStats, total
from espalier.search.completion import TextSampled
from espalier.search.fairness import Holdings, Shares
from espalier.search.request import SubmitOptions
from espalier.search.result import Started
from espalier.search.run.executor import AnyEvent, AnyRequest, Rejected, Resolved, request_of
from espalier.search.scores import SessionTurn, StepsScored
from espalier.search.server_info import Occupancy

_DEATHS_IN_COMPANY = 3
"""Workers that may die while they run a search before it runs alone on one, to find out whether it is the cause."""
_PIECE = 64
"""Characters of a problem that are compared at once, about one KV block of 16 tokens."""
_CHARACTERS_PER_TOKEN = 2
"""Characters of a prompt that cost one token: four a token, which both models read."""
_MAX_PIECES = 4096
"""Pieces of problems that are remembered for each worker, 256 KiB of text."""
_MAX_HELD = 4
"""Searches that a worker has at most, suspended ones included, in multiples of those that it runs."""
_NOTHING = Occupancy(0, 0, {})


@dataclass(eq=False, slots=True)
class Search:
    """One search from its submission to its result.

    Attributes:
        search_id: its id.
        checked: what to search, resolved if a worker was asked about it.
        options: options of the submission.
        on_event: called with each event.
        arrival: its position in the order of submission.
        submitted: time of the submission.
        died_on: the number of each worker that died while it ran the search, once for each death.
        turns: what the caller has said so far, of a session of scores.
        reports: reports that were passed on, by choice of a text or node of a session; its start is one, too.
        repeated: how many of them this run has made again.
        cancelled: whether its cancellation was requested.
        due: time at which it ends wherever it is; infinite without a limit.
    """

    search_id: str
    checked: AnyRequest | Resolved
    options: SubmitOptions
    on_event: Callable[[AnyEvent | Rejected], None] | None
    arrival: int
    submitted: float
    died_on: list[int] = field(default_factory=list)
    turns: list[SessionTurn] = field(default_factory=list[SessionTurn])
    reports: Counter[int | None] = field(default_factory=Counter[int | None])
    repeated: Counter[int | None] = field(default_factory=Counter[int | None])
    cancelled: bool = False
    due: float = field(init=False)

    def __post_init__(self) -> None:
        limit, options = self.request.time_limit, self.options
        own = math.inf if limit is None or options.timed_from_start else limit - options.waited
        self.due = self.submitted + min(own, options.max_seconds)

    @property
    def request(self) -> AnyRequest:
        """The request, with defaults filled in if it is resolved."""
        return request_of(self.checked)

    def without_repeated(self, event: AnyEvent) -> AnyEvent | None:
        """An event without what was passed on in an earlier run; a choice's text is the same, in the same pieces."""
        match event:
            case Started():
                return None if self._repeats(None) else event
            case TextSampled(index=index):
                return None if self._repeats(index) else event
            case StepsScored(search_id, scores):
                new = tuple(score for score in scores if not self._repeats(score.node))
                return StepsScored(search_id, new) if new else None
            case _:
                return event

    def _repeats(self, what: int | None) -> bool:
        self.repeated[what] += 1
        before = self.repeated[what] <= self.reports[what]
        self.reports[what] = max(self.reports[what], self.repeated[what])
        return before

    @property
    def suspect(self) -> bool:
        """True if it may be what kills workers."""
        return len(self.died_on) >= _DEATHS_IN_COMPANY


class RecentProblems:
    """The beginnings of the problems that a worker was given last, whose prompts its prefix cache may hold."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[int, None] = OrderedDict()

    def add(self, salt: bytes, problem: str) -> None:
        """Remember a problem."""
        for piece in _pieces(salt, problem):
            self._pieces[piece] = None
            self._pieces.move_to_end(piece)
        while len(self._pieces) > _MAX_PIECES:
            self._pieces.popitem(last=False)

    def saved_tokens(self, salt: bytes, problem: str) -> int:
        """About how many tokens of the problem need not be computed, as one with the same beginning was added."""
        known = sum(1 for _ in takewhile(self._pieces.__contains__, _pieces(salt, problem)))
        return min(known * _PIECE, len(problem)) // _CHARACTERS_PER_TOKEN


def _pieces(salt: bytes, problem: str) -> Iterator[int]:
    """A hash for each piece, of all the text up to its end: as blocks are named in the prefix cache."""
    key = hash(salt)
    for start in range(0, len(problem), _PIECE):
        key = hash((key, problem[start : start + _PIECE]))
        yield key


def totals(counted: Iterable[Mapping[str, RoleStats]]) -> dict[str, RoleStats]:
    """Sums of counters by role."""
    known = list(counted)
    roles = dict.fromkeys(role for each in known for role in each)
    return {role: total(each[role] for each in known if role in each) for role in roles}


@dataclass(eq=False, slots=True)
class WorkerState:
    """A worker as far as its executor knows.

    Attributes:
        number: its number.
        up: whether it can be given searches.
        folder: whose weights it has in the generator's place, as it last said; empty for those of its start.
        running: the searches that it was given and that have not ended.
        recent: what its prefix cache may hold.
        heard: time of its last report, or of its first search after none.
        held: what it holds and has counted, as it last reported.
        ended: counters by role of its earlier processes.
    """

    number: int
    up: bool = False
    folder: str = ""
    running: dict[str, Search] = field(default_factory=dict)
    recent: RecentProblems = field(default_factory=RecentProblems)
    heard: float = 0.0
    held: Occupancy = _NOTHING
    ended: dict[str, RoleStats] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """About how many tokens its searches may sample, those already sampled included."""
        return sum(search.request.estimated_tokens for search in self.running.values())

    @property
    def stats(self) -> dict[str, RoleStats]:
        """Counters by role, those of its earlier processes included."""
        return totals([self.held.stats, self.ended])

    def has_room(self, search: Search, most: int) -> bool:
        """True if it may be given a search, beside which those of a smaller priority or of callers with more wait.

        There is none beside a suspect, which runs alone.
        """
        if any(other.suspect for other in self.running.values()) or (search.suspect and self.running):
            return False
        priorities = [other.options.priority - search.options.priority for other in self.running.values()]
        if sum(higher >= 0 for higher in priorities) < most and len(priorities) < 2 * most:
            return True
        account, accounts = search.options.account, [other.options.account for other in self.running.values()]
        share, _ = Shares(most - sum(higher > 0 for higher in priorities), [*accounts, account]).of(account)
        return Holdings(accounts).of(account)[0] < share and len(priorities) < _MAX_HELD * most

    def give(self, search: Search) -> None:
        """Note that it was given a search."""
        if not self.running:
            self.heard = time.monotonic()
        self.running[search.search_id] = search
        self.recent.add(search.options.salt, search.request.problem_text)

    def lose(self) -> list[Search]:
        """Note that it has ended; returns the searches that it ran."""
        lost = list(self.running.values())
        self.ended = {role: stats.of_ended() for role, stats in self.stats.items()}
        self.up, self.running, self.recent, self.held = False, {}, RecentProblems(), _NOTHING
        return lost


def choose_worker(search: Search, workers: Iterable[WorkerState], most: int) -> WorkerState | None:
    """Return the worker that a search should run on; None if it has to wait.

    The worker with the fewest outstanding tokens gets it, where what is left of a similar prompt counts as that much
    less to do. A search that a worker died with goes to another first. A suspect runs alone.

    Args:
        search: the search.
        workers: all workers.
        most: searches that a worker may have at once; more may have a smaller priority or a caller with more, and be
            suspended.
    """
    free = [worker for worker in workers if worker.up and worker.has_room(search, most)]

    def cost(worker: WorkerState) -> tuple[int, int]:
        saved = worker.recent.saved_tokens(search.options.salt, search.request.problem_text)
        return search.died_on.count(worker.number), worker.tokens - saved

    return min(free, key=cost, default=None)
