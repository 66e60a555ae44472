"""A job that is killed again and again: what exists is always whole, and the same job run again completes it.

    python -m helpers.kill_rounds JOB FOLDER ROUNDS [URI]     kills at random moments; outputs go to a folder of S3
    python -m helpers.kill_rounds JOB FOLDER steps            one kill after each rename, link and removal of a name
    python -m helpers.kill_rounds sources FOLDER              write FOLDER/in, the inputs of all jobs, before

Each attempt is a forked child; jobs are the functions of `JOBS`. After each kill every object under a final name must
have the bytes that an unbroken run gives it. A last attempt, which is not killed, must leave the same names and bytes
as the unbroken run, so no staging file. Prints a JSON object: the number of kills, and of attempts that came to their
end.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore.session
import numpy as np
import s3fs  # noqa: F401
from helpers.gpt_data import TOKENIZER
from helpers.lineage_data import build_with_lineage
from helpers.preprocess_crash import killed_after, status_of
from helpers.preprocess_jobs import EOD, corpus, job_of, texts, tokenizer_path, write_lines

import binidx.run.stored.baking as baking
import binidx.run.stored.read_planning as read_planning
from binidx import RunOrder, describe_tokenizer
from binidx.corpus import token_parts
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.cut import cut_dataset
from binidx.corpus.merge import merge_datasets, merge_virtually
from binidx.corpus.shuffle import shuffle_datasets
from binidx.dataset.builder import BlendedMegatronDatasetBuilder
from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.jobs.parts import Workers
from binidx.packed.packed_convert import indexed_to_packed, packed_to_indexed
from binidx.packed.packed_files import PackedFiles
from binidx.prepare.preprocess.preprocess import preprocess
from binidx.prepare.text.line_shuffle import shuffle_lines
from binidx.run.global_order import GlobalOrder
from binidx.run.provenance.export import export, plan_by_steps
from binidx.run.schedule import BatchSchedule
from binidx.storage.codecs.segments import SEGMENT_BYTES

VARYING = (".manifest.json", "-binidx.json", "-binidx-orders.json")
"""Endings of objects with times or names of processes, which differ from run to run."""

WORKING = (".tmp", ".partial", ".convert.json", ".lease", ".lock")
"""Endings of objects that a job writes for itself; an unbroken run leaves none."""


def make_sources(at: Path) -> None:
    """Write the inputs of all jobs."""
    en, code = build_with_lineage(at / "en", 80, 1), str(at / "code")
    with IndexedDatasetBuilder(f"{code}.bin", np.uint16) as builder:
        for number in range(50):
            builder.add_document(range(number, number + 20), [12, 8])
        builder.finalize(f"{code}.idx")
    convert_dataset(en, at / "zstd", way=StorageFormat("zstd"))
    corpus(at / "text", count=60)
    write_lines(at / "lines.jsonl", texts(300))
    shutil.copy(tokenizer_path(), at / "tokenizer.json")
    with IndexedDatasetBuilder(f"{at}/long.bin", np.uint16) as builder:
        for number in range(40_000):  # an index of fewer is not cached
            builder.add_document([number % 900], [1])
        builder.finalize(f"{at}/long.idx")
    tokens = np.minimum(np.random.default_rng(0).geometric(0.01, 11 << 19), 65535).astype(np.uint16)
    with IndexedDatasetBuilder(f"{at}/large.bin", np.uint16) as builder:
        for document in np.array_split(tokens, 99):
            builder.add_document(document, [len(document)])
        builder.finalize(f"{at}/large.idx")
    indexed_to_packed(IndexedDataset(code), f"{at}/packed", "t", 300, 0, add_separator=True)


def convert(at: Path, out: str, way: StorageFormat) -> None:
    token_parts.LEAST_BYTES = 4 << 20
    convert_dataset(at / "large", f"{out}/en", way=way, part_bytes=(5 if out.startswith("s3:") else 1) << 20)


def convert_by_workers(at: Path, out: str, source: str, way: StorageFormat) -> None:
    token_parts.LEAST_BYTES = SEGMENT_BYTES
    with ThreadPoolExecutor(2) as threads:
        convert_dataset(at / source, f"{out}/en", way=way, workers=Workers(executor=threads, count=2))


def tokenize(at: Path, out: str) -> None:
    tokenizer = describe_tokenizer(str(at / "tokenizer.json"), eod=EOD)
    job = job_of(sorted(map(str, (at / "text").iterdir())), f"{out}/en", tokenizer=tokenizer, part_bytes=3000)
    with ThreadPoolExecutor(2) as threads:
        preprocess(job, executor=threads, workers=2)


def build(blend: list[str], cache: str, sequence_length: int, num_samples: int) -> Any:
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=sequence_length, blend=(blend, None), split="1,0,0", path_to_cache=cache,
        tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 0, 0], lambda: True, config).build()[0]


def order_of(at: Path) -> RunOrder:
    dataset = build([f"{at}/en", f"{at}/code"], f"{at}/cache", 16, 100)
    return RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(4, 1, 2), len(dataset)))


def bake(at: Path, out: str) -> None:
    order = order_of(at)
    baking.bake(order, out, baking.plan_bake(order, range(order.num_steps() or 0), 1500))


def read_plan(at: Path, out: str) -> None:
    read_planning.PART_SAMPLES = 16
    order = order_of(at)
    plan = read_planning.plan_reads(order, range(order.num_steps() or 0))
    read_planning.write_read_plan(order, out, plan)


def order(at: Path, out: str) -> None:
    found = order_of(at)
    export(found, out, plan_by_steps(range(found.num_steps() or 0), 3), workers=Workers(count=2))


Job = Callable[[Path, str], Any]
JOBS: dict[str, Job] = {
    "merge": lambda at, out: merge_datasets([at / "en", at / "code", at / "en"], f"{out}/all"),
    "merge compressed": lambda at, out: merge_datasets([at / "zstd"] * 2, f"{out}/all"),
    "merge --virtual": lambda at, out: merge_virtually([at / "en", at / "code"], f"{out}/all"),
    "cut head": lambda at, out: cut_dataset(at / "en", [f"{out}/head"], num_documents=30),
    "cut split": lambda at, out: cut_dataset(at / "en", [f"{out}/a", f"{out}/b"], [0.7, 0.2], seed=1),
    "shuffle": lambda at, out: shuffle_datasets([at / "en", at / "code"], f"{out}/all", seed=1),
    "shuffle compressed": lambda at, out: shuffle_datasets([at / "zstd"], f"{out}/all", seed=1),
    "shuffle --lines": lambda at, out: shuffle_lines([at / "lines.jsonl"], f"{out}/a.gz", seed=1, memory_bytes=1 << 30),
    "convert": lambda at, out: convert(at, out, StorageFormat(checksums=True)),
    "compress": lambda at, out: convert(at, out, StorageFormat("zstd", 1)),
    "convert by workers": lambda at, out: convert_by_workers(at, out, "en", StorageFormat(checksums=True)),
    "compress by workers": lambda at, out: convert_by_workers(at, out, "long", StorageFormat("zstd")),
    "preprocess": tokenize,
    "bake": bake,
    "read-plan": read_plan,
    "order": order,
    "pack": lambda at, out: indexed_to_packed(IndexedDataset(f"{at}/en"), out, "t", 500, 0),
    "pack --back": lambda at, out: packed_to_indexed(
        PackedFiles(sorted(map(str, (at / "packed").glob("*.bin"))), 1), f"{out}/all", 0
    ),
    "index cache": lambda at, out: build([f"{at}/long"], out, 1, 50_000),
}


def fork(work: Callable[[], object]) -> int:
    """Start a child that does this and ends with status 0, or 1 and a traceback."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return child


