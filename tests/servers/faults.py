"""What a store or a proxy before it does wrong, as functions from a good answer to what the client gets instead.

    503 500 429      an error with a body like S3's, or like GCS' where the path is its JSON API; any status will do
    busy             503 with `Retry-After: 1`
    garbage          a status line that is none
    oversized        the good answer with a header of 100 kB
    slow             the good answer, `slow_ms` later
    reset close      the connection ends before a byte of the answer, hard (RST) or as if idle (FIN)
    hang             no byte ever comes
    reset-late       half of the body, then RST
    truncate         half of the body, then FIN
    stall            half of the body, then nothing, for as long as the client waits
    short            206 with a byte less than asked, consistent in itself
    long             206 with bytes more than asked
    whole            200 with all of the object, zeros where it was not asked for
    wrong            one bit of the body is another; nothing else tells
    elsewhere        206 with as many bytes from another place, as its Content-Range says
    resized          206 whose Content-Range says another size of the object, and other bytes
    placeless        206 without a Content-Range, and other bytes
    replaced         206 with bytes of another object of the same size, as its ETag, generation and date say
    outgrown         the same of a larger object
    no-upload        404 with S3's code NoSuchUpload
    tagless          the good answer without an ETag
    redirect         307 to another object, `OTHER` beside it

No I/O here: `FAULTS` is the table, `Weather` says which request gets what.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from servers.messages import LENGTH, Request

End = Literal["stay", "close", "reset", "hang"]
EXTRA_BYTES = 1000
NORMAL = statistics.NormalDist()


class Answer(NamedTuple):
    head: bytes
    body: bytes


class Play(NamedTuple):
    """What a client gets: an answer as far as it goes, and what becomes of the connection then."""

    head: bytes
    body: bytes
    end: End = "stay"


Fault = Callable[[Request, Answer, float], Play]
"""A request, its good answer, a number in [0, 1) to choose by."""


@dataclass(frozen=True)
class Weather:
    """How a distant store behaves today; the same seed gives the same request the same luck.

    Args:
        delay_ms: median time to the first byte.
        spread: sigma of the time's logarithm; with 0.5 one request in a hundred takes 3.2 times the median.
        megabytes_per_second: of one connection.
        total_megabytes_per_second: of all connections together.
        faults: name -> part of the requests that meet it, drawn anew each time a range is asked again.
        each: what befalls a range when it is asked the first time, the second, ...; None is a good answer.
        script: what befalls the next requests in the order in which they come.
        slow_ms: how late "slow" is.
        granted_per_second: requests that are answered, over all connections; the rest get 503, before any other fault.
        only: "ranges" for GETs with a Range header, "all" for whatever comes.
        versionless: no ETag, generation or version id passes, only dates do.
        places: part of a path -> fields that are others there; not `script` nor the bandwidths and grants.

    `script` goes before `each`, `each` before `faults`; a list that is used up leaves the choice to the next.
    """

    delay_ms: float = 30.0
    spread: float = 0.0
    megabytes_per_second: float | None = None
    total_megabytes_per_second: float | None = None
    faults: Mapping[str, float] = field(default_factory=dict)
    each: Sequence[str | None] = ()
    script: Sequence[str | None] = ()
    slow_ms: float = 1000.0
    granted_per_second: float | None = None
    only: str = "ranges"
    versionless: bool = False
    places: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := {*self.faults, *self.each, *self.script} - {None, *FAULTS}:
            raise ValueError(f"weather: found {unknown}, needs some of {', '.join(FAULTS)}")
        if self.only not in ("ranges", "all") or sum(self.faults.values()) > 1:
            raise ValueError(f"weather: found {self}, needs only='ranges' or 'all' and rates of 1 in all at most")

    def at(self, path: str) -> Weather:
        """The weather there."""
        others = next((others for part, others in self.places.items() if part in path), None)
        return self if others is None else dataclasses.replace(self, places={}, **others)

    def befalls(self, request: Request) -> bool:
        return self.only == "all" or (request.method == "GET" and bool(request.range))

    def luck(self, request: Request, time: int) -> Luck:
        """Of a request for what was asked `time` times before; it depends on the object's name, not on its place."""
        path, _, query = unquote(request.path).partition("?")
        part = PART_NUMBER.search(query)
        name = f"{path.rpartition('/')[2]} {part and part[0]}"
        key = f"{self.seed} {request.method} {name} {request.range} {time}"
        digest = hashlib.blake2b(key.encode(), digest_size=24).digest()
        late, which, rest = (int.from_bytes(digest[start : start + 8], "little") / 2**64 for start in (0, 8, 16))
        here = self.at(request.path)
        return Luck(here.lateness(late), here.fault(request, time, which), rest)

    def lateness(self, late: float) -> float:
        """Seconds to the first byte; `late` in [0, 1) is the part of requests that are quicker."""
        sigmas = NORMAL.inv_cdf(min(max(late, 1e-9), 1 - 1e-9)) if self.spread else 0.0
        return self.delay_ms / 1e3 * math.exp(self.spread * sigmas)

    def fault(self, request: Request, time: int, which: float) -> str | None:
        if not self.befalls(request):
            return None
        if time < len(self.each):
            return self.each[time]
        for name, rate in self.faults.items():
            if which < rate:
                return name
            which -= rate
        return None


