"""The dashboard in a real browser without a network: every view, live runs, forms and damage."""

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browsers import Browser, opened, served, without_errors
from support.dashboards import lines, make_run

from peerage.ui.drawing import layout

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_run(home, "first", rounds=12)
    make_run(home, "second", rounds=8, label="DecHW", algorithm="dechw")
    make_run(home, "broken").joinpath("summary.json").write_text('{"run": "bro')
    torn = make_run(home, "torn")
    (torn / "metrics.jsonl").write_text('{"scope": "network", "rou\n')
    make_run(home, "<b>sly", label="<img src=x onerror=alert(1)>", status="failed")
    return home


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    with served(home) as found:
        yield found


@pytest.fixture(scope="module")
def chromium(address: str) -> Iterator[Browser]:
    with opened(address) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    with without_errors(chromium):
        yield chromium


def test_the_list_shows_every_status_and_filters(browser: Browser) -> None:
    browser.open("/")
    assert "token" not in browser.driver.current_url
    browser.wait(lambda: len(browser.all("#runs tbody tr")) == 5)
    rows = {
        row.find_element("css selector", ".name").text: row.text for row in browser.all("tbody tr")
    }
    assert "damaged" in rows["broken"]
    assert "finished" in rows["first"]
    assert "<img src=x" in rows["<b>sly"]
    browser.one("input[name=q]").send_keys("dechw")
    browser.wait(lambda: [e.text for e in browser.all("#runs .name")] == ["second"])
    browser.one("input[name=q]").clear()
    browser.one("input[name=q]").send_keys("nothing has this name")
    browser.wait_text("#empty", "Nothing matches")


def test_a_node_is_clicked_and_the_rounds_are_replayed(browser: Browser) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.open("/run/first")
    browser.wait_text("#round", "round 12")
    browser.wait_text("#figures", r"12\s+of 12|12 of 12")
    canvas = browser.one("#graph")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    width, height = browser.run(
        "return [arguments[0].clientWidth, arguments[0].clientHeight]", canvas
    )
    x, y = layout(3, ((0, 1), (1, 2)))[2]
    pad = 26
    at = (pad + x * (width - 2 * pad) - width / 2, pad + y * (height - 2 * pad) - height / 2)
    ActionChains(browser.driver).move_to_element_with_offset(
        canvas, *map(round, at)
    ).click().perform()
    browser.wait_text("#node-title", "Node 2")
    body = browser.wait_text("#node-body", "Examples by label")
    assert "1 neighbour" in body
    assert "cat" in body
    canvas.send_keys(Keys.ESCAPE)
    browser.wait_text("#node-body", "Select a node")
    canvas.send_keys(Keys.ARROW_RIGHT)
    browser.wait_text("#node-title", "Node 0")
    slider = browser.one("#slider")
    slider.send_keys(Keys.HOME)
    browser.wait_text("#round", "^round 0$")
    slider.send_keys(Keys.ARROW_RIGHT)
    browser.wait_text("#round", "^round 1$")
    browser.one("#play").click()
    browser.wait_text("#round", "^round 12$")
    browser.wait(lambda: browser.one("#play").get_attribute("aria-label") == "Play")
    browser.wait(lambda: browser.all(".picture img"))
    browser.wait(lambda: browser.run("return document.querySelector('.picture img').complete"))
    assert "peerage run" in browser.one("#commands").text


def test_a_run_is_watched_while_it_grows(browser: Browser, home: Path) -> None:
    folder = make_run(home, "growing", rounds=30, status="running")
    text = lines(range(31))
    (folder / "metrics.jsonl").write_text("".join(text[:12]) + text[12][:20])
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        browser.open("/run/growing")
        browser.wait_text("#status", "running")
        browser.wait_text("#figures", r"Round\s+2")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(text[12][20:] + "".join(text[13:40]))
        browser.wait_text("#figures", r"Round\s+9")
        before = browser.one("#chart-accuracy polyline").get_attribute("points")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write("".join(text[40:60]))
        browser.wait_text("#figures", r"Round\s+14")
        points = browser.one("#chart-accuracy polyline").get_attribute("points")
        assert len(points.split()) == len(before.split()) + 5
    browser.wait_text("#status", "interrupted")  # the lock is free: its process has ended
    browser.open("/")  # before the folder is gone, for which the page would ask
    shutil.rmtree(folder)


