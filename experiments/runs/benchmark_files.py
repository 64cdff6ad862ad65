"""Reads the records of a benchmark, each with its place: from a file, a folder of the `datasets` library, or the hub.

- A file is JSON in UTF-8 (one object per line, or one array of objects), CSV or TSV with a header, or Parquet.
- A folder is one that `save_to_disk` of the `datasets` library has written, or one of such files; which of them are
  which configuration and split is for that library to say, by the files' names or the folder's `README.md`.
- A hub id is `OWNER/NAME`, or `OWNER/NAME@REVISION`; it is downloaded once, by that library.

`:SPLIT` or `:CONFIGURATION/SPLIT` behind a folder or hub id says which part is read, as in `openai/gsm8k:main/test`.
Without it, that is the only split, or `test`.
"""

import csv
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from espalier.engine.errors import EspalierError, nearest, nearest_file

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of files; one without any of them is read as JSON."""

_BLANKS = re.compile(r"[ \t\r\n]*+")
_HUB_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
_PART = re.compile(r"((?P<configuration>[^/]+)/)?(?P<split>[^/]+)")
_ROWS_AT_ONCE = 256
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_SAVED = ("dataset_dict.json", "state.json")
"""Files that `save_to_disk` writes into a folder of several splits, and of one."""


class BenchmarkError(EspalierError):
    """A benchmark is missing or has a record in an unknown format."""


class Record(NamedTuple):
    """One record: where it is, for messages; its line, or its number from 1; and its fields."""

    place: str
    number: int
    fields: Any


class Part(NamedTuple):
    """A configuration and a split of a dataset; None for the only one."""

    configuration: str | None = None
    split: str | None = None


def read_records(name: str, offline: bool = False) -> tuple[str, Iterator[Record]]:
    """The records of a benchmark, read when they are needed; and a short name of it, for the ids of its problems.

    Args:
        name: a file, a folder or a hub id; see this module.
        offline: take what is of the hub from the datasets library's cache, and use no network.

    Raises:
        BenchmarkError: there is no such benchmark, or it cannot be read; names the file and the line or row.
    """
    path = Path(name)
    if os.path.isfile(path):  # which, unlike `path.is_file`, takes any name
        return path.stem, _of_file(path)
    source, part = _source_and_part(name)
    folder = Path(source)
    if os.path.isdir(folder):
        return folder.resolve().name, _of_folder(folder, part)
    if (found := _HUB_NAME.fullmatch(source)) and folder.suffix.lower() not in SUFFIXES:
        return found["repository"].partition("/")[2], _of_hub(found["repository"], found["revision"], part, offline)
    hint = nearest(name, ("demo", "demo-training")) or nearest_file(path)
    known = "a file, a folder, a hub id like openai/gsm8k, nor `demo` or `demo-training`"
    raise BenchmarkError(f"no benchmark {name!r}: neither {known}{hint}")


def _source_and_part(name: str) -> tuple[str, Part]:
    source, mark, text = name.rpartition(":")
    if not mark or os.path.isdir(name):
        return name, Part()
    if not (found := _PART.fullmatch(text)):
        raise BenchmarkError(f"no benchmark {name!r}: behind the colon stands SPLIT or CONFIGURATION/SPLIT")
    return source, Part(found["configuration"], found["split"])


def _of_file(path: Path) -> Iterator[Record]:
    """Records of a file, by its suffix; JSON unless it is another one."""
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return _of_table(path)
    return _of_parquet(path) if suffix == ".parquet" else read_json(path)


def _read(path: Path) -> str:
    """The text of a file, with the ends of lines that it has."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BenchmarkError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        wrong = f"{error.reason} ({error.object[error.start]:#x})"
        raise BenchmarkError(f"{path}:{line}: not text in UTF-8: {wrong}") from error


# --- JSON ------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Iterator[Record]:
    """Records of a file of JSON: one object a line, or one array of objects.

    Raises:
        BenchmarkError: the file cannot be read or is no such JSON; names the line.
    """
    text = _read(path).replace("\r\n", "\n").replace("\r", "\n")
    if text.lstrip().startswith("["):
        yield from _of_json_array(path, text)
        return
    # Not splitlines(), which also splits at characters that may occur in a record.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            with _json_errors(path, number, number):
                fields = json.loads(line, object_pairs_hook=_object)
            yield _whole(Record(f"{path}:{number}", number, fields), line)


def _of_json_array(path: Path, text: str) -> Iterator[Record]:
    """Parse records one by one, so that each has its line number, and stop when no more are needed."""
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    position, line, counted, number = _past_blanks(text, text.index("[") + 1), 1, 0, 0
    while number or not text.startswith("]", position):
        number += 1
        line, counted = line + text.count("\n", counted, position), position
        with _json_errors(path, 1, line):
            fields, end = decoder.raw_decode(text, position)
        yield _whole(Record(f"{path}:{line} (record {number})", number, fields), text[position:end])
        position = _past_blanks(text, end)
        if text.startswith("]", position):
            break
        if not text.startswith(",", position):
            raise BenchmarkError(f"{path}:{line}: record {number} of the array is not followed by a comma or bracket")
        position = _past_blanks(text, position + 1)
    if text[position + 1 :].strip():
        raise BenchmarkError(f"{path}: there is text after the array of records")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object, unless it names a field twice: json would take the last of them."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object names {repeated!r} twice")
    return fields


def _whole(record: Record, text: str) -> Record:
    """The record that was read from `text`, unless one of its texts holds a lone surrogate, which cannot be written."""
    if "\\ud" in text or "\\uD" in text:
        named = record.fields.items() if isinstance(record.fields, dict) else [("record", record.fields)]
        for name, value in named:
            if lone := _LONE_SURROGATE.search(json.dumps([name, value], ensure_ascii=False)):
                what = f"holds {lone[0]!a}, a lone surrogate, which is no character"
                raise BenchmarkError(f"{record.place}: its {name!a} {what}")
    return record


def _past_blanks(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position


@contextmanager
def _json_errors(path: Path, first_line: int, line: int) -> Iterator[None]:
    """Turn errors into BenchmarkErrors with file and line; the text starts on `first_line`, the record on `line`."""
    try:
        yield
    except json.JSONDecodeError as error:
        place = f"{path}:{first_line + error.lineno - 1}"
        wanted = "one JSON object per line, or one array of objects"
        raise BenchmarkError(f"{place}: not JSON: {error.msg} (column {error.colno}); expected {wanted}") from error
    except (ValueError, RecursionError) as error:
        raise BenchmarkError(f"{path}:{line}: JSON that cannot be read: {error}") from error


# --- Tables ----------------------------------------------------------------------------------------------------------


def _of_table(path: Path) -> Iterator[Record]:
    """Records of CSV or TSV: cells are texts, and an empty one is no value."""
    # The reader itself must see the ends of lines, which may be part of a cell.
    rows = StringIO(_read(path), newline="")
    reader = csv.reader(rows, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
    header: list[str] = []
    line, number = 1, 0  # the line on which a row begins
    try:
        for cells in reader:
            if cells and not header:
                header = [name.strip() for name in cells]
                if repeated := [name for name in dict.fromkeys(header) if header.count(name) > 1]:
                    raise BenchmarkError(f"{path}:{line}: the header names {', '.join(map(repr, repeated))} twice")
            elif cells:
                if len(cells) != len(header):
                    what = f"{len(cells)} cells, but the header names {len(header)} fields"
                    raise BenchmarkError(f"{path}:{line}: {what}")
                number += 1
                fields = {name: cell or None for name, cell in zip(header, cells, strict=True) if name}
                yield Record(f"{path}:{line}", number, fields)
            line = reader.line_num + 1
    except csv.Error as error:
        raise BenchmarkError(f"{path}:{line}: not a row of a table: {error}") from error


def _of_parquet(path: Path) -> Iterator[Record]:
    parquet, arrow = _library("pyarrow.parquet", path), _library("pyarrow", path)
    try:
        with parquet.ParquetFile(path) as file:
            yield from _numbered(str(path), file.iter_batches(batch_size=_ROWS_AT_ONCE))
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise BenchmarkError(f"{path}: not Parquet that can be read: {_in_one_line(error)}") from error


# --- The datasets library --------------------------------------------------------------------------------------------


def _of_folder(folder: Path, part: Part) -> Iterator[Record]:
    datasets = _library("datasets", folder)
    if any((folder / name).is_file() for name in _SAVED):
        if part.configuration:
            raise BenchmarkError(f"{folder} was written by save_to_disk and has no configurations; write FOLDER:SPLIT")
        with _dataset_errors(str(folder)):
            saved = datasets.load_from_disk(str(folder))
        splits = saved if isinstance(saved, dict) else {str(saved.split or part.split or "all"): saved}
        yield from _rows(f"{folder}", splits, part)
        return
    # The library would copy the rows into its cache, and say less about wrong ones: only the files' names are from it.
    with tempfile.TemporaryDirectory() as cache, _dataset_errors(str(folder)):
        builder = datasets.load_dataset_builder(str(folder), part.configuration, cache_dir=cache)
    files: Mapping[str, Iterable[str]] = {str(split): found for split, found in builder.config.data_files.items()}
    paths = [Path(file) for file in files[_chosen(str(folder), files, part)]]
    if wrong := [path for path in paths if path.suffix.lower() not in SUFFIXES]:
        raise BenchmarkError(f"{wrong[0]} cannot be read; a folder's files end in {', '.join(SUFFIXES)}")
    for number, record in enumerate(chain.from_iterable(map(_of_file, paths)), start=1):
        yield record._replace(number=number)


def _of_hub(repository: str, revision: str | None, part: Part, offline: bool) -> Iterator[Record]:
    datasets = _library("datasets", repository)
    name = f"{repository}@{revision}" if revision else repository
    config = datasets.config  # the library has no argument for it, and reads the environment only when imported
    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, offline or config.HF_HUB_OFFLINE
    try:
        with _dataset_errors(repository):
            splits = datasets.load_dataset(repository, part.configuration, revision=revision)
    finally:
        config.HF_HUB_OFFLINE = before
    yield from _rows(name, splits, part)


def _rows(name: str, splits: Mapping[str, Any], part: Part) -> Iterator[Record]:
    split = _chosen(name, splits, part)
    place = f"{name}:{part.configuration}/{split}" if part.configuration else f"{name}:{split}"
    # As Arrow's tables, in which images and sounds are not decoded.
    yield from _numbered(place, splits[split].with_format("arrow").iter(batch_size=_ROWS_AT_ONCE))


def _numbered(place: str, tables: Iterable[Any]) -> Iterator[Record]:
    """The rows of Arrow's tables, with their numbers."""
    for number, fields in enumerate((row for table in tables for row in table.to_pylist()), start=1):
        yield Record(f"{place} (row {number})", number, fields)


def _chosen(name: str, splits: Iterable[str], part: Part) -> str:
    """The split that is read: the one asked for, the only one, or `test`."""
    found = [str(split) for split in splits]
    if part.split is None and (len(found) == 1 or "test" in found):
        return found[0] if len(found) == 1 else "test"
    if part.split in found:
        return str(part.split)
    missing = f"no split {part.split!r}" if part.split else "no split `test`"
    where = f"{name}:{part.configuration}/" if part.configuration else f"{name}:"
    raise BenchmarkError(f"{name} has {missing}; it has {', '.join(found)}: write {where}{found[0]}")


@contextmanager
def _dataset_errors(source: str) -> Iterator[None]:
    """Turn the library's errors into BenchmarkErrors; it raises many kinds, and of the hub's client and of Arrow."""
    try:
        yield
    except Exception as error:
        # With one of these, the library lists the configurations that there are.
        hint = f"; write {source}:CONFIGURATION/SPLIT" if isinstance(error, ValueError) else ""
        raise BenchmarkError(f"cannot load {source} by the datasets library: {_in_one_line(error)}{hint}") from error


def _library(name: str, wanted_for: object) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        needed = f"{name.partition('.')[0]}, which cannot be imported ({error})"
        how = "pip install 'espalier-search[datasets]'"
        raise BenchmarkError(f"reading {wanted_for} needs {needed}: {how}") from error


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
