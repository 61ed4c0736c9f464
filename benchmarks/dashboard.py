"""Times of the dashboard with large runs: pages in a browser, and answers of the server.

    python benchmarks/dashboard.py [--sizes 1000x1000 10000x100] [--runs 2000] [--write FILE]

A size is nodes x rounds, and the result is added to those in FILE. It generates the folder of a run
of each size and many small ones, and needs chromium and chromedriver. Times are those of this
machine. The first paint and the longest tasks are what the browser itself measures: while a task
runs, a page reacts to nothing.
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

TIMEOUT = 600  # seconds
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    "--window-size=1200,900",
)
PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
FETCH = """
  const [address, done] = arguments, start = performance.now();
  fetch(address).then((answer) => answer.text()).then((text) =>
    done([performance.now() - start, text.length]));
"""
# Tasks of at least 50 ms, as the browser reports them, from the start of each page on.
WATCH = """
  window.tasks = [];
  window.observer = new PerformanceObserver((list) => tasks.push(...list.getEntries()));
  observer.observe({type: "longtask", buffered: true});
"""
LONGEST = """
  tasks.push(...observer.takeRecords());
  return Math.max(0, ...tasks.splice(0).map((task) => task.duration));
"""
# Let the drawing of what was done come to its end, and the report about its tasks.
REST = "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 300))"
REPLAY = """
  const done = arguments[0], output = document.getElementById("round"), seen = new Set();
  const watch = new MutationObserver(() => seen.add(output.textContent));
  watch.observe(output, {childList: true});
  document.getElementById("play").click();
  const timer = setInterval(() => {
    if (document.getElementById("play").ariaLabel === "Play") {
      clearInterval(timer);
      done(seen.size);
    }
  }, 100);
"""
COLOUR = """
  const colour = document.getElementById("colour");
  colour.value = colour.options[colour.options.length - 1].value;
  colour.dispatchEvent(new Event("change"));
"""


def rows(round: int, nodes: int, rng: random.Random) -> str:
    values = [min(0.9 * round / 1000 + 0.1 * rng.random(), 1.0) for _ in range(nodes)]
    found = [
        f'{{"scope": "node", "round": {round}, "node": {node}, "accuracy": {value}, "loss": 1.5}}\n'
        for node, value in enumerate(values)
    ]
    network = {
        "scope": "network",
        "round": round,
        "nodes": nodes,
        "bytes": 1000,
        "bytes_total": 1000 * round,
        "accuracy": sum(values) / nodes,
        "accuracy_std": 0.03,
        "accuracy_min": min(values),
        "accuracy_max": max(values),
        "loss": 1.5,
        "seconds": {"train": 0.5, "total": 1.0},
    }
    return "".join(found) + json.dumps(network) + "\n"


def generate(folder: Path, nodes: int, rounds: int) -> None:
    """The folder of a run whose numbers are random."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    edges = sorted({tuple(sorted(rng.sample(range(nodes), 2))) for _ in range(2 * nodes)})
    setup = {
        "allocation": [[20] * 10] * nodes,
        "classes": [str(label) for label in range(10)],
        "examples": [200] * nodes,
        "edges": edges,
        "parameters": [10] * nodes,
        "test_examples": 100,
        "topology": {"connected": True},
    }
    summary = {
        "run": folder.name,
        "status": "finished",
        "algorithm": "decavg",
        "label": "DecAvg",
        "dataset": "digits",
        "nodes": nodes,
        "rounds": rounds,
        "rounds_planned": rounds,
        "accuracy": 0.9,
        "message": "",
    }
    text = f'nodes = {nodes}\nrounds = {rounds}\n[algorithm]\nname = "decavg"\n'
    (folder / "experiment.toml").write_text(text)
    (folder / "setup.json").write_text(json.dumps(setup))
    (folder / "environment.json").write_text("{}")
    (folder / "summary.json").write_text(json.dumps(summary))
    with open(folder / "metrics.jsonl", "w") as file:
        file.writelines(rows(round, nodes, rng) for round in range(rounds + 1))


def longest_task(driver: Any) -> float:
    """Milliseconds of the longest task since the last question; 0 if all were below 50 ms."""
    driver.execute_async_script(REST)
    return float(driver.execute_script(LONGEST))


