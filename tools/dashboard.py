"""Makes the pictures of the dashboard in docs/dashboard.md, from real runs, in a headless browser.

    python tools/dashboard.py [docs/images]

It needs chromium and chromedriver (`make tools`), and takes a few minutes.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

RUN = "run facade-quick --engine serial --nodes 24 --clusters 16/8:rotate --rounds 40"
SMALL = "--nodes 20 --rounds 30 --epochs 1 --engine serial"
COMPARE = f"compare --algorithms decavg,dechw --seeds 2 {SMALL}"
TIMEOUT = 300  # seconds
FRAME = 9  # of the replay: some nodes have learnt more than others by then
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
SHOTS = {  # name -> page, width, theme, what must be there, the last element of the picture
    "dashboard-run": ("/run/facade", 1200, "light", ".picture img", "#live"),
    "dashboard-dark": ("/run/facade", 1200, "dark", ".picture img", "#live"),
    "dashboard-list": ("/", 1200, "light", "#runs tbody tr", "main > .table-panel"),
    "dashboard-compare": ("/compare?study=study", 1200, "light", "#table td", ".table-panel"),
    "dashboard-new": ("/new", 1200, "light", "#main-fields input", "#form"),
    "dashboard-narrow": ("/run/facade", 400, "light", ".picture img", "#network"),
}
MARGIN = 12  # pixels below the last element
BOTTOM = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom + scrollY"
CHOOSE = """
  const set = (id, value, event) => {
    const field = document.getElementById(id);
    field.value = value;
    field.dispatchEvent(new Event(event));
  };
  set("number", 5, "change");
  set("slider", arguments[0], "input");
"""


def peerage(arguments: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "peerage", *arguments.split(), *more]


def take(driver: Any, base: str, name: str, folder: Path) -> None:
    page, width, theme, ready, last = SHOTS[name]
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    resize(driver, width, 900)
    driver.get(base + page)
    wait = WebDriverWait(driver, TIMEOUT)
    wait.until(lambda d: d.find_elements("css selector", ready))
    if page.startswith("/run"):
        wait.until(lambda d: d.execute_script("return document.querySelector('#slider').max > 0"))
        driver.execute_script(CHOOSE, FRAME)
        wait.until(lambda d: d.find_elements("css selector", "#node-body polyline"))
    resize(driver, width, round(driver.execute_script(BOTTOM, last)) + MARGIN)
    driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 500))")
    path = folder / f"{name}.png"
    driver.save_screenshot(str(path))
    with Image.open(path) as picture:
        picture.convert("RGB").save(path, optimize=True)  # a palette would tint the greys


def resize(driver: Any, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def main(folder: Path) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in FLAGS:
        options.add_argument(flag)
    with tempfile.TemporaryDirectory() as home:
        subprocess.run(peerage(COMPARE, "--out", f"{home}/study"), check=True)
        subprocess.run(peerage(f"run {SMALL}", "--out", f"{home}/dechw"), check=True)
        subprocess.run(peerage(RUN, "--out", f"{home}/facade"), check=True)
        serve = peerage("ui --port 0 --no-browser --runs", home)
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            # With its path given, selenium looks for no driver elsewhere.
            service = webdriver.ChromeService(shutil.which("chromedriver"))
            driver = webdriver.Chrome(options=options, service=service)
            try:
                driver.get(found[0])
                for name in SHOTS:
                    take(driver, found[0].partition("/?")[0], name, folder)
            finally:
                driver.quit()
                server.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
