from pathlib import Path

from numba.core import config

from espalier.kernels.cpu import place_of_compiled


def folder_of(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / f"{name}.py").write_text(text)
    return path


def test_what_is_compiled_is_kept_apart_for_each_state_of_the_folder(tmp_path: Path):
    folder = folder_of(tmp_path / "cpu", one="a = 1\n", two="b = 1\n")
    places = {place_of_compiled(folder, "")}
    assert places == {place_of_compiled(folder, "")}
    (folder / "two.py").write_text("b = 2\n")
    places.add(place_of_compiled(folder, ""))
    places.add(place_of_compiled(folder, "", "another kind"))
    assert len(places) == 3
    assert all(Path(place).parent == folder / "__pycache__" for place in places)


def test_a_place_that_was_asked_for_is_kept_to(tmp_path: Path):
    folder = folder_of(tmp_path / "cpu", one="a = 1\n")
    assert Path(place_of_compiled(folder, str(tmp_path / "there"))).parent == tmp_path / "there"
    assert not (folder / "__pycache__").exists()


def test_where_nothing_can_be_written_numba_finds_a_place_for_itself(tmp_path: Path):
    folder = folder_of(tmp_path / "cpu", one="a = 1\n")
    (folder / "__pycache__").write_text("in the way")
    assert place_of_compiled(folder, "") == ""


def test_kernels_are_kept_there():
    from espalier.kernels.cpu import decoder as layers

    place = str(vars(config)["CACHE_DIR"])
    assert Path(place).is_dir()
    assert vars(layers)["_forward"].stats.cache_path.startswith(place)
