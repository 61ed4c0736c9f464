"""A real browser without a network, and a dashboard that runs as its users run it."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes import TIMEOUT

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--window-size=1200,900"),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # no other machine has an address
)


@contextmanager
def served(home: Path, more: Sequence[str] = ()) -> Iterator[str]:
    """The address of a dashboard of the runs in a folder."""
    command = ["-m", "peerage", "ui", "--runs", str(home), "--port", "0", "--no-browser", *more]
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            yield found[0]
        finally:
            process.terminate()
        assert "dashboard ended" in process.stdout.read()
        assert process.wait(TIMEOUT) == 0


class Browser:
    """A browser with explicit waits."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver = driver
        self.base = address.partition("/?")[0]

    def open(self, path: str) -> None:
        self.driver.get(self.base + path)

    def emulate(self, width: int = 1200, height: int = 900, theme: str = "light") -> None:
        """Another size of the screen, and another colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def wait(self, happened: Callable[[], Any]) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        ignored = (StaleElementReferenceException,)
        waiting = WebDriverWait(self.driver, TIMEOUT, 0.1, ignored_exceptions=ignored)
        return waiting.until(lambda _: happened())

    def wait_text(self, selector: str, pattern: str) -> str:
        def found() -> str | None:
            texts = [element.text for element in self.all(selector)]
            return next((text for text in texts if re.search(pattern, text)), None)

        return str(self.wait(found))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def pixels(self) -> list[list[int]]:
        """The colours of the canvas that holds the network, as distinct [red, green, blue]."""
        script = """
          const canvas = document.getElementById("graph");
          const copy = new OffscreenCanvas(canvas.width, canvas.height);
          const pen = copy.getContext("2d", {willReadFrequently: true});
          pen.drawImage(canvas, 0, 0);
          const data = pen.getImageData(0, 0, canvas.width, canvas.height).data, found = new Map();
          for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) {
            const colour = data.slice(i, i + 3).join();
            found.set(colour, (found.get(colour) || 0) + 1);
          }
          return [...found].filter(([, n]) => n > 20).map(([text]) => text.split(",").map(Number));
        """
        return list(self.run(script))

    def shows(self, *colours: str) -> bool:
        """Whether the canvas has areas of all these colours, written as #rrggbb."""
        wanted = [[int(one[at : at + 2], 16) for at in (1, 3, 5)] for one in colours]
        found = self.pixels()
        return all(one in found for one in wanted)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a list."""
        from selenium.webdriver.support.ui import Select

        Select(self.one(selector)).select_by_value(value)

    def downloaded(self, folder: Path, link: Any) -> Path:
        """Click a link that downloads, and wait for its file."""
        before = set(folder.iterdir())
        behaviour = {"behavior": "allow", "downloadPath": str(folder)}
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
        link.click()

        def arrived() -> Path | None:
            new = set(folder.iterdir()) - before
            return next((one for one in new if one.suffix not in (".crdownload", ".tmp")), None)

        file = self.wait(arrived)
        assert isinstance(file, Path)
        self.wait(lambda: not list(folder.glob("*.crdownload")))
        return file


@contextmanager
def opened(address: str) -> Iterator[Browser]:
    """A browser that has opened the dashboard; a test is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("not installed: chromium, chromium-driver (make tools installs them)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(TIMEOUT)
    driver.set_script_timeout(TIMEOUT)
    try:
        driver.get(address)
        yield Browser(driver, address)
    finally:
        driver.quit()


@contextmanager
def without_errors(browser: Browser) -> Iterator[Browser]:
    """The browser; it is an error if its console has one in the end."""
    browser.errors()
    browser.emulate()
    yield browser
    errors = browser.errors()
    assert not errors, errors
