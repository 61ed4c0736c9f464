"""What must hold after `chaos.py` has disturbed a network, and the page that says so."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from chaos_events import LINK, QUORUM, SITES, TIMEOUTS, Occurrence

from peerage.records.rows import Row

# Seconds from a cut until no further round may be counted: the silence until a peer counts as
# gone, and as long again for the round that was under way, as the machine may be busy.
GRACE = 2 * TIMEOUTS.idle


def contacts(row: Row) -> int:
    """The sites that a peer was in contact with in a round that it counted, itself included."""
    return SITES - len(row.get("out_of_contact", []))


def without_quorum(me: int, occurrences: Sequence[Occurrence]) -> Iterator[tuple[float, float]]:
    """When cuts and kills left this site, which ran, with fewer sites than the quorum."""
    lasting = [o for o in occurrences if o.event.kind != "slow" and o.healed is not None]
    times = sorted({time for o in lasting for time in (o.began, o.healed) if time is not None})
    for begin, end in pairwise(times):
        gone = {o.event.site for o in lasting if o.began <= begin and end <= (o.healed or 0)}
        own = [o.event.kind for o in lasting if o.event.site == me and o.began <= begin < o.healed]
        if own != ["kill"] and (me in gone or SITES - len(gone) < QUORUM):
            yield begin, end


def merged(spans: Iterator[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans, with those that follow each other without a gap as one.

    >>> merged(iter([(1, 2), (2, 4), (5, 6)]))
    [(1, 4), (5, 6)]
    """
    found: list[tuple[float, float]] = []
    for begin, end in spans:
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found


def counted_without_quorum(
    me: int, lines: Sequence[dict[str, Any]], occurrences: Sequence[Occurrence]
) -> list[int]:
    """The rounds that a site logged while it cannot have had a quorum."""
    spans = merged(without_quorum(me, occurrences))
    return [
        int(line["row"]["round"])
        for line in lines
        if "row" in line and any(a + GRACE < line["time"] < b for a, b in spans)
    ]


def checks(
    sites: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], planned: int, rounds: int
) -> dict[str, bool]:
    """What must hold after the disturbed run."""
    return {
        "all events happened": len(events) == planned,
        "some of them overlapped": not all(event["alone"] for event in events),
        "all sites caught up after each of them": all(e["caught_up_in"] for e in events),
        "every peer ends in the last round, as finished": all(
            (site["last_round"], site["state"], site["exit_code"]) == (rounds, "finished", 0)
            for site in sites
        ),
        "no round was counted below the quorum": not any(
            site["rounds_below_quorum"] + site["rounds_logged_without_quorum"] for site in sites
        ),
        "no traceback": not any(site["tracebacks"] for site in sites),
    }


def spoken(rate: str) -> str:
    """A rate of `tc` for people.

    >>> spoken("6kbit")
    '6 kbit/s'
    """
    return f"{rate.removesuffix('kbit')} kbit/s"


def what(event: dict[str, Any]) -> str:
    return f"slow, {spoken(event['rate'])}" if event["kind"] == "slow" else event["kind"]


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    accuracy = result["accuracy"]
    lines = [
        "# A disturbed network",
        "",
        f"Made by `{result['command']}`. [chaos.json](chaos.json) has the same numbers and more.",
        "",
        f"Five sites, {result['rounds']} rounds, {len(result['events'])} events drawn from seed "
        f"{result['seed']}. Links have {spoken(LINK)}. A quorum is {QUORUM} of {SITES} sites.",
        "",
        "| check | holds |",
        "| --- | --- |",
        *(f"| {text} | {'yes' if holds else 'NO'} |" for text, holds in result["checks"].items()),
        "",
        f"Mean accuracy after the last round: {accuracy['disturbed']:.2f} % disturbed, "
        f"{accuracy['undisturbed']:.2f} % undisturbed, a difference of "
        f"{accuracy['difference']:+.2f} points. {accuracy['seconds']['disturbed']} and "
        f"{accuracy['seconds']['undisturbed']} seconds.",
        "",
        "## Sites",
        "",
        "Rounds are skipped while a peer runs, and missed also while it is down. A pause is a wait "
        "for a quorum.",
        "",
        "| site | last round | run | skipped | missed | pauses | seconds paused "
        "| least sites in contact |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
        *(
            f"| {s['site']} | {s['last_round']} | {s['rounds_run']} | {s['rounds_skipped']} "
            f"| {s['rounds_missed']} | {s['pauses']} | {s['seconds_paused']} "
            f"| {s['least_contacts']} |"
            for s in result["sites"]
        ),
        "",
        "## Events",
        "",
        "Drawn for a round, and begun in that round, or later when at most one other site was "
        "disturbed. A site has caught up after a round if no site was more than one round ahead.",
        "",
        "| drawn for | begun in | event | site | seconds | caught up after |",
        "| --: | --: | --- | --: | --: | --: |",
        *(
            f"| {e['round']} | {e['began_in']} | {what(e)} | {e['site']} | {e['seconds']} "
            f"| {e['caught_up_in'] or '-'} |"
            for e in result["events"]
        ),
    ]
    return "\n".join(lines) + "\n"
