"""binidx convert between ways of storing tokens: plain, compressed, with checksums; byte for byte whatever breaks."""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from helpers.conversion import MIB, AtEvent, build, dying, memory, names_beside, pair, unfinished_uploads

from binidx.corpus import token_parts
from binidx.corpus.block_digests import CorruptCopyError
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.errors import ConfigError, ObjectChangedError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage.codecs.segments import SEGMENT_BYTES
from binidx.tools import main

COMPRESSED = StorageFormat("zstd")
PART = SEGMENT_BYTES


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_parts, "LEAST_BYTES", PART)


def text_like(prefix: Path, num_tokens: int = 200_000) -> str:
    """Tokens as unevenly spread as those of text."""
    tokens = np.random.default_rng(0).zipf(1.2, num_tokens).astype(np.uint16)
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        builder.add_document(tokens, [num_tokens - 7, 7])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(params=["disk", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A prefix under which nothing lies."""
    if request.param == "s3":
        s3: Bucket = request.getfixturevalue("s3")
        return f"{s3.fresh()}/en"
    return memory() if request.param == "memory" else f"{tmp_path}/target/en"


def stored(uri: str) -> bytes:
    with fsspec.open(uri, "rb") as file:
        return bytes(file.read())


def test_there_and_back_is_byte_for_byte(place: str, tmp_path: Path, capsys) -> None:
    source = text_like(tmp_path / "en")
    with Path(f"{source}.bin").open("ab") as file:
        file.write(b"bytes that no sequence covers")
    assert main(["convert", source, "--to", place, "--compress"]) == 0
    assert names_beside(place) == ["en.bin.zst", "en.idx"]
    assert "at the target" in capsys.readouterr().out
    assert len(stored(f"{place}.bin.zst")) < 0.8 * len(stored(f"{source}.bin"))
    assert main(["convert", place, "--to", str(tmp_path / "back"), "--plain"]) == 0
    assert pair(str(tmp_path / "back")) == pair(source)
    assert main(["convert", place, "--to", str(tmp_path / "as it is")]) == 0
    assert stored(f"{tmp_path}/as it is.bin.zst") == stored(f"{place}.bin.zst")
    assert names_beside(str(tmp_path / "as it is")) == ["as it is.bin.zst", "as it is.idx"]


@pytest.mark.parametrize("num_tokens", [0, 1, PART // 2, PART // 2 + 1])
def test_the_edges_of_a_part(place: str, tmp_path: Path, num_tokens: int) -> None:
    source = build(tmp_path / "en", num_tokens)
    convert_dataset(source, place, way=COMPRESSED, part_bytes=PART)
    assert not convert_dataset(source, place, way=COMPRESSED).copied
    convert_dataset(place, tmp_path / "back", way=StorageFormat("raw", checksums=True), part_bytes=PART)
    assert pair(tmp_path / "back") == pair(source)
    checked = IndexedDataset(tmp_path / "back", storage_options={"binidx": {"verify": True}})
    assert sum(map(len, checked[:])) == num_tokens


def test_compressing_gives_what_the_builder_writes(tmp_path: Path) -> None:
    source = text_like(tmp_path / "en")
    with IndexedDatasetBuilder(tmp_path / "built.bin.zst", np.uint16, compression_level=5) as builder:
        builder.add_index(source)
        builder.finalize(tmp_path / "built.idx")
    convert_dataset(source, tmp_path / "copied", way=StorageFormat("zstd", 5), part_bytes=1000)
    assert stored(f"{tmp_path}/copied.bin.zst") == stored(f"{tmp_path}/built.bin.zst")


def test_another_level_packs_anew(tmp_path: Path) -> None:
    source, packed = text_like(tmp_path / "en"), str(tmp_path / "packed")
    convert_dataset(source, packed, way=COMPRESSED)
    for level in (1, 9):
        convert_dataset(packed, tmp_path / f"level{level}", way=StorageFormat("zstd", level))
        convert_dataset(source, tmp_path / f"fresh{level}", way=StorageFormat("zstd", level))
        assert stored(f"{tmp_path}/level{level}.bin.zst") == stored(f"{tmp_path}/fresh{level}.bin.zst")
        assert stored(f"{tmp_path}/level{level}.bin.zst") != stored(f"{packed}.bin.zst")


def test_a_target_that_is_the_dataset_already_is_left_alone_in_either_form(tmp_path: Path, capsys) -> None:
    source, packed = text_like(tmp_path / "en"), str(tmp_path / "packed")
    convert_dataset(source, packed, way=COMPRESSED)
    before = stored(f"{packed}.bin.zst")
    for verify in ("checksum", "size"):
        assert not convert_dataset(source, packed, way=COMPRESSED, verify=verify).copied
        assert not convert_dataset(packed, source, way=StorageFormat("raw"), verify=verify).copied
    assert main(["convert", source, "--to", packed]) == 2
    assert "packed: holds .bin.zst, .idx, needed a free name; --overwrite" in capsys.readouterr().err
    assert stored(f"{packed}.bin.zst") == before
    convert_dataset(source, packed, overwrite=True)
    assert names_beside(packed) == ["packed.bin", "packed.idx"]
    convert_dataset(source, packed, way=COMPRESSED, overwrite=True)
    assert names_beside(packed) == ["packed.bin.zst", "packed.idx"]


def test_checksums_are_written_come_along_and_go(place: str, tmp_path: Path) -> None:
    source = text_like(tmp_path / "en")
    convert_dataset(source, place, way=StorageFormat(checksums=True))
    assert names_beside(place) == ["en.bin", "en.bin.xxh3", "en.idx"]
    onward = str(tmp_path / "onward")
    convert_dataset(place, onward)
    assert stored(f"{onward}.bin.xxh3") == stored(f"{place}.bin.xxh3")
    assert len(stored(f"{onward}.bin.xxh3")) == 32 + 8 * -(-400_000 // 16384)
    checked = IndexedDataset(onward, storage_options={"binidx": {"verify": True}})
    assert (checked[0] == IndexedDataset(source)[0]).all()
    convert_dataset(onward, place, way=COMPRESSED, overwrite=True)
    assert names_beside(place) == ["en.bin.zst", "en.idx"]
    convert_dataset(place, onward, way=StorageFormat("raw", checksums=True), overwrite=True)
    assert names_beside(onward) == ["onward.bin", "onward.bin.xxh3", "onward.idx"]


def test_checksums_of_a_dataset_where_it_stands(place: str, tmp_path: Path, capsys) -> None:
    convert_dataset(text_like(tmp_path / "en"), place)
    before = pair(place)
    assert main(["convert", place, "--to", place, "--checksums"]) == 0
    out = capsys.readouterr().out
    assert f"its checksums are in {place}.bin.xxh3" in out
    assert "is the source, left alone; its index is valid, its tokens were not compared" in out
    assert pair(place) == before
    whole = stored(f"{place}.bin.xxh3")
    with fsspec.open(f"{place}.bin.xxh3", "wb") as file:
        file.write(b"stale" * 9)
    assert main(["convert", place, "--to", place, "--checksums"]) == 1
    assert "starts with b'stalesta', a checksum file needs" in capsys.readouterr().err
    assert main(["convert", place, "--to", place, "--checksums", "--overwrite"]) == 0
    assert stored(f"{place}.bin.xxh3") == whole
    assert main(["convert", place, "--to", place, "--compress"]) == 2
    assert "source and target, needed two places to store it in another way" in capsys.readouterr().err
    assert names_beside(place) == ["en.bin", "en.bin.xxh3", "en.idx"]


def test_a_source_that_its_checksums_refute_is_not_copied(tmp_path: Path, capsys) -> None:
    source = text_like(tmp_path / "en")
    convert_dataset(source, source, way=StorageFormat(checksums=True))
    with Path(f"{source}.bin").open("r+b") as file:
        file.seek(99_999)
        file.write(b"\xff")
    for way in ([], ["--compress"]):
        assert main(["convert", source, "--to", str(tmp_path / "out"), *way]) == 1
        assert "en.bin: block 6, bytes 98304-114688, is not what" in capsys.readouterr().err
        assert not IndexedDataset.exists(tmp_path / "out")
    refuting = stored(f"{source}.bin.xxh3")
    assert main(["convert", source, "--to", source, "--checksums"]) == 1
    assert "en.bin: block 6, bytes 98304-114688, is not what" in capsys.readouterr().err
    assert stored(f"{source}.bin.xxh3") == refuting
    assert main(["convert", source, "--to", source, "--checksums", "--overwrite"]) == 0
    assert stored(f"{source}.bin.xxh3") != refuting


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--to", "out", "--compress", "en"],
            "argument --compress: found en, needed a level from 1 to 22; or say --compress last",
        ),
        (["en", "--to", "out", "--compress", "0"], "found 0, needed a level from 1 to 22"),
        (["en", "--to", "out", "--compress", "--plain"], "not allowed with argument"),
        (["en", "--to", "out", "--compress", "--checksums"], "checksums: needed a plain .bin"),
    ],
)
def test_a_wrong_call_is_exit_2_and_one_line(arguments, message, tmp_path: Path, monkeypatch, capsys) -> None:
    build(tmp_path / "en", 600)
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["convert", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.glob("out*")) == []


def test_checksums_of_a_compressed_target_are_refused_before_the_source_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^checksums: needed a plain \.bin; each compressed segment has its own$"):
        convert_dataset(tmp_path / "missing", tmp_path / "out", way=StorageFormat("zstd", checksums=True))


def test_a_level_without_compression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="level: found 3 without compression"):
        convert_dataset(build(tmp_path / "en", 600), tmp_path / "out", way=StorageFormat("raw", 3))


def test_killed_at_any_event_while_compressing_it_is_never_half_a_dataset(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 5 * PART // 2 - 77)
    # 5 parts, joined, and 1 that is sent and read back, and 4 stages: more events when the pieces are joined.
    attempts = [[tmp_path / f"{event}", event, tmp_path / f"{event}", 0] for event in range(1, 17)]
    assert dying(source, PART, *chain(*attempts), codec="zstd") == "90" * 16
    for target, *_ in attempts:
        back = f"{target}.back"
        convert_dataset(target, back, way=StorageFormat("raw"))
        assert pair(back) == pair(source)
    assert len(list(tmp_path.iterdir())) == 2 + 16 * 4


def test_killed_after_publishing_it_compresses_nothing_twice(s3: Bucket, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 5 * PART // 2 - 77), f"{s3.fresh()}/en"
    # compress, 5 parts, join, its pieces, verify, ..., 1 part read back: the object stands
    assert dying(source, PART, target, 15, codec="zstd") == "9"
    assert names_beside(target) == ["en-parts", "en.bin.zst", "en.convert.json"]
    done = convert_dataset(source, target, way=COMPRESSED, part_bytes=PART)
    assert (done.parts_kept, done.parts_sent) == (5, 1)
    assert names_beside(target) == ["en.bin.zst", "en.idx"]


def test_a_second_convert_overtakes_one_that_compresses(tmp_path: Path) -> None:
    first, second = text_like(tmp_path / "en"), build(tmp_path / "other", 7_000, seed=1)
    target = memory()
    watch = AtEvent("part", lambda: convert_dataset(second, target, way=COMPRESSED))
    with pytest.raises(ObjectChangedError, match=r"convert.json: written by another convert to this target"):
        convert_dataset(first, target, way=COMPRESSED, part_bytes=PART, watch=watch)
    convert_dataset(target, tmp_path / "back", way=StorageFormat("raw"))
    assert pair(tmp_path / "back") == pair(second)


def test_killed_while_unpacking_in_a_bucket_it_goes_on(s3: Bucket, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 16 * MIB // 2), f"{s3.fresh()}/en"
    convert_dataset(source, tmp_path / "packed", way=COMPRESSED)
    assert dying(str(tmp_path / "packed"), 5 * MIB, target, 4, codec="raw") == "9"
    assert len(unfinished_uploads(target)) == 1
    done = convert_dataset(tmp_path / "packed", target, way=StorageFormat("raw"), part_bytes=5 * MIB)
    assert done.parts_kept == 2
    assert pair(target) == pair(source)
    assert unfinished_uploads(target) == []


def test_a_run_that_stores_it_otherwise_does_not_go_on_from_another(tmp_path: Path) -> None:
    source, target = text_like(tmp_path / "en"), str(tmp_path / "out")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_dataset(source, target, part_bytes=PART, watch=AtEvent("verify", stop))
    watch = AtEvent("", None)
    assert convert_dataset(source, target, way=COMPRESSED, watch=watch).parts_kept == 0
    assert "beginning again" in watch.events[0]
    assert names_beside(target) == ["out.bin.zst", "out.idx"]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:100] + b"\0" * 9 + data[109:]])
def test_what_arrived_wrong_is_removed(place: str, tmp_path: Path, damage: Any) -> None:
    source = text_like(tmp_path / "en")

    def act() -> None:
        data = damage(stored(f"{place}.bin.zst"))
        with fsspec.open(f"{place}.bin.zst", "wb") as file:
            file.write(data)

    with pytest.raises(CorruptCopyError, match=r"en.bin.zst: .*removed, run it again"):
        convert_dataset(source, place, way=COMPRESSED, watch=AtEvent("verify", act))
    assert names_beside(place) == ["en-parts", "en.convert.json"]
    convert_dataset(source, place, way=COMPRESSED)
    assert names_beside(place) == ["en.bin.zst", "en.idx"]
    convert_dataset(place, tmp_path / "back", way=StorageFormat("raw"))
    assert pair(tmp_path / "back") == pair(source)


@pytest.mark.parametrize("event", ["compress", "part", "join"])
def test_a_dataset_stays_until_the_compressed_one_that_replaces_it_is_ready(
    place: str, tmp_path: Path, event: str
) -> None:
    source, old = text_like(tmp_path / "en"), build(tmp_path / "old", 600)
    convert_dataset(old, place)

    def stop() -> None:
        raise KeyboardInterrupt

    # In memory there are no pieces: its last block comes right before the object.
    watch = AtEvent("part" if event == "join" and place.startswith("memory") else event, stop)
    with pytest.raises(KeyboardInterrupt):
        convert_dataset(source, place, way=COMPRESSED, overwrite=True, part_bytes=PART, watch=watch)
    assert pair(place) == pair(old)
    convert_dataset(source, place, way=COMPRESSED, overwrite=True, part_bytes=PART)
    assert names_beside(place) == ["en.bin.zst", "en.idx"]


def test_a_source_that_changes_while_it_is_compressed_is_an_error(tmp_path: Path) -> None:
    source, target = text_like(tmp_path / "en"), str(tmp_path / "out")

    def touch() -> None:
        os.utime(f"{source}.bin", (1, 1))

    with pytest.raises(ObjectChangedError, match="changed"):
        convert_dataset(source, target, way=COMPRESSED, part_bytes=PART, watch=AtEvent("part", touch))
    assert not IndexedDataset.exists(target)


def test_json_tells_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(token_parts, "LEAST_BYTES", 256 * MIB)  # several pieces have a seek table each
    source, target = text_like(tmp_path / "en"), str(tmp_path / "out")
    assert main(["convert", source, "--to", target, "--compress", "9", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    idx = os.path.getsize(f"{source}.idx")
    assert done["source_bytes"] == 400_000 + idx
    assert done["target_bytes"] == os.path.getsize(f"{target}.bin.zst") + idx
    assert done["bytes_sent"] == done["target_bytes"]
