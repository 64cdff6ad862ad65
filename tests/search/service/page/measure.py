"""Prints how long the page works for one stop of the slider, by the size of the tree. No test."""

import tempfile
from pathlib import Path

from page_driver import Browser, start_chromium
from page_traces import wide_trace

from espalier.search.service.page.files import standalone_page

SIZES = ((10, 25), (10, 100), (40, 100))
PARTS = ("ScriptDuration", "RecalcStyleDuration", "LayoutDuration", "TaskDuration")
REPLAY = """
    const [passes, done] = arguments;
    const slider = document.getElementById("slider");
    (async () => {
      for (let pass = 0; pass < passes; pass++) {
        for (let stop = 0; stop <= Number(slider.max); stop++) {
          slider.value = stop;
          slider.dispatchEvent(new Event("input"));
          await new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)));
        }
      }
      done(passes * (Number(slider.max) + 1));
    })();"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        driver = start_chromium(Path(folder) / "profile")
        try:
            browser, file = Browser(driver), Path(folder) / "page.html"
            browser.view(1440, 900)
            driver.set_script_timeout(120)
            driver.execute_cdp_cmd("Performance.enable", {})

            def spent() -> dict[str, float]:
                found = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
                return {metric["name"]: metric["value"] for metric in found}

            for rounds, children in SIZES:
                file.write_text(standalone_page([wide_trace(rounds, children)]))
                browser.open(file.as_uri())
                browser.settle()
                before = spent()
                stops = driver.execute_async_script(REPLAY, 3)
                after = spent()
                took = {part: 1000 * (after[part] - before[part]) / stops for part in PARTS}
                print(f"{rounds * children:>5} steps", *(f"{part} {took[part]:.1f} ms" for part in PARTS), sep="  ")
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
