"""The advice that follows from forecasts: the search to run, or that none will help, and why."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from espalier.engine.errors import EspalierError
from espalier.experiments.advice.forecast import Basis, Forecast, difference
from espalier.experiments.runs.record import CutPaths

_CHANCE = 0.55
"""AUC from which a verifier ranks better than chance."""
_LITTLE = 0.05
"""Gain from one path to any of all below which paths hardly differ in being right."""
_NEAR = 0.02
"""Share of problems by which a cheaper search may be worse and still be advised, where no target is given."""
_FEWEST = 20
"""Problems below which nothing is advised: an accuracy of half of them is known to within 20 points at best."""
_GAIN = 0.1
"""Gain that must be out of the question where it is said that search will not help."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that a problem may cost: seconds, or tokens of both models; None for no limit."""

    seconds: float | None = None
    tokens: float | None = None

    def covers(self, search: Forecast) -> bool:
        """Return true if a search costs no more."""
        within = self.seconds is None or search.seconds <= self.seconds
        return within and (self.tokens is None or search.tokens <= self.tokens)


def read_budget(text: str) -> Budget:
    """Read `2.5s`, seconds a problem, or `3000`, tokens a problem.

    Raises:
        EspalierError: it is neither.
    """
    with suppress(ValueError):
        if 0 < (value := float(text.removesuffix("s"))) < float("inf"):
            return Budget(seconds=value) if text.endswith("s") else Budget(tokens=value)
    raise EspalierError(f"--budget: {text!r} is neither seconds a problem, like 2.5s, nor tokens, like 3000")


@dataclass(frozen=True, slots=True)
class Findings:
    """Measurements of the generator and the verifier.

    Attributes:
        pass_at: probability that any of k paths is right, by k.
        path_rank: AUC of the verifier's scores among paths of a problem; None without right and wrong ones.
        sibling_rank: the same among siblings.
        sibling_pairs: pairs behind it.
        useful_width: see `Forecaster.useful_width`; None without a verifier.
    """

    pass_at: dict[int, float]
    path_rank: float | None = None
    sibling_rank: float | None = None
    sibling_pairs: int = 0
    useful_width: int | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """The search to run, None if there is none; and sentences on why.

    It is `withheld` where what was sampled tells neither that a search helps nor that none does.
    """

    search: Forecast | None
    reasons: tuple[str, ...]
    withheld: bool = False


def cheapest_first(searches: Sequence[Forecast]) -> list[Forecast]:
    """The searches by seconds; none that costs more than another one and solves no more."""
    best: list[Forecast] = []
    for search in sorted(searches, key=lambda each: (each.seconds, -each.accuracy)):
        if not best or search.accuracy > best[-1].accuracy:
            best.append(search)
    return best


def recommend(
    searches: Sequence[Forecast],
    single: Forecast,
    without: Sequence[Forecast],
    found: Findings,
    target: float | None = None,
    budget: Budget | None = None,
    cut: CutPaths = CutPaths({}, 0),  # noqa: B008 - it is frozen
) -> Advice:
    """Choose a search.

    Args:
        searches: the forecasts to choose from, those of `without` among them.
        single: one sampled path.
        without: the forecasts of searches that read no scores.
        found: for the reasons.
        target: accuracy wanted: the cheapest search that reaches it is chosen.
        budget: what a problem may cost. Without a target, the cheapest search within is chosen that is not surely
            more than 2 points worse than the best.
        cut: which of the recorded paths were cut.
    """
    within = [search for search in searches if (budget or Budget()).covers(search)]
    if not within:
        cheapest = min(searches, key=lambda each: each.seconds)
        takes = f"{cheapest.seconds:.3g} s and {cheapest.tokens:.0f} tokens a problem"
        return Advice(None, (f"no search fits the budget: the cheapest takes {takes}",))
    frontier = cheapest_first(within)
    best = frontier[-1]
    gain, low, high = difference(best, single)
    ahead = f"the best is {100 * gain:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}) over one path"
    if unknown := _unknown(len(single.outcomes), low, high, ahead, cut):
        return Advice(None, unknown, withheld=True)
    if low <= 0:
        return Advice(None, (f"search will not help: {ahead}", _why_not(found)))
    reasons: list[str] = []
    if target is not None:
        reached = [search for search in frontier if search.accuracy >= target]
        if not reached:
            short = f"none reaches {target:.0%}; the best comes to {best.accuracy:.1%}"
            return Advice(best, (short, *_verifier_reasons(best, without, found)))
        best = reached[0]
        if best.low < target:
            reasons.append(f"its interval begins at {best.low:.1%}, below the target")
    else:
        best = next(each for each in frontier if each is best or difference(best, each)[1] <= _NEAR)
    if best.basis is Basis.PREDICTED:
        reasons.append("it was not run: its accuracy is that of a model of the recorded paths")
    return Advice(best, (*reasons, *_verifier_reasons(best, without, found)))


def _unknown(problems: int, low: float, high: float, ahead: str, cut: CutPaths) -> tuple[str, ...]:
    """Reasons to say nothing of a gain from `low` to `high` that was found on so many problems; none if it is known."""
    reasons = [f"too many paths did not come to their end: {cut}"] if cut.many else []
    high = max(high, 3 / problems)  # of a thing that none of n showed, up to 3/n may be there
    if problems < _FEWEST:
        reasons.append(f"{problems} problems are too few to tell, take {_FEWEST} or more: {ahead}")
    elif low <= 0 and high > _GAIN:
        wanted = problems * (high / _GAIN) ** 2
        unit = 10 ** (len(str(int(wanted))) - 1)  # one digit, as a number that is guessed has no more
        about = f"{math.ceil(wanted / unit) * unit:,}"
        reasons.append(f"{problems} problems are too few to tell, about {about} would do: {ahead}")
    return tuple(reasons)


def _why_not(found: Findings) -> str:
    paths, any_right = max(found.pass_at.items())
    if any_right - found.pass_at[1] < _LITTLE:
        return (
            f"any of {paths} paths is right on {any_right:.1%} of the problems, one on {found.pass_at[1]:.1%}: there "
            "is little to choose from; raise --temperature, or take another generator"
        )
    if found.path_rank is not None and found.path_rank < _CHANCE:
        return f"the verifier ranks right paths no better than chance (AUC within a problem {found.path_rank:.2f})"
    return "right answers are neither what most paths give nor what the verifier ranks first"


def _verifier_reasons(best: Forecast, without: Sequence[Forecast], found: Findings) -> list[str]:
    """Reasons for or against the verifier, beside the best of the searches without one that cost no more."""
    votes = [each for each in without if each.seconds <= best.seconds]
    if not votes or best in without:
        ranks = f": its AUC within a problem is {found.path_rank:.2f}" if found.path_rank is not None else ""
        return [f"the verifier adds nothing to a vote{ranks}"] if found.useful_width and best in without else []
    vote = max(votes, key=lambda each: each.accuracy)
    gain, low, high = difference(best, vote)
    ahead = f"{100 * gain:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}) more"
    return [f"it solves {ahead}{'' if low > 0 else ', which may be chance,'} than the best vote that costs no more"]