def die_after(step: int) -> None:
    """Make this process kill itself after the n-th call that makes a name appear or go."""
    left = step

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            found = call(*arguments, **options)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return run

    for name in ("replace", "link", "unlink", "rename"):
        setattr(os, name, counted(getattr(os, name)))


class Folder:
    """Outputs in a folder of the disk."""

    def __init__(self, path: Path) -> None:
        self.uri, self._path = str(path), path

    def objects(self) -> dict[str, bytes]:
        found = [each for each in self._path.rglob("*") if each.is_file()]
        return {str(each.relative_to(self._path)): each.read_bytes() for each in found}

    def clear(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class Bucket:
    """Outputs under a URI of S3; botocore has no threads, so this process stays fit for forks."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._bucket, _, self._start = uri.removeprefix("s3://").partition("/")
        self._client = botocore.session.get_session().create_client("s3")

    def objects(self) -> dict[str, bytes]:
        names = [each[len(self._start) + 1 :] for each in self._keys()]
        return {name: self._client.get_object(**self._where(name))["Body"].read() for name in names}

    def clear(self) -> None:
        for key in self._keys():
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def _keys(self) -> list[str]:
        found = self._client.list_objects_v2(Bucket=self._bucket, Prefix=f"{self._start}/")
        return [each["Key"] for each in found.get("Contents", [])]

    def _where(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._start}/{name}"}


class Rounds:
    """A job, its inputs, and the objects that an unbroken run writes."""

    def __init__(self, job: Job, folder: Path, uri: str | None) -> None:
        self.job, self.sources = job, folder / "in"
        self.out = Bucket(uri) if uri else Folder(folder / "out")
        self.kills = self.ends = 0
        self.complete()  # warms caches of the sources
        self.out.clear()
        began = time.monotonic()
        self.complete()
        self.seconds, self.needed = time.monotonic() - began, self.out.objects()
        assert not [name for name in self.needed if name.endswith(WORKING)]
        self.out.clear()

    def start(self, step: int = 0) -> int:
        def work() -> None:
            die_after(step)
            self.job(self.sources, self.out.uri)

        return fork(work)

    def complete(self) -> None:
        assert status_of(self.start()) == 0
        self.ends += 1

    def count(self, status: int) -> bool:
        """Count an attempt, and check that whatever it published is whole; return whether it was killed."""
        assert status in (0, -signal.SIGKILL), status
        self.kills += status != 0
        self.ends += status == 0
        for name, data in self.out.objects().items():
            if name in self.needed and not name.endswith(VARYING):
                assert data == self.needed[name], name
        return status != 0

    def check(self) -> None:
        """Run the job to its end and compare."""
        self.complete()
        found = self.out.objects()
        assert found.keys() == self.needed.keys(), found.keys() ^ self.needed.keys()
        for name, data in self.needed.items():
            assert name.endswith(VARYING) or found[name] == data, name
        self.out.clear()


def main(name: str, folder: str, rounds: str = "", uri: str | None = None) -> None:
    import pandas  # noqa: F401 - before the forks, of which pyarrow imports it in each

    gc.freeze()  # no collection of a child looks at what was imported, and copies it
    if name == "sources":
        (sources := Path(folder, "in")).mkdir()
        return make_sources(sources)
    found = Rounds(JOBS[name], Path(folder), uri)
    if rounds == "steps":
        step = 1
        while found.count(status_of(found.start(step))):
            found.check()
            step += 1
    else:
        choose = random.Random(name)
        while found.kills < int(rounds):
            found.count(killed_after(found.start(), choose.uniform(0, 1.1 * found.seconds)))
            if choose.random() < 0.5:  # else the restart is killed, too
                found.check()
    return print(json.dumps({"kills": found.kills, "ends": found.ends}))


if __name__ == "__main__":
    main(*sys.argv[1:])
