"""ASGI application of the pages: addresses, errors, files to download, and the server that runs it."""

from __future__ import annotations

import csv
import io
import json
import secrets
import shlex
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode, urlsplit

import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from binidx.errors import BinidxError, ConfigError, redacted, redacted_text
from binidx.explore import views
from binidx.explore.explored import Explored
from binidx.format.sidecars.lineage import origin_text
from binidx.packed.packed_run import PackedRunOrder
from binidx.run.display.sample_rows import build_rows

# Numbers in addresses have at most 18 digits, as in queries.
register_url_convertor("number", type("NumberConvertor", (IntegerConvertor,), {"regex": "[0-9]{1,18}"})())

PAGES: dict[str, tuple[str, Callable[..., Any]]] = {
    "step/{step:number}": ("step.html", views.show_step),
    "step/{step:number}/{rank:number}/{slot:number}": ("sample.html", views.show_text),
    "step/{step:number}/seen": ("seen.html", views.show_seen),
    "compare": ("compare.html", views.show_comparison),
    "search": ("search.html", views.show_search),
    "repeats": ("repeats.html", views.show_repeats),
    "source/{number:number}": ("source.html", views.show_source),
    "source/{number:number}/lengths": ("lengths.html", views.show_lengths),
    "source/{number:number}/tokens": ("tokens.html", views.show_tokens),
    "source/{number:number}/duplicates": ("duplicates.html", views.show_duplicates),
    "source/{number:number}/document/{document:number}": ("document.html", views.show_document),
    "source/{number:number}/document/{document:number}/reads": ("reads.html", views.show_reads),
}
"""Address of a page below that of its run -> its template, and the function of its values."""

DIRECTIONS = [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F]
HIDDEN: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **{code: f"[U+{code:04X}]" for code in (0x7F, *DIRECTIONS)},
}
"""Characters without a shape of their own, or that reorder those around them -> their pictures or numbers."""


def visible(text: str) -> str:
    """Return a text whose control characters can be seen."""
    return text.translate(HIDDEN)


def build_templates() -> jinja2.Environment:
    """Return the templates; everything that they print is escaped."""
    loader = jinja2.PackageLoader("binidx.explore")
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Callable[..., Any]] = {
        "count": lambda number: f"{number:,}",
        "percent": lambda share: f"{share:.1%}".replace("%", " %"),
        "visible": visible,
        "redacted": redacted,
        "short": lambda prefix: redacted(prefix).rstrip("/").rpartition("/")[2],
        "origin": lambda origin: redacted_text(origin_text(origin)),
    }
    templates.filters.update(filters)
    templates.policies["json.dumps_kwargs"] = {}
    return templates


