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


# Their examples run experiments, some on the pool.
RUNNING = ("peerage", "peerage.algorithm", "peerage.testing")
SLOW = {name: [pytest.mark.slow] for name in NAMES if name in RUNNING or ".runs" in name}


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, [])) for n in NAMES])
def test_examples(name):
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    report: list[str] = []
    for test in examples(name):
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


def test_there_are_examples():
    assert sum(len(examples(name)) for name in NAMES) >= 10
