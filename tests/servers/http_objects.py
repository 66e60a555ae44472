"""Objects over HTTP, by ranges: enough of HTTP for fsspec's http filesystem and enough of S3 for s3fs to read one key.

    with http_objects({"/bucket/key": b"..."}) as server:
        server.endpoint                  "http://127.0.0.1:PORT"
        server.behaviour = "short"       every GET from now on misbehaves
        server.etag = None               no ETag is sent from now on
        server.modified = None           nor a Last-Modified
        server.targets["/a"] = url       requests for /a are redirected by a 307; {query} in the URL is theirs
    server.statuses["/a"] = 500      requests for /a get this status
    server.gates["/a"] = Gate()      requests for /a are answered once the gate is opened

What a store or a proxy before it has been seen to do: "short" sends a 206 with a byte too few, "whole" a 200 with
everything, "no suffix" does so where the last N bytes are asked, "endless" a 200 that does not say how long it is and
never ends, "inflated" a 206 whose body is a gzip of 256 MiB, "forbidden" a 403, "no signed URLs" a 403 to these,
"contrary" a 412 to every If-Match, "heedless" an answer to every If-Match. No signature is checked.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import itertools
import re
import ssl
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


@functools.cache
def bomb() -> bytes:
    """A small gzip of much."""
    return gzip.compress(bytes(256 << 20), 1)


@dataclass(frozen=True)
class Gate:
    """What holds the answers of one path: `came` is set when a request is there, and `opened` lets all answers pass."""

    came: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


class Server(ThreadingHTTPServer):
    """The server; `requests` remembers (method, path, Range header) of all that came, `urls` their path with the query,
    `conditions` their If-Match, `authorizations` their Authorization, `headers` all of their headers.

    `left` is released once for each endless answer whose client has gone.
    """

    daemon_threads = True
    request_queue_size = 256
    scheme = "http"

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects = dict(objects)
        self.behaviour = "good"
        self.etag: Callable[[bytes], str] | None = lambda data: f'"{hashlib.md5(data).hexdigest()}"'
        self.modified: Callable[[bytes], str] | None = date_of
        self.requests: list[tuple[str, str, str | None]] = []
        self.urls: list[str] = []
        self.conditions: list[str | None] = []
        self.authorizations: list[str | None] = []
        self.headers: list[Mapping[str, str]] = []
        self.targets: dict[str, str] = {}
        self.statuses: dict[str, int] = {}
        self.gates: dict[str, Gate] = {}
        self.left = threading.Semaphore(0)

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing on stderr: clients leave responses that they do not take."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Without it the head and the body go out as two packets 40 ms apart.
    disable_nagle_algorithm = True
    server: Server

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path, behaviour = urlsplit(self.path).path, self.server.behaviour
        condition = self.headers.get("If-Match")
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        self.server.urls.append(self.path)
        self.server.conditions.append(condition)
        self.server.authorizations.append(self.headers.get("Authorization"))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if path in self.server.targets:
            self.send(307, b"", {"Location": self.server.targets[path].replace("{query}", urlsplit(self.path).query)})
            return
        if gate := self.server.gates.get(path):
            gate.came.set()
            gate.opened.wait()
        if path in self.server.statuses:
            self.send(self.server.statuses[path], b"")
            return
        data = self.server.objects.get(path)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.range_of(data))
        if behaviour == "forbidden" or (behaviour == "no signed URLs" and "X-Amz-Signature=" in self.path):
            self.send(403, b"")
        elif data is None:
            self.send(404, b"")
        elif condition is not None and (
            behaviour == "contrary" or (behaviour != "heedless" and condition != self.etag_of(data))
        ):
            self.send(412, b"<Error><Code>PreconditionFailed</Code><Message>It is another.</Message></Error>")
        elif wanted is not None and int(wanted[1]) >= len(data):
            self.send(416, b"<Error><Code>InvalidRange</Code><Message>It is shorter.</Message></Error>")
        elif with_body and behaviour == "endless":
            self.send_without_end(data, 200, self.marks_of(data))
        elif with_body and behaviour == "inflated" and wanted is not None:
            start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            where = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}", "Content-Encoding": "gzip"}
            self.send_without_end(bomb(), 206, {**where, **self.marks_of(data)}, times=1)
        elif not with_body or wanted is None or behaviour == "whole":
            self.send(200, data, self.marks_of(data), with_body=with_body)
        else:
            start, stop = int(wanted[1]), int(wanted[2]) + 1
            body = data[start : stop - 1 if behaviour == "short" else stop]
            where = {"Content-Range": f"bytes {start}-{start + len(body) - 1}/{len(data)}"}
            self.send(206, body, {**where, **self.marks_of(data)})

    def range_of(self, data: bytes | None) -> str:
        """The Range header, with a suffix (`bytes=-N`) put into numbers."""
        asked = self.headers.get("Range") or self.headers.get("x-ms-range", "")
        suffix = re.fullmatch(r"bytes=-(\d+)", asked)
        if suffix is None or not data or self.server.behaviour == "no suffix":
            return asked
        return f"bytes={max(len(data) - int(suffix[1]), 0)}-{len(data) - 1}"

    def etag_of(self, data: bytes) -> str | None:
        return self.server.etag(data) if self.server.etag else None

    def marks_of(self, data: bytes) -> dict[str, str]:
        marks = {"ETag": self.etag_of(data), "Last-Modified": self.server.modified and self.server.modified(data)}
        return {name: mark for name, mark in marks.items() if mark}

    def send(self, status: int, body: bytes, headers: Mapping[str, str] = {}, *, with_body: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def send_without_end(self, data: bytes, status: int, headers: Mapping[str, str], times: int | None = None) -> None:
        """Again and again, until nobody listens any more; or as often as is said."""
        self.close_connection = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for _ in itertools.repeat(None) if times is None else range(times):
                self.wfile.write(data)
        self.server.left.release()

    def log_message(self, *args: object) -> None:
        """Nothing on stderr."""


def date_of(data: bytes) -> str:
    """A second of the years from 2001 to 2032, another one for other bytes."""
    return formatdate(1_000_000_000 + zlib.crc32(data) % 1_000_000_000, usegmt=True)


def write_certificate(path: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself, with its key; without it at the same path that ends in .crt."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    made = [*command.split(), "-keyout", path, "-out", path.with_suffix(".crt")]
    subprocess.run(made, check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


@contextlib.contextmanager
def served_by_thread(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serve from a thread of this process during the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def http_objects(objects: Mapping[str, bytes], *, certificate: Path | None = None) -> Iterator[Server]:
    """Serve the objects from a thread of this process, over TLS if there is a certificate."""
    with Server(objects) as server:
        if certificate is not None:
            server.scheme, context = "https", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        with served_by_thread(server):
            yield server
