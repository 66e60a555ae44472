"""Objects over HTTP, by ranges: enough of HTTP for fsspec's http filesystem and enough of S3 for s3fs to read one key.

    with http_objects({"/bucket/key": b"..."}) as server:
        server.endpoint                  "http://127.0.0.1:PORT"
        server.behaviour = "short"       every GET from now on misbehaves
        server.etag = None               no ETag is sent from now on

What a store or a proxy before it has been seen to do: "short" sends a 206 with a byte too few, "whole" a 200 with
everything, "no suffix" does so where the last N bytes are asked, "endless" a 200 that does not say how long it is and
never ends, "forbidden" a 403, "no signed URLs" a 403 to these, "contrary" a 412 to every If-Match, "heedless" an answer
to every If-Match. No signature is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Server(ThreadingHTTPServer):
    """The server; `requests` remembers (method, path, Range header) of all that came, `conditions` their If-Match,
    `authorizations` their Authorization.

    `left` is released once for each endless answer whose client has gone.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects = dict(objects)
        self.behaviour = "good"
        self.etag: Callable[[bytes], str] | None = lambda data: f'"{hashlib.md5(data).hexdigest()}"'
        self.requests: list[tuple[str, str, str | None]] = []
        self.conditions: list[str | None] = []
        self.authorizations: list[str | None] = []
        self.left = threading.Semaphore(0)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

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

    def answer(self, *, with_body: bool) -> None:
        path, behaviour = urlsplit(self.path).path, self.server.behaviour
        condition = self.headers.get("If-Match")
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        self.server.conditions.append(condition)
        self.server.authorizations.append(self.headers.get("Authorization"))
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
            self.send_without_end(data)
        elif not with_body or wanted is None or behaviour == "whole":
            self.send(200, data, self.etag_of_answer(data), with_body=with_body)
        else:
            start, stop = int(wanted[1]), int(wanted[2]) + 1
            body = data[start : stop - 1 if behaviour == "short" else stop]
            where = {"Content-Range": f"bytes {start}-{start + len(body) - 1}/{len(data)}"}
            self.send(206, body, {**where, **self.etag_of_answer(data)})

    def range_of(self, data: bytes | None) -> str:
        """The Range header, with a suffix (`bytes=-N`) put into numbers."""
        asked = self.headers.get("Range", "")
        suffix = re.fullmatch(r"bytes=-(\d+)", asked)
        if suffix is None or not data or self.server.behaviour == "no suffix":
            return asked
        return f"bytes={max(len(data) - int(suffix[1]), 0)}-{len(data) - 1}"

    def etag_of(self, data: bytes) -> str | None:
        return self.server.etag(data) if self.server.etag else None

    def etag_of_answer(self, data: bytes) -> dict[str, str]:
        return {"ETag": found} if (found := self.etag_of(data)) else {}

    def send(self, status: int, body: bytes, headers: Mapping[str, str] = {}, *, with_body: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Last-Modified", "Fri, 20 Nov 2026 03:53:17 GMT")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def send_without_end(self, data: bytes) -> None:
        """Until nobody listens any more."""
        self.close_connection = True
        self.send_response(200)
        for name, value in self.etag_of_answer(data).items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(data)
        self.server.left.release()

    def log_message(self, *args: object) -> None:
        """Nothing on stderr."""


@contextlib.contextmanager
def http_objects(objects: Mapping[str, bytes]) -> Iterator[Server]:
    """Serve the objects from a thread of this process."""
    with Server(objects) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
