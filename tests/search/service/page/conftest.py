"""A headless Chromium for the tests marked `browser`; without one they are skipped."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_driver import Browser
from page_server import PageServer, trace

from espalier.search.service.page.standalone import standalone_page

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chromium
    chromium.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
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
def open_traces(browser: Any, tmp_path: Path) -> Callable[..., Any]:
    """Opens the self-contained page of traces, given as they are or by their recorded names."""

    def open_page(*traces: Any) -> Any:
        file = tmp_path / "page.html"
        file.write_text(standalone_page([trace(one) if isinstance(one, str) else one for one in traces]))
        browser.open(file.as_uri())
        browser.wait(lambda: browser.all("[role=treeitem]"))
        return browser

    return open_page
