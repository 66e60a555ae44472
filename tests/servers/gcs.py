"""A small Google Cloud Storage in its own process, as far as gcsfs speaks it: the JSON API, objects in memory.

    with gcs_server() as server, server.in_environment():
        open_object("gs://bucket/key")          any bucket is there

    POST   /upload/storage/v1/b/B/o     multipart, or the start of a resumable upload; ifGenerationMatch=0 creates only
    PUT    /upload/...?upload_id=       its next chunk (308 until the last), DELETE ends it
    GET    /download/.../o/KEY          content, by Range; generation=N answers 404 once the object was replaced
    GET    /storage/v1/b/B/o[/KEY]      metadata, or a list by prefix and delimiter
    DELETE /storage/v1/b/B/o/KEY
    POST   /storage/v1/b/B/o/KEY/compose    up to 32 objects of the bucket, of these generations
    POST   /storage/v1/b/B/o/KEY/moveTo/o/NEW
    POST   /storage/v1/b/B/o/KEY/rewriteTo/b/B/o/NEW    a copy, which is done at once

Nobody is asked who he is; gcsfs must be told so (`in_environment`), and not to look for gRPC, before it is imported.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# gcsfs reads this when it is imported; pytest imports this module, and all that use it, before the first test.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

BLOCK = 256 << 10
"""The chunks of a resumable upload are multiples of this, but for the last."""


@dataclass(frozen=True)
class GcsServer:
    """The running server, seen from the process that started it."""

    endpoint: str

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """gcsfs speaks to the server, in this process and its children."""
        from fsspec.config import conf

        # The children's fsspec reads the token from the environment; ours has read it.
        environment = {"STORAGE_EMULATOR_HOST": self.endpoint, "FSSPEC_GS_TOKEN": "anon"}
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        conf["gs"] = {"token": "anon"}
        try:
            yield
        finally:
            del conf["gs"]
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def gcs_server() -> Iterator[GcsServer]:
    """Run a server; it ends with the block, or when this process dies."""
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield GcsServer(f"http://127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.kill()


@dataclass(frozen=True)
class Content:
    data: bytes
    generation: int

    @property
    def second(self) -> int:
        """When it was written, as far as this server knows."""
        return self.generation % 1_000_000_000 + 1_000_000_000


@dataclass
class Pending:
    """A resumable upload."""

    key: str
    condition: str | None
    data: bytearray = field(default_factory=bytearray)


class Store(ThreadingHTTPServer):
    """Objects by bucket/key."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.objects: dict[str, Content] = {}
        self.pending: dict[str, Pending] = {}
        self.heedless = False  # whether a generation that is asked for is ignored
        self.versioned = True  # whether generations and ETags are sent; else dates alone
        self.generation = 1_700_000_000_000_000

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing on stderr: clients leave responses that they do not take."""

    def put(self, key: str, data: bytes, condition: str | None) -> bool:
        with self.lock:
            standing = self.objects.get(key)
            if condition is not None and int(condition) != (standing.generation if standing else 0):
                return False
            self.generation += 1
            self.objects[key] = Content(data, self.generation)
            return True

    def metadata(self, key: str) -> dict[str, Any]:
        bucket, _, name = key.partition("/")
        found = self.objects[key]
        updated = f"{datetime.fromtimestamp(found.second, UTC):%Y-%m-%dT%H:%M:%S}.123Z"
        versions = {"generation": str(found.generation), "etag": f"g{found.generation}"} if self.versioned else {}
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(len(found.data)),
            "md5Hash": base64.b64encode(hashlib.md5(found.data).digest()).decode(),
            "timeCreated": updated,
            "updated": updated,
            **versions,
        }

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, Any]:
        starts = [key for key in sorted(self.objects) if key.startswith(f"{bucket}/{prefix}")]
        items, prefixes = [], []
        for key in starts:
            rest = key[len(bucket) + 1 + len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.append(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(self.metadata(key))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(set(prefixes))}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Store

    def setup(self) -> None:
        super().setup()
        self.query: dict[str, str] = {}

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        place = re.fullmatch(r"(?:/(upload|download))?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", url.path)
        if place is None:
            self.send(404, {"error": {"code": 404, "message": f"no such method: {self.path}"}})
            return
        kind, bucket, name = place[1], unquote(place[2]), unquote(place[3] or "")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if kind == "upload":
            self.upload(bucket, body)
        elif name.endswith("/compose") and self.command == "POST":
            self.compose(bucket, name.removesuffix("/compose"), json.loads(body)["sourceObjects"])
        elif "/moveTo/o/" in name and self.command == "POST":
            self.move(bucket, *name.split("/moveTo/o/"))
        elif (copied := re.fullmatch(r"(.+)/rewriteTo/b/([^/]+)/o/(.+)", name)) and self.command == "POST":
            self.rewrite(f"{bucket}/{copied[1]}", f"{copied[2]}/{copied[3]}")
        elif name:
            self.one_object(f"{bucket}/{name}", kind)
        else:
            self.send(200, self.server.listing(bucket, self.query.get("prefix", ""), self.query.get("delimiter", "")))

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def one_object(self, key: str, kind: str | None) -> None:
        found = self.server.objects.get(key)
        asked = None if self.server.heedless else self.query.get("generation")
        if found is None or asked not in (None, str(found.generation)):
            self.send(404, {"error": {"code": 404, "message": f"No such object: {key}"}})
        elif self.command == "DELETE":
            self.server.objects.pop(key, None)
            self.send(204)
        elif kind == "download":
            self.content(found)
        else:
            self.send(200, self.server.metadata(key))

    def compose(self, bucket: str, name: str, sources: list[dict[str, str]]) -> None:
        found = [(self.server.objects.get(f"{bucket}/{each['name']}"), each.get("generation")) for each in sources]
        if len(sources) > 32:
            self.send(400, {"error": {"code": 400, "message": "The number of source components exceeds 32"}})
        elif any(one is None or generation not in (None, str(one.generation)) for one, generation in found):
            self.send(404, {"error": {"code": 404, "message": "No such object, or generation"}})
        else:
            self.stored(f"{bucket}/{name}", b"".join(one.data for one, _ in found if one), None)

    def move(self, bucket: str, name: str, target: str) -> None:
        if (found := self.server.objects.pop(f"{bucket}/{name}", None)) is None:
            self.send(404, {"error": {"code": 404, "message": f"No such object: {name}"}})
        else:
            self.stored(f"{bucket}/{target}", found.data, None)

    def rewrite(self, key: str, target: str) -> None:
        if (found := self.server.objects.get(key)) is None:
            self.send(404, {"error": {"code": 404, "message": f"No such object: {key}"}})
        else:
            self.server.put(target, found.data, None)
            self.send(200, {"kind": "storage#rewriteResponse", "done": True})

    def content(self, found: Content) -> None:
        wanted, data = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")), found.data
        mark = {"Last-Modified": formatdate(found.second, usegmt=True)}
        if self.server.versioned:
            mark["x-goog-generation"] = str(found.generation)
        if wanted is None:
            self.send(200, data, mark)
        elif int(wanted[1]) >= len(data):
            self.send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        else:
            start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
            place = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
            self.send(206, data[start:stop], {**place, **mark})

    def upload(self, bucket: str, body: bytes) -> None:
        condition = self.query.get("ifGenerationMatch")
        if "upload_id" in self.query:
            self.chunk(self.query["upload_id"], body)
        elif self.query["uploadType"] == "multipart":
            described, data = parts_of(self.headers["Content-Type"], body)
            self.stored(f"{bucket}/{json.loads(described)['name']}", data, condition)
        else:
            name, upload = self.query.get("name") or json.loads(body)["name"], uuid.uuid4().hex
            self.server.pending[upload] = Pending(f"{bucket}/{name}", condition)
            here = f"http://{self.headers['Host']}{urlsplit(self.path).path}?uploadType=resumable&upload_id={upload}"
            self.send(200, headers={"Location": here})

    def chunk(self, upload: str, body: bytes) -> None:
        if self.command == "DELETE":
            self.server.pending.pop(upload, None)
            self.send(499)
            return
        pending = self.server.pending[upload]
        where = re.fullmatch(r"bytes (?:\*|(\d+)-\d+)/(\*|\d+)", self.headers.get("Content-Range", "bytes */0"))
        assert where is not None
        last = where[2] != "*"
        # Of a part that goes on the server keeps whole blocks; the client sends the rest of it again.
        body = body if last else body[: len(body) // BLOCK * BLOCK]
        if (where[1] and int(where[1]) != len(pending.data)) or not (last or body):
            self.send(400, {"error": {"code": 400, "message": f"{where[0]} after {len(pending.data)} bytes"}})
            return
        pending.data += body
        if not last:
            self.send(308, headers={"Range": f"bytes=0-{len(pending.data) - 1}"})
        else:
            self.stored(pending.key, bytes(pending.data), pending.condition)
            del self.server.pending[upload]

    def stored(self, key: str, data: bytes, condition: str | None) -> None:
        if self.server.put(key, data, condition):
            self.send(200, self.server.metadata(key))
        else:
            self.send(412, {"error": {"code": 412, "message": "conditionNotMet"}})

    def send(self, status: int, body: bytes | Mapping[str, Any] = b"", headers: Mapping[str, str] = {}) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Nothing on stderr."""


def parts_of(content_type: str, body: bytes) -> tuple[bytes, bytes]:
    """The description and the data of a multipart/related body."""
    boundary = re.search("boundary=[\"']?([^\"';]+)", content_type)
    assert boundary is not None
    _, described, data, _ = body.split(b"--" + boundary[1].encode())
    bodies = [re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in (described, data)]
    return bodies[0], re.sub(rb"\r?\n\Z", b"", bodies[1])


def main() -> None:
    with Store() as store:
        print(store.server_port, flush=True)
        threading.Thread(target=store.serve_forever, daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
