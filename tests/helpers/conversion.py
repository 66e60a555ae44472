"""What the tests of convert share: datasets, a look at the target, and runs that break off."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from helpers.random_datasets import Document, build_ours

from binidx.storage.open import open_object, read_whole

MIB = 1 << 20


def build(prefix: Path, num_tokens: int, seed: int = 0) -> str:
    """A dataset of about 10 documents, uint16."""
    rng = np.random.default_rng(seed)
    lengths = np.diff(np.sort(rng.integers(0, num_tokens + 1, 9)), prepend=0, append=num_tokens).tolist()
    documents = [Document(rng.integers(0, 65536, length, dtype=np.uint16), [length], [1]) for length in lengths]
    return build_ours(prefix, documents, np.uint16, multimodal=True)


def pair(prefix: Any) -> tuple[bytes, bytes]:
    return tuple(bytes(read_whole(open_object(f"{prefix}.{end}", cache=False))) for end in ("bin", "idx"))


def names_beside(prefix: str) -> list[str]:
    """What lies under a prefix, files of the work and partial ones included; a folder by its name."""
    fs, path = fsspec.url_to_fs(prefix)
    fs.invalidate_cache()
    folder, _, start = path.rpartition("/")
    names = {name[len(folder) + 1 :].partition("/")[0] for name in fs.find(folder)}
    return sorted(name for name in names if name.startswith(start))


def unfinished_uploads(prefix: str) -> list[Any]:
    """Uploads begun and not finished of objects under a prefix; other tests of the session leave theirs."""
    fs, path = fsspec.url_to_fs(prefix)
    bucket, _, key = path.partition("/")
    found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads", [])
    return [upload for upload in found if upload["Key"].startswith(key)]


def memory() -> str:
    return f"memory://{uuid.uuid4().hex}/en"


class AtEvent:
    """A Watch that does something at the first event whose text starts so; a part done is `part`."""

    def __init__(self, text: str, act) -> None:
        self.text, self.act, self.events = text, act, []

    def begin(self, what: str, *counts: object) -> None:
        self.say(what)

    def advance(self, count: int) -> None:
        self.say("part")

    def say(self, message: str) -> None:
        self.events.append(message)
        if self.act is not None and message.startswith(self.text):
            act, self.act = self.act, None
            act()


def dying(source: str, part_bytes: int, *attempts: Any, codec: str | None = None) -> str:
    """The exit status of each attempt: 9 died, 0 came to its end."""
    command = [sys.executable, "-m", "helpers.convert_crash", source, part_bytes, *attempts]
    environment = {**os.environ, **({"CODEC": codec} if codec else {})}
    return subprocess.run(
        list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout
