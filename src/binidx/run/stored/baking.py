"""Bake a run: write its tokens again in the order in which they are consumed, for `binidx.BakedDataset`.

For runs whose thousands of nodes read one bucket: a micro-batch is one range, while shuffled documents take five to
nine ranges per sample. Costs one more copy of the tokens that are read, (S + 1) / S of their size.

Three stages, each of tasks that any worker makes; all reads and writes are sequential:

    places    positions of the run  ─ the order ─►  places of their tokens, grouped by chunks of the sources
    tokens    a chunk of a source   ─ read once ─►  its tokens, grouped by parts of the bake
    parts     a part of the bake    ─ sorted    ─►  its .bin and .idx

Between the stages lie exchange objects (`corpus/exchange.py`) in DIR/exchange, as many bytes as the bake. Finished
tasks and parts are kept, so an interrupted bake resumes, and several machines may share it.

Memory of a task: a part of the bake, 1 GiB, and up to 300 MiB; and about 48 bytes for each piece of a chunk. Scratch
disk of a task: a chunk, if that is larger than 1 GiB, as in bakes of more than 128 GiB: 32 GB for a trillion tokens.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.exchange import (
    HELD_BYTES,
    PIECE_BYTES,
    ROUND_BYTES,
    TASK_BYTES,
    ExchangeTask,
    ExchangeWriter,
    exchange_file,
    list_blocks,
    read_bucket,
)
from binidx.corpus.whole_dataset import DatasetOutput, DatasetTarget
from binidx.errors import ConfigError, FormatError, trims_traceback
from binidx.forks import cached_property
from binidx.format.indexed_dataset import IndexedDataset, as_pair
from binidx.format.tokens import index_of
from binidx.jobs.job_folder import JobFolder
from binidx.jobs.parts import Values, Workers
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.jobs.runner import check_stop
from binidx.jobs.stages import JobStage, run_stages
from binidx.order.document_packing import PackedOrder
from binidx.order.order_protocols import Numbers
from binidx.order.source_order import join_ranges
from binidx.order.stored.baked_order import Baked
from binidx.run.run_order import RunOrder
from binidx.run.run_parts import PerProcess
from binidx.run.stored.read_planning import TWO_THREADS, check_planned, describe_samples
from binidx.storage.location import Location
from binidx.storage.ranges import cut
from binidx.storage.threads import OPENS
from binidx.storage.writing.publish import put_if_absent, write_object

ALGORITHM = 1
"""Version of the exchange objects; increased if a task gives other bytes, so that older ones are not reused."""

STAGES = ("places", "tokens", "parts")

LEAST_TASKS = 16
"""Tasks of the first two stages, of a small run: work for many cores."""

POSITIONS = 1 << 16, 1 << 21
"""Least and most positions of a task: 250 MB of places with 5 pieces a sample."""

BAKE_CHUNK_BYTES = 64 << 20, HELD_BYTES
"""Least and most bytes of a chunk, unless the parts are so many that blocks of `PIECE_BYTES` need larger chunks."""

PLACED_AT_ONCE = 1 << 14
"""Positions whose places are computed at once."""

GAP_BYTES = 256 << 10
"""Unused bytes of a source that are read rather than skipped."""

PLACE = np.dtype([("start", "<u8"), ("position", "<u8"), ("offset", "<u4"), ("num_tokens", "<u4")])
"""Piece of a sample in its source: its first byte; position and first token of the sample's tokens it holds."""

SAMPLE_PIECE = np.dtype([("sample", "<u4"), ("offset", "<u4"), ("num_bytes", "<u4", (1,))])
"""Piece of a sample, with its tokens: number in the part, and first token of the sample's tokens it holds."""


