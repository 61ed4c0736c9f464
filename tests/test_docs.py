"""The commands in the documents run, and their links point at something."""

import json
import re
import shlex
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.pages import Block, blocks_of

from peerage.cli import app as cli
from peerage.experiment import catalogue
from peerage.papers import coverage

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUN = (
    "README.md",
    "docs/pictures.md",
    "docs/guide.md",
    "docs/python.md",
    "docs/mutual-learning.md",
    "docs/networks.md",
    "docs/cluster.md",
    "docs/hubs.md",
    "docs/real-peers.md",
    "docs/real-peers-reference.md",
    "docs/privacy.md",
    "docs/add-an-algorithm.md",
    "docs/reproduce.md",
    "docs/tutorial-researcher.md",
    *(f"docs/papers/p{number}.md" for number in range(5)),
)

LINK = re.compile(r"\]\((?!https?:|#)(?P<path>[^)#\s]+)(?:#(?P<heading>[^)\s]+))?\)")


def blocks(document: str) -> list[Block]:
    return blocks_of((ROOT / document).read_text())


def commands(text: str) -> list[str]:
    """The `$ peerage ...` lines of a console block, continuation lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ peerage ")]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An empty folder, a module for the code of a document, and everything put back afterwards."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["peerage"])
    before, on_terminate = set(sys.modules), signal.getsignal(signal.SIGTERM)
    module = sys.modules["document"] = ModuleType("document")
    yield module
    signal.signal(signal.SIGTERM, on_terminate)
    own = [
        n
        for n, m in sys.modules.items()
        if str(getattr(m, "__file__", "")).startswith(str(tmp_path))
    ]
    for name in ["document", *own]:
        if name not in before:
            del sys.modules[name]


def perform(block: Block, document: str, module: ModuleType) -> None:
    if block.note.startswith(("not run: ", "at: ", "log: ")):
        return
    if block.note.startswith("file: "):
        Path(block.note.removeprefix("file: ")).write_text(block.text)
    elif block.kind == "python":
        # Empty lines first, so that a traceback names the line of the document.
        code = compile("\n" * block.line + block.text, str(ROOT / document), "exec")
        exec(code, vars(module))
    elif block.kind == "console":
        for command in commands(block.text):
            sys.argv = shlex.split(command)
            cli.main()  # leaves by SystemExit unless all went well


@pytest.mark.slow
@pytest.mark.parametrize("document", RUN)
def test_code_and_commands_run(document: str, workplace: ModuleType) -> None:
    found = blocks(document)
    assert any(block.kind in ("python", "console") for block in found)
    for block in found:
        try:
            perform(block, document, workplace)
        except SystemExit as error:
            pytest.fail(
                f"{document} line {block.line}: {sys.argv} ends with exit code {error.code}"
            )


@pytest.mark.parametrize("document", RUN)
def test_fences_and_notes_are_understood(document: str) -> None:
    text, found = (ROOT / document).read_text(), blocks(document)
    assert len(found) * 2 == len(re.findall(r"^```", text, re.MULTILINE))
    notes = [block.note for block in found if block.note]
    known = r"not run: .{10,}|file: \w+\.(py|toml|txt)"
    if document == "docs/real-peers.md":
        known += r"|at: (office(, for every site)?|every site|node-\d)|log: node-\d"
    assert all(re.fullmatch(known, note) for note in notes), notes
    assert sum(note.startswith("not run") for note in notes) <= 1


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.finditer(document.read_text()):
        target = (document.parent / link["path"]).resolve()
        assert target.is_relative_to(ROOT), f"{link[0]} leaves the project"
        assert target.exists(), f"{link[0]} does not exist"
        if link["heading"]:
            assert link["heading"] in headings(target), f"{link[0]} has no such heading"


def headings(document: Path) -> set[str]:
    """The anchors that a page of headings offers."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_document_is_on_the_map() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {index.resolve(), *links(index)}
    # The pages of single results are listed by the README beside them, which must be on the map.
    linked |= {page for readme in linked if readme.name == "README.md" for page in links(readme)}
    missing = {path.resolve() for path in DOCUMENTS} - linked
    assert not missing


def links(document: Path) -> set[Path]:
    found = LINK.finditer(document.read_text())
    return {(document.parent / link["path"]).resolve() for link in found}


def test_the_tables_of_what_is_included_are_fresh() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    for family in ("algorithms", "families"):
        assert f"<!-- {family} -->" in text
        assert f"<!-- /{family} -->" in text
    fresh = catalogue.refreshed(text) == text
    assert fresh, "refresh the tables: python -m peerage.experiment.catalogue docs/algorithms.md"


