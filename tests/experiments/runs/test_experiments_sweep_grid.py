"""The grid of a sweep: values, cells, names and grid files."""

import json
from pathlib import Path

import pytest

from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.experiments.runs.grid import (
    FIELDS,
    cell_name,
    distinct,
    is_cell_name,
    read_grid,
    read_values,
    requests_of,
)
from espalier.experiments.runs.grid import varied_fields as varied
from espalier.search.algorithms import with_defaults
from espalier.search.request import AlgorithmName, SearchRequest

LISTS = {"algorithm": [AlgorithmName.BEAM, AlgorithmName.BEST_OF_N], "beam_width": [1, 4], "expansion": [2, 4]}


@pytest.mark.parametrize(
    ("field", "given", "values"),
    [
        ("seed", "0:3", [0, 1, 2]),
        ("seed", "5,0:2", [5, 0, 1]),
        ("beam_width", [1, 4], [1, 4]),
        ("temperature", "0.6, 1", [0.6, 1.0]),
        ("temperature", 1, [1.0]),
        ("algorithm", "beam,best-of-n", ["beam", "best-of-n"]),
    ],
)
def test_values_are_read_from_text_and_lists(field, given, values):
    read = read_values(FIELDS[field], given)
    assert read == values
    assert [type(value) for value in read if field == "temperature"] == [float] * (field == "temperature") * len(read)


@pytest.mark.parametrize(
    ("field", "given", "said"),
    [
        ("seed", "3:1", "must hold between 1"),
        ("seed", "1,0:2", "lists 1 twice"),
        ("seed", "x", "is not a number"),
        ("seed", f"0:{10**12}", "must hold between 1"),
        ("beam_width", [], "at least one"),
        ("beam_width", "", "is not a number"),
    ],
)
def test_wrong_values_are_refused(field, given, said):
    with pytest.raises(ValueError, match=said):
        read_values(FIELDS[field], given)


def test_cells_equal_after_defaults_are_one():
    requests = requests_of({**LISTS, "confidence": [0.9, 0.95]})
    assert len(requests) == 16
    cells = distinct(requests, with_defaults)
    names = [cell_name(with_defaults(cell), varied(cells)) for cell in cells]
    assert names == ["beam-N1-M2", "beam-N1-M4", "beam-N4-M2", "beam-N4-M4", "best-of-n-N1", "best-of-n-N4"]


@pytest.mark.parametrize("algorithm", [AlgorithmName.GREEDY, AlgorithmName.CHAIN])
def test_votes_and_widths_make_no_cells_of_a_single_path(algorithm: AlgorithmName):
    lists = {"vote": ["majority", "weighted"], "beam_width": [1, 2], "early_stop": ["off", "decided"]}
    assert len(distinct(requests_of({"algorithm": [algorithm], **lists}), with_defaults)) == 1


def test_names_are_those_of_old_sweeps_if_only_n_and_m_vary():
    requests = requests_of({"beam_width": [1, 4], "expansion": [2], "seed": [3]})
    assert [cell_name(each, varied(requests)) for each in requests] == ["N1-M2", "N4-M2"]


def test_every_invalid_cell_is_named_by_field():
    with pytest.raises(InvalidRequestError) as raised:
        requests_of({"beam_width": [1, 256, 300], "expansion": [8], "temperature": [0.5, 11.0]})
    assert {violation.field for violation in raised.value.violations} == {"beam_width", "expansion", "temperature"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("grid.yaml", "- {algorithm: beam, beam_width: [1, 4]}\n- {algorithm: [majority], beam-width: 8}\n"),
        ("grid.toml", '[[cells]]\nalgorithm="beam"\nbeam_width=[1,4]\n[[cells]]\nalgorithm="majority"\nbeam_width=8\n'),
        (
            "grid.json",
            json.dumps([{"algorithm": "beam", "beam_width": "1,4"}, {"algorithm": "majority", "beam_width": [8]}]),
        ),
    ],
)
def test_grid_file_gives_cells_and_options_multiply_them(tmp_path: Path, name, text):
    (tmp_path / name).write_text(text)
    requests = requests_of({"seed": [0, 1]}, read_grid(tmp_path / name))
    assert [(r.algorithm, r.beam_width, r.seed) for r in requests] == [
        ("beam", 1, 0), ("beam", 1, 1), ("beam", 4, 0), ("beam", 4, 1), ("majority", 8, 0), ("majority", 8, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot read"),
        ("3", "must hold fields with lists"),
        ("[]", "must hold fields with lists"),
        ("beams: [1]", "no fields of a search: beams"),
        ("beam_width: [x]", r"beam_width \(--beam-width\): 'x' is not a number"),
        ("seed: [1]", "--seed: also in --grid"),
    ],
)
def test_wrong_grid_files_are_refused(tmp_path: Path, text, said):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(EspalierError, match=said):
        requests_of({"seed": [0]}, read_grid(path))


def test_too_many_cells_are_refused():
    with pytest.raises(EspalierError, match="at most 4096 cells, these lists give 4100"):
        requests_of({"seed": list(range(2050)), "beam_width": [1, 2]})
    assert requests_of({}) == [SearchRequest("-")]


def test_run_folders_of_cells_are_told_from_others():
    beam = SearchRequest("-", AlgorithmName.BEAM, beam_width=4, expansion=2, temperature=0.6, seed=3)
    best = SearchRequest("-", algorithm=AlgorithmName.BEST_OF_N, beam_width=4, expansion=2)
    for name in ("N4-M2", "beam-N4-M2", "N4-M2-temperature0.6-seed3", "N4-M2-seed3-2"):
        assert is_cell_name(name, beam), name
    for name in ("best-of-n-N4", "N4-M2"):
        assert is_cell_name(name, best), name
    for name in ("beam", "mine", "N4", "N4-M3", "N4-M2-old", "beam-N4-M2-temperature0.7"):
        assert not is_cell_name(name, beam), name


@pytest.mark.parametrize("name", ["logit_bias", "stop_when", "stop_unsure", "answer_form", "text_form"])
def test_text_that_may_have_commas_is_one_value(name: str):
    assert read_values(FIELDS[name], "13:-100,50:2.5") == ["13:-100,50:2.5"]
    assert read_values(FIELDS[name], ["5:1,6:2", "7:1"]) == ["5:1,6:2", "7:1"]
    assert read_values(FIELDS["step_rule"], "paragraph,tokens:64") == ["paragraph", "tokens:64"]
