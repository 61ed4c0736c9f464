"""Named values: text, table and object are three forms of the same thing, for every member."""

import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import ANY_TEXT, members

from peerage import specs
from peerage.algorithms.decavg import DecAvg
from peerage.algorithms.dechw import DecHW
from peerage.data.datasets import DATASETS
from peerage.errors import InputError
from peerage.experiment.catalogue import FAMILIES
from peerage.experiment.experiment import Experiment
from peerage.experiment.toml import toml
from peerage.graphs.topology import TOPOLOGIES, ErdosRenyi, Ring
from peerage.runs.labels import label
from peerage.work.losses import CORRECTIONS, LOSSES
from peerage.work.training import LocalSGD

ALL: dict[str, specs.Family] = {**FAMILIES, "losses": LOSSES, "corrections": CORRECTIONS}
MEMBERS = [(kind, name) for kind, family in ALL.items() for name in family]
# A comma ends an option, and the space around one does not count.
WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters=","), min_size=1, max_size=9
).filter(lambda word: word == word.strip() and word.lower() not in ("none", "null"))


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_every_member_comes_back_from_its_text(kind: str, name: str, data: st.DataObject) -> None:
    value = data.draw(members(ALL[kind][name], WORDS))
    text = specs.text(value, kind, ALL[kind])
    again = specs.parse(text, kind, ALL[kind])
    assert again == value
    assert type(again) is ALL[kind][name]
    assert specs.text(again, kind, ALL[kind]) == text


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_every_member_comes_back_from_its_table(kind: str, name: str, data: st.DataObject) -> None:
    value = data.draw(members(ALL[kind][name]))
    table = specs.to_table(value, kind, ALL[kind])
    assert table["name"] == name
    assert specs.from_table(table, kind, ALL[kind]) == value
    # And from the file that holds the table, to the last bit of every number.
    assert tomllib.loads(toml(table)) == table


def test_text_names_only_what_is_not_the_default() -> None:
    assert specs.text(ErdosRenyi(p=0.2), "topology", TOPOLOGIES) == "er:p=0.2"
    assert specs.text(Ring(), "topology", TOPOLOGIES) == "ring"
    assert specs.parse("er:p=0.2,connected=false", "topology", TOPOLOGIES) == ErdosRenyi(
        p=0.2, connected=False
    )


def test_text_may_have_space_around_its_parts() -> None:
    assert specs.parse(" er : p = 0.2 , attempts = 3 ", "topology", TOPOLOGIES) == ErdosRenyi(
        p=0.2, attempts=3
    )


def test_an_equals_sign_may_be_part_of_a_value() -> None:
    value = specs.parse("npz:path=/data/a=b.npz", "dataset", DATASETS)
    assert value.path == "/data/a=b.npz"


def test_none_is_a_value_where_the_option_allows_it() -> None:
    algorithms = {"dechw": DecHW}
    assert specs.parse("dechw:theta=none", "algorithm", algorithms) == DecHW(theta=None)
    assert specs.parse("dechw:theta=3", "algorithm", algorithms) == DecHW(theta=3)
    with pytest.raises(InputError, match="beta cannot be 'none'"):
        specs.parse("dechw:beta=none", "algorithm", algorithms)
    assert specs.parse("femnist:path=none", "dataset", DATASETS).path is None
    # In a table it could be left out, so here it is the name of a folder.
    table = {"name": "femnist", "path": "none"}
    assert specs.from_table(table, "dataset", DATASETS).path == "none"


