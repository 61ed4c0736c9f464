"""Every example in a docstring of the package is run."""

import doctest
import importlib
import pkgutil

import pytest

import peerage

NAMES = ["peerage", *(m.name for m in pkgutil.walk_packages(peerage.__path__, "peerage."))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(name: str) -> list[doctest.DocTest]:
    tests = doctest.DocTestFinder().find(importlib.import_module(name))
    return [test for test in tests if test.examples]


POOL = {name: [pytest.mark.slow] for name in ("peerage", "peerage.testing")}  # they run on it


@pytest.mark.parametrize("name", [pytest.param(n, marks=POOL.get(n, [])) for n in NAMES])
def test_examples(name):
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    report: list[str] = []
    for test in examples(name):
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


def test_there_are_examples():
    assert sum(len(examples(name)) for name in NAMES) >= 10
