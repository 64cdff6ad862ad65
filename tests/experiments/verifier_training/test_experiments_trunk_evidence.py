"""`learn-verifier --trunk`: what a trunk reads of trees, how evidence is combined, and a search with the result."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, ScoreMismatchError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import ModelImpl
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.experiments.runs.folder import read_samples
from espalier.experiments.verifier_training.combining import (
    LearnedEvidence,
    _fitted,
    path_features,
    train_own_evidence,
    train_trunk_evidence,
)
from espalier.experiments.verifier_training.features import (
    LAST,
    TOKENS_AND_STATES,
    Readings,
    StatesHead,
    TrunkReader,
    readings_of,
    tap_candidates,
)
from espalier.experiments.verifier_training.rollouts import RolloutSampler
from espalier.experiments.verifier_training.testing import measure_on_run, trees_of_run
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.prm.families import identify, load_verifier
from espalier.prm.families.trunk_evidence import TrunkEvidence
from espalier.prm.path_evidence import FEATURES, Combination, PathEvidence
from espalier.prm.scorers.trunk_head import add_trunk_head
from espalier.prm.verifier import Verifier
from espalier.search.grading.math_verify import Grader
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.result import SearchResult
from espalier.search.rollout import RolloutSettings, StepRecord
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator

SETTINGS = RolloutSettings(solutions=6, temperature=1.0, max_steps=4, max_step_tokens=12, max_tokens=40)
SYSTEM = "Use steps."
BEAM = SearchRequest(
    "Tom has 38 coins. He finds 47 more.",
    AlgorithmName.BEAM,
    beam_width=2,
    expansion=3,
    max_steps=4,
    max_tokens=60,
    max_step_tokens=20,
)
BEST_OF_N = replace(BEAM, algorithm=AlgorithmName.BEST_OF_N, beam_width=6, expansion=1)


@pytest.fixture(autouse=True)
def no_helpers(one_thread: None) -> None:
    """Every test here computes on one thread."""


@pytest.fixture
def trunk(tiny_checkpoints: dict[str, Path]) -> Checkpoint:
    return Checkpoint(tiny_checkpoints["qwen2-untied"])


@pytest.fixture
def trees(load_model: Callable[[str], Model], make_engine: Callable[..., Engine], grader: Grader) -> list[TreeRecord]:
    engine = make_engine(load_model("talker"), kv_memory_bytes=2**23)
    problems = [Problem(str(i), f"Tom has {i} coins. How many?", "1", None) for i in range(8)]
    return list(RolloutSampler(engine, Generator(engine, "", {}), SETTINGS, grader, 8).sample(problems))


def test_a_trunk_reads_each_tree_once_as_transformers_would(
    trees: list[TreeRecord], trunk: Checkpoint, make_engine: Callable[..., Engine], tmp_path: Path
):
    head = StatesHead()
    loaded = load_generator(trunk, torch.float32, "cpu")
    head.model = replace(loaded, other_heads={TOKENS_AND_STATES: head})
    engine = make_engine(head.model, kv_memory_bytes=2**23)
    readings = TrunkReader(engine, SYSTEM, trees, tmp_path).read(lambda: None)
    engine.check_drained()
    plain = AutoModelForCausalLM.from_pretrained(trunk.folder, dtype=torch.float32).eval()
    tokenizer = loaded.tokenizer
    compared = 0
    for number, tree in enumerate(trees):
        rows = np.flatnonzero(readings.problems == number)
        texts = {index: step for index, step in enumerate(tree.steps) if step.end != "length" and step.text.strip()}
        assert len(rows) == len(texts)
        for row in rows[:4].tolist():
            path, at = [], row
            while at >= 0:
                path.insert(0, at)
                at = int(readings.parents[at])
            lineage = [
                [i for i in tree.lineage(index) if i in texts]
                for index in texts
                if len([i for i in tree.lineage(index) if i in texts]) == len(path)
            ]
            turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": tree.problem}]
            prompt = tokenizer.encode(tokenizer.render_chat(turns, enable_thinking=False))
            found = False
            for indices in lineage:
                parts: list[list[int]] = []
                for place, index in enumerate(indices):
                    broken = place and not tree.steps[indices[place - 1]].text.endswith("\n")
                    parts.append(tokenizer.encode("\n\n" * bool(broken) + tree.steps[index].text))
                ids = [*prompt, *(i for part in parts for i in part)]
                with torch.inference_mode():
                    out = plain(torch.tensor([ids]), output_hidden_states=True)
                last, own = out.hidden_states[-1][0, -2].numpy(), len(parts[-1])
                logs = torch.log_softmax(out.logits[0, -own - 1 : -1], -1).gather(1, torch.tensor(parts[-1])[:, None])
                step = tree.steps[indices[-1]]
                found |= bool(
                    np.allclose(readings.states[row], last, atol=1e-4)
                    and math.isclose(readings.read[row, 0], float(logs.sum()), abs_tol=1e-3)
                    and readings.read[row, 1] == own
                    and math.isclose(readings.sampled[row, 0], sum(step.log_probabilities), abs_tol=1e-4)
                    and readings.sampled[row, 1] == len(step.token_ids)
                )
            assert found
            compared += 1
    assert compared > 10
    again = TrunkReader(engine, SYSTEM, trees, tmp_path).read(lambda: None)
    assert all(np.array_equal(getattr(again, name), getattr(readings, name)) for name in ("states", "read", "parents"))


def made(problems: int = 60, hidden: int = 48) -> Readings:
    """Paths of two steps, right where the second's state and likelihood say so, each with noise of its own."""
    draw = np.random.default_rng(0)
    rows = 20 * problems
    parents = np.where(np.arange(rows) % 2, np.arange(rows) - 1, -1)
    states = draw.normal(size=(rows, hidden)).astype(np.float32) * 3 + 1
    signal = draw.normal(size=rows)
    total = states[:, 0] - 1 + 3 * signal + draw.normal(size=rows)
    right = np.where(np.arange(rows) % 2, total > 0, -1).astype(np.int64)
    values = np.where(right >= 0, right, np.roll(right, -1)).astype(np.float32)
    states[::2, 0] = states[1::2, 0]
    signal[::2] = 0
    tokens = np.full(rows, 10.0)
    read, sampled = np.stack([5 * signal - 20, tokens], 1), np.stack([np.full(rows, -8.0), tokens], 1)
    samples, numbers = np.ones(rows, np.int64), np.repeat(np.arange(problems), 20)
    steps = np.tile(np.arange(20), problems)
    return Readings(states, values, samples, numbers, parents, right, read, sampled, steps)