def measure_list(driver: Any, base: str) -> dict[str, float]:
    driver.get(base + "/")
    WebDriverWait(driver, TIMEOUT).until(lambda d: d.find_elements("css selector", "#runs td"))
    return {
        "first paint": driver.execute_script(PAINT),
        "answer": driver.execute_async_script(FETCH, "/api/list")[0],
        "longest task": longest_task(driver),
    }


def measure_run(driver: Any, base: str, folder: Path, nodes: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the answers about a run, and of the tasks of its page."""
    name, found = folder.name, {}
    for what, address in {
        "first answer": f"/api/run?path={name}",
        "update after a new round": f"/api/run?path={name}",
        "frames of the replay": f"/api/frames?path={name}",
        "layout of the network": f"/api/graph?path={name}",
        "one node": f"/api/node?path={name}&node=7",
    }.items():
        if what.startswith("update"):
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(rows(rounds + 1, nodes, random.Random(1)))
        found[what] = driver.execute_async_script(FETCH, address)[0]
    driver.get(f"{base}/run/{name}")
    wait = WebDriverWait(driver, TIMEOUT)
    wait.until(lambda d: d.find_element("id", "replay").get_attribute("hidden") is None)
    wait.until(lambda d: d.find_elements("css selector", "#legend .ramp"))
    found["first paint"] = driver.execute_script(PAINT)
    found["longest task while it opens"] = longest_task(driver)
    canvas = driver.find_element("id", "graph")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    move(driver, canvas)
    found["longest task in zoom and drag"] = longest_task(driver)
    ActionChains(driver).click(canvas).perform()
    canvas.send_keys(Keys.ARROW_RIGHT)
    wait.until(lambda d: d.find_elements("css selector", "#node-body polyline"))
    found["longest task when a node is chosen"] = longest_task(driver)
    frames = driver.execute_async_script(REPLAY)
    assert frames > 10, f"the replay showed {frames} rounds"
    found["longest task in replay"] = longest_task(driver)
    driver.execute_script(COLOUR)
    driver.set_window_size(700, 900)
    found["longest task in recolouring and another size"] = longest_task(driver)
    driver.set_window_size(1200, 900)
    return found


def move(driver: Any, canvas: Any) -> None:
    """Zoom in and drag with the mouse, and back, as a user does."""
    for delta in (-120, 120):
        actions = ActionChains(driver)
        for _ in range(8):
            actions.scroll_from_origin(ScrollOrigin.from_element(canvas), 0, delta)
        actions.click_and_hold(canvas)
        for step in range(10):
            actions.move_by_offset(9 if delta < 0 else -9, step % 3)
        actions.release().perform()


def parse_size(text: str) -> tuple[int, int]:
    nodes, _, rounds = text.partition("x")
    return int(nodes), int(rounds)


def start_browser() -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in FLAGS:
        options.add_argument(flag)
    # With its path given, selenium looks for no driver elsewhere.
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(TIMEOUT)
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
    return driver


def measure(home: Path, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """Milliseconds of the server and of its pages."""
    command = ["-m", "peerage", "ui", "--port", "0", "--no-browser", "--runs", str(home)]
    start = perf_counter()
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        assert address is not None
        found: dict[str, Any] = {"server": {"start": 1000 * (perf_counter() - start)}}
        driver = start_browser()
        try:
            driver.get(address[0])
            base = address[0].partition("/?")[0]
            found["list"] = measure_list(driver, base)
            for nodes, rounds in sizes:
                found[f"{nodes} nodes, {rounds} rounds"] = measure_run(
                    driver, base, home / f"run-{nodes}-{rounds}", nodes, rounds
                )
        finally:
            driver.quit()
            server.terminate()
    return {
        name: {what: round(value, 1) for what, value in times.items()}
        for name, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[(1000, 1000), (10000, 100)])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        for nodes, rounds in given.sizes:
            generate(Path(home) / f"run-{nodes}-{rounds}", nodes, rounds)
        generate(Path(home) / "small-0", 3, 3)
        for number in range(1, given.runs):
            shutil.copytree(Path(home) / "small-0", Path(home) / f"small-{number}")
        times = measure(Path(home), given.sizes)
    result = {
        "small runs": given.runs,
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "milliseconds": times,
    }
    print(json.dumps(result, indent=1))
    if given.write:
        before = json.loads(given.write.read_text()) if given.write.exists() else []
        given.write.write_text(json.dumps([*before, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
