"""Problems, and what the orchestrator in this process finds for them."""

import pytest
from executor_runs import RUNTIME, Samples, run

from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.search.grading.math_verify import Grader
from espalier.search.run.load import load_orchestrator


@pytest.fixture(scope="session")
def problems() -> list[Problem]:
    return load_benchmark("demo", 24)


@pytest.fixture(scope="session")
def local(problems: list[Problem], grader: Grader) -> Samples:
    orchestrator = load_orchestrator(RUNTIME)
    try:
        return run(orchestrator, problems, grader)
    finally:
        orchestrator.close()