def test_the_table_of_mixes_is_fresh() -> None:
    text = (ROOT / "docs" / "guide.md").read_text()
    assert "<!-- mixes -->" in text
    fresh = catalogue.refreshed(text) == text
    assert fresh, "refresh the table: python -m peerage.experiment.catalogue docs/guide.md"


def test_a_table_has_a_row_for_every_member() -> None:
    rows = catalogue.markdown_table("algorithms").splitlines()
    assert len(rows) == 2 + len(catalogue.FAMILIES["algorithms"])
    assert len({row.count("|") for row in rows}) == 1
    dechw = next(row for row in rows if row.startswith("| `dechw` |"))
    assert "`theta=none`" in dechw
    assert dechw.endswith("| P0, [arXiv:2601.19938](https://arxiv.org/abs/2601.19938) |")


def test_decisions_stay_short() -> None:
    for note in (ROOT / "docs" / "decisions").glob("*.md"):
        text = note.read_text()
        assert len(text.splitlines()) <= 40, note.name
        for part in ("Context", "Choice", "Rejected", "When to revisit"):
            assert f"## {part}\n" in text, f"{note.name} has no part {part!r}"


TABLES = [
    "README.md",
    "docs/results/README.md",
    *(f"docs/papers/{id}.md" for id in coverage.PAPERS),
]


@pytest.mark.parametrize("document", TABLES)
def test_the_tables_of_what_was_run_are_fresh(document: str, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    text = Path(document).read_text()
    assert "<!-- papers -->" in text or "<!-- results -->" in text or "<!-- studies-p" in text
    fresh = coverage.refreshed(text, Path(document).parent) == text
    assert fresh, f"refresh the tables: python -m peerage.papers.coverage {document}"


def test_a_page_its_json_and_its_command_agree(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    found = coverage.results()
    pages = set(Path("docs/results").glob("p?/p?-*.md"))
    assert pages == {result.page for result in found}
    words = tomllib.loads(Path("docs/results/agreement.toml").read_text())
    assert words.keys() == {page.stem for page in pages}
    for result in found:
        assert result.agreement in coverage.AGREEMENT, result.page
        if result.agreement == "none":
            assert result.study.title.startswith("Not in the paper"), result.page
        assert result.command.startswith(f"peerage reproduce {result.study.id} --scale")
        assert result.command.split()[4] == result.scale, result.page
        finished = f"{result.done} of {result.runs} runs finished"
        assert finished in result.page.read_text(), result.page


def test_the_results_stay_small_enough_for_every_clone() -> None:
    sizes = {path: path.stat().st_size for path in (ROOT / "docs/results").rglob("*")}
    largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
    assert sum(sizes.values()) < 4_000_000, f"docs/results has over 4 MB; the largest: {largest}"


def test_finished_runs_among_the_results_have_digests() -> None:
    runs = [
        run
        for path in (ROOT / "docs/results").glob("p?/p?-*.json")
        for run in json.loads(path.read_text())["runs"]
        if run["status"] == "finished" and "seed" in run  # calculations have no models
    ]
    assert len(runs) > 200
    assert all(re.fullmatch("[0-9a-f]{64}", run["digest"]) for run in runs)


def test_the_table_of_extras_has_what_the_project_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(
        r"^\| `(\w[\w-]*)` \| ([^|]+) \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE
    )
    extras = declared["optional-dependencies"]
    assert dict(rows).keys() == extras.keys()
    for name, packages in rows:
        if name != "dev":
            assert packages.split(", ") == [re.split("[>=<]", one)[0] for one in extras[name]]
    every = {one for name in extras if name != "dev" for one in extras[name]}
    assert every <= set(extras["dev"])


def test_the_errors_of_the_page_about_trouble_exist() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(quoted) >= 10
    source = "".join(
        re.sub(r'"\s+f?"', "", path.read_text()) for path in (ROOT / "src").rglob("*.py")
    )
    assert [message for message in quoted if message not in source] == []


def test_the_page_of_speed_states_what_the_benchmarks_measured():
    results = json.loads((ROOT / "docs/results/bench.json").read_text())
    table = (
        (ROOT / "docs/speed.md").read_text().split("<!-- bench -->")[1].split("<!-- /bench -->")[0]
    )
    for name, result in results.items():
        if name != "environment":
            line = next(line for line in table.splitlines() if f"| {result['claim']} |" in line)
            assert f"| {result['ratio']:.2f}" in line
            assert ("falls short" in line) != result["holds"]