def soften(folder: Path) -> None:
    """Give all evidence a small weight: what made states teach puts random models' paths at a score of 0."""
    file = folder / "config.json"
    entries = {"weights": dict.fromkeys(FEATURES, 0.3), "offset": 1.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def run(orchestrator: Orchestrator, *requests: SearchRequest) -> list[list[tuple[object, ...]]]:
    """Text, score and termination of each search's nodes, by path."""
    ids = [orchestrator.submit(request) for request in requests]
    results: dict[str, SearchResult] = {}
    while orchestrator.busy:
        for result in orchestrator.step():
            assert isinstance(result, SearchResult)
            results[result.search_id] = result
    found = [results[search_id].nodes for search_id in ids]
    return [sorted((node.path, node.text, node.score, node.termination) for node in nodes) for nodes in found]


def test_evidence_together_ranks_better_than_any_alone(tmp_path: Path):
    summary = train_trunk_evidence(made(), tmp_path, {"name": "trunk", "digest": "d"}, {"benchmark": "made"}, 0).summary
    solutions, siblings = (summary["measured"][f"auc_{kind}"] for kind in ("solutions", "siblings"))
    assert solutions["score"] > 0.95 > 0.03 + max(solutions[name] for name in FEATURES)
    assert siblings["score"] > 0.7, "first steps are told apart by their states alone"
    assert summary["problems_by_use"] == {"teach": 54, "measure": 6}
    assert summary == json.loads((tmp_path / "training.json").read_text())


def test_scores_of_whole_solutions_are_calibrated():
    readings = made(60)
    readings = replace(readings, values=np.where(readings.right >= 0, readings.values, 0.9).astype(np.float32))
    features = path_features(readings, np.random.default_rng(1).random(len(readings.values)))
    combination = _fitted(features, readings, np.arange(60))
    ends = readings.right >= 0
    scores = np.array([combination.score(row) for row in features[ends].tolist()])
    missed = scores - readings.right[ends]
    assert abs(missed.mean()) < 1e-3, "on average"
    assert abs((missed * np.log(scores / (1 - scores))).mean()) < 1e-2, "neither too sure nor too unsure"


def test_a_paths_evidence_is_means_minimum_and_last():
    readings = made(1)
    scores = np.linspace(0.1, 0.9, 20)
    last = dict(zip(FEATURES, path_features(readings, scores)[3], strict=True))
    assert last["head"] == scores[3]
    assert last["head_mean"] == pytest.approx(scores[2:4].mean())
    assert last["head_min"] == scores[2]
    assert last["likelihood"] == pytest.approx(readings.read[2:4, 0].sum() / 20)
    assert last["likelihood_ratio"] == pytest.approx(last["likelihood"] + 0.8)


def in_layers(readings: Readings, layers: tuple[int, ...], telling: int) -> Readings:
    """The same, with what tells right from wrong in the states of one of several layers only."""
    noise = np.random.default_rng(1).normal(size=readings.states.shape).astype(np.float32)
    states = np.concatenate([readings.states if layer == telling else noise for layer in layers], axis=1)
    return replace(readings, states=states, layers=layers)


@pytest.mark.parametrize("impl", [ModelImpl.NATIVE, ModelImpl.TRANSFORMERS])
def test_states_of_middle_layers_are_transformers_own(
    impl: ModelImpl, trees: list[TreeRecord], trunk: Checkpoint, make_engine: Callable[..., Engine], tmp_path: Path
):
    head = StatesHead()
    loaded = load_generator(Checkpoint(trunk.folder, model_impl=impl), torch.float32, "cpu")
    name = TOKENS_AND_STATES
    head.model = replace(loaded, other_heads={name: head}, wide_heads=frozenset([name]))
    engine = make_engine(head.model, kv_memory_bytes=2**23)
    plain_readings = TrunkReader(engine, SYSTEM, trees, tmp_path).read(lambda: None)
    layers = tap_candidates(loaded.decoder)
    assert layers[0] == LAST
    assert len(layers) > 1
    readings = TrunkReader(engine, SYSTEM, trees, tmp_path).read(lambda: None)
    assert readings.layers == layers
    assert np.array_equal(readings.states_of(LAST), plain_readings.states)
    assert np.array_equal(readings.read, plain_readings.read)
    plain = AutoModelForCausalLM.from_pretrained(trunk.folder, dtype=torch.float32).eval()
    tree = next(tree for tree in trees if tree.steps[0].end != "length" and tree.steps[0].text.strip())
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": tree.problem}]
    prompt = loaded.tokenizer.encode(loaded.tokenizer.render_chat(turns, enable_thinking=False))
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *loaded.tokenizer.encode(tree.steps[0].text)]])
        states = plain(ids, output_hidden_states=True).hidden_states
        for layer in layers[1:]:
            expected = plain.model.norm(states[layer][0, -2]).numpy()
            assert np.abs(readings.states_of(layer) - expected).max(1).min() < 1e-4


