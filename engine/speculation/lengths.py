"""Lengths of drafts: as much as pays on this machine, with these models and this text, by what steps have taken."""

from dataclasses import dataclass, field

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Drafts that are tried."""
_LEAST = 4
"""Steps by which a length is judged, at least."""
_TRIAL = 6
"""Steps in a row that a length is tried for. The first does not count: a drafter has to catch up with the branches."""
_DECAY = 0.97
"""Weight of a step beside the next one."""
_STALE = 200
"""Steps after which a length may be tried again."""
_HOPELESS = 0.85
"""A trial ends early where it gives less than this share of the best length's tokens in the same time."""
_CLEARLY = 1.05
"""Drafts give so many times as many tokens in the same time as none do, or there are none."""
_REMEMBERED = 0.3
"""Weight of what was known of a length, beside a trial of it."""
_SPENT, _REINVESTED = 0.005, 0.5
"""Shares of all time, and of what drafts have saved, that may be lost by trials."""
_OUTLIER = 2.0
"""A step that takes so many times as long as those before it was held up by something else."""


@dataclass(slots=True)
class _Measured:
    """Steps with drafts of one length: how many, their tokens and seconds, newer ones weighing more, and the last."""

    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    last: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, tokens: int, seconds: float, step: int) -> None:
        """Take a step in."""
        self.tokens, self.seconds = self.tokens * _DECAY + tokens, self.seconds * _DECAY + seconds
        self.steps, self.last = self.steps + 1, step


@dataclass(slots=True)
class _Batches:
    """Steps of batches of about one number of branches.

    Attributes:
        lengths: steps by the length of their drafts.
        trial: the length that is being tried, if any, and the steps left of that.
        spent: seconds of all steps.
        lost: seconds more than the best length would have taken, in trials.
        saved: seconds less than without drafts, without what trials lose.
    """

    lengths: dict[int, _Measured] = field(default_factory=lambda: {0: _Measured()})
    trial: tuple[int, int] | None = None
    spent: float = 0.0
    lost: float = 0.0
    saved: float = 0.0

    @property
    def best(self) -> int:
        """The length that gives the most tokens a second, of those known well; 0 unless it is clearly better."""
        clearly = _CLEARLY * self.lengths[0].rate
        known = [length for length, its in self.lengths.items() if its.steps >= _LEAST and its.rate > clearly]
        return max(known, key=lambda length: self.lengths[length].rate, default=0)


class MeasuredLength:
    """Drafts the length that has given the most tokens a second at about as many branches.

    Now and then a neighbour of that length is tried, or none at all, for a few steps. What trials lose, against the
    best length known, is counted: there is none while it is more than half a percent of all time and half of what
    drafts have saved. So where drafts never pay they cost about a percent.
    """

    def __init__(self, most: int) -> None:
        """Draft at most so many tokens."""
        self._choices = [length for length in LENGTHS if length < most] + [most]
        self._of_size: dict[int, _Batches] = {}
        self._step = 0

    def choose(self, branches: int) -> int:
        """Tokens that each of so many branches is to draft at most in the next step; 0 for none."""
        batches = self._of_size.setdefault(_size(branches), _Batches())
        if batches.trial:
            return batches.trial[0]
        may_lose = batches.lost <= _SPENT * batches.spent + _REINVESTED * batches.saved
        if batches.lengths[0].steps < _LEAST or not may_lose or (length := self._next_trial(batches)) is None:
            return batches.best
        its = batches.lengths.setdefault(length, _Measured())
        its.tokens, its.seconds = its.tokens * _REMEMBERED, its.seconds * _REMEMBERED
        batches.trial = length, _TRIAL
        return length

    def record(self, branches: int, length: int, tokens: int, seconds: float) -> None:
        """Take note of a step that did nothing but sample.

        Args:
            branches: how many it sampled.
            length: as chosen.
            tokens: that they got.
            seconds: what it took, with the drafting.
        """
        batches = self._of_size.setdefault(_size(branches), _Batches())
        none, mine = batches.lengths[0], batches.lengths.setdefault(length, _Measured())
        best = batches.lengths[batches.best]
        self._step += 1
        if mine.steps >= _LEAST:
            seconds = min(seconds, _OUTLIER * tokens / mine.rate)
        batches.spent += seconds
        left = batches.trial[1] if batches.trial and batches.trial[0] == length else 0
        if left and best.rate:
            batches.lost += max(0.0, seconds - tokens / best.rate)
        if length and none.rate and (not left or tokens / none.rate > seconds):
            batches.saved = max(0.0, batches.saved + tokens / none.rate - seconds)
        if left < _TRIAL:
            mine.add(tokens, seconds, self._step)
        if left:
            hopeless = left <= _TRIAL - 2 and mine.rate < _HOPELESS * best.rate
            batches.trial = None if hopeless or left == 1 else (length, left - 1)
            if not batches.trial:
                mine.steps, mine.last = max(mine.steps, _LEAST), self._step

    def _next_trial(self, batches: _Batches) -> int | None:
        """The next length to try: near the best, or 0; tried the longest ago; of those never tried the longest."""
        place = self._choices.index(batches.best)
        near = {0, *self._choices[max(0, place - 1) : place + 3]} - {batches.best}
        last = {length: batches.lengths[length].last if length in batches.lengths else -_STALE for length in near}
        length = min(near, key=lambda length: (last[length], -length), default=None)
        return length if length is not None and self._step - last[length] >= _STALE else None


def _size(branches: int) -> int:
    """Numbers of branches that count as the same: each up to 4, then up to the next power of two."""
    return branches if branches <= 4 else 1 << (branches - 1).bit_length()
