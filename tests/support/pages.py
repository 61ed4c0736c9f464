"""The fenced blocks of a document, which the tests run."""

import re
from dataclasses import dataclass

# A fenced block, and the comment on the line above it: `not run: reason` or `file: name`. Blocks
# for tests/net/deploy/test_tutorial.py have `at: place` (commands) or `log: peer` (lines of it).
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    note: str
    line: int  # of the document, before its text


def blocks_of(text: str) -> list[Block]:
    return [
        Block(m["kind"], m["text"], m["note"] or "", text[: m.start("text")].count("\n"))
        for m in BLOCK.finditer(text)
    ]