def test_the_layer_whose_heads_rank_best_is_taken_and_a_search_reads_it(
    trunk: Checkpoint, load_model: Callable[[str], Model], make_engine: Callable[..., Engine], tmp_path: Path
):
    name_and_digest = {"name": "trunk", "digest": trunk.digest()}
    summary = train_trunk_evidence(
        in_layers(made(30), (LAST, 1), 1), tmp_path / "middle", name_and_digest, {}, 0
    ).summary
    assert summary["layer"] == json.loads((tmp_path / "middle/config.json").read_text())["layer"] == 1
    assert summary["auc_by_layer"]["1"] > summary["auc_by_layer"]["last"] + 0.1
    last = train_trunk_evidence(in_layers(made(30), (LAST, 1), LAST), tmp_path / "last", name_and_digest, {}, 0).summary
    assert "layer" not in last
    assert "layer" not in json.loads((tmp_path / "last/config.json").read_text())
    found = {}
    for name in ("middle", "last"):
        family = load_verifier(Checkpoint(trunk.folder), torch.float32, "cpu", str(tmp_path / name))
        engine = make_engine(load_model("talker"), family.model, kv_memory_bytes=2**23, max_batch_tokens=64)
        orchestrator = Orchestrator(engine, Generator(engine, "", {}), Verifier(family, full_rescore=True))
        found[name] = run(orchestrator, BEAM)
    assert found["middle"] != found["last"]


