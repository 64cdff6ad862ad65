"""The folders that keep the samples of an evaluation."""

import errno
import json
import os
import subprocess
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from run_samples import CONFIGURATION, REQUEST, sample

from espalier.engine.errors import EspalierError
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.files import append, replacing
from espalier.experiments.runs.folder import RunFolder
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.summary import search_fields
from espalier.search.request import AlgorithmName


def keep(folder: RunFolder, *samples: Sample) -> None:
    with folder.open_samples() as stream:
        for each in samples:
            append(stream, asdict(each))


def whole_configuration(**changes: Any) -> dict[str, Any]:
    """As `Evaluation.configuration` makes it, of models by any name."""
    filled = {"vote": "weighted", "temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 512}
    search = search_fields(replace(REQUEST, **{**filled, **changes}))
    return {"benchmark": "some", **search, "generator": "a1", "verifier": "b2", "answer_equivalence": "exact-match"}


def write_configuration(folder: Path, configuration: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(configuration))


def test_folder_of_another_configuration_is_refused_with_both_values(tmp_path):
    RunFolder(tmp_path / "run", whole_configuration())
    other = whole_configuration(seed=6, generator_budget=100, algorithm=AlgorithmName.DVTS)
    with pytest.raises(EspalierError) as refused:
        RunFolder(tmp_path / "run", other)
    said = str(refused.value)
    assert 'algorithm is "beam" there, "dvts" now; ' in said
    assert "generator_budget is not set there, 100 now; seed is 5 there, 6 now; name another --out" in said
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == whole_configuration()


def models(name: str = "pair/one", quantization: str = "none", folder: str = "/models/one") -> dict[str, Any]:
    return {"models": {"generator": {"name": name, "quantization": quantization, "folder": folder}}}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (models(quantization="int8"), '--generator-quantization is "none" there, "int8" now'),
        (models(name="pair/two", folder="/models/two"), '--generator is "pair/one" there, "pair/two" now'),
        (models(folder="/elsewhere"), 'the folder of the generator is "/models/one" there, "/elsewhere" now'),
        (models(), 'generator is "a1" there, "c3" now'),
        ({}, 'generator is "a1" there, "c3" now'),
    ],
)
def test_another_model_is_told_by_the_option_that_differs_where_the_commands_say_it(tmp_path, now, said):
    RunFolder(tmp_path, whole_configuration(), command={"command": "first", **models()})
    with pytest.raises(EspalierError) as refused:
        RunFolder(tmp_path, whole_configuration() | {"generator": "c3"}, command={"command": "second", **now})
    assert f"another configuration: {said}; " in str(refused.value)
    assert ("c3" in str(refused.value)) == (said.startswith("generator is"))


def test_long_values_that_differ_are_shown_where_they_do(tmp_path):
    RunFolder(tmp_path, {"system_prompt": 30 * "Be brief. " + "Use steps." + 30 * " Please."})
    with pytest.raises(EspalierError, match=r"system_prompt is ….*Use steps.*… there, ….*Use words.*… now"):
        RunFolder(tmp_path, {"system_prompt": 30 * "Be brief. " + "Use words." + 30 * " Please."})


def test_configuration_survives_the_way_through_its_file(tmp_path):
    configuration = whole_configuration()
    RunFolder(tmp_path, configuration)
    written = (tmp_path / "config.json").read_text()
    RunFolder(tmp_path, configuration)  # another process with the same request takes it as its own
    assert (tmp_path / "config.json").read_text() == written
    assert json.loads(written) == json.loads(json.dumps(configuration))


def test_configuration_holds_what_is_done_and_not_what_was_left_open(make_orchestrator, grader):
    evaluation = Evaluation(make_orchestrator(), [], grader, "some")
    configuration = evaluation.configuration(replace(REQUEST, vote=None))
    assert None not in configuration.values()
    assert (configuration["vote"], configuration["max_tokens"], configuration["top_p"]) == ("weighted", 512, 1.0)
    assert configuration["temperature"] == 1.0  # the checkpoint's own
    assert "simulations" not in configuration  # beam search reads none
    tree = evaluation.configuration(replace(REQUEST, algorithm=AlgorithmName.MCTS))
    assert (tree["simulations"], tree["exploration"]) == (32, 1.25)
    assert evaluation.configuration(replace(REQUEST, temperature=1.0)) == configuration


def test_commands_are_told_and_never_compared(tmp_path):
    for command in ("first", "first", "second", None):
        RunFolder(tmp_path, CONFIGURATION, command=command and {"command": command})
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {**CONFIGURATION, "commands": [{"command": "first"}, {"command": "second"}]}


