"""The pages and the data of the dashboard, and its few actions."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from peerage.errors import InputError, PeerageError
from peerage.files import dumps
from peerage.ui import drawing, views
from peerage.ui.form import Form
from peerage.ui.guard import Guard
from peerage.ui.jobs import Jobs
from peerage.ui.listing import STATUSES, Entry, Listing, resolve
from peerage.ui.opened import OpenRun, OpenRuns
from peerage.ui.peers import tail

HERE = Path(str(files("peerage.ui")))
SHOWN = 200  # entries of a list that are sent at once
MOST_COMPARED = 60  # runs
INTERVAL = 0.5  # seconds between two looks at a run that goes on
LARGEST_BODY = 100_000  # bytes
Answer = Callable[[Request], Any]


@dataclass
class Dashboard:
    """The dashboard of the runs below a home."""

    home: Path
    form: Form
    host: str
    port: int
    token: str
    network: Any = None  # asks the peers of a network on several machines; see `remote.py`
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.listing = Listing(self.home)
        self.runs = OpenRuns()
        self.jobs = Jobs(self.home)
        self.pages = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )

    def app(self) -> Guard:
        """The ASGI application."""
        get, post = ["GET"], ["POST"]
        routes = [
            Route("/", self.page("list"), methods=get),
            Route("/study/{path:path}", self.page("list"), methods=get),
            Route("/run/{path:path}", self.page("run"), methods=get),
            Route("/compare", self.page("compare"), methods=get),
            Route("/new", self.page("new"), methods=get),
            Route("/network", self.page("network"), methods=get),
            Route("/api/list", _json(self.list_entries), methods=get),
            Route("/api/run", _json(self.overview), methods=get),
            Route("/api/events", self.events, methods=get),
            Route("/api/graph", _json(self.graph), methods=get),
            Route("/api/frames", _json(self.frames), methods=get),
            Route("/api/node", _json(self.node), methods=get),
            Route("/api/details", _json(self.details), methods=get),
            Route("/api/compare", _json(self.compare), methods=get),
            Route("/api/form", _json(self.form_fields), methods=get),
            Route("/api/network", self.ask_network, methods=get),
            Route("/figure", self.figure, methods=get),
            Route("/download", self.download, methods=get),
            Route("/api/check", _action(self.check), methods=post),
            Route("/api/start", _action(self.start), methods=post),
            Route("/api/stop", _action(self.stop), methods=post),
            Route("/api/resume", _action(self.resume), methods=post),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ]
        handlers: Mapping[Any, Any] = {PeerageError: _refuse, HTTPException: _refuse}
        app = Starlette(routes=routes, exception_handlers=handlers)
        return Guard(app, self.host, self.port, self.token)

    def page(self, name: str) -> Answer:
        """A page without data, which its script asks for."""

        def answer(request: Request) -> Response:
            path = request.path_params.get("path", "")
            resolve(self.home, path)
            text = self.pages.get_template(f"{name}.html").render(
                token=self.token,
                path=path,
                title=path.rpartition("/")[2] or self.home.absolute().name,
                home=str(self.home),
                with_network=self.network is not None,
            )
            return HTMLResponse(text)

        return answer

    def list_entries(self, request: Request) -> dict[str, Any]:
        query = request.query_params
        within = query.get("within", "")
        entries = self.listing.entries(within)
        if not within:
            waiting = (self._waiting(one) for one in self.jobs.waiting())
            entries = sorted([*waiting, *entries], key=lambda one: -one.started)
        words = query.get("q", "").lower().split()
        texts = {id(one): _search_text(one) for one in entries} if words else {}
        found = [one for one in entries if all(word in texts[id(one)] for word in words)]
        counts = {status: sum(one.status == status for one in found) for status in STATUSES}
        kinds = {
            kind: sum(one.kind == kind for one in found) for kind in ("run", "network", "study")
        }
        chosen = [
            one
            for one in found
            if query.get("status", one.status) in ("", one.status)
            and query.get("kind", one.kind) in ("", one.kind)
        ]
        limit = min(max(_number(query.get("limit"), SHOWN), 1), 5000)
        return {
            "total": len(chosen),
            "statuses": counts,
            "kinds": kinds,
            "entries": [one.table for one in chosen[:limit]],
        }

    def _waiting(self, found: Mapping[str, Any]) -> Entry:
        facts = {"message": found["message"]}
        return Entry(found["path"], "run", found["status"], found["started"], facts)

    def overview(self, request: Request) -> dict[str, Any]:
        return self._overview(request.query_params.get("path", ""))

    def _overview(self, path: str) -> dict[str, Any]:
        folder = resolve(self.home, path)
        entry = self.listing.entry(path)
        if entry is None:
            if self.jobs.knows(path):
                return {**self.jobs.waiting_for(path), "log": self._log(path), "version": -1}
            raise HTTPException(404, f"there is no run {path!r}; go back to the list")
        run = self.runs.get(folder)
        found = views.overview(run, entry)
        return {
            **found,
            "commands": views.commands(folder, entry),
            "log": views.log_tail(run, self.jobs.log(path)),
            "peers": run.peers.states() if run.peers is not None else [],
            "can_stop": self.jobs.is_alive(path),
            "can_resume": entry.kind == "run"
            and entry.status in ("interrupted", "failed")
            and not self.jobs.is_alive(path),
        }

    def _log(self, path: str) -> dict[str, list[str]]:
        return {"": tail(self.jobs.log(path))}

    async def events(self, request: Request) -> Response:
        """Server-sent events: the overview, whenever the run has changed."""
        path = request.query_params.get("path", "")
        resolve(self.home, path)

        async def changes() -> AsyncIterator[str]:
            last: list[Any] = []
            while not await request.is_disconnected() and not self.closing.is_set():
                try:
                    found = await run_in_threadpool(self._overview, path)
                except (PeerageError, HTTPException) as error:
                    yield _event({"status": "damaged", "message": _text(error), "version": -2})
                    return
                watched = ("version", "status", "message", "log", "can_stop", "can_resume")
                state = [found.get(key) for key in watched]
                if state != last:
                    last = state
                    yield _event(found)
                if found["status"] != "running" and not self.jobs.is_alive(path):
                    return  # the page opens another stream after an action
                await asyncio.sleep(INTERVAL)

        return StreamingResponse(changes(), media_type="text/event-stream")

    def _run(self, request: Request) -> OpenRun:
        folder = resolve(self.home, request.query_params.get("path", ""))
        if not folder.is_dir():
            raise HTTPException(404, "there is no such run; go back to the list")
        return self.runs.get(folder)

    def graph(self, request: Request) -> dict[str, Any]:
        return drawing.graph(self._run(request))

    def frames(self, request: Request) -> dict[str, Any]:
        return {"frames": drawing.frames(self._run(request))}

    def node(self, request: Request) -> dict[str, Any]:
        run = self._run(request)
        number = _number(request.query_params.get("node"), -1)
        if not 0 <= number < drawing.node_count(run):
            raise InputError(f"there is no node {number}")
        return views.node(run, number)

    def details(self, request: Request) -> dict[str, Any]:
        from peerage.ui.details import details

        return details(self._run(request).folder)

    def compare(self, request: Request) -> dict[str, Any]:
        from peerage.ui.details import comparison

        folders = self._folders(request)
        return comparison(folders, request.query_params.get("key") or "accuracy")

    def _folders(self, request: Request) -> list[Path]:
        """The runs of a request, or all those of a study."""
        paths = request.query_params.getlist("path")
        study = request.query_params.get("study")
        if study is not None:
            paths += [one.path for one in self.listing.entries(study) if one.kind != "study"]
        if not paths:
            raise InputError("a comparison needs at least one run; select some in the list")
        if len(paths) > MOST_COMPARED:
            raise InputError(f"{len(paths)} runs are too many; select at most {MOST_COMPARED}")
        return [resolve(self.home, path) for path in paths]

    async def figure(self, request: Request) -> Response:
        from peerage.ui.details import figure

        name = request.query_params.get("name", "")
        content = await run_in_threadpool(lambda: figure(self._run(request).folder, name))
        return Response(content, media_type="image/svg+xml")

    async def download(self, request: Request) -> Response:
        return await run_in_threadpool(self._download, request)

    def _download(self, request: Request) -> Response:
        """A report, a table or a model, always as a file, never as a page of the dashboard."""
        from peerage.ui.details import TYPES, download, model

        what = request.query_params.get("what", "")
        folders = self._folders(request)
        name = folders[0].name if len(folders) == 1 else "comparison"
        if what == "model":
            content = model(folders[0], request.query_params.get("node", "best"))
            kind, ending = "application/octet-stream", "model.safetensors"
        elif what == "experiment":
            content = (folders[0] / "experiment.toml").read_bytes()
            kind, ending = "application/toml", "experiment.toml"
        elif what in TYPES:
            content, kind, ending = download(folders, what), TYPES[what], what
        else:
            raise InputError(f"there is no download {what!r}")
        safe = "".join(c if c.isascii() and (c.isalnum() or c in "-._") else "_" for c in name)
        disposition = f'attachment; filename="{safe}-{ending}"'
        return Response(content, media_type=kind, headers={"content-disposition": disposition})

    def form_fields(self, request: Request) -> dict[str, Any]:
        recipe = request.query_params.get("recipe") or None
        if recipe is not None and recipe not in self.form.recipes:
            raise InputError(f"there is no recipe {recipe!r}")
        return {
            "fields": [vars(one) for one in self.form.fields],
            "recipes": self.form.recipes,
            "starting": self.form.starting(recipe),
        }

    def check(self, body: Any) -> dict[str, Any]:
        recipe, values = self.form.read(body)
        arguments = self.form.arguments(recipe, values)
        return {"messages": self.form.messages(recipe, values), "arguments": arguments}

    def start(self, body: Any) -> dict[str, Any]:
        recipe, values = self.form.read(body)
        messages = self.form.messages(recipe, values)
        if messages:
            return {"messages": messages}
        name = values.get("algorithm", recipe or "run").partition(":")[0]
        safe = "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in name)
        return {
            "path": self.jobs.start(self.form.arguments(recipe, values), safe.strip("-") or "run")
        }

    def stop(self, body: Any) -> dict[str, Any]:
        self.jobs.stop(self._path(body))
        return {}

    def resume(self, body: Any) -> dict[str, Any]:
        path = self._path(body)
        if self.listing.entry(path) is None:
            raise InputError(f"there is no run {path!r}")
        self.jobs.resume(path)
        return {}

    def _path(self, body: Any) -> str:
        path = body.get("path") if isinstance(body, dict) else None
        if not isinstance(path, str) or not path:
            raise InputError("an action needs the path of a run")
        resolve(self.home, path)
        return path

    async def ask_network(self, request: Request) -> Response:
        """The status of the peers on several machines, asked with an observer's certificate."""
        if self.network is None:
            raise InputError("start the dashboard with --network to see a network's peers")
        return _answer(await self.network.ask())


def _json(function: Callable[[Request], Mapping[str, Any]]) -> Answer:
    async def answer(request: Request) -> Response:
        return _answer(await run_in_threadpool(function, request))

    return answer


def _action(function: Callable[[Any], Mapping[str, Any]]) -> Answer:
    async def answer(request: Request) -> Response:
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > LARGEST_BODY:
                raise HTTPException(413, "the request is too large")
        try:
            body = json.loads(content)
        except ValueError:
            raise InputError("the request must be JSON") from None
        return _answer(await run_in_threadpool(function, body))

    return answer


def _answer(value: Mapping[str, Any]) -> Response:
    return Response(dumps(value), media_type="application/json")


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {dumps(value)}\n\n"


def _refuse(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400
    return JSONResponse({"error": _text(error)}, status)


def _text(error: Exception) -> str:
    return str(error.detail if isinstance(error, HTTPException) else error)


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else otherwise


def _search_text(entry: Entry) -> str:
    facts = (str(entry.facts.get(key) or "") for key in ("label", "algorithm", "dataset"))
    return " ".join([entry.path, entry.kind, entry.status, *facts]).lower()