class Luck(NamedTuple):
    """Seconds to the first byte, a fault, and a number in [0, 1) for what is left to choose."""

    lateness: float
    fault: str | None
    chance: float


def status(code: int, *error: str) -> Fault:
    name, message = error or ERRORS.get(code, ("InternalError", "We encountered an internal error. Please try again."))

    def play(request: Request, answer: Answer, chance: float) -> Play:
        if request.path.startswith(("/storage/v1/", "/download/", "/upload/")):
            kind, body = "application/json", f'{{"error": {{"code": {code}, "message": "{message}"}}}}'
        else:
            error = f"<Code>{name}</Code><Message>{message}</Message><RequestId>0</RequestId><HostId>0</HostId>"
            kind, body = "application/xml", f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{error}</Error>'
        head = f"HTTP/1.1 {code} {name}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return Play(head.encode(), b"" if request.method == "HEAD" else body.encode())

    return play


def busy(request: Request, answer: Answer, chance: float) -> Play:
    play = status(503)(request, answer, chance)
    return play._replace(head=play.head[:-2] + b"Retry-After: 1\r\n\r\n")


def garbage(request: Request, answer: Answer, chance: float) -> Play:
    return Play(b"", b"HTTP/1.1 2o6 Partly\r\nContent-Length: 0\r\n\r\n", "close")


def oversized(request: Request, answer: Answer, chance: float) -> Play:
    return Play(answer.head[:-2] + b"X-Debug: %b\r\n\r\n" % (b"x" * 100_000), answer.body, "close")


