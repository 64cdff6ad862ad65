"""Which problems of a benchmark are searched."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from espalier.experiments.evaluation.benchmark_files import BenchmarkError
from espalier.experiments.evaluation.benchmarks import Problem


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice of problems; what is empty or None chooses all.

    Attributes:
        sample_ids: their ids.
        levels: their levels.
        subjects: their subjects, ignoring case.
        shuffle_seed: seed of their order; None keeps the benchmark's.
        limit: how many of those that are left, from the start.
    """

    sample_ids: Sequence[str] = ()
    levels: Sequence[int] = ()
    subjects: Sequence[str] = ()
    shuffle_seed: int | None = None
    limit: int | None = None

    def of(self, problems: Sequence[Problem]) -> list[Problem]:
        """The chosen problems.

        Raises:
            BenchmarkError: the benchmark has no problem of an id, level or subject, or none that fits all.
        """
        _require("--sample-ids", self.sample_ids, (p.unique_id for p in problems))
        _require("--levels", self.levels, (p.level for p in problems if p.level is not None))
        subjects = [subject.lower() for subject in self.subjects]
        _require("--subjects", subjects, (p.subject.lower() for p in problems if p.subject))
        chosen = [
            p
            for p in problems
            if (not self.sample_ids or p.unique_id in self.sample_ids)
            and (not self.levels or p.level in self.levels)
            and (not subjects or (p.subject or "").lower() in subjects)
        ]
        if not chosen:
            raise BenchmarkError("no problem has one of the --sample-ids, --levels and --subjects at the same time")
        if self.shuffle_seed is not None:
            random.Random(self.shuffle_seed).shuffle(chosen)
        return chosen[: self.limit]


def _require(flag: str, wanted: Sequence[object], there: Iterable[object]) -> None:
    found = list(dict.fromkeys(there)) if wanted else []
    if unknown := [str(one) for one in wanted if one not in found]:
        shown = ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
        raise BenchmarkError(f"{flag}: the benchmark has no {', '.join(unknown)}; it has {shown or 'none'}")