def test_a_write_that_is_cut_short_leaves_what_was_there(tmp_path, monkeypatch: pytest.MonkeyPatch):
    RunFolder(tmp_path, CONFIGURATION)
    before = (tmp_path / "config.json").read_text()
    write = Path.write_text

    def half(path: Path, text: str, **options: Any) -> int:
        write(path, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        RunFolder(tmp_path, CONFIGURATION, command={"command": "other"})
    assert (tmp_path / "config.json").read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_model_that_the_folder_does_not_name_is_another_configuration(tmp_path: Path):
    write_configuration(tmp_path, {k: v for k, v in whole_configuration().items() if k != "verifier"})
    with pytest.raises(EspalierError, match='verifier is not set there, "b2" now'):
        RunFolder(tmp_path, whole_configuration())


def test_field_of_a_newer_version_is_refused_by_name(tmp_path: Path):
    write_configuration(tmp_path, {**whole_configuration(), "foresight": None})
    with pytest.raises(EspalierError, match="foresight is null there, not set now"):
        RunFolder(tmp_path, whole_configuration())


def test_new_folder_has_no_samples(tmp_path):
    assert RunFolder(tmp_path / "new", CONFIGURATION).done() == []


def test_last_line_cut_short_is_dropped_from_the_file(tmp_path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    keep(folder, sample("a"), sample("b"))
    whole = (tmp_path / "samples.jsonl").read_text()
    with folder.open_samples() as stream:
        stream.write(json.dumps(asdict(sample("c")))[:40].encode())

    assert [s.unique_id for s in folder.done()] == ["a", "b"]
    keep(folder, sample("c"))
    assert (tmp_path / "samples.jsonl").read_text().startswith(whole + '{"unique_id": "c"')
    assert [s.unique_id for s in folder.done()] == ["a", "b", "c"]


def test_last_line_that_lacks_only_its_end_does_not_swallow_the_next(tmp_path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    with folder.open_samples() as stream:
        stream.write(json.dumps(asdict(sample("a"))).encode())
    folder.done()
    keep(folder, sample("b"), sample("c"))
    assert [s.unique_id for s in folder.done()][-2:] == ["b", "c"]


def test_damage_in_the_middle_does_not_cost_the_samples_behind_it(tmp_path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    keep(folder, sample("a"))
    with folder.open_samples() as stream:
        stream.write(b"damaged\n")
    keep(folder, sample("c"))
    with suppress(EspalierError):  # to refuse the file is as good as to read on
        folder.done()
    assert '"c"' in (tmp_path / "samples.jsonl").read_text()


@pytest.mark.parametrize("damage", [{"correct": "maybe"}, {"usage": None}])
def test_sample_whose_fields_are_of_another_kind_is_refused_by_its_line(tmp_path: Path, damage: dict[str, Any]):
    folder = RunFolder(tmp_path, CONFIGURATION)
    line = json.dumps(asdict(sample("a")) | damage)
    (tmp_path / "samples.jsonl").write_text(f"{line}\n")
    with pytest.raises(EspalierError, match=r"samples\.jsonl:1 is damaged"):
        folder.done()


def test_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EspalierError, match="file"):
        RunFolder(tmp_path / "file", CONFIGURATION)


def test_samples_of_nobody_knows_what_are_refused(tmp_path: Path):
    keep(RunFolder(tmp_path, CONFIGURATION), sample("a"))
    (tmp_path / "config.json").unlink()
    with pytest.raises(EspalierError, match=r"without a config\.json; name another --out"):
        RunFolder(tmp_path, CONFIGURATION)
    assert not (tmp_path / "config.json").exists()


def test_last_line_of_bytes_that_are_no_text_is_dropped(tmp_path: Path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    keep(folder, sample("a"))
    with (tmp_path / "samples.jsonl").open("ab") as stream:
        stream.write(b"\xff\xfe\x00")
    assert [s.unique_id for s in folder.done()] == ["a"]
    keep(folder, sample("b"))
    assert [s.unique_id for s in folder.done()] == ["a", "b"]


@pytest.mark.parametrize("text", ['{"seed"', "[]"])
def test_damaged_configuration_is_refused_by_name(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EspalierError, match=r"config\.json"):
        RunFolder(tmp_path, CONFIGURATION)


def test_what_a_killed_process_was_writing_is_removed_and_what_a_running_one_writes_is_not(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    theirs = tmp_path / f"config.json.{os.getppid()}.partial"
    for path in (
        theirs,
        tmp_path / f"config.json.{ended.pid}.partial",
        tmp_path / f"summary.json.{os.getpid()}.partial",
    ):
        path.write_text("half")
    RunFolder(tmp_path, CONFIGURATION)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", theirs.name]


def test_trees_are_kept_of_samples_only_and_one_of_each(tmp_path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    keep(folder, sample("a"), sample("b"), sample("c", epoch=1), sample("d", stop_reason="refused"))
    lines = [
        json.dumps({"unique_id": name, "epoch": epoch, "nodes": [number]}) + "\n"
        for number, (name, epoch) in enumerate(
            [("a", 0), ("b", 0), ("c", 0), ("c", 1), ("d", 0), ("nobody", 0), ("a", 0)]
        )
    ]
    (tmp_path / "trees.jsonl").write_text("".join(lines) + lines[0][:20])
    with folder.open_trees(wanted=[("b", 0)]) as stream:
        stream.write(lines[1].encode())
    assert (tmp_path / "trees.jsonl").read_text() == lines[3] + lines[6] + lines[1]


def test_a_damaged_tree_before_the_last_is_named(tmp_path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    (tmp_path / "trees.jsonl").write_text('{"unique_id": "a", "epoch": 0, "nodes": []}\n{"unique\n')
    with pytest.raises(EspalierError, match=r"trees.jsonl:2 is damaged: .*; repair or remove the line"):
        folder.open_trees()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path):
    """Libraries that write tensors raise what they like where a disk is full; torch even loses the reason."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"before")

    def write(error: Exception) -> None:
        with replacing(path) as partial:
            partial.write_bytes(b"half")
            raise error

    lost = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
    for error, said in (
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (lost, f"{lost}; is the disk full?"),
    ):
        with pytest.raises(EspalierError) as refused:
            write(error)
        assert str(refused.value) == f"cannot write {path}: {said}"
        assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == b"before"
    with replacing(path) as partial:
        partial.write_bytes(b"after")
    assert path.read_bytes() == b"after"
