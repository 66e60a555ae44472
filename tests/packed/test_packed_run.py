"""Orders of packed runs, exported, against the loaders' own rules rank by rank."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from binidx.errors import ConfigError, FormatError
from binidx.format.arrow import parquet
from binidx.packed.packed_files import PackedDatasetBuilder, PackedFiles
from binidx.packed.packed_order import AtEnd, PackedRun, PackedSet
from binidx.packed.packed_run import PackedReading, PackedRunOrder, _read_names
from binidx.run.provenance.export import export, plan_by_rank, plan_by_steps
from binidx.storage.location import Location


def order_of(
    at_end: AtEnd = AtEnd.repeat, files: Sequence[PackedFiles] | None = None, **changes: object
) -> PackedRunOrder:
    sets = [PackedSet(17, 6, 2, 1337, at_end=at_end), PackedSet(9, 4, 1, 1337, at_end=at_end)]
    fields = {"weights": [0.7, 0.3], "seed": 5, "num_ranks": 2, "num_workers": 3, "micro_batch_size": 2}
    reading = PackedReading(sets, ["web", "code"], **{**fields, "accumulation": 2, **changes})  # type: ignore[arg-type]
    return PackedRunOrder(reading, files)


@pytest.mark.parametrize("mixed_by_rank", [False, True])
def test_ranks_read_their_own_run(mixed_by_rank: bool) -> None:
    order = order_of(mixed_by_rank=mixed_by_rank)
    readings = order.readings(range(3, 20))
    blocks = order.packed.blocks.blocks_of(readings.sample)
    for rank in range(2):
        sets = [
            PackedSet(17, 6, 2, 1337 + rank, at_end=AtEnd.repeat),
            PackedSet(9, 4, 1, 1337 + rank, at_end=AtEnd.repeat),
        ]
        run = PackedRun(sets, [0.7, 0.3], 5 + rank * mixed_by_rank, rank, 2, 3, 2)
        here = readings.rank == rank
        assert (blocks[here] == run.blocks(3 * 4, 20 * 4)).all()
        assert readings.step[here].tolist() == np.repeat(np.arange(3, 20), 4).tolist()
        assert readings.slot[here].tolist() == [0, 1, 2, 3] * 17


def test_a_run_that_ends_has_so_many_steps() -> None:
    order = order_of(AtEnd.stop)
    count = order.num_steps()
    assert count is not None
    assert len(order.readings(range(count)).step) == count * 8
    with pytest.raises(IndexError):
        order.readings(range(count + 1))
    assert order_of().num_steps() is None


def test_files_hold_the_blocks_themselves(tmp_path: Path) -> None:
    rng, files = np.random.default_rng(0), []
    for name, (count, chunk) in {"web": (17, 50), "code": (9, 33)}.items():
        builder = PackedDatasetBuilder(f"{tmp_path}/{name}", name, chunk, 0, np.uint16)
        builder.add_array(rng.integers(0, 2**16, count * chunk))
        builder.write_reminder()
        files.append(PackedFiles(builder.filenames, 8))
    order = order_of(files=files)
    assert [each.num_blocks for each in files] == [each.num_blocks for each in order.packed.sets]
    export(order, f"{tmp_path}/out", plan_by_rank(2, range(30)), tokens=True)
    export(order, f"{tmp_path}/steps", plan_by_steps(range(30), 7))
    for rank in range(2):
        rows = parquet.read_table(f"{tmp_path}/out/worker_{rank}-of-2_ordered_dataset.parquet").to_pylist()
        assert len(rows) == 30 * 4
        for row in rows:
            source = ["web", "code"].index(row["source"])
            assert row["input_ids"] == files[source].read([row["file"]], [row["block"]])[0].tolist()
            assert row["sample"] == row["file"] * files[source].num_blocks + row["block"]


def test_a_list_of_files_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "files.txt").write_bytes(b"a\xff\n")
    with pytest.raises(FormatError, match=r"files.txt: not UTF-8 .*; needs a text file with a name on each line"):
        _read_names(Location.of(f"{tmp_path}/files.txt"))


def test_tokens_need_files_and_sets_need_names() -> None:
    with pytest.raises(ConfigError, match="has no files"):
        order_of().table(range(1), tokens=True)
    with pytest.raises(ConfigError, match="2 sets, files of"):
        order_of(files=[])
    with pytest.raises(ConfigError, match="give each of 150 workers 0"):
        order_of(num_ranks=50)


def test_the_fingerprint_is_of_everything() -> None:
    changes = [{}, {"seed": 6}, {"num_ranks": 1}, {"num_workers": 1}, {"mixed_by_rank": True}, {"at_end": AtEnd.wrap}]
    assert len({order_of(**each).fingerprint for each in changes}) == len(changes)  # type: ignore[arg-type]
