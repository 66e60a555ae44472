"""convert and verify by workers: what one process writes and finds, whoever does which part, also after a break."""

from __future__ import annotations

import contextlib
import json
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from helpers.conversion import AtEvent, names_beside
from helpers.lineage_data import build_with_lineage
from helpers.random_datasets import Document, build_ours

from binidx.corpus import token_parts
from binidx.corpus.block_digests import CorruptCopyError
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_virtually
from binidx.corpus.token_parts import PinnedDataset
from binidx.corpus.verify import verify_dataset
from binidx.corpus.whole_dataset import WholeDataset
from binidx.errors import ConfigError, FormatError, ObjectChangedError, ObjectExistsError
from binidx.jobs.parts import Shard, Workers
from binidx.storage.codecs.segments import SEGMENT_BYTES
from binidx.storage.location import Location
from binidx.storage.writing.publish import write_object
from binidx.tools import main

HERE = Workers(count=2)
WAYS = [StorageFormat(), StorageFormat("raw", checksums=True), StorageFormat("zstd"), StorageFormat("zstd", 1)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_parts, "LEAST_BYTES", SEGMENT_BYTES)


def objects(prefix: Any) -> dict[str, bytes]:
    """Names after the prefix, and contents, of all objects there."""
    fs, path = fsspec.url_to_fs(str(prefix))
    fs.invalidate_cache()
    beside = fs.find(path.rpartition("/")[0])
    return {name[len(path) :]: fs.cat(name) for name in beside if name.startswith(path)}


