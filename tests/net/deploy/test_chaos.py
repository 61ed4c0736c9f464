"""The program that disturbs a network: what it draws, and that its checks find faults."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("chaos")


@pytest.fixture
def chaos_events(chaos: ModuleType) -> ModuleType:
    return importlib.import_module("chaos_events")


@pytest.fixture
def chaos_checks(chaos: ModuleType) -> ModuleType:
    return importlib.import_module("chaos_checks")


@pytest.mark.parametrize("seed", range(20))
def test_events_are_drawn_from_the_seed(chaos_events, seed):
    groups = chaos_events.draw(seed, 30, 200)
    assert groups == chaos_events.draw(seed, 30, 200) != chaos_events.draw(seed + 1, 30, 200)
    events = [event for group in groups for event in group]
    assert len(events) == 30
    assert {event.kind for event in events} == {"cut", "kill", "slow"}
    assert [event.round for event in events] == sorted(event.round for event in events)
    assert events[0].round >= 5
    assert events[-1].round < 170
    [together] = [group for group in groups if len(group) > 1]
    assert len({event.site for event in together}) == 3  # of five, so two are left
    assert {event.kind for event in together} == {"cut"}
    assert all((event.rate in chaos_events.SLOW) == (event.kind == "slow") for event in events)


def happened(chaos_events, kind: str, site: int, began: float, healed: float):
    event = chaos_events.Event(1, kind, site, healed - began)
    return chaos_events.Occurrence(event, began, 1, alone=True, healed=healed)


def lines(*times: float) -> list[dict]:
    return [{"time": time, "row": {"round": int(time)}, "message": ""} for time in times]


def test_rounds_without_a_quorum_are_found(chaos_events, chaos_checks):
    cuts = [happened(chaos_events, "cut", site, 100, 130) for site in (0, 1, 2)]
    logged = lines(99, 105, 115, 129, 131)
    for site in (0, 4):  # cut off, and left with one other
        assert chaos_checks.counted_without_quorum(site, logged, cuts) == [115, 129]
    two = [*cuts[:1], happened(chaos_events, "cut", 1, 110, 150)]  # three others are a quorum
    assert chaos_checks.counted_without_quorum(4, logged, two) == []
    assert chaos_checks.counted_without_quorum(1, logged, two) == [129, 131]
    assert (
        chaos_checks.counted_without_quorum(
            1, logged, [happened(chaos_events, "slow", 1, 100, 130)]
        )
        == []
    )


def test_a_killed_site_counts_as_gone_for_the_others(chaos_events, chaos_checks):
    gone = [happened(chaos_events, "cut", 0, 100, 130), happened(chaos_events, "cut", 1, 100, 130)]
    gone.append(happened(chaos_events, "kill", 2, 110, 140))
    logged = lines(115, 125, 139)
    assert chaos_checks.counted_without_quorum(4, logged, gone) == [125]
    assert chaos_checks.counted_without_quorum(2, logged, gone) == []  # it did not run


def test_the_log_of_a_site_is_read_as_it_grows(chaos, tmp_path):
    def line(second: int, message: str, **more: object) -> str:
        time = f"2026-01-01T00:00:{second:02}+00:00"
        return json.dumps({"time": time, "message": message, **more}) + "\n"

    site = chaos.Site(tmp_path / "log")
    site.read()
    waits = line(2, "in contact with 1 of 5 peers, 3 needed: round 3 waits for node-1")
    text = line(1, "round 2 of 9", row={"round": 2}) + waits + "killed while wri\n"
    site.file.write_text(text + waits[:20])
    site.read()
    assert (site.round, len(site.lines), site.pauses) == (2, 2, [])
    again = line(9, "enough peers are in contact again, continuing with round 3")
    site.file.write_text(text + waits + again + line(10, "", row={"round": 3}))
    site.read()
    assert site.round == 3
    assert [end - begin for begin, end in site.pauses] == [7]


GOOD = {
    "site": 0,
    "last_round": 200,
    "state": "finished",
    "exit_code": 0,
    "rounds_below_quorum": [],
    "rounds_logged_without_quorum": [],
    "tracebacks": 0,
}
EVENTS = [{"alone": True, "caught_up_in": 9}, {"alone": False, "caught_up_in": 12}]


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ({"last_round": 199}, "every peer ends in the last round, as finished"),
        ({"exit_code": 1}, "every peer ends in the last round, as finished"),
        ({"rounds_below_quorum": [7]}, "no round was counted below the quorum"),
        ({"rounds_logged_without_quorum": [7]}, "no round was counted below the quorum"),
        ({"tracebacks": 1}, "no traceback"),
    ],
)
def test_one_bad_site_fails_a_check(chaos_checks, fault, check):
    assert all(chaos_checks.checks([GOOD, GOOD], EVENTS, 2, 200).values())
    found = chaos_checks.checks([GOOD, GOOD | fault], EVENTS, 2, 200)
    assert [text for text, holds in found.items() if not holds] == [check]


def test_events_that_did_not_happen_or_overlap_or_end_fail_a_check(chaos_checks):
    events = [{"alone": True, "caught_up_in": None}]
    found = list(chaos_checks.checks([GOOD], events, 2, 200).values())
    assert found == [False, False, False, True, True, True]


def test_contacts_are_read_from_the_records(chaos_events, chaos_checks):
    assert chaos_checks.contacts({"round": 1}) == 5
    assert (
        chaos_checks.contacts({"round": 1, "out_of_contact": [0, 3, 4]}) == 2 < chaos_events.QUORUM
    )


def test_the_stored_page_says_what_the_stored_result_says(chaos_checks):
    folder = BENCHMARKS.parent / "docs" / "results" / "net"
    result = json.loads((folder / "chaos.json").read_text())
    assert (folder / "chaos.md").read_text() == chaos_checks.page(result)
    assert len(result["events"]) == 30
    assert all(result["checks"].values())
