"""Real runs in a real browser: colours, clusters, faults, comparisons, downloads and keys."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.browsers import Browser, opened, served, without_errors
from support.command_line import peerage

from peerage.records.rows import RunRecord
from peerage.report import export
from peerage.report.figures import COLOURS

pytestmark = pytest.mark.slow
SMALL = "--nodes 6 --model logistic --epochs 1 --engine serial --batch-size 64"
ABSENT = "#9aa0a6"
CUT = "#d55e00"
PAGES = ("/", "/study/study", "/run/facade", "/compare?study=study", "/new")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for line in (
        f"run facade-quick --engine serial --nodes 6 --clusters 4/2:rotate --rounds 4"
        f" --out {home}/facade",
        f"run dfml-quick --engine serial --nodes 4 --rounds 2 --out {home}/dfml",
        f"run {SMALL} --rounds 4 --topology ring --link-activity 0.5 --leave 1@3"
        f" --out {home}/faulty",
        f"compare {SMALL} --rounds 2 --algorithms decavg,dechw --seeds 2 --out {home}/study",
    ):
        done = peerage(line)
        assert done.code == 0, done.err
    return home


@pytest.fixture(scope="module")
def chromium(home: Path) -> Iterator[Browser]:
    with served(home) as address, opened(address) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    with without_errors(chromium):
        yield chromium


def colours(browser: Browser) -> list[str]:
    """What nodes can be coloured by."""
    return [option.get_attribute("value") for option in browser.all("#colour option")]


def seek(browser: Browser, round: int) -> None:
    """Move the slider of the replay to a round."""
    from selenium.webdriver.common.keys import Keys

    slider = browser.one("#slider")
    browser.wait(slider.is_displayed)
    slider.send_keys(Keys.HOME)
    for _ in range(round):
        slider.send_keys(Keys.ARROW_RIGHT)
    browser.wait_text("#round", f"^round {round}$")


def test_nodes_are_coloured_by_cluster_and_head(browser: Browser) -> None:
    browser.open("/run/facade")
    browser.wait_text("#round", "^round 4$")
    browser.wait(lambda: colours(browser) == ["accuracy", "cluster", "head"])
    assert "%" in browser.one("#legend").text
    browser.choose("#colour", "cluster")
    names = RunRecord.load(chosen_run(browser)).setup["clusters"]["names"]
    browser.wait(lambda: all(name in browser.one("#legend").text for name in names))
    browser.wait(lambda: browser.shows(*COLOURS[:2]))
    browser.choose("#colour", "head")
    browser.wait_text("#legend", r"head \d")
    browser.wait(lambda: any(browser.shows(colour) for colour in COLOURS))
    browser.choose("#colour", "accuracy")
    browser.wait(lambda: browser.all("#legend .ramp"))
    browser.wait(lambda: not browser.shows(*COLOURS[:2]))


def chosen_run(browser: Browser) -> Path:
    """The folder of the run whose page is open, from the command that repeats it."""
    words = str(browser.wait_text("#commands code", "peerage run")).split()
    return Path(words[-1]).parent


def test_clusters_have_fairness_and_head_choice(browser: Browser, home: Path) -> None:
    browser.open("/run/facade")
    browser.wait_text("#tables", "Fairness between clusters")
    browser.wait_text("#charts", "Accuracy by cluster")
    titles = ["Data of each node", "Head choice", "Fair accuracy"]
    browser.wait(lambda: [e.text for e in browser.all("#report-figures h2")] == titles)
    for picture in browser.all("#report-figures img"):
        browser.run("arguments[0].scrollIntoView()", picture)
        browser.wait(lambda picture=picture: browser.run(LOADED, picture))
    browser.one("#number").send_keys("5\n")
    body = browser.wait_text("#node-body", "cluster")
    assert str(RunRecord.load(home / "facade").setup["clusters"]["names"][1]) in body


LOADED = "return arguments[0].complete && arguments[0].naturalWidth > 100"


def test_nodes_are_coloured_by_architecture(browser: Browser) -> None:
    browser.open("/run/dfml")
    browser.wait(lambda: "architecture" in colours(browser))
    browser.choose("#colour", "architecture")
    for name in ("mlp:128x64", "mlp:64x32", "mlp:32", "mlp:32x32x32"):
        browser.wait(lambda name=name: name in browser.one("#legend").text.split("\n"))
    browser.wait(lambda: browser.shows(*COLOURS[:4]))
    browser.one("#number").send_keys("1\n")
    assert "mlp:64x32" in browser.wait_text("#node-body", "architecture")


def test_cut_links_and_a_node_that_left_are_drawn(browser: Browser) -> None:
    browser.open("/run/faulty")
    seek(browser, 0)
    assert "gone" not in browser.one("#legend").text
    assert not browser.shows(CUT)
    seek(browser, 4)  # node 1 has left in round 3, and with it its two links
    browser.wait_text("#legend", r"✕ gone \(1\)")
    browser.wait_text("#legend", r"- - cut \([2-6]\)")
    browser.wait(lambda: browser.shows(CUT, ABSENT))


def test_seeds_of_a_study_are_bands_and_the_table_is_sorted_and_saved(
    browser: Browser, tmp_path: Path
) -> None:
    browser.open("/")
    browser.wait_text("#runs tbody", "study")
    next(link for link in browser.all("#runs .name") if link.text == "study").click()
    browser.wait(lambda: len(browser.all("#runs tbody tr")) == 4)
    browser.one("#compare-all").click()
    browser.wait(lambda: len(browser.all("#chart polygon.band")) == 2)
    assert len(browser.all("#chart polyline")) == 2
    assert browser.one(".keys").text.count("(2 seeds)") == 2
    browser.choose("#key", "loss")
    browser.wait_text("#chart-title", "[Ll]oss")
    titles = [cell.text for cell in browser.all("#table th")]
    column = next(place for place, title in enumerate(titles) if "accuracy" in title.lower())

    def values() -> list[float]:
        rows = browser.all("#table tbody tr")
        cells = [row.find_elements("css selector", "td")[column].text for row in rows]
        return [float(cell.split()[0]) for cell in cells]

    found = values()
    assert len(set(found)) > 1
    browser.all("#table th button")[column].click()
    browser.wait(lambda: values() == sorted(found))
    browser.all("#table th button")[column].send_keys("\n")
    browser.wait(lambda: values() == sorted(found, reverse=True))
    assert browser.all("#table th")[column].get_attribute("aria-sort") == "descending"
    saved = browser.downloaded(tmp_path, browser.one("#csv"))
    rows = list(csv.DictReader(io.StringIO(saved.read_text())))
    assert {row["algorithm"] for row in rows} == {"decavg", "dechw"}
    percents = sorted(100 * float(row["accuracy"]) for row in rows)
    assert percents == pytest.approx(sorted(found), abs=0.051)  # the page shows one decimal


def test_models_tables_and_reports_are_downloaded(
    browser: Browser, tmp_path: Path, home: Path
) -> None:
    browser.open("/run/faulty")
    browser.wait_text("#status", "finished")
    record = RunRecord.load(home / "faulty")
    browser.one(".menu summary").send_keys("\n")  # with a key
    files = {}
    for name in ("Report", "Table", "Curves", "Experiment", "Best model"):
        (link,) = [one for one in browser.all("#downloads a") if one.text.startswith(name)]
        files[name] = browser.downloaded(tmp_path, link)
    assert files["Table"].read_text() == export.TEXTS[".csv"]([record])
    assert files["Curves"].read_text() == export.TEXTS[".json"]([record])
    assert files["Experiment"].read_bytes() == (home / "faulty" / "experiment.toml").read_bytes()
    own = tmp_path / "own.safetensors"
    done = peerage(f"model {home}/faulty --node best --out {own}")
    assert done.code == 0, done.err
    mine, theirs = load_file(own), load_file(files["Best model"])
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in mine)
    browser.driver.get(files["Report"].as_uri())
    browser.wait(lambda: browser.all("svg"))
    assert record.summary["label"] in browser.one("body").text
    browser.open("/")


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_contrast_and_nothing_comes_from_elsewhere(
    browser: Browser, path: str, theme: str
) -> None:
    browser.emulate(theme=theme)
    browser.open(path)
    browser.wait(lambda: browser.all("#runs td, polyline, #main-fields input"))
    brightness = browser.run(CONTRAST + "return light(colour(document.documentElement))")
    assert (brightness > 0.5) == (theme == "light")
    assert browser.run(CONTRAST + "return faint()") == []
    script = "return performance.getEntriesByType('resource').map((one) => one.name)"
    assert all(name.startswith(browser.base + "/") for name in browser.run(script))


# Relative luminance and contrast as WCAG 2 defines them; texts need 4.5.
CONTRAST = """
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const colour = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const found = numbers(getComputedStyle(one).backgroundColor);
      if (found.length < 4 || found[3] > 0.99) return found;
    }
    return [255, 255, 255];
  };
  const faint = () => [...document.querySelectorAll("body *")].filter((element) => {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const left_out = element.closest("svg, [aria-disabled=true], :disabled");
    if (!own || left_out || !element.checkVisibility()) return false;
    const pair = [numbers(getComputedStyle(element).color), colour(element)].map(light);
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05) < 4.5;
  }).map((element) => `${element.tagName}.${element.className} ${element.textContent}`);
