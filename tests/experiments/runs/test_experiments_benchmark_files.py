"""Benchmarks in CSV, Parquet, folders of the `datasets` library and on the hub; every error names its place."""

import csv
import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from espalier.experiments.runs import benchmark_files
from espalier.experiments.runs.benchmarks import BenchmarkError, Problem, load_benchmark

ROWS = [
    {"problem": "1+1?", "answer": "2", "subject": "sums", "level": 1},
    {"problem": "Which of\nthese, say?", "answer": "$\\frac{1}{2}$", "subject": None, "level": 2},
]
WANTED = [
    Problem("some/1", "1+1?", "2", 1, subject="sums"),
    Problem("some/2", "Which of\nthese, say?", "$\\frac{1}{2}$", 2),
]


def write_table(path: Path, rows: list[dict], delimiter: str = ",", encoding: str = "utf-8") -> str:
    with path.open("w", newline="", encoding=encoding) as stream:
        writer = csv.DictWriter(stream, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def write_lines(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def refusal(name: str, **asked) -> str:
    with pytest.raises(BenchmarkError) as refused:
        load_benchmark(name, **asked)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# --- CSV and TSV -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".CSV", ",")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_table_is_read_with_line_ends_and_delimiters_inside_its_cells(tmp_path, suffix, delimiter, encoding):
    assert load_benchmark(write_table(tmp_path / f"some{suffix}", ROWS, delimiter, encoding)) == WANTED


def test_table_has_the_field_rules_of_json(tmp_path):
    name = write_table(tmp_path / "some.csv", [{"Task": "1+1?", "Gold": "It is 2.\n#### 1,002", "nr": 7}])
    assert load_benchmark(name, field_map={"problem": "Task", "answer": "Gold", "id": "nr"}) == [
        Problem("7", "1+1?", "1002", None)
    ]


def test_column_without_a_name_is_the_index_that_pandas_writes(tmp_path):
    (tmp_path / "some.csv").write_text(',problem,answer\r\n0,1+1?,2\r\n\r\n1,"2+2?",4\r\n')
    assert [(p.unique_id, p.answer) for p in load_benchmark(str(tmp_path / "some.csv"))] == [
        ("some/1", "2"), ("some/2", "4"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('problem,answer\n"1\n1?",2\n2?,\n', "some.csv:4: no answer: the record has problem, answer"),
        ("problem,answer\n1?,2\n2?,3,4\n", "some.csv:3: 3 cells, but the header names 2 fields"),
        ("problem,answer\n1?\n", "some.csv:2: 1 cells, but the header names 2"),
        ("problem,answer,answer\n1?,2,3\n", "some.csv:1: the header names 'answer' twice"),
        ("task,answer\n1?,2\n", "some.csv:2: no problem: the record has task, answer; wanted: problem,"),
        ('problem,answer\n1?,2\n"2?,3\n', "some.csv:3: not a row of a table"),
        ('problem,answer\n1?,2\n"2?"x,3\n', "some.csv:3: not a row of a table"),
        ("problem,answer\n", "some.csv holds no problems"),
        ("", "some.csv holds no problems"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_line(tmp_path, text, said):
    (tmp_path / "some.csv").write_text(text)
    assert said in refusal(str(tmp_path / "some.csv"))


def test_table_is_read_no_further_than_its_limit(tmp_path):
    (tmp_path / "some.csv").write_text("problem,answer\n1?,2\n2?,3,4\n")
    assert len(load_benchmark(str(tmp_path / "some.csv"), 1)) == 1


# --- Parquet ---------------------------------------------------------------------------------------------------------


def write_parquet(path: Path, rows: list[dict]) -> str:
    arrow = pytest.importorskip("pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    importlib.import_module("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    return str(path)


def test_parquet_is_read(tmp_path):
    assert load_benchmark(write_parquet(tmp_path / "some.parquet", ROWS)) == WANTED


def test_parquet_lists_and_numbers_are_golds(tmp_path):
    rows = [{"question": "Which?", "final_answer": ["2", "3"]}]
    assert load_benchmark(write_parquet(tmp_path / "a.parquet", rows))[0].golds == ("2", "3")
    assert load_benchmark(write_parquet(tmp_path / "b.parquet", [{"question": "?", "answer": 142.0}]))[0].golds == (
        "142",
    )


def test_what_is_wrong_with_a_parquet_row_is_said_with_its_number(tmp_path):
    rows = [{"problem": "1?", "answer": "1"}] * 300
    said = refusal(write_parquet(tmp_path / "some.parquet", [*rows, {"problem": "2?", "answer": None}]))
    assert "some.parquet (row 301): no answer: the record has problem, answer" in said
    said = refusal(write_parquet(tmp_path / "some.parquet", [{"problem": "2?", "answer": b"2"}]))
    assert "some.parquet (row 1): its answer is a bytes, not a text" in said


def test_file_that_is_not_parquet_is_refused_by_name(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "some.parquet").write_text("problem,answer\n1?,2\n")
    assert "some.parquet: not Parquet that can be read" in refusal(str(tmp_path / "some.parquet"))


@pytest.mark.parametrize(
    ("name", "package"), [("some.parquet", "pyarrow"), ("folder", "datasets"), ("a/b", "datasets")]
)
def test_missing_library_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, name, package):
    (tmp_path / "some.parquet").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    for module in ("pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    said = refusal(name)
    assert f"reading {name} needs {package}" in said
    assert "pip install 'espalier-search[datasets]'" in said


# --- Folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library, which must leave the user's cache alone and reach no network."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    yield library
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def splits(datasets):
    return datasets.DatasetDict({
        "train": datasets.Dataset.from_list([{"question": "0?", "answer": "#### 0"}]),
        "test": datasets.Dataset.from_list([{"question": f"{n}?", "answer": f"#### {n}"} for n in (1, 2)]),
    })  # fmt: skip


def test_folder_of_save_to_disk_is_read(tmp_path, splits):
    splits.save_to_disk(str(tmp_path / "some"))
    assert load_benchmark(str(tmp_path / "some")) == [
        Problem("some/1", "1?", "1", None), Problem("some/2", "2?", "2", None),
    ]  # fmt: skip
    assert [p.answer for p in load_benchmark(f"{tmp_path / 'some'}:train")] == ["0"]
    assert "has no split 'validation'; it has train, test: write " in refusal(f"{tmp_path / 'some'}:validation")
    assert "has no configurations" in refusal(f"{tmp_path / 'some'}:main/test")


def test_folder_of_one_saved_split_is_read_by_any_name(tmp_path, splits):
    splits["train"].save_to_disk(str(tmp_path / "one"))
    assert [p.unique_id for p in load_benchmark(str(tmp_path / "one"))] == ["one/1"]
    assert [p.answer for p in load_benchmark(f"{tmp_path / 'one'}:train")] == ["0"]


def test_row_of_a_saved_dataset_is_named(tmp_path, datasets):
    datasets.Dataset.from_list([{"question": "1?", "answer": "1"}, {"question": "2?", "answer": ""}]).save_to_disk(
        str(tmp_path / "some")
    )
    assert "some:all (row 2): its answer is empty" in refusal(str(tmp_path / "some"))


def test_folder_of_files_is_read_by_its_splits_and_errors_name_the_file(tmp_path, datasets):
    write_lines(tmp_path / "some" / "train.jsonl", [{"problem": "0?", "answer": "0"}])
    write_lines(tmp_path / "some" / "test.jsonl", ROWS)
    assert load_benchmark(str(tmp_path / "some")) == WANTED
    assert [p.answer for p in load_benchmark(f"{tmp_path / 'some'}:train")] == ["0"]
    write_lines(tmp_path / "some" / "test.jsonl", [*ROWS, {"problem": "3?"}])
    assert f"{tmp_path}/some/test.jsonl:3: no answer" in refusal(str(tmp_path / "some"))
    assert "has no split 'dev'; it has train, test: write " in refusal(f"{tmp_path / 'some'}:dev")


def test_shards_of_parquet_are_one_split_with_ids_that_run_on(tmp_path, datasets):
    for shard, row in enumerate(ROWS):
        write_parquet(tmp_path / "some" / "data" / f"test-0000{shard}-of-00002.parquet", [row])
    assert load_benchmark(str(tmp_path / "some")) == WANTED


def test_configurations_of_a_readme_are_chosen_by_name(tmp_path, datasets):
    for name in ("easy", "hard"):
        write_lines(tmp_path / "some" / f"{name}.jsonl", [{"problem": f"{name}?", "answer": "1"}])
    (tmp_path / "some" / "README.md").write_text(
        "---\nconfigs:\n- config_name: easy\n  data_files: easy.jsonl\n"
        "- config_name: hard\n  data_files:\n  - split: dev\n    path: hard.jsonl\n---\n"
    )
    assert [p.problem for p in load_benchmark(f"{tmp_path / 'some'}:hard/dev")] == ["hard?"]
    assert [p.problem for p in load_benchmark(f"{tmp_path / 'some'}:easy/train")] == ["easy?"]
    for name in (f"{tmp_path / 'some'}", f"{tmp_path / 'some'}:odd/dev"):
        said = refusal(name)
        assert "['easy', 'hard']" in said
        assert said.endswith(f"write {tmp_path / 'some'}:CONFIGURATION/SPLIT")


def test_folder_without_benchmark_files_is_refused(tmp_path, datasets):
    (tmp_path / "empty").mkdir()
    assert "cannot load" in refusal(str(tmp_path / "empty"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "test.txt").write_text("1+1?")
    assert "test.txt cannot be read; a folder's files end in .jsonl, " in refusal(str(tmp_path / "text"))


# --- The hub ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("openai/gsm8k:main/test", ("openai/gsm8k", "main", None)),
        ("openai/gsm8k:main/train", ("openai/gsm8k", "main", None)),
        ("HuggingFaceH4/MATH-500", ("HuggingFaceH4/MATH-500", None, None)),
        ("HuggingFaceH4/MATH-500:test", ("HuggingFaceH4/MATH-500", None, None)),
        ("HuggingFaceH4/MATH-500@v1.0:test", ("HuggingFaceH4/MATH-500", None, "v1.0")),
    ],
)
def test_hub_id_is_taken_apart(monkeypatch, datasets, splits, name, asked):
    def load_dataset(path, configuration, revision):
        assert (path, configuration, revision) == asked
        return splits

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    expected = ["0"] if name.endswith("train") else ["1", "2"]
    problems = load_benchmark(name)
    assert [p.answer for p in problems] == expected
    assert problems[0].unique_id == f"{name.partition('/')[2].partition(':')[0].partition('@')[0]}/1"


@pytest.fixture
def in_the_cache(tmp_path, monkeypatch, datasets):
    """`openai/gsm8k` as the library keeps it after a download: with the configuration `main`, and no other."""
    folder = tmp_path / "gsm8k"
    for split in ("train", "test"):
        write_lines(folder / f"{split}.jsonl", [{"question": f"{split}?", "answer": "Two.\n#### 2"}])
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_dir: .\n---\n")
    datasets.load_dataset(str(folder), "main", cache_dir=str(tmp_path / "made"))
    (prepared,) = (tmp_path / "made").glob("gsm8k/main/*/*/dataset_info.json")
    place = tmp_path / "downloaded" / "openai___gsm8k" / "main" / prepared.parents[1].name / prepared.parent.name
    shutil.copytree(prepared.parent, place)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "downloaded")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def test_what_was_downloaded_is_read_offline_without_the_network(in_the_cache, monkeypatch, datasets):
    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: pytest.fail("asked the hub"))
    for name, problem in (
        ("openai/gsm8k:main/test", "test?"), ("openai/gsm8k:main/train", "train?"), ("openai/gsm8k", "test?"),
    ):  # fmt: skip
        assert load_benchmark(name, offline=True) == [Problem("gsm8k/1", problem, "2", None)]
    assert "Couldn't reach 'openai/other' on the Hub (OfflineModeIsEnabled)" in refusal("openai/other", offline=True)
    assert "Available configs in the cache: ['main']" in refusal("openai/gsm8k:socratic/test", offline=True)
    assert "has no split 'dev'; it has " in refusal("openai/gsm8k:main/dev", offline=True)
    assert datasets.config.HF_HUB_OFFLINE is False


def test_row_of_a_hub_dataset_is_named(monkeypatch, datasets):
    rows = datasets.DatasetDict({"test": datasets.Dataset.from_list([{"question": "1?", "result": "1"}])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    assert "o/n:main/test (row 1): no answer: the record has question, result" in refusal("o/n:main/test")


def test_hub_that_cannot_be_reached_is_one_line(monkeypatch, datasets):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach\n'o/n' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert "cannot load o/n by the datasets library: ConnectionError: Couldn't reach 'o/n' on the Hub" in refusal("o/n")


@pytest.mark.parametrize(
    "name", ["data/gsm8k.jsonl", "data/gsm8k.csv:test", "gsm8k", "a/b/c", "some:test", "/nowhere/at/all"]
)
def test_name_that_is_no_hub_id_is_not_looked_up(monkeypatch, name):
    monkeypatch.setattr(benchmark_files, "_library", lambda *_: pytest.fail("asked the hub"))
    assert f"no benchmark {name!r}: neither a file, a folder, a hub id like openai/gsm8k, nor `demo`" in refusal(name)


@pytest.mark.parametrize("part", ["a/b/c", "", "/test", "main/"])
def test_part_in_another_form_is_refused(part):
    assert "behind the colon stands SPLIT or CONFIGURATION/SPLIT" in refusal(f"openai/gsm8k:{part}")


def test_folder_and_file_with_a_colon_in_their_name_are_found(tmp_path, datasets):
    write_lines(tmp_path / "a:b" / "test.jsonl", ROWS)
    assert len(load_benchmark(str(tmp_path / "a:b"))) == 2
    assert len(load_benchmark(f"{tmp_path / 'a:b'}:test")) == 2
    assert len(load_benchmark(write_lines(tmp_path / "c:d.jsonl", ROWS))) == 2
