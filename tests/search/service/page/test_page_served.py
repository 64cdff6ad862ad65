"""The page as `espalier serve --http-port` sends it, with the bundled pair, in a browser."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest

pytestmark = pytest.mark.browser

PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    callers = tmp_path_factory.mktemp("server") / "callers.toml"
    callers.write_text(f'[ann]\ntoken_sha256 = "{sha256(b"s3cret").hexdigest()}"\n')
    command = [sys.executable, "-m", "espalier.experiments.cli.main", "serve", "--port", "0", "--http-port", "0"]
    with subprocess.Popen(
        [*command, "--callers", str(callers)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ESPALIER_THREADS": "1"},
    ) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found
        yield found.group()
        server.terminate()


@pytest.fixture
def page(browser: Any, url: str) -> Any:
    browser.open(url)
    browser.fill("#problem-text", PROBLEM)
    return browser


@pytest.mark.parametrize("algorithm", ["beam", "best-of-n"])
def test_a_search_grows_and_ends_with_its_answer(page, algorithm):
    page.fill("#token", "s3cret")
    page.run(f"document.querySelector('[name=algorithm]').value = '{algorithm}'")
    page.run("document.querySelector('[name=algorithm]').dispatchEvent(new Event('change'))")
    page.click("#start")
    page.wait(lambda: page.one("#start").is_enabled() and page.all(".won"))
    page.settle()
    assert page.text(".outcome strong") == "73"
    if algorithm == "beam":  # the other is one round, too short to be seen growing
        whole = page.steps()
        page.slide(1)
        assert 1 < len(page.steps()) < len(whole), "what streams say of the tree, not the result alone"


def test_a_token_that_is_wrong_is_told(page):
    page.fill("#token", "wrong")
    page.click("#start")
    page.wait(lambda: page.one("#start").is_enabled() and "the token is unknown to this server" in page.text("body"))
    said = page.wait(lambda: page.console())
    assert all("401" in line for line in said)
