"""`espalier view` writes the page of traces that `espalier solve` recorded."""

import json
import webbrowser
from pathlib import Path

import pytest

from espalier.search.growth import search as running

SOLVE = ("solve", "Tom has 38 coins. (a) He finds 47 more. (b) He loses 25. How many coins does he have now?")


def embedded(page: Path) -> list[dict]:
    """The traces in a page."""
    text = page.read_text()
    begin = text.index('id="traces">') + len('id="traces">')
    return json.loads(text[begin : text.index("</script>", begin)])


@pytest.fixture
def traces(espalier, tmp_path, monkeypatch) -> list[Path]:
    monkeypatch.setattr(running, "_PARTIAL_SECONDS", 0.0)
    files = [tmp_path / "beam.json", tmp_path / "best.json"]
    for file, algorithm in zip(files, ("beam", "best-of-n"), strict=True):
        assert espalier(*SOLVE, "-a", algorithm, "-N", 3, "-M", 2, "--trace", file).code == 0
    return files


def test_a_recorded_trace_becomes_a_page_beside_it(espalier, traces, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail("nobody asked for a browser"))
    ran = espalier("view", traces[0])
    assert ran.code == 0, ran.err
    page = traces[0].with_suffix(".html")
    assert ran.out.strip() == f"page  {page}"
    assert embedded(page) == [json.loads(traces[0].read_text())]


def test_two_traces_become_one_page_where_it_is_wanted(espalier, traces, tmp_path):
    ran = espalier("view", *traces, "--html", tmp_path / "both.html")
    assert ran.code == 0, ran.err
    beam, best = embedded(tmp_path / "both.html")
    assert (beam["configuration"]["algorithm"], best["configuration"]["algorithm"]) == ("beam", "best-of-n")
    assert len(best["rounds"][0]["moments"]) > 1, "paths that ran to their ends are seen to grow"


def test_the_page_is_opened_on_request(espalier, traces, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(opened.append(url)))
    ran = espalier("view", traces[0], "--open")
    assert opened == [traces[0].with_suffix(".html").as_uri()]
    assert ran.code == 0
    assert "no browser" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.json"], "cannot read a trace"),
        (["beam.json", "best.json", "beam.json"], "2 searches at most, 3 are given"),
        (["beam.json", "--html", "page.txt"], "must end in .html"),
        (["trace.html"], "is a trace; name another file"),
    ],
)
def test_mistakes_are_told_in_one_line_and_write_nothing(espalier, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.html").write_text("{}")
    ran = espalier("view", *arguments)
    assert ran.code == 2
    assert said in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["trace.html"]
    assert (tmp_path / "trace.html").read_text() == "{}"
