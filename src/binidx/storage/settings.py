"""Read settings of this library, beside the options of the filesystems.

    storage_options={"endpoint_url": ..., "binidx": {"cache_dir": "/nvme/binidx"}}      for one dataset
    BINIDX_CACHE_DIR=/nvme/binidx                                                       for all of a process

The key `binidx` of `storage_options` is removed before fsspec gets them; it takes precedence over the environment.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from binidx.errors import ConfigError, check_option_names

logger = logging.getLogger(__name__)

OURS = "binidx"
"""Key of `storage_options` with the settings of this library."""


FILLS = ("auto", "never", "all")
"""Values of `cache_fill`."""


def parse_bytes(text: str) -> int:
    """Return `"500GB"`, `"64MiB"`, `"1.5T"` or digits in bytes; units without an i are powers of 1000."""
    number = text.strip().rstrip("iIBbKMGTPkmgtp ")
    unit = text.strip()[len(number) :].strip().lower().removesuffix("b")
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}[unit.removesuffix("i")]
    return int(float(number) * (1024 if unit.endswith("i") else 1000) ** power)


FLAGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


def parse_flag(text: str) -> bool:
    return FLAGS[text.lower()]


FORMS: dict[Any, str] = {
    parse_bytes: "a number of bytes such as 2GB or 512MiB",
    parse_flag: "1 or 0",
    float: "a number of seconds such as 60",
    int: "a whole number",
}
"""Parser of a setting -> the values that it takes, for errors."""


def parse_places(text: str) -> dict[str, None]:
    """Return the names in a text with commas between them, without options."""
    return dict.fromkeys(name.strip() for name in text.split(",") if name.strip())


def parse_index_dir(text: str) -> str:
    """Return the directory, or "" for a word that means off."""
    return "" if text.lower() in ("0", "off", "no", "false") else text


def setting(default: Any, parser: Callable[[str], Any], minimum: float | None = None) -> Any:
    """Return the field of a setting, whose text `parser` reads, and which is at least `minimum` if it is a number."""
    return field(default=default, metadata={"rule": (parser, minimum)})


@dataclass(frozen=True)
class ReadSettings:
    """Settings of a reader.

    Args:
        fast: send ranges to s3://, gs://, abfs:// and http://, and writes to s3://, without their drivers, by signed
            URLs; None: where that works.
        cache_dir: directory of a disk cache, on this node or shared by nodes; "memory": one in /dev/shm, shared by the
            processes of the node; None: no disk cache.
        cache_bytes: limit of all files in cache_dir; None: leave a tenth of its file system free; of "memory", a half.
        cache_fill: which extents of 8 MiB of a `.bin` loaders fetch into cache_dir in the background: "auto", those of
            which the node will read enough; "all"; or "never".
        cache_chunk_bytes: bytes that a cache fetches together; None: 64 KiB. A slow link needs less.
        index_dir: directory of this node for `.idx` files and index arrays if there is no cache_dir; None: a directory
            of this user in the temporary directory. "off": each process holds them in its own memory. (If the directory
            is full, small ones; larger ones are an error.)
        index_bytes: limit of all files in index_dir; None: leave a tenth of its file system free.
        verify: compare a plain `.bin` with its checksums, which must exist; None: only a remote one, and only if there
            are checksums; if the store does not tell whether there are, a warning is logged.
        deadline_seconds: time after which a read, or the lookup of an object, fails that gets no response, or only
            broken ones, retries included.
        outage_seconds: time after which a read, a write or a deletion fails whose store cannot be reached or answers
            5xx, or 429 or 503 to all processes of the node. What a run can do without is tried once: leases and caches
            of indices, files of losses. None: two minutes less than the timeout of the process group of
            torch.distributed, 8 minutes without one.
        hedge: send a second request for a range that is much later than others, and use the first response.
        concurrency: requests in flight, of all readers of the process with the same value; None: 64, or 128 for
            requests that are sent without a driver.
        max_gap: unused bytes to fetch rather than send a second request; None: the cost of a request in bytes.
        check_dates: where a store sends no ETag, refuse a response with another Last-Modified than the object had when
            it was opened; False: for stores whose replicas send different dates for one object.
        redirect_hosts: origins, such as "http://10.0.0.7:51081", to which an endpoint of s3:// may redirect reads, as a
            cache of many hosts does; no credentials are sent there. In text, commas stand between them.
        parts_from: other hosts and buckets, such as "gs://more", on which a virtual merge may have parts: their
            names with commas between them, or a mapping from each name to the storage options there.

    Raises:
        ConfigError: an unknown setting, or a value that is malformed or out of range.

    Source: ours.
    """

    fast: bool | None = setting(None, parse_flag)
    cache_dir: str | None = setting(None, str)
    cache_bytes: int | None = setting(None, parse_bytes, 0)
    cache_fill: str = setting("auto", str)
    cache_chunk_bytes: int | None = setting(None, parse_bytes, 1)
    index_dir: str | None = setting(None, parse_index_dir)
    index_bytes: int | None = setting(None, parse_bytes, 0)
    verify: bool | None = setting(None, parse_flag)
    deadline_seconds: float = setting(60.0, float, 0)
    outage_seconds: float | None = setting(None, float, 0)
    hedge: bool = setting(True, parse_flag)
    concurrency: int | None = setting(None, int, 1)
    max_gap: int | None = setting(None, parse_bytes, 0)
    check_dates: bool = setting(True, parse_flag)
    redirect_hosts: Collection[str] = setting((), lambda text: tuple(parse_places(text)))
    parts_from: Mapping[str, Mapping[str, Any] | None] = field(
        default_factory=dict, metadata={"rule": (parse_places, None)}
    )

    def __post_init__(self) -> None:
        for name, (_, minimum) in RULES.items():
            value = getattr(self, name)
            if minimum is None or (value is None and getattr(type(self), name) is None):
                continue
            if not isinstance(value, int | float) or not value >= minimum or math.isnan(value):
                raise ConfigError(f"{name}: found {value!r}, needs a number, at least {minimum}")
        if self.deadline_seconds == 0:
            raise ConfigError("deadline_seconds: found 0, needs a number above it; no read would ever be in time")
        if self.cache_dir is not None and not self.cache_dir.strip():
            raise ConfigError(f"cache_dir: found {self.cache_dir!r}, needs a directory, or None for no cache")
        if self.cache_fill not in FILLS:
            raise ConfigError(f"cache_fill: found {self.cache_fill!r}, needs one of {', '.join(FILLS)}")
        form, hosts = r"https?://[^\s/?#@]+/?", self.redirect_hosts
        known = isinstance(hosts, list | tuple | set | frozenset) and all(isinstance(host, str) for host in hosts)
        if not known or not all(re.fullmatch(form, host) for host in hosts):
            raise ConfigError(f"redirect_hosts: found {hosts!r}, needs a list of origins: ['http://10.0.0.7:51081']")
        if not isinstance(self.parts_from, Mapping):
            raise ConfigError(f"parts_from: found {self.parts_from!r}, needs text, or a mapping from name to options")

    @property
    def patience_seconds(self) -> float:
        """Time that a read waits for a store to come back: `outage_seconds`, or its default in this process."""
        return default_outage_seconds() if self.outage_seconds is None else self.outage_seconds

    @classmethod
    def of(cls, storage_options: Mapping[str, Any] | None) -> ReadSettings:
        """Return the settings of the options, else of the environment (BINIDX_FAST=0, ...), else the defaults.

        Text has the same meaning in options and environment, so options may come from a file: {"cache_bytes": "500GB"}.
        """
        if not isinstance(storage_options, Mapping | None):
            kind = type(storage_options).__name__
            raise ConfigError(f"storage_options: found {kind}, needs a dict of fsspec's options")
        given = (storage_options or {}).get(OURS) or {}
        names = given if isinstance(given, Mapping) else [repr(given)]
        check_option_names(f"storage_options['{OURS}']", names, RULES, f"needs {', '.join(RULES)}")
        set_here = tuple([(name, text) for name, variable in VARIABLES if (text := os.environb.get(variable))])
        if not given:
            return _environment_settings(set_here)
        read = vars(_environment_settings(set_here))
        return cls(**read | {name: _parsed(f"{OURS} {name}", name, value) for name, value in given.items()})


@functools.lru_cache(64)
def _environment_settings(texts: tuple[tuple[str, bytes], ...]) -> ReadSettings:
    """Return the settings given by environment variables (BINIDX_*); cached, since every opened object needs them."""
    for given in os.environ:
        near = difflib.get_close_matches(given, KNOWN, 1, 0.85) if given.startswith("BINIDX_") else []
        if near and given not in KNOWN:
            logger.warning("%s: is no setting, and ignored; did you mean %s?", given, near[0])
    return ReadSettings(**{name: _parsed(f"BINIDX_{name.upper()}", name, os.fsdecode(text)) for name, text in texts})


def default_outage_seconds() -> float:
    """Return the default of `outage_seconds`: two minutes less than the timeout of torch's process group.

    The two minutes leave time for the read that follows; of a timeout below four minutes, half is returned.
    """
    try:
        # torch has no public function for it; a process without torch or without a group has no such member, either.
        group = sys.modules["torch.distributed"].distributed_c10d._get_default_group()
        backends = [group._get_backend(device) for device in group._device_types]
        timeout = min(backend.options._timeout.total_seconds() for backend in backends)
    except Exception:
        timeout = NCCL_TIMEOUT_SECONDS
    return float(max(timeout - 120, timeout / 2))


NCCL_TIMEOUT_SECONDS = 600.0
"""Timeout of a process group of NCCL, unless the user sets another."""


def leading_number(variable: str) -> int | None:
    """Return the number with which a launcher's variable begins, such as Slurm's "8(x16)"; None if there is none."""
    digits = "".join(itertools.takewhile(str.isdecimal, os.environ.get(variable, "")))
    return int(digits) if digits else None


LAUNCHER_SIZES = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables of torchrun, Open MPI and Slurm with the number of processes, and of those on this node."""