def test_the_default_trunk_has_evidence_of_paths_too_where_it_ranks_better(
    tiny_checkpoints: dict[str, Path],
    make_engine: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    talker = Checkpoint(tiny_checkpoints["talker"])
    readings = made(60)
    readings = in_layers(replace(readings, sampled=readings.read), (LAST, 1), 1)
    summary = train_own_evidence(readings, tmp_path / "own", {"name": "talker", "digest": talker.digest()}, {}, 0)
    assert summary["weights"]["likelihood"] > 0.1
    assert abs(summary["weights"]["likelihood_ratio"]) < 1e-3
    assert summary["measured"]["auc_solutions"]["score"] > summary["measured"]["auc_solutions"]["head"] + 0.05
    assert summary["layer"] == 1

    soften(tmp_path / "own")
    model, _ = add_trunk_head(Checkpoint(tmp_path / "own"), load_generator(talker, torch.float32, "cpu"))
    states = torch.from_numpy(readings.states[:7])
    found = model.head_named("trunk-head")(states)[:, 0].sigmoid().numpy()
    width = states.shape[1] // 2
    tensors = Checkpoint(tmp_path / "own")
    x = states[:, width:]
    for i in range(len(tensors.tensors) // 2):
        weight, bias = (tensors.take(f"score.{i}.{part}", torch.float32, "cpu") for part in ("weight", "bias"))
        x = (x.relu() if i else x) @ weight.T + bias
    assert found == pytest.approx(x[:, 0].sigmoid().numpy(), abs=1e-5), "the head reads the layer's states"

    def orchestrator(full_rescore: bool) -> Orchestrator:
        model = load_generator(Checkpoint(talker.folder), torch.float32, "cpu")
        model, scorer = add_trunk_head(Checkpoint(tmp_path / "own"), model, full_rescore)
        engine = make_engine(model, kv_memory_bytes=2**23)
        return Orchestrator(engine, Generator(engine, "", {"temperature": 1.0, "top_p": 1.0}), scorer)

    requests = [replace(each, seed=seed) for each in (BEAM, BEST_OF_N) for seed in (2, 3)]
    plain = run(orchestrator(False), *requests)
    assert run(orchestrator(True), *requests) == plain
    assert run(orchestrator(False), requests[-1])[0] == plain[-1], "alone as in company"
    scores = {score for nodes in plain for *_, score, _ in nodes if score is not None}
    assert len(scores) > 5
    and_then = PathEvidence.and_then
    calls = []

    def forgets(self: PathEvidence, step: PathEvidence) -> PathEvidence:
        calls.append(step)
        return and_then(self, step) if len(calls) % 2 else step

    monkeypatch.setattr(PathEvidence, "and_then", forgets)
    broken = orchestrator(True)
    with pytest.raises(ScoreMismatchError, match="trunk-head gives step"):
        run(broken, *requests)
    broken.close()


def test_evidence_that_adds_nothing_is_left_out(tmp_path: Path):
    readings = made(60)
    nothing, first = np.ones_like(readings.read), np.full(len(readings.values), -1)
    right = readings.values.astype(np.int64)
    alone = replace(readings, read=nothing, sampled=nothing, parents=first, right=right)  # paths of one step
    summary = train_own_evidence(alone, tmp_path, {"name": "talker", "digest": "d"}, {}, 0)
    assert "weights" not in json.loads((tmp_path / "config.json").read_text())
    assert summary == json.loads((tmp_path / "training.json").read_text())


@pytest.mark.parametrize("layer", [0, -1, "2", 1.5, 99])
def test_a_layer_that_is_none_is_refused(layer: object, learned: Path, trunk: Checkpoint):
    file = learned / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer": layer}))
    with pytest.raises(CheckpointError, match="layer"):
        load_verifier(trunk, torch.float32, "cpu", str(learned))


@pytest.fixture
def learned(trunk: Checkpoint, tmp_path: Path) -> Path:
    """A verifier for the trunk, learned from made-up states of its width."""
    folder = tmp_path / "learned"
    train_trunk_evidence(made(30), folder, {"name": "trunk", "digest": trunk.digest()}, {}, 0)
    soften(folder)
    return folder


@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N], ids=["beam", "best-of-n"])
def test_a_search_scores_by_it_and_the_full_rescore_agrees(
    request_: SearchRequest,
    learned: Path,
    trunk: Checkpoint,
    load_model: Callable[[str], Model],
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
):
    def orchestrator(full_rescore: bool) -> Orchestrator:
        family = load_verifier(Checkpoint(trunk.folder), torch.float32, "cpu", str(learned))
        engine = make_engine(load_model("talker"), family.model, kv_memory_bytes=2**23, max_batch_tokens=64)
        return Orchestrator(
            engine, Generator(engine, "", {"temperature": 1.0, "top_p": 1.0}), Verifier(family, full_rescore)
        )

    requests = [replace(request_, seed=seed) for seed in (2, 3, 6)]
    plain = run(orchestrator(False), *requests)
    assert run(orchestrator(True), *requests) == plain
    scored = [(path, score) for nodes in plain for path, _, score, _ in nodes if score is not None]
    assert max(len(path) for path, _ in scored) > 2  # type: ignore[arg-type]
    assert len({score for _, score in scored}) > 5
    evidence = TrunkEvidence.evidence
    monkeypatch.setattr(
        TrunkEvidence, "evidence", lambda self, values, before, sampled: evidence(self, values, None, sampled)
    )
    broken = orchestrator(True)
    with pytest.raises(ScoreMismatchError, match="trunk-evidence gives step 2"):
        run(broken, *requests)
    broken.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"trunk": {"name": "other", "digest": "a" * 64}},
            r"hidden states of other \(digest aaaaaaaaaaaa….*learn-verifier",
        ),
        ({"architectures": ["Qwen2ForCausalLM"]}, "names Qwen2ForCausalLM, not TrunkEvidenceForStepScores"),
        ({"weights": {"head": 1.0}}, "must have an offset and weights of head, head_mean"),
        ({"offset": "much"}, "must have an offset and weights"),
    ],
)
def test_what_the_folder_must_say(change: dict[str, object], message: str, learned: Path, trunk: Checkpoint):
    file = learned / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert identify(trunk, str(learned)).info.name == "trunk-evidence"
    with pytest.raises(CheckpointError, match=message):
        load_verifier(trunk, torch.float32, "cpu", str(learned))


