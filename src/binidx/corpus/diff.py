"""Compare two datasets by their documents: added, removed and repeated ones, and whether the order differs.

Two documents are equal if their tokens are: sequences, dtype and modes are not compared. The k-th copy of a document in
A is matched with the k-th copy in B; a document without a match was removed or added.

Three stages of tasks, with exchange objects (`exchange`) between them:

    hash     documents of A or B  ─►  xxh3_128 of the tokens of each as int64, grouped by hash
    match    documents of A and B with hashes of one range  ─►  (number in A, number in B), grouped by number in A
    order    a range of documents of A  ─►  where their matches go back

Memory of a task: some hundred MB, for any number of documents. Disk: 40 bytes a document.
Time: about 1 us for a document and 1 ns for a token.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.exchange import ExchangeTask, ExchangeWriter, document_tasks, exchange_file, list_blocks, read_bucket
from binidx.corpus.shuffle_buckets import assign_buckets
from binidx.corpus.token_parts import PinnedDataset
from binidx.corpus.whole_dataset import Options, Prefix, WholeDataset
from binidx.errors import ConfigError
from binidx.jobs.job_folder import JobFolder
from binidx.jobs.parts import Values, Workers
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.jobs.runner import check_stop
from binidx.jobs.stages import JobStage, run_stages
from binidx.storage.location import Location

TASK_BYTES = 1 << 30
"""Bytes of tokens that a task hashes, about."""

BUCKET_DOCUMENTS = 1 << 21
"""Documents of a dataset in a task of the stages "match" and "order", about."""

HASHED = np.dtype([("hash", "<u8", 2), ("document", "<u8")])
MATCHED = np.dtype([("left", "<u8"), ("right", "<u8")])

ALGORITHM = 2
"""Version of the exchange objects; increased if a task gives other bytes, so that older ones are not reused."""


@dataclass(frozen=True)
class Difference:
    """Differences between the documents of A and B; pairs of counts are those of A and of B.

    Attributes:
        num_common: matched documents.
        num_removed, num_added: documents without a match in A and in B; `removed`, `added`: the first few numbers.
        num_duplicates: copies of an earlier document.
        num_order_breaks: matched documents whose match in B comes before that of the previous matched document of A;
            0 if the order is equal.
        order_breaks: the numbers in A of the first few of them.
        parts_missing: tasks that other shards must make before the same call can go on; the counts of differences are
            then 0.
    """

    prefixes: tuple[str, str]
    num_documents: tuple[int, int]
    num_tokens: tuple[int, int]
    num_common: int
    num_removed: int
    num_added: int
    num_duplicates: tuple[int, int]
    num_order_breaks: int
    removed: list[int]
    added: list[int]
    order_breaks: list[int]
    seconds: float
    parts_missing: int = 0

    @property
    def same(self) -> bool:
        """True if B has the same documents in the same order."""
        return not (self.num_removed or self.num_added or self.num_order_breaks or self.parts_missing)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as one JSON object."""
        return {"same": self.same, **asdict(self)}


def diff_datasets(
    left: Prefix,
    right: Prefix,
    *,
    few: int = 5,
    left_options: Options = None,
    right_options: Options = None,
    watch: ProgressWatcher | None = None,
    workers: Workers | None = None,
    records: Prefix | None = None,
    scratch: str | None = None,
) -> Difference:
    """Compare the documents of two datasets; all tokens of both are read.

    Args:
        few: how many documents of each kind to name.
        workers: where the tasks run, and this call's share of each stage; by default one thread.
        records: folder of what lies between the stages, with the options of A, for a restart and for workers of other
            machines; it is removed at the end. None: a temporary directory.
        scratch: directory of temporary files; None for the system's temporary directory.

    Raises:
        ConfigError: `few` is negative; the tokens are not integers; or the workers are not of this machine, and there
            are no `records`.
        FormatError: a dataset is not valid.
        ObjectChangedError: a dataset was replaced meanwhile.
        ObjectExistsError: `records` are of another comparison.
    """
    if few < 0:
        raise ConfigError(f"few: found {few}, need 0 or more")
    began, watch = time.monotonic(), watch or SilentWatcher()
    datasets = WholeDataset(Location.of(left, left_options)), WholeDataset(Location.of(right, right_options))
    for dataset in datasets:
        if dataset.dtype.kind == "f":
            raise ConfigError(f"{dataset.prefix}: tokens are {dataset.dtype.name}, documents are compared as integers")
        dataset.check_index(watch)
    workers = workers or Workers(count=1)
    is_here = workers.engine in (None, "local") and workers.executor is None and workers.shard is None
    if records is None and not is_here:
        raise ConfigError("records: workers of other machines need a folder that all of them reach; name one")
    with ExitStack() as stack:
        place = records or stack.enter_context(tempfile.TemporaryDirectory(prefix="binidx-diff-", dir=scratch))
        folder = Location.of(place, left_options if records is not None else None)
        counts = datasets[0].index.num_documents, datasets[1].index.num_documents
        pinned = [PinnedDataset.of(dataset) for dataset in datasets]
        job = _Diff(Location(folder.absolute, folder.options), pinned, counts, few, scratch)
        found = job.run(datasets, workers, watch)
    for dataset in datasets:
        dataset.source.check_unchanged()
    prefixes = datasets[0].prefix, datasets[1].prefix
    tokens = datasets[0].index.num_tokens, datasets[1].index.num_tokens
    return Difference(prefixes, counts, tokens, **found, seconds=time.monotonic() - began)