class Pages:
    """Responses of the pages of one run or dataset.

    Args:
        explored: the run or the dataset.
    """

    def __init__(self, explored: Explored) -> None:
        self.explored, self.templates = explored, build_templates()

    @property
    def first_page(self) -> tuple[str, Callable[..., Any]]:
        """The template of the first page, and the function of its values."""
        if self.explored.order is None:
            return "source.html", lambda explored, query: views.show_source(explored, query, 0)
        return "packed_run.html" if isinstance(self.explored.order, PackedRunOrder) else "run.html", views.show_run

    def render(self, template: str, values: dict[str, Any], depth: int = 0, **more: Any) -> str:
        """Return the HTML of a page.

        Args:
            template: name of its template.
            values: its values.
            depth: folders between its address and that of the run.
            more: further values.
        """
        base = "../" * depth or "./"
        common = {"explored": self.explored, "base": base, "fragment": False, "static": False}
        command = values.get("command")
        typed = command and ["binidx", command[0], redacted(values.get("target", self.explored.name)), *command[1:]]
        typed_line = typed and shlex.join(map(redacted, typed))
        return self.templates.get_template(template).render({**common, **more, **values, "typed": typed_line})

    def routes(self) -> list[BaseRoute]:
        """Return the addresses of all pages and files."""
        digest = self.explored.digest
        first = Route("/", lambda request: RedirectResponse(f"./{digest}/", 307))
        shown = {"": self.first_page, **PAGES}
        pages = [Route(f"/{digest}/{path}", partial(self._show, *page)) for path, page in shown.items()]
        others = [
            Route(f"/{digest}/find", self._find),
            Route(f"/{digest}/timeline.{{kind}}", self._timeline_file),
            Route(f"/{digest}/compare.csv", self._comparison_file),
            Route(f"/{digest}/step/{{step:number}}.{{kind}}", self._step_file),
            Mount("/assets", StaticFiles(packages=[("binidx.explore", "static")])),
        ]
        # A file of a step would otherwise be a step that is no number.
        return [first, *others, *pages]

    def _show(self, template: str, view: Callable[..., Any], request: Request) -> Response:
        values = view(self.explored, request.query_params, **request.path_params)
        return self._html(request, template, {**request.path_params, **values})

    def _html(self, request: Request, template: str, values: dict[str, Any], status: int = 200) -> Response:
        depth = max(request.url.path.count("/") - 2, 0)
        fragment = "x-fragment" in request.headers
        text = self.render(template, values, depth, fragment=fragment)
        return Response(text, status, media_type="text/html")

    def _find(self, request: Request) -> Response:
        found = views.find_page(self.explored, request.query_params)
        if isinstance(found, str):
            return RedirectResponse(f"./{found}", 303)
        return self._html(request, "found.html", found)

    def _timeline_file(self, request: Request) -> Response:
        """Respond with the timeline as CSV, or as a figure for a paper."""
        kind, order = request.path_params["kind"], self.explored.order
        if order is None:
            raise HTTPException(404)
        steps = views.parse_range(request.query_params.get("steps"), self.explored.steps)
        timeline = self.explored.timeline(steps, views.BINS)
        if kind == "csv":
            return _download(as_csv(timeline.rows()), "text/csv", "timeline.csv")
        if kind not in FIGURE_TYPES:
            raise HTTPException(404)
        from binidx.run.display.figures import draw_blend, figure_bytes

        return _download(figure_bytes(draw_blend(timeline), kind), FIGURE_TYPES[kind], f"timeline.{kind}")

    def _comparison_file(self, request: Request) -> Response:
        """Respond with the documents that are in one of two parts alone, as CSV."""
        found = views.show_comparison(self.explored, request.query_params)["found"]
        return _download(as_csv(row for source in found for row in source.rows()), "text/csv", "compare.csv")

    def _step_file(self, request: Request) -> Response:
        """Respond with the rows of a step as parquet, as CSV with a row for each piece, or as JSON lines."""
        kind, step, order = request.path_params["kind"], request.path_params["step"], self.explored.order
        if order is None or kind not in ("csv", "json", "parquet"):
            raise HTTPException(404)
        order = self.explored.order_at(step)
        reads, rank = views.read_step(order, step, request.query_params)
        name = f"step-{step}{'' if rank is None else f'-rank-{rank}'}.{kind}"
        if kind == "parquet":
            from binidx.format.arrow import parquet

            parquet.write_table(order.table(range(step, step + 1), rank, docs="spans"), out := io.BytesIO())
            return _download(out.getvalue(), "application/vnd.apache.parquet", name)
        rows = list(build_rows(order, reads))
        if kind == "json":
            return _download("".join(f"{json.dumps(row)}\n" for row in rows), "application/x-ndjson", name)
        pieces = (row | doc for row in rows for doc in row.get("docs") or [{}])
        flat = ({key: value for key, value in piece.items() if key not in ("docs", "origin")} for piece in pieces)
        return _download(as_csv(flat), "text/csv", name)

    def fail(self, request: Request, error: Exception) -> Response:
        """Respond to an error with its message, and never with more."""
        status = 404 if isinstance(error, ConfigError | IndexError | HTTPException) else 500
        if isinstance(error, BinidxError | IndexError):
            message = redacted_text(str(error))
        elif isinstance(error, HTTPException):
            message = "there is no such page; its address may be of another run, or of other data"
            status = error.status_code
        else:  # which the server logs
            message = f"{type(error).__name__}: a fault in binidx; its terminal shows more"
        return self._html(request, "error.html", {"message": message, "status": status}, status)


