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
COLOURS = 128  # of a picture, which keeps its file small
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
SHOTS = {  # name -> page, width, height, theme, what must be there
    "dashboard-run": ("/run/facade", 1200, 1010, "light", ".picture img"),
    "dashboard-dark": ("/run/facade", 1200, 1010, "dark", ".picture img"),
    "dashboard-list": ("/", 1200, 420, "light", "#runs tbody tr"),
    "dashboard-compare": ("/compare?study=study", 1200, 900, "light", "#table tbody tr"),
    "dashboard-new": ("/new", 1200, 900, "light", "#main-fields input"),
    "dashboard-narrow": ("/run/facade", 400, 1000, "light", ".picture img"),
}


def peerage(arguments: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "peerage", *arguments.split(), *more]


def take(driver: Any, base: str, name: str, folder: Path) -> None:
    page, width, height, theme, ready = SHOTS[name]
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(base + page)
    wait = WebDriverWait(driver, TIMEOUT)
    wait.until(lambda d: d.find_elements("css selector", ready))
    if page.startswith("/run"):
        wait.until(lambda d: d.execute_script("return document.querySelector('#slider').max > 0"))
        choose = (
            "const n = document.getElementById('number'); n.value = 5;"
            "n.dispatchEvent(new Event('change'))"
        )
        driver.execute_script(choose)
        wait.until(lambda d: d.find_elements("css selector", "#node-body polyline"))
    path = folder / f"{name}.png"
    driver.save_screenshot(str(path))
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)


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
