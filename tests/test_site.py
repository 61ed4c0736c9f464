"""`make docs` builds a site without warnings, broken links or anything from other hosts."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import peerage as pg

ROOT = Path(__file__).parent.parent


class Page(HTMLParser):
    """The links, loaded files and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {found[key] or "" for key in ("id", "name") if key in found}
        if tag == "a":
            self.links.append(found.get("href") or "")
        elif tag == "link" and found.get("rel") not in ("canonical", "search", "index"):
            self.loaded.append(found.get("href") or "")
        elif tag in ("script", "img", "source", "iframe"):
            self.loaded.append(found.get("src") or "")


@pytest.mark.slow
def test_the_site_is_complete(tmp_path: Path) -> None:
    # As in the Makefile; a test has no .venv of its own.
    [line] = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-m sphinx" in line]
    words = line.replace("build/site", str(tmp_path / "site")).split()[1:]
    made = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")

    site = (tmp_path / "site").resolve()
    pages = {path: Page(path) for path in site.rglob("*.html")}
    documents = {path.relative_to(site).with_suffix("") for path in pages}
    for source in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        assert source.relative_to(ROOT).with_suffix("") in documents
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data"):
                assert link not in page.loaded or parts.scheme == "data", f"{path} loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path} leads to {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path} leads to {link}"

    described = pages[site / "docs" / "api.html"].anchors
    # Described in words, as they are neither classes nor functions.
    others = {"ALGORITHMS", "STOP", "algorithms", "datasets", "models", "partitions", "topologies"}
    assert {name for name in pg.__all__ if f"peerage.{name}" not in described} == others