@pytest.mark.parametrize(("name", "status"), [("torn", "damaged"), ("broken", "damaged")])
def test_damaged_runs_are_shown_as_such(browser: Browser, name: str, status: str) -> None:
    browser.open(f"/run/{name}")
    browser.wait_text("#status", status)
    browser.wait_text("#message", "cannot be read|not valid JSON")


def test_two_runs_are_compared_and_sorted(browser: Browser) -> None:
    browser.open("/")
    for name in ("first", "second"):
        box = f"input[aria-label='Select {name}']"
        browser.wait(lambda box=box: browser.all(box))
        browser.one(box).click()
    browser.wait_text("#compare", "Compare 2 selected")
    browser.one("#compare").click()
    browser.wait(lambda: len(browser.all("#chart polyline")) == 2)

    def first() -> str:
        return str(browser.one("#table tbody td").text)

    browser.wait(lambda: len(browser.all("#table tbody tr")) == 2)
    rounds = browser.all("#table th button")[2]
    rounds.click()
    browser.wait(lambda: first() == "DecHW")  # 8 rounds before 12
    rounds.click()
    browser.wait(lambda: first() == "DecAvg")
    assert "what=table.csv" in browser.one("#csv").get_attribute("href")


def test_a_run_is_started_stopped_and_resumed_from_the_form(browser: Browser, home: Path) -> None:
    browser.open("/new")
    browser.wait(lambda: browser.run("return document.body.dataset.ready") == "yes")
    browser.one("#field-nodes").send_keys("0")
    browser.wait_text("#field-nodes-error", "nodes must be")
    browser.one("#start").click()
    browser.wait(lambda: browser.run("return document.activeElement.id") == "field-nodes")
    assert not (home / ".ui").exists()
    values = {"nodes": "3", "topology": "ring", "model": "logistic", "rounds": "100000"}
    values |= {"epochs": "1", "batch-size": "200", "engine": "serial"}
    for section in browser.all("#sections details"):
        browser.run("arguments[0].open = true", section)
    for name, value in values.items():
        field = browser.one(f"#field-{name}")
        field.clear()
        field.send_keys(value)
    browser.wait_text("#command", "--engine=serial")
    browser.one("#start").click()
    browser.wait(lambda: "/run/run-" in browser.driver.current_url)
    browser.wait_text("#figures", r"Round\s+[1-9]")
    browser.wait(lambda: browser.one("#stop").is_displayed())
    browser.one("#stop").click()
    browser.wait_text("#status", "interrupted")
    browser.wait_text("#message", "interrupted in round")
    browser.wait(lambda: browser.one("#resume").is_displayed())
    browser.one("#resume").click()
    browser.wait_text("#status", "running")
    browser.wait(lambda: browser.one("#stop").is_displayed())
    browser.one("#stop").click()
    browser.wait_text("#status", "interrupted")


def test_a_foreign_page_can_do_nothing(chromium: Browser, home: Path) -> None:
    before = sorted((home / ".ui").glob("*"))
    chromium.driver.get("data:text/html,<title>foreign</title>")
    script = """
      const [base, done] = arguments;
      fetch(base + "/api/start", {method: "POST", mode: "no-cors", credentials: "include",
        body: JSON.stringify({recipe: "demo", values: {}})})
        .then(() => done("sent"), () => done("blocked"));
    """
    assert chromium.driver.execute_async_script(script, chromium.base) in ("sent", "blocked")
    assert sorted((home / ".ui").glob("*")) == before
    chromium.errors()  # the browser reports the refusal


@pytest.mark.parametrize("path", ["/", "/run/first", "/compare?path=first&path=second", "/new"])
def test_pages_fit_a_narrow_screen_and_have_names(browser: Browser, path: str) -> None:
    browser.emulate(width=400, height=800)
    browser.open(path)
    ready = {"/": "#runs tbody tr", "/new": "#main-fields input"}.get(path, "polyline")
    browser.wait(lambda: browser.all(ready))
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    unnamed = """
      return [...document.querySelectorAll("input, select, button, a[href]")].filter((element) =>
        !(element.ariaLabel || element.labels?.length || element.textContent.trim())).length
    """
    assert browser.run(unnamed) == 0
