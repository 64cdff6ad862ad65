"""Samples paths of a benchmark's problems once, or takes those of a run folder, and forecasts searches from them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.experiments.advice.forecast import Costs, Forecast, Forecaster, costs_of
from espalier.experiments.advice.modelled_search import UnpredictableSearchError
from espalier.experiments.advice.recommend import Advice, Budget, Findings, recommend
from espalier.experiments.advice.recorded import RecordedTree, recorded_tree
from espalier.experiments.report.trees import trees_in
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.folder import RunFolder
from espalier.experiments.runs.grid import distinct
from espalier.experiments.runs.record import CutPaths, Sample, lost_paths
from espalier.search.algorithms import algorithm_of, last_score_suffices, needs_verifier
from espalier.search.common_fields import Aggregation, AlgorithmName, EarlyStop
from espalier.search.request import SearchRequest

Shown = Callable[[int, int], AbstractContextManager[Callable[[Sample], None]]]
"""Shows progress towards so many searches, of which so many are done; gives what to call with each new sample."""
SAMPLES, ADVICE = "samples", "advice.json"
"""The run folder of the recorded paths, and the file, in the folder of an advice."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Report:
    """Figures that were measured, forecasts, and advice.

    Attributes:
        problems: how many were sampled.
        paths: of each.
        findings: of the generator and the verifier.
        costs: of their tokens.
        searches: forecasts, the cheapest first.
        advice: the search to run.
        skipped: searches without a forecast, and why.
        cut: which of the paths were cut.
    """

    problems: int
    paths: int
    findings: Findings
    costs: Costs
    searches: tuple[Forecast, ...]
    advice: Advice
    skipped: dict[str, str]
    cut: CutPaths

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-serializable values, the content of `advice.json`."""
        chosen = self.advice.search
        return {
            "format": FORMAT, "problems": self.problems, "paths": self.paths, "findings": asdict(self.findings),
            "costs": asdict(self.costs), "advice": chosen and chosen.to_dict(), "reasons": self.advice.reasons,
            "withheld": self.advice.withheld, "cut": dict(self.cut.counts),
            "searches": [search.to_dict() for search in self.searches], "skipped": self.skipped,
        }  # fmt: skip


def sampling_request(requests: Sequence[SearchRequest], paths: int) -> SearchRequest:
    """The search that records paths for `requests`: independent ones, all to their ends, scored if any is.

    Its steps all have scores if any of the requests reads more than a path's last.

    Raises:
        EspalierError: the requests differ in how they sample, so that one set of paths is not enough.
    """
    scored, last = any(map(needs_verifier, requests)), all(map(last_score_suffices, requests))
    name = AlgorithmName.BEST_OF_N if scored else AlgorithmName.MAJORITY
    sampled = {
        replace(
            request, algorithm=name, beam_width=paths, expansion=1, vote=None, early_stop=EarlyStop.OFF,
            aggregation=Aggregation.LAST if last else Aggregation.MEAN,
            **dict.fromkeys(("lookahead_steps", "simulations", "exploration", "rebase_temperature")),
            iterations=None, confidence=None,
        )
        for request in requests
    }  # fmt: skip
    if len(sampled) > 1:
        raise EspalierError("advise samples once: give lists for the algorithm, -N, -M, --vote and parameters only")
    (request,) = sampled
    if request.generator_budget or request.verifier_budget or request.time_limit or request.stop_unsure:
        raise EspalierError("advise forecasts whole searches: leave out budgets, --time-limit and --stop-unsure")
    return request


@dataclass(frozen=True, slots=True)
class Sampling:
    """Runs searches on the problems, in run folders of their own.

    Attributes:
        evaluation: of the problems, with `keep_trees`.
        out: folder of the advice, which gets the run folders.
        command: see `RunFolder`.
        shown: see `Shown`.
    """

    evaluation: Evaluation
    out: Path
    command: dict[str, Any]
    shown: Shown

    def record_paths(self, request: SearchRequest) -> tuple[list[RecordedTree], Costs, CutPaths]:
        """Sample the paths of a request of `sampling_request` that the folder `out`/samples lacks, and read all."""
        evaluation, folder = self.evaluation, self._folder(SAMPLES, request)
        before, started, stepped = {s.key for s in self._samples(folder)}, time.perf_counter(), self._step_seconds()
        self._run(request, folder)
        wall = time.perf_counter() - started
        stepped = {role: value - stepped.get(role, 0.0) for role, value in self._step_seconds().items()}
        samples = [sample for sample in self._samples(folder) if sample.epoch == 0]
        nodes = trees_in(folder.folder, {sample.unique_id for sample in samples})
        samples = [sample for sample in samples if sample.key in nodes]
        if not samples:
            raise EspalierError(f"no problem could be searched; see {folder.folder}")
        problems = {problem.unique_id: problem for problem in evaluation.problems}
        trees = {
            s.key: recorded_tree(problems[s.unique_id], nodes[s.key], s.usage["prompt_tokens"], evaluation.grader)
            for s in samples
        }
        fresh = [sample for sample in samples if sample.key not in before]
        if not fresh:  # their time is known in all only
            fresh, stepped, wall = samples, {}, sum(sample.wall_seconds for sample in samples)
        filled = evaluation.executor.defaults.fill(request)
        lost = (lost_paths(nodes[sample.key], filled) for sample in samples)
        cut = CutPaths.among(lost, sum(tree.paths for tree in trees.values()))
        costs = costs_of([trees[s.key] for s in fresh], [s.usage for s in fresh], stepped, wall)
        return list(trees.values()), costs, cut

    def run_some(
        self, forecaster: Forecaster, requests: Sequence[SearchRequest]
    ) -> dict[SearchRequest, dict[str, Sample]]:
        """Run those of the searches of which recorded paths tell too little.

        One path of the likeliest tokens costs little, and samples do not show it. Of the step-by-step searches one is
        run, and corrects the forecasts of the others; see `Forecaster.step_by_step`.

        Args:
            forecaster: of the recorded paths.
            requests: the searches to choose from.

        Returns:
            Their samples by problem, by the request with every default filled in.
        """
        fill = self.evaluation.executor.defaults.fill
        filled = {fill(request): request for request in distinct(requests, fill)}
        greedy = [each for each in filled if each.temperature == 0 and algorithm_of(each).candidates(each) == 1]
        names = {each: str(each.algorithm) for each in greedy}
        step_by_step = forecaster.step_by_step([each for each in filled if each not in names])
        if step_by_step:
            names[step_by_step] = f"{step_by_step.algorithm}-{step_by_step.beam_width}x{step_by_step.expansion}"
        found: dict[SearchRequest, dict[str, Sample]] = {}
        for each, name in names.items():
            folder = self._folder(name, filled[each])
            self._run(filled[each], folder)
            found[each] = {sample.unique_id: sample for sample in self._samples(folder)}
        if step_by_step and found[step_by_step]:
            forecaster.correct(step_by_step, found[step_by_step])
        return {request: samples for request, samples in found.items() if samples}

    def _step_seconds(self) -> dict[str, float]:
        """Seconds of the engine's steps so far, by role; empty where workers run them."""
        from espalier.search.run.orchestrator import Orchestrator

        if not isinstance(executor := self.evaluation.executor, Orchestrator):
            return {}
        return {role: stats.step_seconds.sum for role, stats in executor.engine.stats().items()}

    def _folder(self, name: str, request: SearchRequest) -> RunFolder:
        return RunFolder(self.out / name, self.evaluation.configuration(request), self.command)

    def _samples(self, folder: RunFolder) -> list[Sample]:
        """Samples of the problems that were searched."""
        samples = folder.samples_of(self.evaluation.asked or self.evaluation.problems)
        return [sample for sample in samples if not sample.refused]

    def _run(self, request: SearchRequest, folder: RunFolder) -> None:
        """Run a search on the problems that its folder lacks, and show that."""
        asked = self.evaluation.asked or self.evaluation.problems
        with self.shown(len(asked), len(self._samples(folder))) as on_sample:
            replace(self.evaluation, on_sample=on_sample).run(request, folder)


