"""Times of the dashboard with large runs: pages in a browser, and answers of the server.

    python benchmarks/dashboard.py [--nodes 1000] [--rounds 1000] [--runs 2000] [--write FILE]

It generates the folder of one large run and many small ones. It needs chromium and chromedriver.
Times are those of this machine; the first paint is what the browser itself measures.
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
from selenium.webdriver.support.ui import WebDriverWait

TIMEOUT = 600  # seconds
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
FETCH = """
  const [address, done] = arguments, start = performance.now();
  fetch(address).then((answer) => answer.text()).then((text) =>
    done([performance.now() - start, text.length]));
"""
# The longest time in which the page does nothing else while it is moved or replayed.
LONGEST = """
  const done = arguments[0];
  let longest = 0, last = performance.now(), end = last + 3000;
  document.getElementById("play").click();
  const canvas = document.getElementById("graph");
  const tick = (now) => {
    longest = Math.max(longest, now - last);
    last = now;
    canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: now % 2 < 1 ? -1 : 1}));
    if (now < end) requestAnimationFrame(tick); else done(longest);
  };
  requestAnimationFrame(tick);
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


def measure(driver: Any, base: str) -> dict[str, float]:
    """Milliseconds of pages and answers."""
    found: dict[str, float] = {}
    wait = WebDriverWait(driver, TIMEOUT)
    driver.set_script_timeout(TIMEOUT)
    driver.get(base + "/")
    wait.until(lambda d: d.find_elements("css selector", "#runs tbody tr"))
    found["list: first paint"] = driver.execute_script(PAINT)
    for name, address in {
        "list: answer": "/api/list",
        "run: first answer": "/api/run?path=large",
        "run: update": "/api/run?path=large",
        "run: frames of the replay": "/api/frames?path=large",
        "run: layout of the network": "/api/graph?path=large",
        "run: one node": "/api/node?path=large&node=7",
    }.items():
        found[name] = driver.execute_async_script(FETCH, address)[0]
    driver.get(base + "/run/large")
    wait.until(lambda d: not d.find_element("id", "replay").get_attribute("hidden"))
    found["run: first paint"] = driver.execute_script(PAINT)
    wait.until(lambda d: d.find_elements("css selector", "#legend .ramp"))
    found["run: longest pause in replay and zoom"] = driver.execute_async_script(LONGEST)
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in FLAGS:
        options.add_argument(flag)
    with tempfile.TemporaryDirectory() as home:
        generate(Path(home) / "large", given.nodes, given.rounds)
        generate(Path(home) / "small-0", 3, 3)
        for number in range(1, given.runs):
            shutil.copytree(Path(home) / "small-0", Path(home) / f"small-{number}")
        command = ["-m", "peerage", "ui", "--port", "0", "--no-browser", "--runs", home]
        start = perf_counter()
        with subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address is not None
            begin = 1000 * (perf_counter() - start)
            # With its path given, selenium looks for no driver elsewhere.
            service = webdriver.ChromeService(shutil.which("chromedriver"))
            driver = webdriver.Chrome(options=options, service=service)
            try:
                driver.get(address[0])
                times = measure(driver, address[0].partition("/?")[0])
            finally:
                driver.quit()
                server.terminate()
    result = {
        "nodes": given.nodes,
        "rounds": given.rounds,
        "runs": given.runs,
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "milliseconds": {"start of the server": round(begin, 1), **times},
    }
    print(json.dumps(result, indent=1))
    if given.write:
        given.write.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