@dataclass(frozen=True)
class _Diff:
    """Job of a comparison; its methods run in the workers."""

    location: Location
    datasets: Sequence[PinnedDataset]
    counts: tuple[int, int]
    few: int
    scratch: str | None

    @property
    def folder(self) -> JobFolder:
        """Folder of the records and exchange objects."""
        identities = [dataset.identity for dataset in self.datasets]
        return JobFolder(self.location, {"binidx_diff": ALGORITHM, "few": self.few, "datasets": identities})

    def run(self, datasets: Sequence[WholeDataset], workers: Workers, watch: ProgressWatcher) -> dict[str, Any]:
        """Run the stages; return the fields of a Difference about documents."""
        sizes = [(dataset.index.num_documents, dataset.num_bytes) for dataset in datasets]
        hashes = document_tasks("hash", sizes, TASK_BYTES)
        stages = [
            JobStage("hash", self.write_hashes, lambda _: hashes),
            JobStage("match", self.write_matches, self.match_tasks, "rows"),
            JobStage("order", self.find_breaks, self.order_tasks, "rows"),
        ]
        remote = any(dataset.prefix.local_path is None for dataset in self.datasets)
        results, missing = run_stages(stages, self.folder, workers, watch, remote_data=remote)
        if missing:
            return self.summary([], [], missing)
        hashed, matches, ordered = results
        tasks = [*hashes, *self.match_tasks(hashed), *self.order_tasks(matches)]
        self.folder.remove(tasks, [exchange_file(self.location, task.name) for task in tasks])
        return self.summary([*matches.values()], [ordered[name] for name in sorted(ordered)], 0)

    def match_tasks(self, hashed: dict[str, Values]) -> list[ExchangeTask]:
        """Return the tasks of the stage "match"."""
        sides = [{name: each for name, each in hashed.items() if name.startswith(f"hash-{n:06}")} for n in (0, 1)]
        blocks = zip(*(list_blocks(side, self.num_buckets) for side in sides), strict=True)
        size = sum(self.counts) // self.num_buckets
        return [ExchangeTask(f"match-{n:06}", size, blocks=both) for n, both in enumerate(blocks)]

    def order_tasks(self, matches: dict[str, Values]) -> list[ExchangeTask]:
        """Return the tasks of the stage "order"."""
        blocks, size = list_blocks(matches, self.num_buckets), self.counts[0] // self.num_buckets
        return [ExchangeTask(f"order-{n:06}", size, blocks=pairs) for n, pairs in enumerate(blocks)]

    @property
    def num_buckets(self) -> int:
        """Tasks of the stages "match" and "order"."""
        return max(1, -(-max(self.counts) // BUCKET_DOCUMENTS))

    def write_hashes(self, task: ExchangeTask) -> Values:
        """Write the hashes of some documents, grouped by hash."""
        num_buckets, document = self.num_buckets, task.rows.start
        with closing(ExchangeWriter(num_buckets, HASHED, self.scratch)) as writer:
            for hashes in hash_documents(self.datasets[task.number], task.rows):
                check_stop()
                rows = np.empty(len(hashes), HASHED)
                rows["hash"], rows["document"] = hashes, np.arange(document, document + len(hashes))
                document += len(hashes)
                writer.add_rows(assign_buckets(hashes[:, 0], num_buckets), rows)
            return writer.publish(exchange_file(self.location, task.name))

    def write_matches(self, task: ExchangeTask) -> Values:
        """Write the matches of the documents of A with hashes of one range, grouped by number in A."""
        sides = [read_bucket(self.location, blocks, HASHED).rows for blocks in task.blocks]
        numbers, distinct = match_documents(*(rows["hash"] for rows in sides))
        matched, added = numbers >= 0, np.ones(len(sides[1]), bool)
        added[numbers[matched]] = False
        left, right = sides[0]["document"], sides[1]["document"]
        rows = np.empty(int(matched.sum()), MATCHED)
        rows["left"], rows["right"] = left[matched], right[numbers[matched]]
        num_buckets, count = self.num_buckets, max(self.counts[0], 1)
        with closing(ExchangeWriter(num_buckets, MATCHED, self.scratch)) as writer:
            writer.add_rows((rows["left"] * num_buckets // count).astype(np.int64), rows)
            published = writer.publish(exchange_file(self.location, task.name))
        removed, new = left[~matched], right[added]
        first = {"removed": removed[: self.few].tolist(), "added": new[: self.few].tolist()}
        sizes = {"num_removed": len(removed), "num_added": len(new), "num_common": len(rows), "distinct": distinct}
        return {**published, **first, **sizes}

    def find_breaks(self, task: ExchangeTask) -> Values:
        """Return the order breaks among some documents of A, and the matches at both ends."""
        rows = read_bucket(self.location, task.blocks, MATCHED).rows
        rows = rows[np.argsort(rows["left"], kind="stable")]
        breaks = rows["left"][1:][rows["right"][1:] < rows["right"][:-1]]
        ends = [[int(value) for value in rows[place].tolist()] for place in (0, -1) if len(rows)]
        return {"num_breaks": len(breaks), "breaks": breaks[: self.few].tolist(), "ends": ends}

    def summary(self, matches: Sequence[Values], ordered: Sequence[Values], missing: int) -> dict[str, Any]:
        """Return the fields of a Difference about documents; zeros if tasks are missing."""
        copies = [self.counts[side] - sum(match["distinct"][side] for match in matches) for side in (0, 1)]
        breaks, last, num_breaks = list[int](), -1, 0
        for part in ordered:
            if part["ends"]:
                (first, number), (_, end) = part["ends"]
                between = [first] if number < last else []
                num_breaks, last = num_breaks + len(between) + part["num_breaks"], end
                breaks += [*between, *part["breaks"]]
        names = ("removed", "added")
        return {
            **{name: sum(match[name] for match in matches) for name in ("num_common", "num_removed", "num_added")},
            **{name: sorted(number for match in matches for number in match[name])[: self.few] for name in names},
            "num_duplicates": (0, 0) if missing else (copies[0], copies[1]),
            "num_order_breaks": num_breaks,
            "order_breaks": breaks[: self.few],
            "parts_missing": missing,
        }


def hash_documents(pinned: PinnedDataset, documents: range) -> Iterator[NDArray[np.uint64]]:
    """Yield 128-bit xxh3 hashes of documents, of their tokens as little-endian int64; shape (num_documents, 2) each.

    Args:
        documents: numbers of neighbouring documents.
    """
    dataset = pinned.open()

    def widen(data: memoryview) -> memoryview:
        return np.frombuffer(data, dataset.dtype).astype("<i8").view(np.uint8).data

    place = documents.start, documents.stop
    for digests, _ in dataset.hash_documents(pinned.reader(), xxhash.xxh3_128, widen, place):
        yield np.frombuffer(b"".join(digests), ">u8").astype(np.uint64).reshape(-1, 2)


def match_documents(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> tuple[NDArray[np.int64], tuple[int, int]]:
    """Match documents of A with documents of B.

    Args:
        left, right: hashes of A and B, shape (num_documents, 2) each, in the order of the documents.

    Returns:
        For each document of A the place of its match in B, -1 without a match, shape (num_documents of A,); and the
        number of distinct documents in A, and in B.
    """
    numbers, hashes = np.full(len(left), -1, np.int64), np.concatenate([left, right])
    if not len(hashes):
        return numbers, (0, 0)
    # Stable: for each hash the copies of A come before those of B, both in their order.
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    hashes, is_a = hashes[order], order < len(left)
    documents = np.where(is_a, order, order - len(left))
    new = np.concatenate([[True], (hashes[1:] != hashes[:-1]).any(1)])
    group, start = np.cumsum(new) - 1, np.flatnonzero(new)
    in_a, in_b = (np.bincount(group[side], minlength=len(start)) for side in (is_a, ~is_a))
    copy = np.arange(len(order)) - start[group]
    at = np.flatnonzero(is_a & (copy < in_b[group]))
    numbers[documents[at]] = documents[at + in_a[group[at]]]
    return numbers, (int(np.count_nonzero(in_a)), int(np.count_nonzero(in_b)))
