"""States go through tensors and JSON and come back as they were."""

import json
from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peerage.errors import CheckpointError
from peerage.state import check_state, classes_in, map_tensors, pack, unpack


@dataclass(frozen=True)
class Inner:
    count: int
    x: Tensor


@dataclass(frozen=True)
class Outer:
    inner: Inner
    history: tuple[Inner, ...]
    by_name: dict[str, Any]


class Pair(NamedTuple):
    a: Any
    b: Any


class Color(StrEnum):
    RED = "red"


@dataclass
class Derived:
    x: Tensor
    norm: float = field(init=False)

    def __post_init__(self) -> None:
        self.norm = float(self.x.norm())


@dataclass(frozen=True)
class Holder:
    last: list[Inner] | None


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Inner | Outer):
        return same(vars(a), vars(b))
    return bool(a == b) or (a != a and b != b)


def round_trip(state: Any, example: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    tree = pack(state, tensors, "3.state")
    assert all(name.startswith("3.state.") for name in tensors)
    return unpack(json.loads(json.dumps(tree, allow_nan=False)), tensors, example)


TENSORS = st.sampled_from(
    [torch.zeros(3), torch.tensor(2), torch.ones(2, 2, dtype=torch.float64), torch.tensor([True])]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | TENSORS
INNER = st.builds(Inner, st.integers(), TENSORS)
STATES = st.recursive(
    LEAVES | INNER,
    lambda states: (
        st.lists(states, max_size=3)
        | st.lists(states, max_size=3).map(tuple)
        | st.dictionaries(st.text(), states, max_size=3)
        | st.builds(Outer, INNER, st.tuples(INNER), st.dictionaries(st.text(), states, max_size=2))
    ),
    max_leaves=8,
)
EXAMPLE = Outer(Inner(0, torch.zeros(1)), (), {})


@given(STATES)
@settings(deadline=None, max_examples=150)
def test_states_survive(state):
    assert same(round_trip(state, EXAMPLE), state)


@given(STATES)
@settings(deadline=None, max_examples=100)
def test_every_tensor_is_mapped_and_nothing_else(state):
    found: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor.clone()

    mapped = map_tensors(change, state)
    tensors: dict[str, Tensor] = {}
    pack(state, tensors, "")
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in tensors.values()]
    assert same(mapped, state)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_json_does_not_have_survive(value):
    assert same(round_trip((value, {"best": value}), None), (value, {"best": value}))


def test_tensors_that_a_state_holds_twice_get_two_names():
    x = torch.ones(2)
    tensors = {"3.params": x}
    tree = pack((x, {"again": x}), tensors, "3.state")
    assert len(tensors) == 3
    assert same(unpack(tree, tensors, None), (x, {"again": x}))


@pytest.mark.parametrize(
    "state",
    [
        {1, 2},
        {1.5: "a"},
        object(),
        b"bytes",
        Inner,
        deque([1]),
        defaultdict(list),
        np.float64(1),
        torch.Size([2]),
        Color.RED,
    ],
    ids=lambda state: type(state).__name__,
)
def test_other_states_are_rejected(state):
    with pytest.raises(CheckpointError, match=f"of type {type(state).__name__} cannot be saved"):
        pack((state,), {}, "0.state")


@pytest.mark.parametrize(
    "tree",
    [
        {"dataclass": "Stranger", "fields": {}},
        {"something": "else"},
        ["a list"],
        7,
    ],
)
def test_trees_of_another_algorithm_are_rejected(tree):
    with pytest.raises(CheckpointError, match="a state that init does not return"):
        unpack(tree, {}, EXAMPLE)


def test_whole_numbers_and_texts_are_keys():
    state = {3: torch.ones(1), "all": {0: 2.0}}
    assert same(round_trip(state, None), state)


def test_named_tuples_survive():
    state = Pair(torch.ones(2), 3)
    for kept in (round_trip(state, Pair(None, 0)), map_tensors(torch.clone, state)):
        assert type(kept) is Pair
        assert same(tuple(kept), (torch.ones(2), 3))


def test_fields_that_the_constructor_does_not_take_survive():
    state = Derived(torch.tensor([3.0, 4.0]))
    state.norm = 7.0  # not what the constructor would set
    for kept in (round_trip(state, Derived(torch.zeros(1))), map_tensors(torch.clone, state)):
        assert same(vars(kept), {"x": torch.tensor([3.0, 4.0]), "norm": 7.0})


def test_an_attribute_that_is_no_field_is_rejected():
    state = Derived(torch.zeros(1))
    state.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="attribute 'extra' of Derived is not a field"):
        pack(state, {}, "0.state")


def test_a_class_is_known_from_a_value_or_from_the_type_of_a_field():
    known = classes_in([Holder(None)])
    check_state(Holder([Inner(1, torch.zeros(1))]), known)
    with pytest.raises(CheckpointError, match="holds a Pair, which init does not return; return"):
        check_state([Pair(1, 2)], known)
    again = Holder([Inner(1, torch.zeros(2))])
    found = round_trip(again, [Holder(None)])
    assert found.last is not None
    assert same(found.last, again.last)
