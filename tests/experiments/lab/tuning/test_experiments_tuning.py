"""`lab study tune-verifier`: states that enter a layer are kept, the layers above are tuned on them, and merged."""

import json
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from hybrids import write_hybrid_talker
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, EspalierError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import ModelImpl
from espalier.experiments.lab.__main__ import app
from espalier.experiments.lab.tuning import reader as readers
from espalier.experiments.lab.tuning import tuning
from espalier.experiments.lab.tuning.entering import KeptStates
from espalier.experiments.lab.tuning.reader import EnteringReader, heads_for
from espalier.experiments.lab.tuning.tuning import LastLayers, Tuner
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.verifier_training.features import LAST, Readings, StatesHead, TrunkReader
from espalier.experiments.verifier_training.rollouts import RolloutSampler
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.kernels.layers import UnsupportedShapeError
from espalier.search.grading.math_verify import Grader
from espalier.search.rollout import RolloutSettings
from espalier.search.run.generator import Generator

SETTINGS = RolloutSettings(solutions=6, temperature=1.0, max_steps=4, max_step_tokens=12, max_tokens=40)
PARTS = [0, 1, 2, 3, 4], [5, 6, 7]
TRUNK = "qwen2-untied"


@pytest.fixture(autouse=True)
def no_helpers(one_thread: None) -> None:
    """Every test here computes on one thread."""


@pytest.fixture
def trees(load_model: Callable[[str], Model], make_engine: Callable[..., Engine], grader: Grader) -> list[TreeRecord]:
    engine = make_engine(load_model("talker"), kv_memory_bytes=2**23)
    problems = [Problem(str(i), f"Tom has {i} coins. How many?", "1", None) for i in range(8)]
    found = RolloutSampler(engine, Generator(engine, "", {}), SETTINGS, grader, 8).sample(problems)
    return sorted(found, key=lambda tree: int(tree.problem_id))


Read = Callable[..., tuple[Readings, TrunkReader]]


@pytest.fixture
def read(trees: list[TreeRecord], make_engine: Callable[..., Engine], tmp_path: Path) -> Read:
    """Reads the trees with a checkpoint, and keeps the states that enter a layer if one is given."""

    def of(checkpoint: Checkpoint, entering: int | None = None) -> tuple[Readings, TrunkReader]:
        trunk, loaded = StatesHead(), load_generator(checkpoint, torch.float32, "cpu")
        heads = heads_for(trunk)
        trunk.model = replace(loaded, other_heads=heads, wide_heads=frozenset(heads))
        given = make_engine(trunk.model, kv_memory_bytes=2**23), "Use steps.", trees, tmp_path / "readings"
        reader = TrunkReader(*given) if entering is None else EnteringReader(*given, entering)
        return reader.read(lambda: None), reader

    return of


def by_transformers(folder: Path) -> Checkpoint:
    return Checkpoint(folder, model_impl=ModelImpl.TRANSFORMERS)


def graded(readings: Readings) -> Readings:
    """The same, with every other solution right: random models know no answers."""
    rows = np.arange(len(readings.values))
    last = ~np.isin(rows, readings.parents)
    return replace(readings, right=np.where(last, rows % 2, -1), values=(rows % 2).astype(np.float32))


@pytest.fixture
def make_tuner(tiny_checkpoints: dict[str, Path], read: Read, tmp_path: Path) -> Callable[..., Tuner]:
    readings, reader = read(Checkpoint(tiny_checkpoints[TRUNK]), 1)
    readings = graded(readings)

    def make(saved: str = "tuning.pt", identity: str = "these", seed: int = 0) -> Tuner:
        layers = LastLayers(Checkpoint(tiny_checkpoints[TRUNK]), 2)
        kept = KeptStates(reader.entering_files, readings)
        return Tuner(layers, readings, kept, PARTS, tmp_path / saved, identity, seed)

    return make


