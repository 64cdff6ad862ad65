"""The summary of an evaluation: totals over its samples."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from espalier.experiments.evaluation.sample import Sample
from espalier.experiments.evaluation.statistics import effective_trials, wilson_interval
from espalier.search.request import SearchRequest


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a run, computed from its samples only.

    Attributes:
        problems: number of the benchmark's problems in the run.
        searches: number of searches, more than `problems` with several epochs.
        epochs: searches of each problem; with several, what follows counts searches, and means are over them.
        refused: problems that could not be searched, for example for exceeding a context; they count as not solved.
        ungraded: problems whose answer could not be graded; they count as not solved.
        errors: the first reason of `refused` and of `ungraded`, by these names; without those that are 0.
        accuracy: share of problems solved; `low` and `high` are its 95% Wilson interval, of the effective number of
            trials where there are epochs.
        generated_tokens: mean tokens sampled per problem.
        verifier_tokens: mean tokens computed by the verifier per problem.
        verifier_redundancy: verifier tokens computed, relative to those in the search trees; 1 means no recomputation.
        generator_redundancy: the same for the generator; None like the three below if samples are derived.
        blocks_shared: physical relative to logical KV blocks at a search's peak, mean over problems.
        seconds: wall time of all commands that searched the problems.
        problems_per_minute: problems per minute of that time; None if it was not measured.
        grader: name and version of the grader.
        configuration: the search with every default filled in.
        unanswered: searches that ended without an answer, by reason; see `Unanswered`. They count as not solved.
        derived: samples that were derived from a larger search; what only a search tells is then None.
    """

    benchmark: str
    problems: int
    refused: int
    ungraded: int
    errors: dict[str, str]
    correct: int
    accuracy: float
    low: float
    high: float
    accuracy_by_level: dict[str, float]
    generated_tokens: float
    verifier_tokens: float
    verifier_redundancy: float | None
    generator_redundancy: float | None
    blocks_shared: float | None
    seconds: float | None
    problems_per_minute: float | None
    grader: str
    configuration: dict[str, Any]
    accuracy_by_subject: dict[str, float] = field(default_factory=dict)
    searches: int = 0
    epochs: int = 1
    derived: int = 0
    unanswered: dict[str, int] = field(default_factory=dict)


def search_fields(request: SearchRequest) -> dict[str, Any]:
    """Fields of a request with every default filled in, without its problem and history, and absent limits."""
    of_problem = ("problem", "history")
    return {name: value for name, value in request.to_dict().items() if name not in of_problem and value is not None}


def summarise(samples: list[Sample], benchmark: str, effective: SearchRequest, grader: str) -> Summary:
    """Summarize samples of the search `effective`, which has every default filled in."""
    correct = sum(sample.correct for sample in samples)
    count = len(samples)
    clusters = list(_correct_by(samples, lambda sample: sample.unique_id).values())
    trials = count if len(clusters) == count else effective_trials(clusters)
    low, high = wilson_interval(trials * correct / count, trials) if count else wilson_interval(0, 0)

    def total(name: str) -> float:
        return sum(sample.usage[name] for sample in samples)

    derived = sum(bool(sample.derived_from) for sample in samples)
    searched = [] if derived else [sample.usage for sample in samples]
    shares = [usage["physical_blocks"] / usage["logical_blocks"] for usage in searched if usage["logical_blocks"]]
    refused = [sample for sample in samples if sample.refused]
    ungraded = [sample for sample in samples if sample.ungraded]
    firsts = {"refused": refused[:1], "ungraded": ungraded[:1]}
    timed = [sample for sample in samples if sample.wall_seconds and not sample.refused]
    seconds = sum(sample.wall_seconds for sample in samples)
    verifier_tree = total("verifier_tree_tokens")
    return Summary(
        benchmark=benchmark,
        problems=len(clusters),
        refused=len(refused),
        ungraded=len(ungraded),
        errors={what: f"{first.unique_id}: {first.error}" for what, found in firsts.items() for first in found},
        correct=correct,
        accuracy=correct / count if count else 0.0,
        low=low,
        high=high,
        accuracy_by_level=_accuracy_by(samples, lambda sample: sample.level),
        generated_tokens=total("generated_tokens") / max(1, count),
        verifier_tokens=total("verifier_tokens") / max(1, count),
        verifier_redundancy=total("verifier_tokens") / verifier_tree if verifier_tree and not derived else None,
        generator_redundancy=None if derived else total("generator_tokens") / max(1.0, total("generator_tree_tokens")),
        blocks_shared=None if derived else sum(shares) / len(shares) if shares else 1.0,
        seconds=None if derived else seconds,
        problems_per_minute=60 * len(timed) / seconds if timed and not derived else None,
        grader=grader,
        configuration=search_fields(effective),
        accuracy_by_subject=_accuracy_by(samples, lambda sample: sample.subject),
        searches=count,
        epochs=max(map(len, clusters), default=1),
        derived=derived,
        unanswered=dict(Counter(str(why) for sample in samples if (why := sample.why_unanswered))),
    )


def _correct_by(samples: list[Sample], key: Callable[[Sample], Any]) -> dict[Any, list[bool]]:
    found: dict[Any, list[bool]] = defaultdict(list)
    for sample in samples:
        found[key(sample)].append(sample.correct)
    return found


def _accuracy_by(samples: list[Sample], key: Callable[[Sample], Any]) -> dict[str, float]:
    groups = _correct_by(samples, key)
    return {str(group): sum(groups[group]) / len(groups[group]) for group in sorted(groups.keys() - {None})}
