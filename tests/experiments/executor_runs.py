"""The same evaluation by any executor, and what it finds apart from times."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.record import Sample
from espalier.search.grading.math_verify import Grader
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.executor import Executor
from espalier.search.run.settings import RuntimeSettings

RUNTIME = RuntimeSettings(kv_memory=2**28, threads=1, max_running=4)
REQUEST = SearchRequest("-", AlgorithmName.BEAM, 2, 2)
TIMES = ("seconds", "queue_seconds", "first_step_seconds")

Samples = dict[tuple[str, int], dict[str, Any]]


def run(
    executor: Executor,
    problems: list[Problem],
    grader: Grader,
    on_sample: Callable[[Sample], None] = lambda _: None,
) -> Samples:
    """The samples of an evaluation, without their times."""
    found: list[Sample] = []

    def keep(sample: Sample) -> None:
        found.append(sample)
        on_sample(sample)

    Evaluation(executor, problems, grader, "demo", on_sample=keep).run(REQUEST)
    assert len({sample.key for sample in found}) == len(found), "a search counted twice"
    return {sample.key: plain(sample) for sample in found}


def plain(sample: Sample) -> dict[str, Any]:
    record = asdict(replace(sample, wall_seconds=0.0))
    return record | {"usage": {name: value for name, value in record["usage"].items() if name not in TIMES}}