@pytest.mark.parametrize("by", [Checkpoint, by_transformers], ids=["native", "transformers"])
@pytest.mark.parametrize("name", [TRUNK, "gemma3"])
def test_kept_states_enter_the_layer_and_the_layers_above_give_the_last(
    name: str,
    by: Callable[[Path], Checkpoint],
    tiny_checkpoints: dict[str, Path],
    trees: list[TreeRecord],
    read: Read,
):
    folder = tiny_checkpoints[name]
    layers = LastLayers(Checkpoint(folder), 2)  # of two, the second reads what the first gives of tokens within steps
    readings, reader = read(by(folder), layers.first)
    kept = KeptStates(reader.entering_files, readings)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    branched = 0
    for number in range(len(trees)):
        tree = kept.tree(number)
        assert kept.tokens(number) == len(tree.states) == len(tree.positions)
        with torch.no_grad():
            found = layers(tree)[tree.ends].numpy()
        expected = readings.states_of(LAST)[tree.rows]
        assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max(), "bfloat16 rounds what is kept"
        branched += len(set(readings.parents[tree.rows].tolist())) < len(tree.rows)
    assert branched, "some steps have siblings"
    # The path to a last step, as the tree's mask and positions describe it.
    path = tree.sees[tree.ends[-1]].nonzero()[:, 0]
    assert tree.positions[path].tolist() == list(range(len(path)))
    ids = _ids_of(reader, trees[number], tree.rows, readings)
    assert len(ids) == len(path)
    with torch.inference_mode():
        entering = plain(torch.tensor([ids]), output_hidden_states=True).hidden_states[layers.first][0]
    assert (tree.states[path] - entering).abs().max() < 0.01 * entering.abs().max()


def _ids_of(reader: TrunkReader, tree: TreeRecord, rows: np.ndarray, readings: Readings) -> list[int]:
    """What is computed on the path to the tree's last row."""
    its_rows, at = [], int(rows[-1])
    while at >= 0:
        its_rows.insert(0, at - int(rows[0]))
        at = int(readings.parents[at])
    order = [index for index, *_ in reader._steps(tree)]
    family = reader._family
    ids = family.prompt_ids(tree.problem)
    for row in its_rows:
        ids += reader._reading(tree, order[row]).token_ids
    return ids


def test_tuning_lowers_the_loss_and_ranks_what_it_was_taught(make_tuner: Callable[..., Tuner], monkeypatch):
    monkeypatch.setattr(tuning, "_LEARNING_RATE", 1e-2)
    tuner = make_tuner()
    done: list[int] = []
    epochs = []
    for _ in range(6):
        expected = tuner.epoch_problems
        epochs.append(tuner.run_epoch(lambda: done.append(1)))
        assert len(done) == expected
        done.clear()
    assert epochs[0].loss is None
    assert epochs[-1].loss < 0.7 * epochs[1].loss
    assert "before tuning" in str(epochs[0])
    head = tuner.finish()
    one = tuner._teach[0]
    with torch.no_grad():
        states = tuner._layers(one.tree())[one.tree().ends]
        assert one.ahead(head(states)[:, 0]) >= 0.5, "the head takes states as they are once it is finished"


def test_tuning_ends_when_other_problems_are_ranked_no_better_and_takes_the_best_epoch(
    make_tuner: Callable[..., Tuner], monkeypatch: pytest.MonkeyPatch
):
    tuner = make_tuner()
    losses = iter([1.0, 0.9, 0.95, 0.97, 0.1])
    weights = []
    loss = tuning._Problem.loss

    def scripted(self: tuning._Problem, logits: torch.Tensor) -> torch.Tensor:
        return loss(self, logits) if torch.is_grad_enabled() else torch.tensor(now)

    monkeypatch.setattr(tuning._Problem, "loss", scripted)
    while not tuner.done:
        now = next(losses)
        tuner.run_epoch(lambda: None)
        weights.append(tuner._snapshot())
    assert [epoch.choosing_loss for epoch in tuner.epochs] == pytest.approx([1.0, 0.9, 0.95, 0.97])
    assert tuner.best.number == 1
    tuner._load(tuner._best)
    assert all(map(torch.equal, tuner._snapshot(), weights[1]))


