"""Eight processes that build one index at once; half of them are killed.

    python -m helpers.build_race URI ROUNDS SEED SPAN

Each builder is a forked child that begins within 20 ms of the others; some use the build lock, the others build at
once, as processes do that lost their lease. At a random instant of its first SPAN seconds it may get a SIGKILL. Now and
then the data changes between two rounds, or some builders of one round have other data under the same name. A builder
that ends has compared its arrays.

After each round one more process checks: if a builder ended, and all had the same data, the cache must be valid; it
must return no other array; and after the process has rebuilt a broken cache, the files are numpy.save's bytes.

Prints one JSON object: counts of rounds and builders, and of errors, which must be 0.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from functools import partial
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.manifest import ALGORITHM, Origin
from binidx.index.cache.order_record import OrderKey
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.writing import publish, staging

BUILDERS = 8
NAME = "0123456789abcdef0123456789abcdef-Kind-train"
NAMES = ("large", "small")


class CarelessFileSystem(LocalFileSystem):
    """Store that shows whole objects only, and ignores conditions."""

    protocol = "careless"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("careless://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "wb") as file:
            file.write(value)
        os.replace(temporary, path)


fsspec.register_implementation("careless", CarelessFileSystem, clobber=True)


def expected(content: int) -> dict[str, np.ndarray]:
    """Return a large array that is mapped, one in four of several parts, and a small one."""
    size = 80_000 if content % 4 else 700_000
    return {
        "large": (np.arange(size, dtype=np.int64) * content).reshape(-1, 2),
        "small": np.full(100, content, np.int32),
    }


def make_cache(directory: str, content: int) -> IndexCache:
    origin = Origin(content=lambda: {"index_digest": str(content)})
    return IndexCache(
        IndexFiles(Location.of(directory), NAME), origin=origin, order=lambda: OrderKey(content, False, 0, 10)
    )


def make_build(content: int) -> Any:
    def build(writer: ArrayWriter) -> None:
        for name, array in expected(content).items():
            with writer.array(name, array.shape, array.dtype) as out:
                time.sleep(random.random() * 0.005)
                out[:] = array

    return build


def build_without_lock(cache: IndexCache, content: int) -> dict[str, np.ndarray]:
    wanted = {"algorithm": ALGORITHM}
    found = cache.load(wanted, NAMES)
    return found or cache.build("described", wanted, make_build(content)).arrays


def build_one(directory: str, content: int, seed: int) -> bool:
    random.seed(seed)
    time.sleep(random.random() * 0.02)
    cache = make_cache(directory, content)
    if random.random() < 0.25:
        arrays = cache.load_or_build("described", {}, NAMES, make_build(content))
    else:
        arrays = build_without_lock(cache, content)
    return same(arrays, content)


def check_cache(directory: str, content: int, *, must_be_whole: bool) -> bool:
    """Return whether a cache is right, and becomes valid if it was not."""
    cache = make_cache(directory, content)
    # Twice, for a store that stalls: a manifest that takes longer than 10 s counts as missing.
    found = cache.load({"algorithm": ALGORITHM}, NAMES) or cache.load({"algorithm": ALGORITHM}, NAMES)
    if found is None and must_be_whole:
        return wrong(directory, "nothing is there")
    if found is not None and not same(found, content):
        return wrong(directory, "other arrays are served")
    if not same(build_without_lock(cache, content), content) or cache.load({"algorithm": ALGORITHM}, NAMES) is None:
        return wrong(directory, "it cannot be built anew")
    for name, array in expected(content).items():
        if bytes(read_whole(open_object(cache.files.array_file(name), cache=False))) != saved(array):
            return wrong(directory, f"{name}.npy is another one")
    return True


def wrong(directory: str, what: str) -> bool:
    print(f"{directory}: {what}", file=sys.stderr)
    return False


def same(arrays: dict[str, np.ndarray], content: int) -> bool:
    return all(np.array_equal(arrays[name], array) for name, array in expected(content).items())


def saved(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def fork(work: Any) -> int:
    """A child that ends with 0 if `work` gives True, 1 if False, 2 if it raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 2
    try:
        code = 0 if work() else 1
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def race(directory: str, contents: list[int], choose: random.Random, span: float) -> tuple[int, int, int]:
    """How many ended well, ended wrong, and were killed."""
    pids = [fork(partial(build_one, directory, content, choose.randrange(2**32))) for content in contents]
    kills = sorted((choose.uniform(0, span), pid) for pid in pids if choose.random() < choose.choice((0.3, 0.7, 1.0)))
    begun = time.monotonic()
    for when, pid in kills:
        time.sleep(max(0.0, begun + when - time.monotonic()))
        os.kill(pid, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return codes.count(0), sum(code > 0 for code in codes), sum(code < 0 for code in codes)


def main(uri: str, rounds: int, seed: int, span: float) -> None:
    logging.disable(logging.WARNING)
    staging.ONE_PUT = publish.ONE_PUT = 5 << 20  # the least that S3 takes as a part
    fsspec.get_filesystem_class(uri.partition("://")[0] if "://" in uri else "file")  # imported once, for all children
    choose = random.Random(seed)
    done = {"rounds": 0, "ended": 0, "wrong": 0, "killed": 0, "not_whole": 0}
    directory, content = f"{uri}/0", 1
    for number in range(rounds):
        directory = f"{uri}/{number}" if choose.random() < 0.3 else directory
        content = choose.randrange(1, 100) if choose.random() < 0.5 else content
        others = choose.randrange(1, BUILDERS) if choose.random() < 0.2 else 0
        contents = [content + 1] * others + [content] * (BUILDERS - others)
        ended, wrong, killed = race(directory, contents, choose, span)
        whole = ended > 0 and not others
        looker = fork(partial(check_cache, directory, content, must_be_whole=whole))
        done["not_whole"] += os.waitpid(looker, 0)[1] != 0
        for name, count in (("rounds", 1), ("ended", ended), ("wrong", wrong), ("killed", killed)):
            done[name] += count
    print(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
