"""Parts that are made in threads of this process: a failed one stops the others of its call."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from binidx.errors import FormatError
from binidx.jobs.parts import Workers, make_parts
from binidx.jobs.runner import check_stop


@dataclass(frozen=True)
class NamedPart:
    name: str
    size: int = 1


def make(names: list[str], part: Any) -> list[str]:
    return [*make_parts(part, [NamedPart(name) for name in names], Workers(count=len(names)))]


def test_a_failed_part_stops_those_of_its_call_and_of_no_other() -> None:
    is_other_begun, is_slow_begun, has_failed, ended = threading.Event(), threading.Event(), threading.Event(), []

    def part_of_other_call(part: NamedPart) -> str:
        is_other_begun.set()
        has_failed.wait()
        check_stop()
        return part.name

    def part(part: NamedPart) -> str:
        if part.name == "bad":
            is_slow_begun.wait()
            is_other_begun.wait()
            raise FormatError("bad part")
        is_slow_begun.set()
        for _ in range(3_000):
            check_stop()
            time.sleep(0.01)
        ended.append(part.name)  # after half a minute
        return part.name

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(make, ["other"], part_of_other_call)
        try:
            with pytest.raises(FormatError, match="bad part"):
                make(["slow", "bad"], part)
        finally:
            has_failed.set()
        assert other.result() == ["other"]
    assert ended == []