def test_an_interrupted_tuning_goes_on_where_it_was(make_tuner: Callable[..., Tuner]):
    whole = make_tuner("whole.pt")
    for _ in range(4):
        whole.run_epoch(lambda: None)
    for _ in range(2):
        make_tuner().run_epoch(lambda: None)
    interrupted = make_tuner()
    with pytest.raises(KeyboardInterrupt):
        interrupted.run_epoch(_interrupt)
    again = make_tuner()
    assert len(again.epochs) == 2
    for _ in range(2):
        again.run_epoch(lambda: None)
    assert again.epochs == whole.epochs
    assert all(map(torch.equal, again._snapshot(), whole._snapshot()))
    assert make_tuner(identity="others").epochs == []
    fresh = [make_tuner(f"{at}.pt", seed=seed) for at, seed in enumerate((1, 1, 2))]
    assert make_tuner(seed=1).epochs == fresh[0].epochs == []
    assert all(map(torch.equal, fresh[0]._snapshot(), fresh[1]._snapshot()))
    assert not torch.equal(fresh[0]._snapshot()[0], fresh[2]._snapshot()[0])


def tune(*flags: object) -> Any:
    return CliRunner().invoke(app, ["study", "tune-verifier", *map(str, flags)], env={"COLUMNS": "200"})


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("form", ["folder", "GGUF"])
@pytest.mark.parametrize("name", ["qwen2-tied", TRUNK])
def test_the_merged_adapter_gives_what_the_trained_layers_gave(
    name: str, form: str, tiny_checkpoints: dict[str, Path], read: Read, tmp_path: Path
):
    folder = tiny_checkpoints[name]
    if form == "GGUF":
        folder = write_gguf(folder, tmp_path / "trunk.gguf", GGMLQuantizationType.Q8_0)
    layers = LastLayers(Checkpoint(folder), 1)
    readings, reader = read(Checkpoint(folder), layers.first)
    kept = KeptStates(reader.entering_files, readings)
    torch.manual_seed(0)
    for name, parameter in layers.named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(parameter, std=0.1)
    layers.write(tmp_path / "adapter", str(folder))
    adapted, _ = read(Checkpoint(folder, adapter=tmp_path / "adapter"))
    for number in range(3):
        tree = kept.tree(number)
        with torch.no_grad():
            expected = layers(tree)[tree.ends].numpy()
        found, untuned = (each.states_of(LAST)[tree.rows] for each in (adapted, readings))
        assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
        assert np.abs(found - untuned).max() > 0.1 * np.abs(expected).max()


def test_the_adapter_is_in_pefts_layout(tiny_checkpoints: dict[str, Path], tmp_path: Path):
    LastLayers(Checkpoint(tiny_checkpoints[TRUNK]), 2).write(tmp_path, "org/model")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    products = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == products
    assert config["layers_to_transform"] == [1, 2]
    assert config["base_model_name_or_path"] == "org/model"
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * len(products)
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_{}.weight"
    assert tensors[name.format("A")].shape == (tuning.RANK, 80)
    assert tensors[name.format("B")].shape == (48, tuning.RANK)
    assert not tensors[name.format("B")].any()


def test_layers_that_give_other_states_by_themselves_are_refused(
    tiny_checkpoints: dict[str, Path], read: Read, tmp_path: Path
):
    readings, reader = read(Checkpoint(tiny_checkpoints[TRUNK]), 1)
    readings = graded(readings)
    one_fewer = LastLayers(Checkpoint(tiny_checkpoints[TRUNK]), 1)
    with pytest.raises(CheckpointError, match=r"the last 1 layers give other states .*cannot be tuned"):
        Tuner(one_fewer, readings, KeptStates(reader.entering_files, readings), PARTS, tmp_path / "t.pt", "", 0)
    nothing_right = replace(readings, right=np.minimum(readings.right, 0))
    two = LastLayers(Checkpoint(tiny_checkpoints[TRUNK]), 2)
    with pytest.raises(EspalierError, match=r"too few problems have right and wrong solutions.*-N"):
        Tuner(two, nothing_right, KeptStates(reader.entering_files, readings), PARTS, tmp_path / "t.pt", "", 0)


