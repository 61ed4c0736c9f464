"""Run folders made by hand, and requests to the dashboard without a connection."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from peerage.cli.ui import form
from peerage.ui.app import Dashboard

HOST, PORT, TOKEN = "127.0.0.1", 8765, "0123456789abcdef0123"
EDGES = [[0, 1], [1, 2]]


def rows_of_round(round: int, nodes: int = 3) -> list[dict[str, Any]]:
    """The rows of a round in which node i has accuracy (round + i) / 100."""
    values = [(round + node) / 100 for node in range(nodes)]
    found = [
        {"scope": "node", "round": round, "node": node, "accuracy": value, "loss": 2.0 - value}
        for node, value in enumerate(values)
    ]
    mean = sum(values) / nodes
    network = {
        "scope": "network",
        "round": round,
        "nodes": nodes,
        "bytes": 100,
        "bytes_total": 100 * round,
        "accuracy": mean,
        "accuracy_std": 0.01,
        "accuracy_min": min(values),
        "accuracy_max": max(values),
        "loss": 2.0 - mean,
        "seconds": {"train": 0.5, "exchange": 0.25, "total": 1.0},
    }
    return [*found, network]


def make_run(home: Path, name: str, *, rounds: int = 3, nodes: int = 3, **summary: Any) -> Path:
    """The folder of a run with hand-made numbers."""
    folder = home / name
    folder.mkdir(parents=True)
    known = {
        "run": name,
        "status": "finished",
        "algorithm": "decavg",
        "label": "DecAvg",
        "dataset": "digits",
        "nodes": nodes,
        "rounds": rounds,
        "rounds_planned": rounds,
        "accuracy": (rounds + 1) / 100,
        "message": "",
    }
    setup = {
        "allocation": [[5, node] for node in range(nodes)],
        "classes": ["cat", "dog"],
        "examples": [5 + node for node in range(nodes)],
        "edges": EDGES[: nodes - 1],
        "parameters": [10] * nodes,
        "test_examples": 20,
        "topology": {"connected": True},
    }
    seed = summary.pop("seed", 0)
    (folder / "experiment.toml").write_text(
        f'nodes = {nodes}\nrounds = {rounds}\nseed = {seed}\n[algorithm]\nname = "decavg"\n'
        '[local]\nepochs = 1\n[dataset]\nname = "digits"\n'
    )
    (folder / "setup.json").write_text(json.dumps(setup))
    (folder / "environment.json").write_text(json.dumps({"peerage": "0"}))
    (folder / "summary.json").write_text(json.dumps(known | summary))
    (folder / "metrics.jsonl").write_text("".join(lines(range(rounds + 1), nodes)))
    return folder


def lines(rounds: Any, nodes: int = 3) -> list[str]:
    return [json.dumps(row) + "\n" for round in rounds for row in rows_of_round(round, nodes)]


def dashboard(home: Path) -> Dashboard:
    return Dashboard(home, form(), HOST, PORT, TOKEN)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(
    app: Any,
    path: str,
    query: Any = (),
    *,
    method: str = "GET",
    body: Any = None,
    token: str | None = TOKEN,
    headers: dict[str, str] | None = None,
) -> Answer:
    """The answer of an ASGI application to a request as the pages make it."""
    given = {"host": f"{HOST}:{PORT}"}
    if token is not None:
        given["cookie"] = f"peerage-{PORT}={token}"
        given |= {"x-peerage-token": token} if method == "POST" else {}
    given |= headers or {}
    content = b"" if body is None else json.dumps(body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": urlencode(query).encode(),
        "scheme": "http",
        "server": (HOST, PORT),
        "client": (HOST, 1),
        "root_path": "",
        "headers": [(key.encode(), value.encode()) for key, value in given.items()],
    }
    sent: list[dict[str, Any]] = []

    async def call() -> None:
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # the caller stays connected
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)

    asyncio.run(call())
    start = next(one for one in sent if one["type"] == "http.response.start")
    return Answer(
        start["status"],
        {key.decode(): value.decode() for key, value in start["headers"]},
        b"".join(one.get("body", b"") for one in sent),
    )