FIGURE_TYPES = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf"}


def as_csv(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as CSV, with a column for each of their keys."""
    out, rows = io.StringIO(), list(rows)
    if names := dict.fromkeys(name for row in rows for name in row):
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def _download(content: str | bytes, kind: str, name: str) -> Response:
    return Response(content, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def build_app(explored: Explored, token: str, hosts: Collection[str], cookie: str = "binidx") -> Guard:
    """Return the pages behind their gate, as an ASGI application.

    Args:
        explored: the run or the dataset.
        token: token that the first address must have.
        hosts: names that a Host header may have.
        cookie: name of the cookie.
    """
    pages = Pages(explored)

    async def respond(request: Request, error: Exception) -> Response:
        return await run_in_threadpool(pages.fail, request, error)

    handlers: dict[Any, Any] = dict.fromkeys([HTTPException, BinidxError, IndexError, Exception], respond)
    return Guard(Starlette(routes=pages.routes(), exception_handlers=handlers), token, hosts, cookie)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; OSError if it is in use."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def build_server(app: Guard) -> uvicorn.Server:
    """Return the server of the pages; `run(sockets=[...])` serves until it is interrupted. It logs no address."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    return uvicorn.Server(config)


def write_report(explored: Explored) -> str:
    """Return the first page, and the counts of each source, as one HTML file that needs nothing else."""
    pages, style = Pages(explored), files("binidx.explore").joinpath("static", "explore.css").read_text("utf-8")
    template, view = pages.first_page
    numbers = () if template == "packed_run.html" else range(len(explored.sources))
    lengths: Sequence[Any] = [views.show_lengths(explored, {}, source)["lengths"] for source in numbers]
    return pages.render(template, view(explored, {}), static=True, style=style, lengths=lengths)


HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response: no script or style but our files, no page around ours, no copy in a cache."""


class Guard:
    """ASGI application that answers only requests with the token, to a known host, that read.

    The first request has the token in its address. Its response sets a cookie, which scripts cannot read and which no
    request of another site carries, and leads to the address without the token. It does so by `Refresh`: after a
    redirect of a link on another site, the browser would not send a strict cookie.

    Args:
        app: the pages.
        token: the token.
        hosts: names that a Host header may have, without ports; others may be an attacker's (DNS rebinding).
        cookie: name of the cookie; of each port another, because cookies do not distinguish ports.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str], cookie: str) -> None:
        self.app, self.token, self.hosts, self.cookie = app, token, {host.lower() for host in hosts}, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no page uses another protocol
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (self._refuse(request := Request(scope)) or self._enter(request) or self.app)(
            scope, receive, send_guarded
        )

    def _refuse(self, request: Request) -> Response | None:
        """Return the response to a request of another page or to another host; None if it is none."""
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError:
            host = None
        if host not in self.hosts:
            return PlainTextResponse("this host name is not allowed; binidx explore --allow-host NAME allows it\n", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("these pages are read-only\n", 405)
        is_foreign = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if is_foreign and request.headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("a request of another page\n", 403)
        return None

    def _enter(self, request: Request) -> Response | None:
        """Return the response that takes the token out of the address, or refuses; None if the cookie is right."""
        given = request.query_params.getlist("token")
        if given and self._is_token(given[0]):
            rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
            # Relative, for proxies that serve these pages below another path.
            target = f"./{request.url.path.rpartition('/')[2]}{'?' if rest else ''}{urlencode(rest)}"
            response = PlainTextResponse("opening the pages\n", headers={"Refresh": f"0; url={target}"})
            response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            return response
        if self._is_token(request.cookies.get(self.cookie, "")):
            return None
        return PlainTextResponse("open the address that binidx explore has printed, with its token\n", 403)

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(errors="replace"), self.token.encode())