@trims_traceback
def plan_bake(order: RunOrder, steps: range, part_bytes: int = 1 << 30) -> Baked:
    """Return the description of a bake of these steps.

    Args:
        order: the order of the run.
        steps: steps to bake.
        part_bytes: approximate size of the tokens of a part; a task holds one in memory.

    Returns:
        The description, which `bake` publishes beside the parts.

    Raises:
        IndexError: a step is beyond the end of the run.
        ConfigError: there are no steps, or the bounds of documents matter to the samples, which a bake does not store.
    """
    check_planned(order, steps, "bake")
    config = order.config
    if any(isinstance(member, PackedOrder) for member in order.reads.members):
        raise ConfigError("order: found packed documents, whose samples have several lengths; a bake stores one length")
    config.check_bakeable()
    stored = (config.sequence_length + config.add_extra_token_to_sequence) * np.dtype(order.token_dtype).itemsize
    described = describe_samples(order, steps, max(1, part_bytes // stored))
    del described["options"]["prefixes"]  # a bake has the tokens itself
    return Baked(**described)


@dataclass(frozen=True)
class BakeProgress:
    """Result of a call of `bake`.

    Attributes:
        written: parts of the bake that this call wrote.
        missing: parts of the bake that are missing: shares of other shards, or later stages.
        stage: stage in which the call ended: "places", "tokens" or "parts"; the bake is complete if `missing` is 0.
        waits_for: tasks of this stage that other shards must make before the same command can go on.
    """

    written: int
    missing: int
    stage: str
    waits_for: int


@dataclass(frozen=True)
class _Bake:
    """Job of a bake; its methods run in the workers."""

    shared: PerProcess[RunOrder]
    baked: Baked
    target: Location
    scratch: str | None

    @property
    def order(self) -> RunOrder:
        """Order of the run."""
        return self.shared.get()

    @property
    def folder(self) -> JobFolder:
        """Folder of the exchange objects."""
        identity = {"binidx_bake": ALGORITHM, **asdict(self.baked), "chunk_bytes": self.chunk_bytes}
        return JobFolder(self.target / "exchange", identity)

    @cached_property
    def token_bytes(self) -> list[int]:
        """Number of bytes of the tokens of each source."""
        return [index_of(source.dataset).num_bytes for source in self.order.sources]

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk of a source, but the last."""
        least, most = BAKE_CHUNK_BYTES
        size = min(max(sum(self.token_bytes) // LEAST_TASKS, least), most)
        blocks = PIECE_BYTES * len(self.parts)  # a block for each part; 12 MiB in one would be two requests
        return max(size // blocks, 1) * blocks // 8 * 8

    @cached_property
    def first_chunks(self) -> Numbers:
        """Number of the first chunk of each source, then the number of chunks."""
        counts = [-(-num_bytes // self.chunk_bytes) for num_bytes in self.token_bytes]
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @cached_property
    def parts(self) -> list[range]:
        """Positions of each part."""
        return self.baked.parts()

    def part(self, number: int) -> Location:
        """Return the prefix of a part."""
        return self.baked.part_file(self.target, self.parts[number])

    def place_tasks(self) -> list[ExchangeTask]:
        """Return the tasks of the stage "places"."""
        first, stop = self.baked.first, self.baked.stop
        count = min(max((stop - first) // LEAST_TASKS, POSITIONS[0]), POSITIONS[1])
        ranges = [range(*part) for part in cut((first, stop), count)]
        return [ExchangeTask(f"places-{number:06}", len(rows), rows=rows) for number, rows in enumerate(ranges)]

    def token_tasks(self, places: Mapping[str, Values]) -> list[ExchangeTask]:
        """Return the tasks of the stage "tokens"."""
        chunks = [range(*chunk) for num_bytes in self.token_bytes for chunk in cut((0, num_bytes), self.chunk_bytes)]
        blocks = list_blocks(places, len(chunks))
        return [ExchangeTask(f"tokens-{n:06}", len(rows), n, rows, blocks[n]) for n, rows in enumerate(chunks)]

    def part_tasks(self, tokens: Mapping[str, Values]) -> list[ExchangeTask]:
        """Return the tasks of the stage "parts"."""
        blocks = list_blocks(tokens, len(self.parts))
        return [ExchangeTask(f"part-{n:06}", len(part), n, part, blocks[n]) for n, part in enumerate(self.parts)]

    def count_missing(self) -> int:
        """Return the number of parts that do not exist."""
        return OPENS.map(self._exists, range(len(self.parts))).count(False)

    def _exists(self, number: int) -> bool:
        part = self.part(number)
        return IndexedDataset.exists(part.uri, storage_options=part.options)

    def write_places(self, task: ExchangeTask) -> Values:
        """Write the places of the tokens at some positions, grouped by chunk."""
        with closing(ExchangeWriter(int(self.first_chunks[-1]), PLACE, self.scratch)) as writer:
            for first, stop in cut((task.rows.start, task.rows.stop), PLACED_AT_ONCE):
                check_stop()
                writer.add_rows(*self._places(np.arange(first, stop)))
            return writer.publish(exchange_file(self.folder.location, task.name))

    def _places(self, positions: Numbers) -> tuple[Numbers, NDArray[Any]]:
        """Return the chunk and the row of each piece of the samples; a piece across chunks is cut."""
        pieces = self.order.reads.locate(self.order.reading.samples_at(positions))
        counts = np.diff(pieces.bounds)
        ends = np.concatenate([[0], np.cumsum(pieces.num_tokens)])
        found = ends[pieces.bounds[1:]] - ends[pieces.bounds[:-1]]
        if (wrong := np.flatnonzero(found != self.baked.stored_length)).size:
            raise ConfigError(
                f"{self.target}: position {positions[wrong[0]]} has a sample of {found[wrong[0]]} tokens, "
                f"needs {self.baked.stored_length}; leave out the last step"
            )
        sources = np.repeat(pieces.sources, counts)
        item_bytes = np.array([source.dataset.dtype.itemsize for source in self.order.sources])[sources]
        starts, stops = pieces.starts, pieces.starts + pieces.num_tokens * item_bytes
        first, last = starts // self.chunk_bytes, (stops - 1) // self.chunk_bytes
        after = np.where(stops > starts, last + 1, first)  # a piece of an empty sequence is in no chunk
        number, chunks = np.repeat(np.arange(len(starts)), after - first), join_ranges(first, after)
        start = np.maximum(starts[number], chunks * self.chunk_bytes)
        stop = np.minimum(stops[number], (chunks + 1) * self.chunk_bytes)
        rows = np.empty(len(number), PLACE)
        rows["start"] = start
        rows["position"] = np.repeat(positions, counts)[number]
        in_sample = ends[:-1] - np.repeat(ends[pieces.bounds[:-1]], counts)
        rows["offset"] = in_sample[number] + (start - starts[number]) // item_bytes[number]
        rows["num_tokens"] = (stop - start) // item_bytes[number]
        return self.first_chunks[sources[number]] + chunks, rows

    def write_tokens(self, task: ExchangeTask) -> Values:
        """Write the tokens of a chunk, grouped by part."""
        source = int(np.searchsorted(self.first_chunks, task.number, "right")) - 1
        rows = read_bucket(self.folder.location, task.blocks, PLACE).rows
        rows = rows[np.argsort(rows["start"], kind="stable")]
        with closing(ExchangeWriter(len(self.parts), SAMPLE_PIECE, self.scratch)) as writer:
            for first in range(task.rows.start, task.rows.stop, ROUND_BYTES):
                check_stop()
                own = slice(*np.searchsorted(rows["start"], np.array([first, first + ROUND_BYTES], "<u8")))
                if len(places := rows[own]):
                    data, starts = self._read(source, places)
                    part, sample = np.divmod(places["position"] - self.baked.first, self.baked.samples_per_part)
                    pieces = np.empty(len(places), SAMPLE_PIECE)
                    pieces["sample"], pieces["offset"] = sample, places["offset"]
                    lengths = places["num_tokens"].astype(np.int64) * self.order.token_dtype.itemsize
                    pieces["num_bytes"][:, 0] = lengths
                    bounds = np.column_stack([starts, starts + lengths]).reshape(-1)
                    writer.add_rows(part.astype(np.int64), pieces, [(data, bounds)], np.arange(0, len(bounds), 2))
            return writer.publish(exchange_file(self.folder.location, task.name))

    def _read(self, source: int, rows: NDArray[Any]) -> tuple[NDArray[np.uint8], Numbers]:
        """Read the tokens of rows that are sorted by place; return bytes in the run's dtype, and each row's offset."""
        dataset = as_pair(self.order.sources[source].dataset)
        kind, wide = dataset.dtype, self.order.token_dtype
        starts = rows["start"].astype(np.int64)
        stops = np.maximum.accumulate(starts + rows["num_tokens"].astype(np.int64) * kind.itemsize)
        breaks = np.flatnonzero(starts[1:] > stops[:-1] + GAP_BYTES)
        firsts, lasts = np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [len(rows) - 1]])
        sizes = stops[lasts] - starts[firsts]
        before = np.cumsum(sizes) - sizes
        stretches = zip(starts[firsts].tolist(), stops[lasts].tolist(), strict=True)
        pieces = [part for stretch in stretches for part in cut(stretch, PIECE_BYTES, PIECE_BYTES / 2)]
        views = dataset.bin_reader.read(pieces)
        tokens = np.frombuffer(b"".join(views), kind).astype(wide, copy=False)
        run = np.repeat(np.arange(len(firsts)), lasts + 1 - firsts)
        offsets = starts - starts[firsts][run] + before[run]
        return tokens.view(np.uint8), offsets // kind.itemsize * wide.itemsize

    def write_part(self, task: ExchangeTask) -> Values:
        """Write a part of the bake, unless it exists."""
        if self._exists(task.number):
            return {"written": 0}
        prefix, length = self.part(task.number), self.baked.stored_length
        records = read_bucket(self.folder.location, task.blocks, SAMPLE_PIECE)
        rows = records.rows
        places = rows["sample"].astype(np.int64) * length + rows["offset"]
        order = np.argsort(places, kind="stable")
        ends = np.concatenate([[0], np.cumsum(rows["num_bytes"][order, 0].astype(np.int64))])
        dtype, num_bytes = self.order.token_dtype, len(task.rows) * length * self.order.token_dtype.itemsize
        if ends[-1] != num_bytes or (places[order] * dtype.itemsize != ends[:-1]).any():
            raise FormatError(f"{prefix}: {ends[-1]:,} bytes of tokens in {self.folder.location}, need {num_bytes:,}")
        if self.baked.blended:
            samples = self.order.reading.samples_at(np.asarray(task.rows, np.int64))
            np.save(ids := io.BytesIO(), self.order.order.locate(samples)[0].astype(np.int16))
            write_object(prefix + "-dataset_id.npy", [ids.getvalue()])
        with closing(DatasetOutput(DatasetTarget(prefix, "raw"), dtype, False)) as output:
            for _, (pieces,) in records.sorted(order):
                check_stop()
                for piece in pieces:
                    output.bin.write(piece)
            output.columns.add(np.full(len(task.rows), length, np.int32), np.arange(1, len(task.rows) + 1))
            output.publish()
        return {"written": 1}


@trims_traceback
def bake(
    order: RunOrder,
    directory: str,
    baked: Baked,
    *,
    workers: Workers = TWO_THREADS,
    scratch: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    watch: ProgressWatcher | None = None,
) -> BakeProgress:
    """Write the samples of a run again in the order in which it reads them; keep the parts that exist.

    Args:
        order: the order of the run.
        directory: path or URI of the target.
        baked: the result of `plan_bake`, the same for all machines that share the work.
        workers: where the tasks run, and this call's share of each stage.
        scratch: directory of the scratch files on the workers; None for the system's temporary directory.
        storage_options: options of the target's store.
        watch: receiver of the progress.

    Returns:
        The numbers of parts written and missing. With a shard, other shards may have to end the stage first; then the
        same call goes on.

    Raises:
        ObjectExistsError: the directory holds a bake of another run.
        ObjectChangedError: a worker in another process found other data.
        ConfigError: a sample is truncated, as only a partial last validation sample is.

    Source: ours.
    """
    job = _Bake(order.per_process(), baked, Location(Location.of(directory).absolute, storage_options), scratch)
    watch = watch or SilentWatcher()
    description = baked.write_first(job.target)
    progress = BakeProgress(0, job.count_missing(), STAGES[-1], 0)
    if progress.missing:
        progress = _run_stages(job, workers, watch)
    if not progress.missing:
        put_if_absent(job.target / baked.last_file, description)
        tasks = [*job.place_tasks(), *job.token_tasks({})]
        job.folder.remove(tasks, [exchange_file(job.folder.location, task.name) for task in tasks])
    return progress


def _run_stages(job: _Bake, workers: Workers, watch: ProgressWatcher) -> BakeProgress:
    """Run the stages, up to one whose tasks other shards must make."""
    stages = [
        JobStage("find the tokens", job.write_places, lambda _: job.place_tasks(), "samples"),
        JobStage("read the tokens", job.write_tokens, job.token_tasks),
        JobStage("write the parts", job.write_part, job.part_tasks, "samples", recorded=False),
    ]
    options = {"remote_data": job.target.local_path is None, "task_bytes": TASK_BYTES}
    results, waits_for = run_stages(stages, job.folder, workers, watch, **options)
    if len(results) < len(stages):
        return BakeProgress(0, job.count_missing(), STAGES[len(results) - 1], waits_for)
    written = sum(result["written"] for result in results[-1].values())
    return BakeProgress(written, job.count_missing(), STAGES[-1], 0)