def test_what_cannot_be_tuned_is_refused(tiny_checkpoints: dict[str, Path], tmp_path: Path):
    folder = tiny_checkpoints[TRUNK]
    with pytest.raises(CheckpointError, match=r"--tune 3: .* has 3 layers; give 1 to 2"):
        LastLayers(Checkpoint(folder), 3)
    LastLayers(Checkpoint(folder), 1).write(tmp_path / "adapter", "")
    with pytest.raises(CheckpointError, match=r"the trunk has the adapter .*merge it"):
        LastLayers(Checkpoint(folder, adapter=tmp_path / "adapter"), 1)
    with pytest.raises(CheckpointError, match=r"--tune: layers of linear_attention, .*cannot be tuned"):
        LastLayers(Checkpoint(write_hybrid_talker(tmp_path / "hybrid")), 2)
    with pytest.raises(UnsupportedShapeError, match="there is no layer 3 of 0 to 2"):
        load_generator(Checkpoint(folder), torch.float32, "cpu").decoder.layers.tap_raw(3)
    with pytest.raises(UnsupportedShapeError, match="are not given"):
        load_generator(by_transformers(folder), torch.float32, "cpu").decoder.layers.tap_raw(3)


def test_states_that_do_not_fit_are_refused_before_any_is_read(
    tiny_checkpoints: dict[str, Path], read: Read, monkeypatch: pytest.MonkeyPatch
):
    readings, reader = read(Checkpoint(tiny_checkpoints[TRUNK]), 1)
    tokens, needed = reader.require_room()
    kept = KeptStates(reader.entering_files, readings)
    assert tokens == sum(kept.tokens(number) for number in range(8))
    assert needed == tokens * 48 * 2
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(readers.shutil, "disk_usage", lambda folder: usage(needed - 1))
    assert reader.require_room()[0] == tokens, "they are there already"
    reader.entering_files[0].unlink()
    with pytest.raises(EspalierError, match=r"the states of [\d,]+ tokens take .*--limit.*-N"):
        reader.require_room()


def test_from_a_generator_to_a_search_with_a_tuned_trunk_by_two_commands(espalier, tmp_path: Path):
    out = tmp_path / "mine"
    flags = ("--out", out, "--limit", 20, "-N", 4, "--trunk", "demo-generator", "--tune", 1)
    ran = tune(*flags)
    assert ran.exit_code == 0, ran.output
    assert "epoch 0: before tuning" in ran.output
    assert ran.output.count("AUC within a problem, solutions of 2 other problems: score") == 2
    summary, untuned = (json.loads((out / name / "training.json").read_text()) for name in ("verifier", "untuned"))
    assert summary["tuned_layers"] == 1
    assert len(summary["epochs"]) > 1
    assert summary["trunk"]["digest"] != untuned["trunk"]["digest"]
    again = tune(*flags)
    assert "from before" in again.output
    assert json.loads((out / "verifier" / "training.json").read_text())["measured"] == summary["measured"]
    asked = "Tom has 38 coins. (a) He finds 47 more. How many?"
    verifier = ("--verifier", out / "adapter", "--verifier-family", out / "verifier")
    found = espalier("solve", asked, *verifier, "--verify-incremental", "--json")
    assert found.code == 0, found.err
    result = json.loads(found.out)
    assert result["usage"]["verifier_tokens"] > 0
    assert all(0 <= candidate["score"] <= 1 for candidate in result["candidates"])


def test_tuning_needs_a_trunk(tmp_path: Path):
    assert "Missing option '--trunk'" in tune("--out", tmp_path / "mine").output
    ran = tune("--out", tmp_path / "mine", "--trunk", "demo-generator", "--tune", 99)
    assert isinstance(ran.exception, CheckpointError)
    assert "--tune 99" in str(ran.exception)
    assert not (tmp_path / "mine").exists(), "before anything is sampled"
