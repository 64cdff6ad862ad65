"""The summary of a run: totals over its samples."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.statistics import clustered_standard_error, effective_trials, pass_at_k, wilson_interval
from espalier.search.request import SearchRequest
from espalier.search.result import USAGE_COUNTERS


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a run, computed from its samples only.

    Attributes:
        problems: number of the benchmark's problems in the run.
        searches: number of searches, more than `problems` with several epochs.
        epochs: searches of each problem; with several, what follows counts searches, and means are over them.
        refused: searches that could not be run, for example for exceeding a context; they count as not solved, and are
            left out of the cost.
        ungraded: searches whose answer could not be graded; they count as not solved, unless that is so of all
            answers, see `is_graded`.
        unanswered: searches that ended without an answer, by reason; see `Unanswered`. They count as not solved.
        errors: the first reason of `refused` and of `ungraded`, by these names; without those that are 0.
        accuracy: share of searches with a right answer; `low` and `high` are its 95% Wilson interval, of the effective
            number of trials where there are epochs, as searches of one problem depend on each other.
        standard_error: of the accuracy, clustered by problem; None with one epoch.
        pass_at: unbiased pass@k by k, mean over problems, for powers of 2 and the smallest number of searches of a
            problem; empty with one epoch.
        generated_tokens: mean tokens sampled per search.
        verifier_tokens: mean tokens computed by the verifier per search.
        verifier_redundancy: verifier tokens computed, relative to those in the search trees; 1 means no recomputation.
        generator_redundancy: the same for the generator; None, like all that follow, if samples are derived.
        blocks_shared: physical relative to logical KV blocks at a search's peak, mean over searches.
        seconds: wall time of all commands that searched the problems.
        problems_per_minute: problems per minute of that time; None if it was not measured.
        search_seconds: mean time from a search's start to its end; others may have run at the same time.
        peak_kv_bytes: mean bytes of KV that a search holds at its peak, of both models.
        grader: name and version of the grader.
        configuration: the search with every default filled in.
        derived: samples that were derived from a larger search; what only a search tells is then None.
        further: means of the counters of `Usage` that have a column of their own in reports.
    """

    benchmark: str
    problems: int
    searches: int
    epochs: int
    refused: int
    ungraded: int
    unanswered: dict[str, int]
    errors: dict[str, str]
    correct: int
    accuracy: float
    low: float
    high: float
    standard_error: float | None
    pass_at: dict[int, float]
    accuracy_by_level: dict[str, float]
    accuracy_by_subject: dict[str, float]
    generated_tokens: float
    verifier_tokens: float
    verifier_redundancy: float | None
    generator_redundancy: float | None
    blocks_shared: float | None
    seconds: float | None
    problems_per_minute: float | None
    search_seconds: float | None
    peak_kv_bytes: float | None
    grader: str
    configuration: Mapping[str, Any]
    derived: int
    further: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The values of `summary.json`."""
        values = asdict(self)
        return values | values.pop("further")

    @property
    def is_graded(self) -> bool:
        """False if answers were to be graded and none could be: then the accuracy is not known, and no 0%."""
        return not self.ungraded or self.refused + self.ungraded + sum(self.unanswered.values()) < self.searches

    @property
    def accuracy_text(self) -> str:
        """The accuracy in percent with its 95% interval; the reason for none where no answer could be graded."""
        if not self.is_graded:
            return f"not known: none of {self.ungraded} answers could be graded"
        return f"{100 * self.accuracy:.1f}%  [{100 * self.low:.1f}, {100 * self.high:.1f}] at 95%"

    @property
    def wall_seconds(self) -> float | None:
        """Time of the run per search; None if it was not measured."""
        return self.seconds / (self.searches - self.refused) if self.seconds and self.searches > self.refused else None

    @property
    def peak_kv_mib(self) -> float | None:
        """`peak_kv_bytes` in MiB."""
        return None if self.peak_kv_bytes is None else self.peak_kv_bytes / 2**20


def search_fields(request: SearchRequest) -> dict[str, Any]:
    """Fields of a request with every default filled in, without its problem and history, and absent limits."""
    of_problem = ("problem", "history")
    return {name: value for name, value in request.to_dict().items() if name not in of_problem and value is not None}


def summarise(samples: Sequence[Sample], benchmark: str, configuration: Mapping[str, Any], grader: str = "") -> Summary:
    """Summarize samples of a search whose `configuration` has every default filled in."""
    count, correct = len(samples), sum(sample.correct for sample in samples)
    clusters = list(grouped(samples, "unique_id").values())
    several = len(clusters) < count
    trials = effective_trials(clusters) if several else count
    low, high = wilson_interval(trials * (correct / max(1, count)), trials)
    ran = [sample.usage for sample in samples if not sample.refused]
    derived = sum(bool(sample.derived_from) for sample in samples)
    firsts = {what: [s for s in samples if getattr(s, what)] for what in ("refused", "ungraded")}
    timed = sum(bool(sample.wall_seconds) and not sample.refused for sample in samples)
    seconds = sum(sample.wall_seconds for sample in samples)

    def total(name: str) -> float:
        return sum(usage.get(name, 0) for usage in ran)  # older samples lack some

    def mean(name: str) -> float:
        return total(name) / max(1, len(ran))

    most = min(map(len, clusters), default=0)
    ks = sorted({2**i for i in range(most.bit_length())} | {most}) if most > 1 else []
    verifier_tree = total("verifier_tree_tokens")
    searched = [] if derived else ran
    shares = [u["physical_blocks"] / u["logical_blocks"] for u in searched if u["logical_blocks"]]
    return Summary(
        benchmark=benchmark,
        problems=len(clusters),
        searches=count,
        epochs=max(map(len, clusters), default=1),
        refused=len(firsts["refused"]),
        ungraded=len(firsts["ungraded"]),
        unanswered=dict(Counter(str(why) for sample in samples if (why := sample.why_unanswered))),
        errors={what: f"{found[0].unique_id}: {found[0].error}" for what, found in firsts.items() if found},
        correct=correct,
        accuracy=correct / max(1, count),
        low=low,
        high=high,
        standard_error=clustered_standard_error(clusters) if several else None,
        pass_at={k: fmean(pass_at_k(len(found), sum(found), k) for found in clusters) for k in ks},
        accuracy_by_level=_accuracy_by(samples, "level"),
        accuracy_by_subject=_accuracy_by(samples, "subject"),
        generated_tokens=mean("generated_tokens"),
        verifier_tokens=mean("verifier_tokens"),
        verifier_redundancy=total("verifier_tokens") / verifier_tree if verifier_tree and not derived else None,
        generator_redundancy=None if derived else total("generator_tokens") / max(1.0, total("generator_tree_tokens")),
        blocks_shared=None if derived else fmean(shares) if shares else 1.0,
        seconds=None if derived else seconds,
        problems_per_minute=60 * timed / seconds if timed and not derived else None,
        search_seconds=None if derived else mean("seconds"),
        peak_kv_bytes=None if derived else mean("peak_kv_bytes"),
        grader=grader,
        configuration=configuration,
        derived=derived,
        further={name: mean(name) for name, declared in USAGE_COUNTERS.items() if declared.column},
    )


def grouped(samples: Sequence[Sample], field: str) -> dict[Any, list[bool]]:
    """Right and wrong searches by the value of a field; without those that have none."""
    found: dict[Any, list[bool]] = {}
    for sample in samples:
        if (group := getattr(sample, field)) is not None:
            found.setdefault(group, []).append(sample.correct)
    return found


def _accuracy_by(samples: Sequence[Sample], field: str) -> dict[str, float]:
    return {str(group): fmean(correct) for group, correct in sorted(grouped(samples, field).items())}
