"""Gate before the pages: the token, the Host header, methods, and headers that keep other pages out."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
