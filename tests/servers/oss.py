"""A small Alibaba Cloud OSS in a thread, as far as oss2 and ossfs speak it: objects in memory, every request signed.

    with oss_server() as server, server.in_environment():
        open_object("oss://corpus/key")         the bucket "corpus" is there, no other one

    GET      /B/KEY           content by Range. A range that is not inside the object brings the whole object with 200,
                              unless x-oss-range-behavior: standard (then 206 of what is there, or 416)
    HEAD     /B/KEY
    PUT      /B/KEY           x-oss-forbid-overwrite: true answers 409; Content-MD5 is compared; x-oss-copy-source
    DELETE   /B/KEY           204, whether it was there or not
    POST     /B/KEY?uploads   ?uploadId: PUT ?partNumber (or a copy of a range), GET lists, POST completes, DELETE ends
    GET      /B/?prefix=      lists, by delimiter and marker

Signatures are computed here from what arrived, not by oss2: version 1 in a header or a URL, version 4 likewise. A wrong
one is 403 SignatureDoesNotMatch, a URL after its time 403 AccessDenied, as no signature, but for the bucket "public".
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from servers.http_objects import served_by_thread

KEY, SECRET, REGION = "test-key-id", "test-key-secret", "cn-test"
SUB_RESOURCES = {"uploads", "uploadId", "partNumber", "security-token", "bucketInfo", "objectMeta", "acl", "append"}
MIN_PART = 100 << 10


@dataclass(frozen=True)
class Content:
    data: bytes
    etag: str
    changed: int

    @classmethod
    def of(cls, data: bytes, etag: str | None = None) -> Content:
        return cls(data, etag or f'"{hashlib.md5(data).hexdigest().upper()}"', int(time.time()))


@dataclass
class OssServer(ThreadingHTTPServer):
    """The server. `requests` remembers (method, path, Range header, status) of all that came.

    Attributes:
        failing: statuses with which the next requests are answered instead, first to last.
        token: security token that each request must have; "": none.
    """

    objects: dict[str, Content] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, Content]]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None, int]] = field(default_factory=list)
    failing: list[int] = field(default_factory=list)
    token: str = ""
    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True

    def __post_init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)

    __hash__ = object.__hash__

    def add(self, name: str, data: bytes) -> None:
        """Put an object without a request; `name` is BUCKET/KEY."""
        self.objects[name] = Content.of(data)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def options(self) -> dict[str, str]:
        return {"endpoint": self.endpoint, "key": KEY, "secret": SECRET}

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """oss:// is this server, in this process and its children."""
        names = {"OSS_ENDPOINT": self.endpoint, "OSS_ACCESS_KEY_ID": KEY, "OSS_ACCESS_KEY_SECRET": SECRET}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing on stderr: clients leave responses that they do not take."""


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message or code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: OssServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.bucket, _, self.key = unquote(url.path)[1:].partition("/")
        self.name = f"{self.bucket}/{self.key}"
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if self.server.failing:
                raise Refusal(self.server.failing.pop(0), "ServerBusy")
            self.check_signature()
            if self.bucket not in ("corpus", "public"):
                raise Refusal(404, "NoSuchBucket", "The specified bucket does not exist.")
            answer = self.answer_for_upload if {"uploads", "uploadId"} & {*self.query} else self.answer_for_object
            answer() if self.key else self.answer_for_bucket()
        except Refusal as refusal:
            text = f"<Error><Code>{refusal.code}</Code><Message>{escape(refusal.message)}</Message></Error>"
            self.send(refusal.status, text.encode())

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def check_signature(self) -> None:
        given = self.headers.get("Authorization", "")
        token = self.query.get("security-token") or self.query.get("x-oss-security-token")
        if self.server.token != (token or self.headers.get("x-oss-security-token", "")):
            raise Refusal(403, "InvalidAccessKeyId", "The security token is another one.")
        if given.startswith("OSS4-HMAC-SHA256 "):
            fields = dict(part.strip().split("=", 1) for part in given.partition(" ")[2].split(","))
            moment, scope, found = self.headers["x-oss-date"], fields["Credential"], fields["Signature"]
            needed = self.signature_v4(moment, scope, dict(self.query))
        elif "x-oss-signature" in self.query:
            query = dict(self.query)
            found, moment, scope = query.pop("x-oss-signature"), query["x-oss-date"], query["x-oss-credential"]
            needed = self.signature_v4(moment, scope, query)
        elif given.startswith("OSS "):
            scope, _, found = given.removeprefix("OSS ").partition(":")
            needed = self.signature_v1(self.headers["Date"])
        elif "Signature" in self.query:
            if int(self.query["Expires"]) < time.time():
                raise Refusal(403, "AccessDenied", "Request has expired.")
            scope, found = self.query["OSSAccessKeyId"], self.query["Signature"]
            needed = self.signature_v1(self.query["Expires"])
        elif self.bucket == "public":
            return
        else:
            raise Refusal(403, "AccessDenied", "You are not allowed: there is no signature.")
        if scope.partition("/")[0] != KEY:
            raise Refusal(403, "InvalidAccessKeyId", "The OSS Access Key Id you provided does not exist.")
        if found != needed:
            raise Refusal(403, "SignatureDoesNotMatch", "The request signature does not match.")

    def signature_v1(self, date: str) -> str:
        """Return the signature of version 1: verb, MD5, type, date, x-oss- headers, resource with its sub-resources."""
        ours = sorted(
            (name.lower(), value) for name, value in self.headers.items() if name.lower().startswith("x-oss-")
        )
        chosen = sorted(name for name in self.query if name in SUB_RESOURCES)
        fields = [f"{name}={self.query[name]}" if self.query[name] else name for name in chosen]
        lines = [
            *(self.command, self.headers.get("Content-MD5", ""), self.headers.get("Content-Type", ""), date),
            *(f"{name}:{value}" for name, value in ours),
            f"/{self.bucket}/{self.key}" + ("?" + "&".join(fields) if fields else ""),
        ]
        digest = hmac.new(SECRET.encode(), "\n".join(lines).encode(), hashlib.sha1).digest()
        return base64.b64encode(digest).decode()

    def signature_v4(self, moment: str, scope: str, query: Mapping[str, str]) -> str:
        def sign(key: bytes, text: str) -> bytes:
            return hmac.new(key, text.encode(), hashlib.sha256).digest()

        if scope.split("/")[1:] != [moment[:8], REGION, "oss", "aliyun_v4_request"]:
            raise Refusal(403, "InvalidRegion", f"The scope is {scope}.")
        signed = {name.lower(): value for name, value in self.headers.items()}
        chosen = sorted(name for name in signed if name.startswith("x-oss-") or name in ("content-type", "content-md5"))
        fields = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in query.items())
        canonical = [
            *(self.command, quote(f"/{self.bucket}/{self.key}", safe="/~")),
            "&".join(f"{name}={value}" if value else name for name, value in fields),
            *(f"{name}:{signed[name]}" for name in chosen),
            *("", "", signed.get("x-oss-content-sha256", "UNSIGNED-PAYLOAD")),
        ]
        digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
        key = f"aliyun_v4{SECRET}".encode()
        for part in (moment[:8], REGION, "oss", "aliyun_v4_request"):
            key = sign(key, part)
        text = f"OSS4-HMAC-SHA256\n{moment}\n{moment[:8]}/{REGION}/oss/aliyun_v4_request\n{digest}"
        return sign(key, text).hex()

    def answer_for_object(self) -> None:
        if self.command == "PUT":
            self.put()
        elif self.command == "DELETE":
            self.server.objects.pop(self.name, None)
            self.send(204)
        else:
            self.content(self.existing(self.name))

    def existing(self, name: str) -> Content:
        if (found := self.server.objects.get(name)) is None:
            raise Refusal(404, "NoSuchKey", "The specified key does not exist.")
        return found

    def put(self) -> None:
        if self.headers.get("x-oss-forbid-overwrite") == "true" and self.name in self.server.objects:
            raise Refusal(
                409, "FileAlreadyExists", "The object you specified already exists and can not be overwritten."
            )
        copied = self.copied()
        made = self.server.objects[self.name] = Content.of(self.checked_body() if copied is None else copied)
        if copied is None:
            self.send(200, headers={"ETag": made.etag})
        else:
            self.send_xml("CopyObjectResult", f"<ETag>{made.etag}</ETag>", {"ETag": made.etag})

    def checked_body(self) -> bytes:
        digest = self.headers.get("Content-MD5")
        if digest and digest != base64.b64encode(hashlib.md5(self.body).digest()).decode():
            raise Refusal(400, "InvalidDigest", "The Content-MD5 you specified was invalid.")
        return self.body

    def copied(self) -> bytes | None:
        """The bytes of the object, or of its range, that a request copies; None: it copies none."""
        if not (source := unquote(self.headers.get("x-oss-copy-source", ""))):
            return None
        found = self.existing(source.removeprefix("/"))
        if self.headers.get("x-oss-copy-source-if-match", found.etag) != found.etag:
            raise Refusal(412, "PreconditionFailed", "The source is another one.")
        where = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("x-oss-copy-source-range", ""))
        return found.data[int(where[1]) : int(where[2]) + 1] if where else found.data

    def content(self, found: Content) -> None:
        if self.headers.get("If-Match", found.etag) != found.etag:
            raise Refusal(412, "PreconditionFailed", "At least one of the pre-conditions did not hold.")
        size = len(found.data)
        marks = {
            "ETag": found.etag,
            "Last-Modified": formatdate(found.changed, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        where = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if where is None or not any(where.groups()) or self.command == "HEAD":
            self.send(200, found.data, marks)
            return
        start = int(where[1]) if where[1] else max(size - int(where[2]), 0)
        stop = int(where[2]) + 1 if where[1] and where[2] else size
        if start >= size or stop > size or start >= stop:
            if self.headers.get("x-oss-range-behavior") != "standard" or start >= stop:
                self.send(200, found.data, marks)
                return
            if start >= size:
                raise Refusal(416, "InvalidRange", "The requested range cannot be satisfied.")
        stop = min(stop, size)
        self.send(206, found.data[start:stop], {**marks, "Content-Range": f"bytes {start}-{stop - 1}/{size}"})

    def answer_for_upload(self) -> None:
        if self.command == "POST" and "uploads" in self.query:
            token = uuid.uuid4().hex.upper()
            self.server.uploads[token] = self.name, {}
            self.send_xml("InitiateMultipartUploadResult", f"<UploadId>{token}</UploadId>")
            return
        name, parts = self.server.uploads.get(self.query["uploadId"], ("", {}))
        if name != self.name:
            raise Refusal(404, "NoSuchUpload", "The specified upload does not exist.")
        if self.command == "PUT":
            copied = self.copied()
            part = Content.of(self.checked_body() if copied is None else copied)
            parts[int(self.query["partNumber"])] = part
            if copied is None:
                self.send(200, headers={"ETag": part.etag})
            else:
                self.send_xml("CopyPartResult", f"<ETag>{part.etag}</ETag>", {"ETag": part.etag})
        elif self.command == "GET":
            self.list_parts(parts)
        elif self.command == "DELETE":
            del self.server.uploads[self.query["uploadId"]]
            self.send(204)
        else:
            self.complete(parts)

    def list_parts(self, parts: Mapping[int, Content]) -> None:
        most, after = int(self.query.get("max-parts", 1000)), int(self.query.get("part-number-marker") or 0)
        numbers = [number for number in sorted(parts) if number > after]
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><LastModified>2026-11-01T00:00:00.000Z</LastModified>"
            f"<ETag>{parts[number].etag}</ETag><Size>{len(parts[number].data)}</Size></Part>"
            for number in numbers[:most]
        )
        marker = numbers[:most][-1] if numbers else 0
        more = str(len(numbers) > most).lower()
        page = f"<NextPartNumberMarker>{marker}</NextPartNumberMarker><IsTruncated>{more}</IsTruncated>"
        self.send_xml("ListPartsResult", page + listed)

    def complete(self, parts: Mapping[int, Content]) -> None:
        named = [
            (int(part.findtext("PartNumber", "")), part.findtext("ETag", "").strip('"'))
            for part in ElementTree.fromstring(self.body).iter("Part")
        ]
        if any(number not in parts or parts[number].etag.strip('"') != tag for number, tag in named):
            raise Refusal(400, "InvalidPart", "One or more of the specified parts could not be found.")
        if any(len(parts[number].data) < MIN_PART for number, _ in named[:-1]):
            raise Refusal(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size.")
        digest = hashlib.md5("".join(tag for _, tag in named).encode()).hexdigest().upper()
        data = b"".join(parts[number].data for number, _ in named)
        made = self.server.objects[self.name] = Content.of(data, f'"{digest}-{len(named)}"')
        del self.server.uploads[self.query["uploadId"]]
        self.send_xml("CompleteMultipartUploadResult", f"<ETag>{made.etag}</ETag>", {"ETag": made.etag})

    def answer_for_bucket(self) -> None:
        if "bucketInfo" in self.query:
            self.send_xml("BucketInfo", f"<Bucket><Name>{self.bucket}</Name></Bucket>")
            return
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        items: dict[str, str] = {}
        for name, found in sorted(self.server.objects.items()):
            bucket, _, key = name.partition("/")
            if bucket != self.bucket or not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folder = prefix + rest.partition(delimiter)[0] + delimiter
                items[folder] = f"<CommonPrefixes><Prefix>{quote(folder)}</Prefix></CommonPrefixes>"
            else:
                items[key] = (
                    f"<Contents><Key>{quote(key)}</Key><LastModified>2026-11-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{found.etag}</ETag><Type>Normal</Type><Size>{len(found.data)}</Size>"
                    "<StorageClass>Standard</StorageClass></Contents>"
                )
        most = int(self.query.get("max-keys", 100))
        names = [name for name in sorted(items) if name > self.query.get("marker", "")]
        more = str(len(names) > most).lower()
        marker = f"<NextMarker>{quote(names[most - 1])}</NextMarker>" if len(names) > most else ""
        listed = "".join(items[name] for name in names[:most])
        page = f"<EncodingType>url</EncodingType><IsTruncated>{more}</IsTruncated>{marker}"
        self.send_xml("ListBucketResult", f"<Name>{self.bucket}</Name><Prefix>{quote(prefix)}</Prefix>{page}{listed}")

    def send_xml(self, name: str, text: str, headers: Mapping[str, str] = {}) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{text}</{name}>'
        self.send(200, body.encode(), {"Content-Type": "application/xml", **headers})

    def send(self, status: int, body: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, path, self.headers.get("Range"), status))
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("x-oss-request-id", uuid.uuid4().hex[:24].upper())
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing on stderr."""


@contextlib.contextmanager
def oss_server() -> Iterator[OssServer]:
    """Serve an empty bucket from a thread of this process."""
    with OssServer() as server, served_by_thread(server):
        yield server