def test_tables_are_as_strict_as_texts() -> None:
    with pytest.raises(InputError, match="no name; add name = one of decavg"):
        specs.from_table({"weights": "data"}, "algorithm", {"decavg": DecAvg})
    with pytest.raises(InputError, match="no option 'wieghts'; did you mean 'weights'"):
        specs.from_table({"name": "decavg", "wieghts": 1}, "algorithm", {"decavg": DecAvg})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rign", "unknown topology 'rign'; did you mean 'ring'? known: ba, complete,"),
        ("zzz", "unknown topology 'zzz'; known: ba, complete,"),
        ("er:q=1", "topology 'er' has no option 'q'; known: attempts, connected, degree, p"),
        ("ring:p=1", "topology 'ring' has no option 'p'; it takes no options"),
        ("er:p", "topology 'er:p': 'p' is not of the form key=value; write er:key=value"),
        ("er:p=many", "topology 'er': p cannot be 'many': input should be a valid number"),
        ("er", "topology 'er': give exactly one of p and degree, such as er:p=0.2"),
        ("edge-list", "topology 'edge-list' requires path; write path=VALUE"),
        (
            "heavy-tail:kind=chung",
            "topology 'heavy-tail': kind must be one of chung-lu, configuration; got 'chung', did "
            "you mean 'chung-lu'?",
        ),
        ("regular:k=2.5", "topology 'regular': k cannot be '2.5': input should be a valid int"),
    ],
)
def test_errors_name_the_value_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        specs.parse(text, "topology", TOPOLOGIES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_outside_the_family_has_no_table() -> None:
    with pytest.raises(InputError, match="is not one of the registered ones"):
        specs.to_table(Path(), "topology", TOPOLOGIES)


@dataclass(frozen=True)
class Mixed:
    """Options of every type that a file can hold."""

    count: int
    share: float = 0.5
    widths: tuple[int, ...] = (3, 4)
    on: bool = True
    path: Path = Path("a")
    inner: LocalSGD = LocalSGD()  # a value with a section of its own


def test_numbers_of_numpy_become_plain_ones() -> None:
    value = Mixed(np.int64(3), np.float32(0.5), (np.int32(1), 2), np.bool_(False))  # type: ignore[arg-type]
    table = specs.plain(value)
    assert table == {"count": 3, "share": 0.5, "widths": [1, 2], "on": False, "path": Path("a")}
    assert [type(table[key]) for key in ("count", "share", "on")] == [int, float, bool]


def test_tuples_and_paths_come_back_from_a_file() -> None:
    value = Mixed(count=3, widths=(7,), path=Path("/data/ö"))
    table = tomllib.loads(toml(specs.plain(value)))
    assert specs.construct(Mixed, table, "mixed") == value


@dataclass(frozen=True)
class Several:
    """Options with several values."""

    widths: tuple[int, ...] = (3, 4)
    shares: tuple[float, ...] = ()
    names: tuple[str, ...] = ("a",)
    pair: tuple[int, float] = (1, 0.5)
    kinds: tuple[Literal["one", "two"], ...] = ("one",)
    perhaps: tuple[int, ...] | None = None
    flags: tuple[bool, ...] = ()


FAMILY = {"several": Several}
ITEMS = WORDS.filter(lambda word: "+" not in word)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("several:widths=30+2", Several(widths=(30, 2))),
        ("several:widths=30", Several(widths=(30,))),
        ("several:widths=-1+-2", Several(widths=(-1, -2))),
        ("several:widths=", Several(widths=())),
        ("several: widths = 5 + 6 ,names= cat + dog", Several((5, 6), names=("cat", "dog"))),
        ("several:shares=1e-3+2.5", Several(shares=(0.001, 2.5))),
        ("several:shares=1e16", Several(shares=(1e16,))),
        ("several:names=none", Several(names=("none",))),
        ("several:pair=7+1", Several(pair=(7, 1.0))),
        ("several:kinds=two+one", Several(kinds=("two", "one"))),
        ("several:perhaps=none", Several()),
        ("several:perhaps=8+9", Several(perhaps=(8, 9))),
        ("several:flags=true+no", Several(flags=(True, False))),
    ],
)
def test_several_values_are_joined_by_plus(text: str, value: Several) -> None:
    assert specs.parse(text, "thing", FAMILY) == value
    assert specs.parse(specs.text(value, "thing", FAMILY), "thing", FAMILY) == value


