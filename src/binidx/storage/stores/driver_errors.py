"""What a driver raised: its status, its words; and itself as the cause of an error of ours, unless it tells a secret.

A traceback shows causes, and aiohttp says whole URLs, signatures and all.
"""

from __future__ import annotations

from collections.abc import Iterator

from binidx.errors import redacted_text


class DriverError(Exception):
    """In place of a driver's exception: what it said, without the secrets.

    Attributes:
        status: of HTTP, if there was an answer.
        names: of its class and the bases of that.
    """

    def __init__(self, told: str, status: int | None, names: frozenset[str]) -> None:
        super().__init__(told, status, names)
        self.status, self.names = status, names

    def __str__(self) -> str:
        return str(self.args[0])


def cause_of(error: BaseException) -> BaseException:
    """The error itself; or what stands for it, if it or what it came of tells a secret."""
    if all(redacted_text(said) == said for said in _told(error)):
        return error
    stand_in = DriverError(redacted_text(driver_text(error)), http_status(error), names_of(error))
    stand_in.__cause__ = None if error.__cause__ is None else cause_of(error.__cause__)
    return stand_in


def _told(error: BaseException | None) -> Iterator[str]:
    """What a traceback would say of it."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def names_of(error: BaseException) -> frozenset[str]:
    """Of its class and the bases of that: drivers are told apart by these, as they may not be there to be imported."""
    return error.names if isinstance(error, DriverError) else frozenset(each.__name__ for each in type(error).__mro__)


def http_status(error: BaseException | None) -> int | None:
    """The HTTP status behind a driver's exception: botocore's, gcsfs's and aiohttp's ways of carrying it."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict) and "ResponseMetadata" in response:
            return int(response["ResponseMetadata"].get("HTTPStatusCode", 0))
        # aiohttp says 400 of an answer that it cannot read, cut off for one: no server did.
        unread = type(error).__module__ == "aiohttp.http_exceptions"
        for name in () if unread else ("status", "code"):
            value = getattr(error, name, None)
            if str(value).isdigit():
                return int(str(value))
        error = error.__cause__
    return None


def driver_text(error: BaseException) -> str:
    """The exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