def cut(end: End) -> Fault:
    """Half of the body."""
    return lambda request, answer, chance: Play(answer.head, answer.body[: len(answer.body) // 2], end)


def nothing(end: End) -> Fault:
    return lambda request, answer, chance: Play(b"", b"", end)


def short(request: Request, answer: Answer, chance: float) -> Play:
    return resized(answer, answer.body[:-1])


def long(request: Request, answer: Answer, chance: float) -> Play:
    return resized(answer, answer.body + bytes(EXTRA_BYTES))


def resized(answer: Answer, body: bytes) -> Play:
    """The body is what the head says; the place in the object too."""
    head = LENGTH.sub(b"\r\nContent-Length: %d" % len(body), answer.head)
    if found := PLACE.search(head):
        place = b"\r\nContent-Range: bytes %d-%d/%b" % (int(found[1]), int(found[1]) + len(body) - 1, found[2])
        head = PLACE.sub(place, head)
    return Play(head, body)


def whole(request: Request, answer: Answer, chance: float) -> Play:
    found = PLACE.search(answer.head)
    if found is None:
        return Play(*answer)
    start, size = int(found[1]), int(found[2])
    body = bytes(start) + answer.body + bytes(size - start - len(answer.body))
    head = b"HTTP/1.1 200 OK" + PLACE.sub(b"", answer.head[answer.head.index(b"\r\n") :])
    return Play(LENGTH.sub(b"\r\nContent-Length: %d" % size, head), body)


def wrong(request: Request, answer: Answer, chance: float) -> Play:
    body = bytearray(answer.body)
    place = int(chance * len(body) * 8)
    body[place // 8] ^= 1 << place % 8
    return Play(answer.head, bytes(body))


def elsewhere(request: Request, answer: Answer, chance: float) -> Play:
    return other_bytes(answer, lambda start, stop, size: (start + 1, stop + 1, size))


def another_size(request: Request, answer: Answer, chance: float) -> Play:
    return other_bytes(answer, lambda start, stop, size: (start, stop, size + EXTRA_BYTES))


def placeless(request: Request, answer: Answer, chance: float) -> Play:
    return Play(PLACE.sub(b"", answer.head), inverted(answer.body))


def replaced(request: Request, answer: Answer, chance: float) -> Play:
    head = DATE.sub(b"\r\nLast-Modified: Thu, 01 Jan 1998 00:00:00 GMT", MARK.sub(rb'\g<1>"7"', answer.head))
    return Play(head, inverted(answer.body))


def outgrown(request: Request, answer: Answer, chance: float) -> Play:
    return replaced(request, Answer(*another_size(request, answer, chance)[:2]), chance)


def tagless(request: Request, answer: Answer, chance: float) -> Play:
    return Play(MARK.sub(b"", answer.head), answer.body)


def redirect(request: Request, answer: Answer, chance: float) -> Play:
    place = f"{request.path.rpartition('/')[0]}/{OTHER}"
    return Play(f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode(), b"")


def without_versions(answer: Answer) -> Answer:
    """The same of a store that has only dates."""
    head, body = VERSIONS.sub(b"", answer.head), answer.body
    if b"application/json" in head and body:
        body = JSON_VERSIONS.sub(b"", body)
        head = LENGTH.sub(b"\r\nContent-Length: %d" % len(body), head)
    return Answer(head, body)


def other_bytes(answer: Answer, moved: Callable[[int, int, int], tuple[int, int, int]]) -> Play:
    """A 206 as long as the good one, of another (start, stop, size)."""
    found = PLACE.search(answer.head)
    if found is None:
        return Play(*answer)
    start, size = int(found[1]), int(found[2])
    start, stop, size = moved(start, start + len(answer.body), size)
    place = b"\r\nContent-Range: bytes %d-%d/%d" % (start, stop - 1, size)
    return Play(PLACE.sub(place, answer.head), inverted(answer.body))


def inverted(body: bytes) -> bytes:
    return body.translate(INVERTED)


OTHER = "other.bin"
INVERTED = bytes(range(255, -1, -1))
PART_NUMBER = re.compile(r"\bpartNumber=\d+")
MARK = re.compile(rb"(\r\n(?:etag|x-goog-generation):[ \t]*)[^\r]*", re.IGNORECASE)
DATE = re.compile(rb"\r\nlast-modified:[^\r]*", re.IGNORECASE)
VERSIONS = re.compile(rb"\r\n(?:etag|x-goog-generation|x-amz-version-id):[^\r]*", re.IGNORECASE)
JSON_VERSIONS = re.compile(rb',\s*"(?:generation|etag)":\s*"[^"]*"')
PLACE = re.compile(rb"\r\ncontent-range:[ \t]*bytes (\d+)-\d+/(\d+)", re.IGNORECASE)

ERRORS = {
    429: ("TooManyRequests", "The rate limit was exceeded."),
    500: ("InternalError", "We encountered an internal error. Please try again."),
    503: ("SlowDown", "Please reduce your request rate."),
}

OF_CONTENT: dict[str, Fault] = {
    "reset-late": cut("reset"),
    "truncate": cut("close"),
    "stall": cut("hang"),
    "short": short,
    "long": long,
    "whole": whole,
    "wrong": wrong,
    "elsewhere": elsewhere,
    "resized": another_size,
    "placeless": placeless,
    "replaced": replaced,
    "outgrown": outgrown,
    "redirect": redirect,
}
"""Those that need a body: another answer passes them by."""

FAULTS: dict[str, Fault] = {
    **{str(code): status(code) for code in (*ERRORS, 403, 404, 408, 412, 416, 502, 504)},
    "busy": busy,
    "garbage": garbage,
    "oversized": oversized,
    "slow": lambda request, answer, chance: Play(*answer),
    "reset": nothing("reset"),
    "close": nothing("close"),
    "hang": nothing("hang"),
    "no-upload": status(404, "NoSuchUpload", "The specified multipart upload does not exist."),
    "tagless": tagless,
    **OF_CONTENT,
}