@pytest.fixture
def run_folder(espalier, tmp_path: Path) -> Path:
    """A run whose paths `--test` reads."""
    run = ("eval", "--limit", 6, "--algorithm", "best-of-n", "-N", 4, "--early-stop", "off", "--trees")
    ran = espalier(*run, "--vote", "majority", "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    return tmp_path / "run"


def test_from_a_generator_and_a_trunk_to_a_search_by_two_commands(espalier, run_folder: Path, tmp_path: Path):
    flags = ("learn-verifier", "--out", tmp_path / "mine", "--limit", 20, "-N", 4, "--trunk", "demo-generator")
    ran = espalier(*flags, "--test", run_folder)
    assert ran.code == 0, ran.err
    assert "AUC within a problem, solutions of 2 other problems: score" in ran.out
    tested = json.loads((tmp_path / "mine/verifier/test.json").read_text())
    samples = {sample.unique_id: sample for sample in read_samples(run_folder)}
    assert [vote["paths"] for vote in tested["votes"]] == [2, 4]
    assert tested["votes"][-1]["majority"] == pytest.approx(mean(each.correct for each in samples.values()))
    for problem in tested["paths"]:
        counted = Counter[str]()
        for path in problem["paths"]:
            counted[path["answer"]] += path["samples"]
        assert {name: n for name, n in counted.items() if name} == samples[problem["problem_id"]].answers
    verifier = ("--verifier", "demo-generator", "--verifier-family", tmp_path / "mine" / "verifier")
    asked = "Tom has 38 coins. (a) He finds 47 more. How many?"
    found = espalier("solve", asked, *verifier, "--verify-incremental", "--json")
    assert found.code == 0, found.err
    result = json.loads(found.out)
    assert result["usage"]["verifier_tokens"] > 0
    assert all(0 < candidate["score"] < 1 for candidate in result["candidates"])


def test_a_vote_by_evidence_that_knows_solves_what_any_path_solves(run_folder: Path, grader: Grader):
    problems = {problem.unique_id: problem for problem in load_benchmark("demo", 6)}
    trees = trees_of_run(run_folder, problems, grader)
    wrong = StepRecord(None, "\\boxed{5}", [0], [-1.0], 3, "eos", "5", False)
    outvoted = [wrong, StepRecord(None, "\\boxed{4}", [0], [-1.0], 1, "eos", "4", True, value=1.0)]
    trees.append(TreeRecord("outvoted", "2+2?", "4", steps=outvoted))
    rows = [(at, i, np.zeros(4), (-1.0 - i, 1)) for at, tree in enumerate(trees) for i in range(len(tree.steps))]
    readings = readings_of(rows, trees, 0, (LAST,), 4)
    right = np.maximum(readings.right, 0)
    learned = LearnedEvidence(torch.nn.Linear(4, 1), Combination((0.0,) * 5, 0.0), {})
    features = np.repeat(np.where(right, 0.0, -9.0)[:, None], len(FEATURES), axis=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LearnedEvidence, "features", lambda self, readings: features)
        found = measure_on_run(learned, trees, readings)
    last, solved = found["votes"][-1], found["right"]
    assert solved["problem_ids"] == [tree.problem_id for tree in trees]
    assert mean(solved["likelihood"]) == pytest.approx(last["likelihood"]["accuracy"])
    assert (solved["majority"][-1], solved["likelihood"][-1]) == (0, 1)
    assert last["majority"] < last["any"]
    assert last["likelihood"]["accuracy"] == last["any"]
    assert last["likelihood"]["ahead"] == pytest.approx(last["any"] - last["majority"])
    assert last["score"]["accuracy"] <= last["majority"] + 1e-9, "equal scores are a majority's"


def test_a_run_without_trees_and_a_head_without_a_trunk_are_refused(espalier, run_folder: Path, tmp_path: Path):
    flags = ("learn-verifier", "--out", tmp_path / "mine", "--limit", 20, "-N", 2, "--test", run_folder)
    ran = espalier(*flags)
    assert (ran.code, "--test needs --trunk" in ran.err) == (2, True), ran.err
    (run_folder / "trees.jsonl").unlink()
    ran = espalier(*flags, "--trunk", "demo-generator")
    assert (ran.code, "holds no trees" in ran.err) == (2, True), ran.err
    config = json.loads((run_folder / "config.json").read_text())
    (run_folder / "config.json").write_text(json.dumps(config | {"algorithm": "beam"}))
    ran = espalier(*flags, "--trunk", "demo-generator")
    assert (ran.code, "is a run of beam, whose paths depend on the verifier" in ran.err) == (2, True), ran.err
