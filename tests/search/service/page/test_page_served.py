"""The page as `espalier serve --http-port` sends it, with the bundled pair, in a browser."""

from collections.abc import Iterator
from typing import Any

import pytest
from callers_files import callers_file

from espalier.experiments.lab.bench.service.server_process import serving

pytestmark = pytest.mark.browser

PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    callers = callers_file(tmp_path_factory.mktemp("server"), s3cret="")
    with serving("--http-port", "0", "--callers", str(callers)) as server:
        assert server.url
        yield server.url


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