def test_several_values_are_printed_as_they_are_typed() -> None:
    value = Several(widths=(30, 2), shares=(1e16, 0.5), names=(), pair=(1, 0.5))
    text = "several:widths=30+2,shares=1e16+0.5,names="
    assert specs.text(value, "thing", FAMILY) == text
    assert specs.text(Several(), "thing", FAMILY) == "several"
    table = specs.to_table(value, "thing", FAMILY)
    assert table["widths"] == [30, 2]
    assert specs.from_table(table, "thing", FAMILY) == value
    assert specs.spelled(Several().widths) == "3+4"  # in the lists of options


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers()),
    st.lists(st.floats(allow_nan=False)),
    st.lists(ITEMS),
    st.none() | st.lists(st.integers()),
)
def test_several_values_come_back_from_their_text(
    widths: list[int], shares: list[float], names: list[str], perhaps: list[int] | None
) -> None:
    value = Several(
        tuple(widths),
        tuple(shares),
        tuple(names),
        perhaps=None if perhaps is None else tuple(perhaps),
    )
    assert specs.parse(specs.text(value, "thing", FAMILY), "thing", FAMILY) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "several:widths=30x2",
            "thing 'several': widths cannot be '30x2': input should be a valid integer, unable to "
            "parse string as an integer; join values by +, as in widths=A+B",
        ),
        ("several:widths=1++2", "widths cannot be '': input should be a valid integer, unable to"),
        ("several:pair=7", "join values by +, as in pair=A+B"),
        (
            "several:kinds=one+tow",
            "kinds must be one of one, two; got 'tow', did you mean 'two'?; jo",
        ),
    ],
)
def test_values_that_cannot_be_joined_say_how(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        specs.parse(text, "thing", FAMILY)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=50)
@given(st.floats(allow_nan=False), st.integers(), ANY_TEXT)
def test_toml_keeps_every_number_and_every_character(x: float, n: int, text: str) -> None:
    table = {"x": x, "n": n, "text": text, "list": [x, n], "inner": {"text": text}}
    assert tomllib.loads(toml(table)) == table


def test_several_values_for_the_users_algorithm(tmp_path: Path) -> None:
    """From a text, through the file of a run, and in the name that reports give it."""
    file = tmp_path / "own.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from peerage import Algorithm\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Grouped(Algorithm):\n"
        "    sizes: tuple[int, ...] = (1,)\n"
    )
    experiment = Experiment(algorithm=f"{file}:Grouped:sizes=30+2", nodes=4)
    assert experiment.algorithm.sizes == (30, 2)
    assert "sizes = [30, 2]" in experiment.to_toml()
    assert Experiment.from_toml(experiment.to_toml()) == experiment
    assert label(experiment) == "Grouped (sizes=30+2)"


# Choices


@dataclass(frozen=True)
class Chosen:
    kind: Literal["one", "two"] = "one"
    maybe: Literal["one", "two"] | None = None
    other: str = "any"

    def __post_init__(self) -> None:
        specs.check_choices(self)


def test_choices_are_checked_however_a_value_is_made() -> None:
    text = "c:kind=two,maybe=one,other=text"
    assert specs.parse(text, "thing", {"c": Chosen}) == Chosen("two", "one", "text")
    assert Chosen(maybe=None).maybe is None
    message = "kind must be one of one, two; got 'tow', did you mean 'two'?"
    for name in ("kind", "maybe"):
        expected = message.replace("kind", name)
        with pytest.raises(InputError) as caught:
            Chosen(**{name: "tow"})
        assert str(caught.value) == expected
        with pytest.raises(InputError) as caught:
            specs.parse(f"c:{name}=tow", "thing", {"c": Chosen})
        assert str(caught.value) == f"thing 'c': {expected}"
    with pytest.raises(InputError, match="kind must be one of one, two; got None"):
        Chosen(kind=None)  # type: ignore[arg-type]


def test_choices_of_every_member_of_every_family_are_checked() -> None:
    checked = 0
    for family in FAMILIES.values():
        for cls in family.values():
            hints = get_type_hints(cls)
            needed = {f.name: "1" for f in fields(cls) if f.default is MISSING}
            for field in fields(cls):
                kinds = (hints[field.name], *get_args(hints[field.name]))
                if any(get_origin(kind) is Literal for kind in kinds):
                    with pytest.raises(InputError, match=f"{field.name} must be one of"):
                        cls(**needed | {field.name: "nothing like it"})
                    checked += 1
    assert checked > 10
