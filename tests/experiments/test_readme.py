"""The first page is short, every command and example in it runs, and no README links to what is not there."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from readme_files import ROOT, anchors, blocks, commands, links, pages, text_of, words

from espalier.experiments.cli.main import app as espalier_app
from espalier.experiments.demo import generator_path
from espalier.experiments.demo.taught import not_taught
from espalier.experiments.lab.__main__ import app as lab

MAX_LINES = 230
GRPC, HTTP = "127.0.0.1:50051", "127.0.0.1:8080"
"""Addresses of a server on the pages."""

RUN: dict[str, list[str]] = {
    'espalier solve "Tom starts with 63 coins. (a) He finds 58 more. (b) He gives away 35. '
    'How many coins does Tom have now?" -N 4 -M 4': [],
    "espalier eval --benchmark demo --algorithm best-of-n -N 16 --limit 50 --out runs/best": ["--limit", "2"],
    "espalier sweep -N 1,2,4 -M 1,2,4 --benchmark demo --limit 60 --out runs/sweep": ["--limit", "1"],
}
"""Commands of the first page that are run as they stand, and what is added for fewer problems."""

SERVED = {
    "espalier serve --port 50051 --http-port 8080 &",
    f'espalier solve --endpoint {GRPC} "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. '
    'How many coins does he have now?" --json',
}
"""Those that are run together, on a free port."""

MADE = {"make demo": "espalier solve", "make test": "pytest"}
"""Those of which only the recipe is looked at, and what it has to run."""

ONLY_READ = {
    "espalier solve --generator Qwen/Qwen2.5-1.5B-Instruct --verifier Qwen/Qwen2.5-Math-PRM-7B --kv-memory 8G "
    '"What is 2 + 3 + 4?"',
    "espalier models inspect small.gguf large.gguf --memory 8G",
    "espalier eval --generator small.gguf --verifier confidence --benchmark gsm8k_test.jsonl --limit 200 "
    "--algorithm best-of-n -N 16 --early-stop off --trees --out small-16",
    "espalier learn-verifier --generator small.gguf --trunk large.gguf --benchmark gsm8k_train.jsonl --limit 500 -N 8 "
    "--test small-16 --out evidence",
    "espalier advise --generator small.gguf --verifier large.gguf --verifier-family evidence/verifier "
    "--benchmark gsm8k_more.jsonl --limit 60",
}
"""Those that need a download: their options are read, and nothing is run."""


def test_the_first_page_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= MAX_LINES


def test_every_command_of_the_first_page_has_its_test_and_no_test_is_left_over() -> None:
    assert sorted(commands("README.md")) == sorted([*RUN, *SERVED, *MADE, *ONLY_READ])


@pytest.mark.parametrize("command", RUN)
def test_a_command_of_the_first_page_runs(
    command: str, espalier: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = espalier(*words(command)[1:], *RUN[command])
    assert ran.code == 0, ran.err
    assert ran.out


@pytest.mark.parametrize("command", [line for line in commands("search/README.md") if "-form" in line])
def test_the_examples_of_forms_answer_rightly(command: str, espalier: Callable[..., Any]) -> None:
    ran = espalier(*words(command)[1:])
    assert ran.code == 0, ran.err
    assert re.search(r"answer\b[\s\S]*\b73\b", ran.out), ran.out


@pytest.mark.parametrize("command", MADE)
def test_make_runs_what_the_first_page_says(command: str) -> None:
    recipe = subprocess.run(
        [*words(command), "--dry-run", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    assert recipe.returncode == 0, recipe.stderr
    assert MADE[command] in recipe.stdout


def parse(command: str) -> None:
    """Read a command's options as it would itself, without running it."""
    program, *given = words(command)
    if program == "make":
        assert re.search(rf"^{given[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), command
        return
    if program == "python":
        assert given[:2] == ["-m", "espalier.experiments.lab"], command
        given = given[2:]
    else:
        assert program in ("espalier", ".venv/bin/espalier"), command
    parser: Any = typer.main.get_command(lab if program == "python" else espalier_app)
    while hasattr(parser, "get_command"):
        parser = parser.get_command(None, given.pop(0))
    parser.make_context(parser.name, given)


@pytest.mark.parametrize(("page", "command"), [(page, command) for page in pages() for command in commands(page)])
def test_every_readme_gives_commands_with_options_that_exist(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out.json").touch()  # what one command of a page writes and the next one reads
    parse(command)


def test_a_command_with_an_unknown_option_is_found() -> None:
    with pytest.raises(Exception, match="--beam-with"):
        parse('espalier solve "…" --beam-with 4')


@pytest.fixture(scope="module")
def at_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Puts the addresses of a server of the bundled pair, started by the first page's command, into a page's text.

    It may reload its generator's weights from `step-100`, which are the same.
    """
    weights = tmp_path_factory.mktemp("weights")
    shutil.copytree(generator_path(), weights / "step-100")
    environment = {**os.environ, "ESPALIER_THREADS": "1", "ESPALIER_RELOAD_FOLDER": str(weights)}
    (serve,) = (command for command in SERVED if " serve " in command)
    free = words(serve.replace("50051", "0").replace("8080", "0"))
    command = [sys.executable, "-m", "espalier.experiments.cli.main", *free[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        grpc, http = re.findall(r"127\.0\.0\.1:\d+", server.stdout.readline())
        yield lambda text: text.replace(GRPC, grpc).replace(HTTP, http)
        server.terminate()


def test_the_served_commands_run_together(at_server: Callable[[str], str], espalier: Callable[..., Any]) -> None:
    (solve,) = (command for command in SERVED if " solve " in command)
    ran = espalier(*words(at_server(solve))[1:])
    assert ran.code == 0, ran.err
    assert '"answer"' in ran.out


EXAMPLES = [(page, number) for page in pages() for number in range(len(blocks(page, "python")))]


@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_every_python_example_runs(
    page: str, number: int, at_server: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    example = at_server(blocks(page, "python")[number])
    exec(compile(example, page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


CALLS = [
    (page, number)
    for page in pages()
    for number, text in enumerate(blocks(page, "sh"))
    if text.startswith("curl ")  # others install and start what is not this test's to touch
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("page", "number"), CALLS)
def test_every_call_of_the_server_from_a_shell_is_answered(
    page: str, number: int, at_server: Callable[[str], str]
) -> None:
    call = at_server(blocks(page, "sh")[number])
    ran = subprocess.run(["sh", "-c", call], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    if "/v1/completions" in call:
        assert [choice["index"] for choice in json.loads(ran.stdout)["choices"]] == [0, 1, 2, 3]
    elif "/v1/reload" in call:
        assert json.loads(ran.stdout).keys() == {"digest", "digest_before", "seconds"}
    elif "/v1/score" in call:
        right, wrong = (entry["score"] for entry in json.loads(ran.stdout)["data"])
        assert right > wrong
    else:
        assert '"answer":"73"' in ran.stdout, "38 + 47 - 12, as all of them ask"
        assert '"warnings":[]' in ran.stdout or ("/v2/" in call and "warnings" not in ran.stdout)


@pytest.mark.parametrize("page", pages())
def test_every_problem_of_a_page_is_one_that_the_pair_was_taught(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    problems = re.findall(r"""(?<=["'\n])[A-Z][^"'\n]*(?:\(a\)[^"'\n]*How many| coins\.)[^"'\n?]*\?""", text)
    assert [found for problem in problems if (found := not_taught(problem))] == []


@pytest.mark.parametrize("page", pages())
def test_links_lead_to_files_and_headings_that_exist(page: str) -> None:
    broken = []
    for file, heading in links(page):
        target = (ROOT / page).parent / file if file else ROOT / page
        if not target.exists():
            broken.append(file)
        elif heading:
            readme = target / "README.md" if target.is_dir() else target
            if heading not in anchors(str(readme.resolve().relative_to(ROOT))):
                broken.append(f"{file}#{heading}")
    assert broken == []


def test_the_first_page_leads_to_every_other_page() -> None:
    reached = {"README.md"}
    open_pages = ["README.md"]
    while open_pages:
        page = open_pages.pop()
        for file, _ in links(page):
            target = (ROOT / page).parent / file
            target = (target / "README.md" if target.is_dir() else target).resolve()
            name = str(target.relative_to(ROOT))
            if name.endswith(".md") and target.is_file() and name not in reached:
                reached.add(name)
                open_pages.append(name)
    assert set(pages()) - reached == set()
