"""The form of a new run: its fields are the flags, and its messages those of the experiment."""

from pathlib import Path
from typing import Any

import pytest
from support.dashboards import ask, dashboard

from peerage.cli.flags import TABLE
from peerage.cli.ui import form, starting
from peerage.errors import InputError


def messages(recipe: str | None = None, **values: str) -> dict[str, str]:
    return form().messages(recipe, {key.replace("_", "-"): v for key, v in values.items()})


def test_every_flag_is_a_field() -> None:
    assert [field.name for field in form().fields] == [flag.name for flag in TABLE]


@pytest.mark.parametrize(
    ("values", "field", "text"),
    [
        ({"nodes": "many"}, "nodes", "nodes must be a whole number, got 'many'"),
        ({"lr": "fast"}, "lr", "lr must be a number, got 'fast'"),
        ({"rounds": "5", "nodes": "0"}, "nodes", "nodes"),
        ({"nodes": "8", "algorithm": "dechv"}, "algorithm", "dechw"),
        ({"nodes": "8", "message_loss": "2"}, "message-loss", "2"),
    ],
)
def test_the_message_of_the_experiment_is_at_its_field(
    values: dict[str, str], field: str, text: str
) -> None:
    found = messages(**values)
    assert list(found) == [field]
    assert text in found[field]


def test_right_values_have_no_messages() -> None:
    assert messages(nodes="4", topology="ring", algorithm="dechw:theta=30") == {}
    assert messages("demo", rounds="2") == {}


def test_code_is_never_loaded_by_the_dashboard(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("raise SystemExit('this must not run')")
    assert messages(algorithm="mine.py:Mine") == {}


def test_a_value_is_never_a_flag_of_its_own() -> None:
    values = {"topology": "--out=/tmp/x", "spread": "on", "directed-activity": "off"}
    assert form().arguments("demo", values | {"metric": "a.py:f b.py:g"}) == [
        "demo",
        "--topology=--out=/tmp/x",
        "--spread",
        "--no-directed-activity",
        "--metric=a.py:f",
        "--metric=b.py:g",
    ]


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"values": []},
        {"recipe": "../x"},
        {"values": {"out": "/tmp"}},
        {"values": {"nodes": 4}},
        {"values": {"nodes": "\0"}},
    ],
)
def test_other_requests_are_refused(body: Any) -> None:
    with pytest.raises(InputError):
        form().read(body)


def test_a_recipe_fills_the_form() -> None:
    found = starting("demo")
    assert (found["nodes"], found["rounds"]) == ("50", "22")
    assert found["algorithm"].startswith("dechw")
    assert starting(None) == {}


def test_the_page_shows_what_is_wrong_and_starts_nothing(tmp_path: Path) -> None:
    app = dashboard(tmp_path).app()
    body = {"recipe": "", "values": {"nodes": "0"}}
    assert list(ask(app, "/api/start", method="POST", body=body).json["messages"]) == ["nodes"]
    assert not (tmp_path / ".ui").exists()
    found = ask(app, "/api/check", method="POST", body=body).json
    assert found["arguments"] == ["--nodes=0"]
