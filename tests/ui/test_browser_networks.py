"""Networks of real peers in a real browser: one on this machine, and one read by an observer."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.browsers import Browser, opened, served, without_errors
from support.command_line import error_line, peerage
from support.machines import Machines
from support.processes import TIMEOUT, until

import peerage as pg
from peerage.net.peer.network import Timeouts

pytestmark = pytest.mark.slow
LONG = "--nodes 3 --topology ring --partition iid --model logistic --epochs 1 --rounds 1000000"
CUT = "#d55e00"


@contextmanager
def browsing(home: Path, *more: str) -> Iterator[Browser]:
    with served(home, more) as address, opened(address) as browser, without_errors(browser):
        yield browser


def row(browser: Browser, name: str) -> str:
    """The row of a peer in a table."""
    rows = [one.text for one in browser.all("table tbody tr")]
    return next((text for text in rows if text.startswith(name)), "")


def choose_node(browser: Browser, wanted: str, title: str) -> None:
    """Select a node of the graph with the arrow keys; the first key selects node 0."""
    from selenium.webdriver.common.keys import Keys

    canvas = browser.one("#graph")
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ARROW_UP) * 3:
        canvas.send_keys(key)
        browser.wait_text(title, "node-")
        if browser.one(title).text == wanted:
            return
    browser.wait_text(title, f"^{wanted}$")


def test_a_network_on_several_machines_is_shown_to_an_observer(tmp_path: Path) -> None:
    """The peers are processes that are asked through their own port, and nothing else is read."""
    three = pg.Experiment(
        nodes=3, topology="complete", partition="iid", model="logistic", rounds=10**6
    )
    home = tmp_path / "runs"
    home.mkdir()
    with Machines(tmp_path, three, Timeouts(start=3600, message=30, idle=2)) as network:
        certs = tmp_path / "certs"
        done = peerage(f"certs add watcher --observer --folder {certs}")
        assert done.code == 0, done.err
        for me in range(3):
            network.start(me)
        network.until(lambda: network.round(0) >= 2)
        arguments = ["--network", f"{tmp_path}/network.toml", "--identity", "watcher"]
        with browsing(home, *arguments, "--certs", str(certs)) as browser:
            next(link for link in browser.all("nav a") if link.text == "Network").click()
            browser.wait_text("#about", "3 of 3 peers answered")
            first = browser.wait(
                lambda: "running" in row(browser, "node-0") and row(browser, "node-0")
            )
            assert "of 1 000 000" in first.replace("\u202f", " ")
            label = "Network of 3 peers and 3 links"
            browser.wait(lambda: browser.one("#graph").get_attribute("aria-label") == label)
            choose_node(browser, "node-0", "#peer-title")
            assert "127.0.0.1:" in browser.one("#peer").text
            before = row(browser, "node-0")
            browser.wait(lambda: row(browser, "node-0") != before)  # it is asked again
            browser.wait(lambda: browser.all("#chart polyline"))  # from two answers on
            gone = network.processes.pop(2)
            gone.kill()
            gone.wait()
            browser.wait_text("#about", "2 of 3 peers answered")
            assert "connection refused" in row(browser, "node-2")
            browser.wait_text("#legend", r"✕ gone \(1\)")
            browser.wait_text("#legend", r"- - cut \(2\)")
            browser.wait(lambda: browser.shows(CUT))
            # An observer has no control: there is no action for a network, and no run of it.
            assert browser.all("main button") == []
            browser.emulate(width=400, height=800)
            browser.wait(lambda: browser.run("return document.documentElement.scrollWidth") <= 400)
        assert list(home.iterdir()) == []
        assert all("Traceback" not in network.log(me) for me in range(3))


def test_a_missing_identity_is_named(tmp_path: Path) -> None:
    assert "belong together" in error_line(peerage(f"ui --network {tmp_path}/network.toml"))


@contextmanager
def network_up(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A network that `peerage up` runs, until the context is left."""
    command = [sys.executable, "-m", "peerage", "up", *LONG.split(), "--out", str(folder)]
    with (
        open(folder.parent / "up.log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(TIMEOUT)


def peer_process(up: subprocess.Popen[bytes], name: str) -> psutil.Process | None:
    """The process of a peer, which has its name."""
    children = psutil.Process(up.pid).children(recursive=True)
    return next((one for one in children if one.name() == name), None)


def test_a_network_that_up_runs_is_watched_until_its_end(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    home.mkdir()
    with network_up(home / "net") as up, browsing(home) as browser:
        rows = home / "net" / "peers" / "node-2" / "metrics.jsonl"
        until(lambda: rows.exists() and rows.read_text().count("\n") > 3, "a peer has rows")
        browser.open("/")
        browser.wait_text("#runs tbody tr", r"net\s*network\s*running[\s\S]*%")
        browser.open("/run/net")
        browser.wait_text("#status", "running")
        browser.wait_text("#figures", r"Round\s+[1-9]")
        browser.wait(lambda: browser.all("#chart-accuracy polyline"))
        browser.wait(lambda: "running" in row(browser, "node-2"))
        before = browser.one("#figures").text
        browser.wait(lambda: browser.one("#figures").text != before)  # it is live
        choose_node(browser, "node-1", "#node-title")
        assert "sent" in browser.one("#node-body").text
        assert "gone" not in browser.one("#legend").text
        peer = peer_process(up, "node-2")
        assert peer is not None
        peer.kill()
        browser.wait_text("#legend", r"✕ gone \(1\)")
        browser.wait_text("#legend", r"- - cut \(2\)")
        browser.wait(lambda: "not running" in row(browser, "node-2"))
        assert not browser.one("#stop").is_displayed()  # it was started elsewhere
        up.send_signal(signal.SIGINT)
        browser.wait_text("#status", "interrupted|failed")
        browser.wait(lambda: browser.one("#replay").is_displayed())
        browser.open("/")
