"""Problems that are searched several times, and the trees that are kept."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from run_samples import CONFIGURATION, REQUEST

from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.folder import RunFolder
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.statistics import effective_trials, wilson_interval
from espalier.experiments.runs.summary import Summary
from espalier.search.run.orchestrator import Orchestrator

PROBLEMS = [Problem(f"p/{i}", f"What is {i}+1?", str(i), 1, subject="odd" if i % 2 else "even") for i in range(3)]


@pytest.fixture
def run(make_orchestrator: Callable[..., Orchestrator], grader) -> Callable[..., Summary]:
    def run(request=REQUEST, folder=None, **options: Any) -> Summary:
        return Evaluation(make_orchestrator(), PROBLEMS, grader, "some", **options).run(request, folder)

    return run


def outcome(sample: Sample) -> tuple[Any, ...]:
    return sample.unique_id, sample.answer, sample.text, sample.usage["nodes"], sample.usage["generated_tokens"]


def test_each_epoch_is_a_search_with_a_seed_of_its_own(run):
    samples: list[Sample] = []
    summary = run(epochs=3, on_sample=samples.append)
    assert sorted(sample.key for sample in samples) == [(f"p/{i}", epoch) for i in range(3) for epoch in range(3)]
    assert (summary.problems, summary.epochs) == (3, 3)
    for epoch in range(3):
        alone: list[Sample] = []
        run(replace(REQUEST, seed=REQUEST.seed + epoch), on_sample=alone.append)
        assert sorted(map(outcome, alone)) == sorted(outcome(s) for s in samples if s.epoch == epoch)
    assert len({outcome(sample) for sample in samples if sample.unique_id == "p/0"}) > 1
    assert summary.accuracy == sum(sample.correct for sample in samples) / 9
    clusters = [[sample.correct for sample in samples if sample.unique_id == p.unique_id] for p in PROBLEMS]
    trials = effective_trials(clusters)
    assert (summary.low, summary.high) == pytest.approx(wilson_interval(trials * summary.accuracy, trials))
    assert set(summary.accuracy_by_subject) == {"odd", "even"}


def test_more_epochs_later_search_only_what_is_new(run, tmp_path):
    folder = RunFolder(tmp_path / "run", CONFIGURATION)
    run(folder=folder)
    new: list[Sample] = []
    summary = run(epochs=2, folder=folder, on_sample=new.append)
    assert [sample.epoch for sample in new] == [1, 1, 1]
    assert (summary.problems, summary.epochs) == (3, 2)
    assert [sample.key for sample in sorted(folder.done(), key=lambda s: s.key)] == [
        (f"p/{i}", epoch) for i in range(3) for epoch in range(2)
    ]
    assert run(epochs=1, folder=folder) == summary, "what the folder holds counts"


def test_trees_are_kept_whole_and_of_every_sample(run, tmp_path):
    folder = RunFolder(tmp_path / "run", CONFIGURATION)
    run(epochs=2, keep_trees=True, folder=folder, asked=PROBLEMS[:2])
    path = tmp_path / "run" / "trees.jsonl"
    path.write_text(path.read_text() + '{"unique_id": "p/2", "epo')  # an interrupted line
    run(epochs=2, keep_trees=True, folder=folder)
    trees = {
        (tree["unique_id"], tree["epoch"]): tree["nodes"] for tree in map(json.loads, path.read_text().splitlines())
    }
    samples = {sample.key: sample for sample in folder.done()}
    assert trees.keys() == samples.keys()
    for key, nodes in trees.items():
        assert len(nodes) > samples[key].usage["nodes"] / 2
        paths = {tuple(node["path"]): node["text"] for node in nodes}
        assert samples[key].text in {
            "".join(paths[path[: depth + 1]] for depth in range(len(path))) for path in paths
        }, "the selected path is one of the tree's"
