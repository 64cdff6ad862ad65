"""What tests do with the page in a browser, and what they see there. Selenium is imported once there is a browser."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 15.0


class Keys:
    """Keys without a character, as WebDriver names them."""

    TAB, ENTER, ESCAPE, SPACE, HOME = "\ue004", "\ue007", "\ue00c", " ", "\ue011"
    LEFT, UP, RIGHT, DOWN = "\ue012", "\ue013", "\ue014", "\ue015"


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


def start_chromium(profile: Path) -> Any:
    """Start a browser with a new profile; `quit` ends it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


class Browser:
    """One tab. Selectors are those of CSS."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def view(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the window and the preferred colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})

    def open(self, url: str) -> None:
        self.driver.get(url)

    def console(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script of the tests' own; it is not bound by the page's policy."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition` holds, and return what it gave."""
        end = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < end, f"in vain; the console says {self.console()}"
            time.sleep(0.02)
        return found

    def settle(self) -> None:
        """Wait until the page has drawn what it was told."""
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    # ---- what is there

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def style(self, selector: str, name: str) -> str:
        """A computed style of the first element that fits."""
        script = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"
        return self.run(script, selector, name)

    def rgb(self, selector: str, name: str) -> tuple[float, ...]:
        """A computed colour as red, green and blue in [0, 1], in whatever space it was computed."""
        script = """
            const context = document.createElement("canvas").getContext("2d");
            context.fillStyle = arguments[0];
            context.fillRect(0, 0, 1, 1);
            return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);"""
        return tuple(part / 255 for part in self.run(script, self.style(selector, name)))

    def value(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).value", selector)

    def steps(self, panel: int = 0, kind: str = "") -> set[int]:
        """Ids of the nodes that a panel shows, the root's too; of one kind, if it is given."""
        script = """
            const panel = document.querySelectorAll(".panel")[arguments[0]];
            return [...panel.querySelectorAll("[role=treeitem]" + arguments[1])].map((e) => Number(e.dataset.id));"""
        return set(self.run(script, panel, f".{kind}" if kind else ""))

    @property
    def focused(self) -> int:
        """Id of the node that has the focus."""
        return int(self.run("return document.activeElement.dataset.id ?? -1"))

    # ---- what is done

    def slide(self, stop: int) -> None:
        script = """
            const slider = document.getElementById("slider");
            slider.value = arguments[0];
            slider.dispatchEvent(new Event("input"));"""
        self.run(script, stop)
        self.settle()

    def press(self, *keys: str) -> None:
        for key in keys:
            self._actions().send_keys(key).perform()
            self.settle()

    def click(self, element: Any) -> None:
        if isinstance(element, str):
            element = self.one(element)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        self._actions().move_to_element(element).click().perform()
        self.settle()

    def _actions(self) -> Any:
        from selenium.webdriver.common.action_chains import ActionChains

        return ActionChains(self.driver)

    def click_step(self, node_id: int) -> None:
        self.click(f'[data-id="{node_id}"] .dot')

    def fill(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)