def build(prefix: Path, num_bytes: int, seed: int = 0) -> str:
    """uint16 with modes; documents of all lengths, some empty, one longer than a part; the last one ends anywhere."""
    rng, left, documents = np.random.default_rng(seed), num_bytes // 2, []
    while left:
        count = min(left, int(rng.choice([0, 1, 700, SEGMENT_BYTES // 2, SEGMENT_BYTES])))
        tokens = np.minimum(rng.geometric(0.01, count), 65535).astype(np.uint16)
        documents.append(Document(tokens, [count], [1]))
        left -= count
    return build_ours(prefix, documents, np.uint16, multimodal=True)


SIZES = [0, 2, 2 * SEGMENT_BYTES, 3 * SEGMENT_BYTES + 4242]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source_form", ["raw", "zstd", "sums", "virtual zstd"])
def test_a_copy_by_workers_has_the_bytes_of_a_copy_by_one_process(size: int, source_form: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, size, source_form)
    for number, way in enumerate(WAYS):
        one = convert_dataset(source, tmp_path / f"one{number}" / "en", way=way)
        many = convert_dataset(source, tmp_path / f"many{number}" / "en", way=way, workers=HERE)
        assert objects(tmp_path / f"many{number}" / "en") == objects(tmp_path / f"one{number}" / "en")
        assert (many.num_tokens, many.target_bytes, many.verified) == (one.num_tokens, one.target_bytes, one.verified)
        assert many.parts_missing == 0


def source_of(folder: Path, size: int, form: str) -> str:
    source = build(folder / "en", size)
    if form == "sums":
        convert_dataset(source, source, way=StorageFormat(checksums=True))
    if form.endswith("zstd"):
        convert_dataset(source, source := f"{folder}/packed", way=StorageFormat("zstd"))
    if form.startswith("virtual"):
        merge_virtually([source, source], source := f"{folder}/merged")
    return source


@pytest.mark.parametrize("way", WAYS[1:3], ids=str)
def test_a_bucket_joins_the_parts_itself_and_workers_read_the_copy_back(
    way: StorageFormat, s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_parts, "LEAST_BYTES", 6 << 20)
    documents = [
        Document(np.random.default_rng(n).integers(0, 9, 9 << 19, np.uint16), [9 << 19], [0]) for n in range(2)
    ]
    source, base = build_ours(tmp_path / "en", documents, np.uint16), s3.fresh()
    watch = Events()
    convert_dataset(source, f"{base}/en", way=way, workers=HERE, watch=watch)
    convert_dataset(source, tmp_path / "one" / "en", way=way)
    assert objects(f"{base}/en") == objects(tmp_path / "one" / "en")
    assert [text.split()[0] for text in watch.begun][:3] == [
        "compress" if way.codec == "zstd" else "copy",
        "join",
        "verify",
    ]
    back = convert_dataset(f"{base}/en", tmp_path / "back" / "en", workers=HERE, way=StorageFormat("raw"))
    assert Path(f"{tmp_path}/back/en.bin").read_bytes() == Path(f"{source}.bin").read_bytes()
    assert back.verified == "checksum"


class Events:
    """Watcher that keeps the names of the phases."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin(self, what: str, *counts: object) -> None:
        self.begun.append(what)

    def advance(self, count: int) -> None: ...

    def say(self, message: str) -> None: ...


@pytest.mark.parametrize("place", ["disk", "bucket"])
@pytest.mark.parametrize("way", WAYS[1:3], ids=str)
def test_the_shard_that_finds_all_records_finishes_the_copy(
    place: str, way: StorageFormat, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = build(tmp_path / "en", 7 * SEGMENT_BYTES + 4242)
    target = f"{request.getfixturevalue('s3').fresh()}/en" if place == "bucket" else f"{tmp_path}/copy/en"
    expected = convert_dataset(source, tmp_path / "one" / "en", way=way)
    done = [convert_dataset(source, target, way=way, workers=Workers(shard=Shard(n, 3))) for n in (2, 0, 1)]
    assert [result.parts_missing for result in done] == [6, 3, 0]
    assert done[-1].target_bytes == expected.target_bytes
    assert objects(target) == objects(tmp_path / "one" / "en")
    again = convert_dataset(source, target, way=way, workers=Workers(shard=Shard(0, 3)))
    assert (again.copied, again.verified) == (False, "sample")
    assert objects(target) == objects(tmp_path / "one" / "en")


@pytest.mark.parametrize("kept", [0, 2, 7])
def test_a_lost_record_or_another_split_into_shards_gives_the_same_bytes(kept: int, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 7 * SEGMENT_BYTES + 4242), tmp_path / "copy" / "en"
    way = StorageFormat("raw", checksums=True)
    convert_dataset(source, tmp_path / "one" / "en", way=way)
    convert_dataset(source, target, way=way, workers=Workers(shard=Shard(0, 2)))
    records = sorted(file for file in Path(f"{target}-parts").glob("*.json") if file.name != "job.json")
    for record in records[kept:]:
        record.unlink()
    convert_dataset(source, target, way=way, workers=Workers(shard=Shard(2, 5)))
    done = convert_dataset(source, target, way=way, workers=HERE)
    assert done.parts_kept >= min(kept, len(records))
    assert objects(target) == objects(tmp_path / "one" / "en")


class Interrupted(Events):
    """Watcher that raises KeyboardInterrupt at an event."""

    def __init__(self, event: int) -> None:
        super().__init__()
        self.left = event

    def begin(self, what: str, *counts: object) -> None:
        self.advance(0)

    def advance(self, count: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("damage", ["flipped", "cut", "lost"])
def test_a_piece_that_is_damaged_after_its_record_is_made_again_by_the_next_call(damage: str, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 3 * SEGMENT_BYTES), tmp_path / "copy" / "en"
    convert_dataset(source, target, workers=Workers(shard=Shard(0, 2)))
    piece = next(Path(f"{target}-parts").glob("*.bin"))
    data = bytearray(piece.read_bytes())
    piece.unlink()
    if damage != "lost":
        data[1000] ^= 1
        piece.write_bytes(data[: 5000 if damage == "cut" else None])
    with pytest.raises(CorruptCopyError, match=r"\.bin: lost or damaged, its record was removed; give the same"):
        convert_dataset(source, target, workers=HERE)
    assert not Path(f"{target}.idx").exists()
    convert_dataset(source, target, workers=HERE)
    assert Path(f"{target}.bin").read_bytes() == Path(f"{source}.bin").read_bytes()
    assert names_beside(str(target)) == ["en.bin", "en.idx"]


def test_a_copy_that_is_replaced_while_workers_read_it_back_is_joined_again(s3: Bucket, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 3 * SEGMENT_BYTES), f"{s3.fresh()}/en"
    replaced = AtEvent("verify", lambda: write_object(Location(f"{target}.bin"), [bytes(3 * SEGMENT_BYTES)]))
    convert_dataset(source, target, workers=HERE, watch=replaced)
    assert [event.split()[0] for event in replaced.events if event.startswith(("join", "verify"))][:3] == [
        "join",
        "verify",
        "join",
    ]
    assert objects(target)[".bin"] == Path(f"{source}.bin").read_bytes()
    assert set(objects(target)) == {".bin", ".idx"}


def test_a_piece_that_is_damaged_in_a_bucket_is_an_error(s3: Bucket, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 3 * SEGMENT_BYTES), f"{s3.fresh()}/en"
    convert_dataset(source, target, workers=Workers(shard=Shard(0, 2)), way=StorageFormat("zstd"))
    piece = next(name for name in objects(target) if name.endswith(".zst"))
    write_object(Location(target + piece), [objects(target)[piece][:-9], b"123456789"])
    with pytest.raises(CorruptCopyError, match="lost or damaged, its record was removed"):
        convert_dataset(source, target, workers=HERE, way=StorageFormat("zstd"))
    convert_dataset(source, target, workers=HERE, way=StorageFormat("zstd"))
    convert_dataset(source, tmp_path / "one" / "en", way=StorageFormat("zstd"))
    assert objects(target) == objects(tmp_path / "one" / "en")


def test_what_stands_at_the_target_stays(tmp_path: Path) -> None:
    source, other = build(tmp_path / "en", 3 * SEGMENT_BYTES), build(tmp_path / "other" / "en", 3 * SEGMENT_BYTES, 1)
    before = objects(other)
    with pytest.raises(ObjectExistsError, match=r"holds \.bin, \.idx, needed a free name; --overwrite replaces it"):
        convert_dataset(source, other, workers=HERE)
    assert objects(other) == before
    with pytest.raises(ConfigError, match="shard, overwrite: shards do not know of each other"):
        convert_dataset(source, other, overwrite=True, workers=Workers(shard=Shard(0, 2)))
    convert_dataset(source, other, overwrite=True, workers=HERE)
    assert [*objects(other).values()] == [Path(f"{source}.{end}").read_bytes() for end in ("bin", "idx")]


def test_a_pair_that_became_a_virtual_merge_of_the_same_size_is_another_version(tmp_path: Path) -> None:
    other, source = build(tmp_path / "other", SEGMENT_BYTES, seed=1), build(tmp_path / "en", SEGMENT_BYTES)
    opened = PinnedDataset.of(WholeDataset(Location.of(source))).opened
    for end in ("bin", "idx"):
        Path(f"{source}.{end}").unlink()
    merge_virtually([other], source)
    with pytest.raises(ObjectChangedError, match=r"en\.idx: changed since it was opened \(.*\); run it again"):
        PinnedDataset(Location.of(source), opened).open()


def test_a_source_that_changes_meanwhile_is_an_error_of_one_line(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 3 * SEGMENT_BYTES), tmp_path / "copy" / "en"
    convert_dataset(source, target, workers=Workers(shard=Shard(0, 2)))
    build(tmp_path / "en", 3 * SEGMENT_BYTES, seed=1)
    with pytest.raises(
        ObjectExistsError, match=r"en-parts/job\.json: parts of another job, which differs in source; finish"
    ):
        convert_dataset(source, target, workers=HERE)
    with pytest.raises(ObjectChangedError, match=r"changed since it was opened \(.*\); run it again"):
        convert_dataset(source, tmp_path / "b" / "en", workers=Changing(source))


class Changing(Workers):
    """Workers before whose first part the source is replaced."""

    def __init__(self, source: str) -> None:
        super().__init__(count=1)
        object.__setattr__(self, "source", source)

    def open(self, *, remote_data: bool = False, task_bytes: int = 0) -> Any:
        build(Path(self.source), 3 * SEGMENT_BYTES, seed=2)
        return super().open(remote_data=remote_data, task_bytes=task_bytes)


def test_checksums_in_place_are_those_of_one_process(tmp_path: Path) -> None:
    one, many = (build(tmp_path / name / "en", 5 * SEGMENT_BYTES + 4242) for name in ("one", "many"))
    convert_dataset(one, one, way=StorageFormat(checksums=True))
    for number in (0, 1):
        convert_dataset(many, many, way=StorageFormat(checksums=True), workers=Workers(shard=Shard(number, 2)))
    assert objects(many) == objects(one)
    Path(f"{many}.bin.xxh3").write_bytes(bytes(100))
    convert_dataset(many, many, way=StorageFormat(checksums=True), overwrite=True, workers=HERE)
    assert objects(many) == objects(one)


def test_a_copy_begun_by_one_process_is_finished_by_workers(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 3 * SEGMENT_BYTES), tmp_path / "copy" / "en"
    with contextlib.suppress(KeyboardInterrupt):
        convert_dataset(source, target, part_bytes=SEGMENT_BYTES, watch=Interrupted(4))
    assert Path(f"{target}.convert.json").exists()
    convert_dataset(source, target, workers=HERE)
    assert names_beside(str(target)) == ["en.bin", "en.idx"]


@pytest.mark.parametrize("way", [StorageFormat("raw", checksums=True), StorageFormat("zstd")], ids=str)
def test_a_copy_begun_by_workers_is_finished_by_one_process(way: StorageFormat, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 3 * SEGMENT_BYTES + 4242), tmp_path / "copy" / "en"
    convert_dataset(source, target, way=way, workers=Workers(shard=Shard(0, 2)))
    done = convert_dataset(source, target, way=way)
    assert done.parts_kept == 2
    convert_dataset(source, tmp_path / "one" / "en", way=way)
    assert objects(target) == objects(tmp_path / "one" / "en")


def test_records_of_an_earlier_version_have_one_digest_for_a_part(s3: Bucket, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 3 * SEGMENT_BYTES), f"{s3.fresh()}/en"
    convert_dataset(source, target, workers=Workers(shard=Shard(0, 2)))
    for name, data in objects(target).items():
        if name.endswith(".json") and not name.endswith("job.json"):
            record = json.loads(data)
            assert record["result"].pop("blocks")
            write_object(Location(target + name), [json.dumps(record).encode()])
    assert convert_dataset(source, target, workers=HERE).parts_kept == 2
    assert objects(target)[".bin"] == Path(f"{source}.bin").read_bytes()


def test_sidecars_come_along(tmp_path: Path) -> None:
    source = build_with_lineage(tmp_path / "en", 80, 1)
    convert_dataset(source, tmp_path / "one" / "en")
    convert_dataset(source, tmp_path / "many" / "en", workers=HERE)
    assert objects(tmp_path / "many" / "en") == objects(tmp_path / "one" / "en")
    assert ".lineage.parquet" in objects(tmp_path / "many" / "en")


def found(*args: Any, **options: Any) -> dict[str, Any] | str:
    """The result of a verification without its duration, or its error."""
    try:
        return {**asdict(verify_dataset(*args, **options)), "seconds": 0}
    except FormatError as error:
        return str(error)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source_form", ["raw", "zstd", "sums", "virtual", "virtual zstd"])
def test_workers_find_what_one_process_finds(size: int, source_form: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, size, source_form)
    for options in ({}, {"quick": True}, {"vocab_size": 65536}, {"vocab_size": 100}):
        one = found(source, **options)
        assert found(source, **options, workers=HERE) == one
        assert found(source, **options, workers=HERE, records=tmp_path / "records") == one
        assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("form", ["zstd", "sums", "virtual", "virtual zstd"])
def test_the_first_of_several_damages_is_named_as_one_process_names_it(form: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, 7 * SEGMENT_BYTES + 4242, form if form.startswith("virtual") else "raw")
    if form == "sums" or form == "virtual":
        convert_dataset(tmp_path / "en", tmp_path / "en", way=StorageFormat(checksums=True))
    if form == "virtual":
        merge_virtually([tmp_path / "en", tmp_path / "en"], tmp_path / "merged", overwrite=True)
    if form == "zstd":
        convert_dataset(source, source := f"{tmp_path}/packed", way=StorageFormat("zstd"))
    file = next(tmp_path.glob("packed.bin*" if form.endswith("zstd") else "en.bin"))
    assert verify_dataset(source, workers=HERE).checked_by is not None
    data, stat = bytearray(file.read_bytes()), file.stat()
    for share in (0.4, 0.6, 0.9):
        data[int(len(data) * share)] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    token_parts.PinnedDataset.open.cache_clear()
    token_parts.PinnedDataset.reader.cache_clear()
    one = found(source)
    assert isinstance(one, str)
    assert "; document " in one
    assert found(source, workers=HERE) == one
    done = [found(source, workers=Workers(shard=Shard(n, 3)), records=tmp_path / "records") for n in range(3)]
    assert one in done
    assert found(source, workers=HERE, records=tmp_path / "records") == one


def test_shards_of_a_verification_leave_findings_and_the_last_reports(tmp_path: Path) -> None:
    source, records = build(tmp_path / "en", 7 * SEGMENT_BYTES + 4242), tmp_path / "records"
    with pytest.raises(ConfigError, match="shard, records: a shard needs a folder"):
        verify_dataset(source, workers=Workers(shard=Shard(0, 3)))
    one = verify_dataset(source)
    for number, missing in ((2, 6), (0, 3), (1, 0)):
        done = verify_dataset(source, workers=Workers(shard=Shard(number, 3)), records=records)
        assert done.parts_missing == missing
    assert done.token_range == one.token_range
    with pytest.raises(ObjectExistsError, match="parts of another job, which differs in vocab_size, parts; finish"):
        verify_dataset(source, vocab_size=65536, workers=HERE, records=records)
    assert found(source, workers=HERE, records=records) == {**asdict(one), "seconds": 0}
    assert not records.exists()


@pytest.mark.parametrize("seed", range(4))
def test_workers_compare_the_documents_that_one_process_compares(seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(token_parts, "ALIGN_BYTES", 8)
    monkeypatch.setattr(token_parts, "LEAST_BYTES", random.Random(seed).choice([8, 64, 1000]))
    source = build_with_lineage(tmp_path / "en", 80, seed)
    one = found(source, lineage=True)
    assert found(source, lineage=True, workers=HERE) == one
    assert isinstance(one, dict)
    tokens = np.fromfile(f"{source}.bin", np.uint16)
    tokens[[len(tokens) // 2, len(tokens) // 3]] ^= 1
    tokens.tofile(f"{source}.bin")
    one = found(source, lineage=True)
    assert "is of another document" in str(one)
    assert found(source, lineage=True, workers=HERE) == one


def test_the_commands_take_the_same_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target, records = (
        build(tmp_path / "en", 3 * SEGMENT_BYTES),
        str(tmp_path / "copy"),
        str(tmp_path / "records"),
    )
    assert main(["convert", source, "--to", target, "--compress", "1", "--shard", "1/2"]) == 0
    left = "2 parts left to other shards, the last of which finishes"
    assert capsys.readouterr().out == f"{target}: 1 part made, 0 existed; {left}\n"
    assert main(["convert", source, "--to", target, "--compress", "1", "--workers", "2"]) == 0
    assert main(["verify", target, "--shard", "0/2"]) == 2
    assert "--shard, --records: a shard needs a folder for its findings" in capsys.readouterr().err
    assert main(["verify", target, "--shard", "0/2", "--records", records]) == 0
    assert capsys.readouterr().out == f"{target}: no damage found; 1 part left to other shards\n"
    assert main(["verify", target, "--records", records]) == 0
    assert "compared with the checksums of their frames" in capsys.readouterr().out
    assert main(["verify", target, "--engine", "spark"]) == 2
    assert "--engine: found spark, needed local, ray, ray:ADDRESS or dask=ADDRESS" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.bin.zst", "copy.idx", "en.bin", "en.idx"]