@functools.cache
def fleet_size() -> tuple[int, int]:
    """Return the number of processes and of nodes that a launcher started, as far as its variables show; else 1, 1."""
    for all_processes, of_node in LAUNCHER_SIZES:
        sizes = [leading_number(name) or 0 for name in (all_processes, of_node)]
        if min(sizes) > 0:
            return sizes[0], max(1, sizes[0] // sizes[1])
    return 1, 1


def drivers_own(storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options without the key "binidx", for fsspec."""
    return {name: value for name, value in (storage_options or {}).items() if name != OURS}


def _parsed(subject: str, name: str, value: Any) -> Any:
    """Parse a value that is text or a path; return others as they are."""
    if not isinstance(value, str | os.PathLike):
        return value
    try:
        return RULES[name][0](os.fspath(value))
    except (KeyError, ValueError, OverflowError) as error:
        form = FORMS.get(RULES[name][0], "another value")
        raise ConfigError(f"{subject}: found {value!r}, needs {form}") from error


RULES: dict[str, tuple[Callable[[str], Any], float | None]] = {
    setting.name: setting.metadata["rule"] for setting in fields(ReadSettings)
}
"""Setting -> parser of its text, and the minimum of a number."""

KNOWN = {f"BINIDX_{name.upper()}" for name in (*RULES, "traceback")}
"""Variables of the environment that this library reads, but for those of the commands' options."""

VARIABLES = [(name, f"BINIDX_{name.upper()}".encode()) for name in RULES]
"""Settings and their variables in bytes, as `os.environb` has them: text would take ten times as long."""