"""


def test_everything_is_reached_with_the_keyboard(browser: Browser) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> None:
        ActionChains(browser.driver).send_keys(*keys).perform()

    def focused() -> str:
        script = "const e = document.activeElement; return e.id || e.ariaLabel || e.textContent"
        return str(browser.run(script)).strip()

    def tab_to(wanted: str) -> None:
        for _ in range(60):
            press(Keys.TAB)
            if focused() == wanted:
                break
        assert focused() == wanted
        outline = "return getComputedStyle(document.activeElement).outlineStyle"
        assert browser.run(outline) != "none"  # the focus is visible

    browser.open("/")
    browser.wait_text("#runs tbody", "dfml")
    press(Keys.TAB)
    assert focused() == "Skip to content"
    tab_to("Select dfml")
    press(Keys.SPACE)
    browser.wait_text("#compare", "Compare 1 selected")
    browser.open("/run/facade")
    browser.wait_text("#round", "^round 4$")
    tab_to("colour")
    tab_to("graph")
    press(Keys.ARROW_RIGHT)
    browser.wait_text("#node-title", "Node 0")
    press(Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_UP, Keys.ARROW_DOWN)
    tab_to("play")
    tab_to("slider")
    press(Keys.HOME)
    browser.wait_text("#round", "^round 0$")
    chart = browser.one("#charts .chart")
    browser.run("arguments[0].focus()", chart)
    press(Keys.END)
    browser.wait_text("#charts .tip", "round 4")
    press(Keys.ARROW_LEFT)
    browser.wait_text("#charts .tip", "round 3")
    press(Keys.ESCAPE)
    browser.wait(lambda: not browser.one("#charts .tip").is_displayed())


@pytest.mark.parametrize("path", [*PAGES, "/run/dfml", "/run/faulty"])
def test_pages_fit_400_pixels(browser: Browser, path: str) -> None:
    browser.emulate(width=400, height=800)
    browser.open(path)
    browser.wait(lambda: browser.all("#runs td, polyline, #main-fields input"))
    if path.startswith("/run"):
        browser.wait(lambda: browser.all("#legend > *"))
        browser.one("#number").send_keys("1\n")
        browser.wait(lambda: browser.all("#node-body polyline"))
    assert browser.run("return document.documentElement.scrollWidth") <= 400
