"""How objects are read: settings of ours, beside those of the filesystems.

    storage_options={"endpoint_url": ..., "binidx": {"cache_dir": "/nvme/binidx"}}      for one dataset
    BINIDX_CACHE_DIR=/nvme/binidx                                                       for all of a process

The key `binidx` of `storage_options` is taken out before fsspec sees them; what stands there wins over the environment.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from binidx.errors import ConfigError

OURS = "binidx"
"""The key of `storage_options` that holds our settings."""


@dataclass(frozen=True)
class ReadSettings:
    """What a reader of objects can be told.

    Args:
        fast: ask s3:// and gs:// by signed URLs, without their drivers' work for each request; None: where that works.
        cache_dir: a directory of this node, or of all nodes, that keeps what was read: `disk_cache`. None: none.
        cache_bytes: the most that lies in it; None: what leaves a tenth of its file system free.
        cache_chunk_bytes: what is fetched into it where one byte is asked; None: 64 KiB. A thin link wants less.
        index_dir: a directory of this node that keeps `.idx` files and arrays of indices where there is no cache_dir;
            None: one of this user's in the temporary directory. "off": none, each process has its own in memory.
        index_bytes: the most that lies in it; None: what leaves a tenth of its file system free.
        verify: check what is read against the sums beside the object; None: where there are any.
        deadline_seconds: after this a read gives up, whatever was tried again in it.
        hedge: ask once more for a range that is much later than its like, and take the first answer.
        concurrency: requests in flight at once, of all objects and threads of the process that say the same; None: 64,
            128 where they are asked without their driver.
        max_gap: bytes fetched in vain rather than a second request; 0: not one; None: what a request costs in bytes.

    Raises:
        ConfigError: a setting that is none of these, or a value that cannot be read, or makes no sense.
    """

    fast: bool | None = None
    cache_dir: str | None = None
    cache_bytes: int | None = None
    cache_chunk_bytes: int | None = None
    index_dir: str | None = None
    index_bytes: int | None = None
    verify: bool | None = None
    deadline_seconds: float = 60.0
    hedge: bool = True
    concurrency: int | None = None
    max_gap: int | None = None

    def __post_init__(self) -> None:
        # A bound that nothing fits into, or a time that is none, would be waited for in vain.
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is None and getattr(type(self), name) is None:
                continue
            if not isinstance(value, int | float) or not value >= least or math.isnan(value):
                raise ConfigError(f"{name}: found {value!r}, needs a number, at least {least}")
        if self.deadline_seconds == 0:
            raise ConfigError("deadline_seconds: found 0, needs a number above it; no read would ever be in time")
        if self.cache_dir is not None and not self.cache_dir.strip():
            raise ConfigError(f"cache_dir: found {self.cache_dir!r}, needs a directory, or None for no cache")

    @classmethod
    def of(cls, storage_options: Mapping[str, Any] | None) -> ReadSettings:
        """Those of the options, else of the environment (BINIDX_FAST=0, ...), else the defaults.

        Text means the same in both, so that options may come from a file: {"cache_bytes": "500GB"}.
        """
        given = (storage_options or {}).get(OURS) or {}
        unknown = sorted(given.keys() - PARSERS.keys()) if isinstance(given, Mapping) else [repr(given)]
        if unknown:
            raise ConfigError(f"storage_options['{OURS}']: found {', '.join(unknown)}, needs {', '.join(PARSERS)}")
        set_here = tuple((name, text) for name, variable in VARIABLES if (text := os.environb.get(variable)))
        if not given:
            return _of_environment(set_here)
        read = vars(_of_environment(set_here))
        return cls(**read | {name: _parsed(f"{OURS} {name}", name, value) for name, value in given.items()})


@functools.lru_cache(64)
def _of_environment(found: tuple[tuple[str, bytes], ...]) -> ReadSettings:
    """They are asked for with each object that is opened, and environments seldom change."""
    return ReadSettings(**{name: _parsed(f"BINIDX_{name.upper()}", name, os.fsdecode(text)) for name, text in found})


def drivers_own(storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options without ours: what fsspec may see."""
    return {name: value for name, value in (storage_options or {}).items() if name != OURS}


def parse_bytes(text: str) -> int:
    """`"500GB"`, `"64MiB"`, `"1.5T"` or plain digits, in bytes; a bare unit counts in thousands."""
    number = text.strip().rstrip("iBbKMGTPkmgtp ")
    unit = text.strip()[len(number) :].strip().lower().removesuffix("b")
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}[unit.removesuffix("i")]
    return int(float(number) * (1024 if unit.endswith("i") else 1000) ** power)


def parse_flag(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
        text.lower()
    ]


def parse_index_dir(text: str) -> str:
    """A directory; "", which is none, for what switches it off."""
    return "" if text.lower() in ("0", "off", "no", "false") else text


def _parsed(subject: str, name: str, value: Any) -> Any:
    """A value as it is, unless it is text or a path."""
    if not isinstance(value, str | os.PathLike):
        return value
    try:
        return PARSERS[name](os.fspath(value))
    except (KeyError, ValueError, OverflowError) as error:
        raise ConfigError(f"{subject}: found {value!r}, which is no value for it") from error


PARSERS: dict[str, Callable[[str], Any]] = {
    "fast": parse_flag,
    "cache_dir": str,
    "cache_bytes": parse_bytes,
    "cache_chunk_bytes": parse_bytes,
    "index_dir": parse_index_dir,
    "index_bytes": parse_bytes,
    "verify": parse_flag,
    "deadline_seconds": float,
    "hedge": parse_flag,
    "concurrency": int,
    "max_gap": parse_bytes,
}
"""setting -> how its text in the environment is read"""

VARIABLES = [(name, f"BINIDX_{name.upper()}".encode()) for name in PARSERS]
"""As the environment has them: to ask for them as text takes ten times the time."""

LEAST: dict[str, float] = {
    "cache_bytes": 0,
    "cache_chunk_bytes": 1,
    "index_bytes": 0,
    "deadline_seconds": 0,
    "concurrency": 1,
    "max_gap": 0,
}
"""setting that is a number -> the least it may be"""
