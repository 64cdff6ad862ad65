"""A headless Chromium for the tests marked `browser`; without one they are skipped."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_driver import Browser, start_chromium
from page_server import PageServer
from page_traces import trace

from espalier.search.service.page.files import standalone_page


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("selenium", reason="needs selenium")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver")
    chromium = start_chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Browser]:
    """The browser as after its start; the test fails if the console has anything to say, such as a violated policy."""
    browser = Browser(chromium)
    browser.view(1440, 900)
    yield browser
    said = browser.console()
    chromium.get("about:blank")
    assert said == []


@pytest.fixture
def server() -> Iterator[PageServer]:
    server = PageServer()
    yield server
    server.go_on()
    server.shutdown()
    server.server_close()


@pytest.fixture
def open_traces(browser: Browser, tmp_path: Path) -> Callable[..., Browser]:
    """Opens the self-contained page of traces, given as they are or by their recorded names."""

    def open_page(*traces: Any) -> Browser:
        file = tmp_path / "page.html"
        file.write_text(standalone_page([trace(one) if isinstance(one, str) else one for one in traces]))
        browser.open(file.as_uri())
        browser.wait(lambda: browser.all("[role=treeitem]"))
        return browser

    return open_page