def advise(
    forecaster: Forecaster,
    requests: Sequence[SearchRequest],
    fill: Callable[[SearchRequest], SearchRequest],
    target: float | None,
    budget: Budget | None,
    run: Mapping[SearchRequest, Mapping[str, Sample]],
    cut: CutPaths,
) -> Report:
    """Forecast searches, and choose one.

    Args:
        forecaster: of the recorded paths.
        requests: the searches to choose from.
        fill: fills in a request's defaults.
        target: see `recommend`.
        budget: see `recommend`.
        run: samples of searches that were run; see `run_some`.
        cut: which of the recorded paths were cut.
    """
    found: dict[bool, list[Forecast]] = {True: [], False: []}
    skipped: dict[str, str] = {}
    for request in map(fill, distinct(requests, fill)):
        try:
            search = forecaster.of_run(request, run[request]) if request in run else forecaster.forecast(request)
            found[needs_verifier(request)].append(search)
        except UnpredictableSearchError as error:
            skipped[str(request.algorithm)] = str(error)
    single = forecaster.forecast(fill(replace(requests[0], algorithm=AlgorithmName.MAJORITY, beam_width=1, vote=None)))
    searches = [*found[True], *found[False]] or [single]
    findings = _findings(forecaster, requests[0], fill)
    advice = recommend(searches, single, found[False], findings, target, budget, cut)
    ordered = tuple(sorted(searches, key=lambda search: search.seconds))
    sampled = len(forecaster.trees), forecaster.paths
    return Report(*sampled, findings, forecaster.costs, ordered, advice, skipped, cut)


def _findings(
    forecaster: Forecaster, request: SearchRequest, fill: Callable[[SearchRequest], SearchRequest]
) -> Findings:
    passes = forecaster.pass_at()
    if all(step.score is None for tree in forecaster.trees for step in tree.steps):
        return Findings(passes)
    how = request.aggregation
    width = forecaster.useful_width(fill(replace(request, algorithm=AlgorithmName.BEST_OF_N, vote=None)))
    siblings, pairs = forecaster.sibling_rank(how)
    return Findings(passes, forecaster.path_rank(how), siblings, pairs, width)
