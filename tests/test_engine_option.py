"""`pytest --engine NAME` runs all tests with that engine, so that a new one has them at once."""

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import peerage as pg
from peerage.engine import ray
from peerage.experiment import Engine
from peerage.runs import run

TESTS = Path(__file__).parent
# The class of each engine, and the module from which a run takes it.
TEAMS = {"serial": (run, "SerialTeam"), "pool": (run, "PoolTeam"), "ray": (ray, "RayTeam")}


def team_of(engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the engine that a run with these settings really uses."""
    used = []
    for name, (module, kind) in TEAMS.items():
        real = getattr(module, kind)

        def made(*arguments: Any, name: str = name, real: Any = real) -> Any:
            used.append(name)
            return real(*arguments)

        monkeypatch.setattr(module, kind, made)
    pg.run(pg.Experiment(nodes=2, topology="ring", rounds=1, model="logistic", engine=engine))
    [name] = used
    return name


def test_the_fixture_has_the_engines_that_there_are(engine, request, monkeypatch):
    assert engine["name"] in get_args(Engine.model_fields["name"].annotation)
    assert request.config.getoption("engine") in (None, engine["name"])
    assert team_of(engine, monkeypatch) == engine["name"]


def test_a_run_uses_the_chosen_engine_whatever_it_asks_for(request, monkeypatch):
    chosen = request.config.getoption("engine")
    assert team_of({"name": "serial"}, monkeypatch) == (chosen or "serial")


@pytest.mark.own_engine
def test_a_test_about_one_engine_keeps_it(monkeypatch):
    assert team_of({"name": "serial"}, monkeypatch) == "serial"


@pytest.mark.slow
@pytest.mark.own_engine
@pytest.mark.parametrize("name", TEAMS)
def test_the_option_itself(name):
    """The tests above, each with one engine; the fixture gives no other."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--engine", name]
    names = "fixture or asks_for or keeps_it"
    done = subprocess.run(
        [*command, "-k", names, __file__], cwd=TESTS.parent, capture_output=True, text=True
    )
    assert "3 passed" in done.stdout, done.stdout
    assert f"there_are[{name}] PASSED" in done.stdout


@pytest.mark.slow
@pytest.mark.own_engine
def test_an_unknown_engine_is_rejected():
    command = [sys.executable, "-m", "pytest", "--engine", "none", __file__]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "invalid choice: 'none'" in done.stderr
