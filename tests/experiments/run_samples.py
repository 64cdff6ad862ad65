"""A search, its configuration, a sample and a summary, written by hand."""

from dataclasses import replace
from typing import Any

from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.summary import Summary, summarise
from espalier.search.request import AlgorithmName, SearchRequest

REQUEST = SearchRequest("-", AlgorithmName.BEAM, 2, 2, max_steps=4, max_step_tokens=10, seed=5)
CONFIGURATION = {"benchmark": "some", "seed": 5}


def sample(name: str, **changes: Any) -> Sample:
    usage = {
        "generated_tokens": 10,
        "generator_tokens": 30,
        "generator_tree_tokens": 20,
        "verifier_tokens": 8,
        "verifier_tree_tokens": 8,
        "physical_blocks": 3,
        "logical_blocks": 6,
        "seconds": 0.5,
        "peak_kv_bytes": 2**21,
    }
    plain = Sample(name, 1, "1", "1", True, "", 0.5, "finished", "\\boxed{1}", {"1": 1}, usage)
    return replace(plain, **changes)


def summary(**changes: Any) -> Summary:
    """That of a sample, but for some figures."""
    return replace(summarise([sample("a")], "some", {}, "math-verify 0"), **changes)
