"""Hostile messages of every layer against live peers: what they survive, and what it costs them.

Run `make fuzz`, or `PYTHONPATH=tests python benchmarks/fuzz.py [--minutes N] [--out FOLDER]`. The
environment variable PEERAGE_FUZZ has the number of messages, a million by default. It sends them,
or as many as fit into the time, then runs the same network undisturbed for as many rounds. Under
attack, each round has a pause of a second, so that the attackers get most of the processor. It
writes fuzz.json and fuzz.md, and ends with exit code 1 if anything happened that must not.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from support.fuzzed import GROWTH, Fuzzed, fuzz

from peerage.files import write_bytes, write_json
from peerage.records.environment import environment

MESSAGES = int(os.environ.get("PEERAGE_FUZZ", "1000000"))
OUT = Path("docs/results/net")
MEGABYTE = 1 << 20
PAUSE = 1.0  # seconds in each round
LINES = 10.0  # seconds between two lines of progress
WHAT = {"calls_refused": "calls", "connections_refused": "connections"}


class Progress:
    """Prints a line now and then."""

    def __init__(self) -> None:
        self.began = self.printed = time.monotonic()

    def __call__(self, messages: int, rounds: list[int]) -> None:
        now = time.monotonic()
        if now - self.printed >= LINES:
            self.printed = now
            rate = messages / (now - self.began)
            line = f"{messages} messages, {rate:.0f} per second, rounds {rounds}"
            print(line, file=sys.stderr, flush=True)


def by_kind(found: Fuzzed) -> dict[str, dict[str, int]]:
    """What became of the messages of each kind."""
    table: dict[str, dict[str, int]] = {}
    for name, count in sorted(found.outcomes.items()):
        kind, _, outcome = name.rpartition(": ")
        table.setdefault(kind, {})[outcome] = count
    return table


def facts(found: Fuzzed, wanted: int) -> dict[str, Any]:
    return {
        "messages": found.messages,
        "wanted": wanted,
        "seconds": round(found.seconds, 1),
        "problems": found.problems(),
        "accepted_wrongly": len(found.wrong),
        "peers_ended": len(found.ended),
        "rows_compared": found.compared,
        "rows_different": found.different,
        "accuracy": round(found.accuracy, 4),
        "memory_mb": {
            name: [round(one / MEGABYTE, 1) for one in both] for name, both in found.memory.items()
        },
        "growth_bound_mb": GROWTH // MEGABYTE,
        "rounds": found.rounds,
        "by_kind": by_kind(found),
        "refused": {what: dict(sorted(counts.items())) for what, counts in found.refused.items()},
        "environment": environment(),
    }


def page(known: dict[str, Any]) -> str:
    """The result as a page."""
    layers: dict[str, Counter[str]] = {}
    for kind, outcomes in known["by_kind"].items():
        layers.setdefault(kind.partition(": ")[0], Counter()).update(outcomes)
    names = ["answered", "refused", "ignored", "disconnected"]
    rows = [
        [layer, outcomes.total(), *(outcomes[name] for name in names)]
        for layer, outcomes in layers.items()
    ]
    memory = [
        [name, *sizes, round(sizes[1] - sizes[0], 1), "{} to {}".format(*known["rounds"][name])]
        for name, sizes in known["memory_mb"].items()
    ]
    reasons = [
        [WHAT[what], reason, count]
        for what, counts in known["refused"].items()
        for reason, count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    problems = "\n".join(f"- {text}" for text in known["problems"]) or "Nothing of this happened."
    return f"""# Hostile messages against live peers

`make fuzz` sends hostile messages of every layer to three live peers: from outsiders, and from
three members with valid certificates, one of which dials out. The peers run rounds at the same
time, with a pause of {PAUSE:g} second in each. This run sent {known["messages"]} messages in
{known["seconds"]:.0f} seconds. It was asked for {known["wanted"]}
([numbers](fuzz.json), with every kind of mutation).

No peer may end, finish no round, log an error, accept what a check forbids, miss a message of an
honest peer, or take {known["growth_bound_mb"]} MB more memory. {problems}

The same network ran again without attackers. Accuracy and loss of every honest peer after every
round were compared, bit by bit: {known["rows_different"]} of {known["rows_compared"]} rows differ.
The mean accuracy after the last of these rounds is {100 * known["accuracy"]:.1f} %.

What became of the messages, as the attackers saw it. A correct question of a member is answered,
and so is a message in which only something changed that a member may choose. These messages are
never used: they are not the first of a round.

{_table(["layer", "messages", *names], rows)}
Memory of each peer after the first 2 % of the messages and at the end, in MB (resident), and its
rounds in this time:

{_table(["peer", "before", "after", "growth", "rounds"], memory)}
What the peers counted, by reason. Those that are too early, late, replayed or too many (`full`)
also occur between honest peers.

{_table(["refused", "reason", "count"], reasons)}"""


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(
            Path(folder),
            MESSAGES,
            seconds=60 * given.minutes,
            seed=given.seed,
            progress=Progress(),
            pause=PAUSE,
        )
    known = facts(found, MESSAGES)
    given.out.mkdir(parents=True, exist_ok=True)
    write_json(given.out / "fuzz.json", known)
    write_bytes(given.out / "fuzz.md", page(known).encode())
    print(f"{found.messages} messages; problems: {found.problems() or 'none'}")
    if found.problems():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
