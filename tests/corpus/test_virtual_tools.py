"""What a tool makes of a virtual merge is, byte for byte, what it makes of the dataset that a merge writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from helpers.conversion import AtEvent, names_beside
from helpers.lineage_data import END, build_with_lineage, read_lineage
from helpers.random_datasets import Document, build_ours, random_documents

from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.cut import cut_dataset
from binidx.corpus.diff import diff_datasets
from binidx.corpus.merge import merge_datasets, merge_virtually
from binidx.corpus.shuffle import shuffle_datasets
from binidx.corpus.verify import verify_dataset
from binidx.errors import ConfigError, FormatError, ObjectChangedError, ObjectExistsError, ShortReadError
from binidx.format import idx
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.source import open_source
from binidx.format.virtual import ShiftedReader
from binidx.packed.packed_convert import indexed_to_packed
from binidx.storage.location import Location
from binidx.storage.open import read_whole
from binidx.testing import MemoryObject
from binidx.tools import main

STORED = {"plain": StorageFormat(), "compressed": StorageFormat("zstd"), "checked": StorageFormat(checksums=True)}

Tool = Callable[[str, str], object]
"""Called with the prefix of a dataset, and one to write to."""

WRITING: dict[str, Tool] = {
    "merge": lambda source, out: merge_datasets([source], out),
    "merge_twice": lambda source, out: merge_datasets([source, source], out),
    "head": lambda source, out: cut_dataset(source, [out], num_documents=17),
    "head_of_none": lambda source, out: cut_dataset(source, [out], num_documents=0),
    "head_of_all": lambda source, out: cut_dataset(source, [out], num_documents=1_000),
    "sample": lambda source, out: cut_dataset(source, [out], [0.4], seed=3),
    "split": lambda source, out: cut_dataset(source, [f"{out}-a", f"{out}-b"], [0.7, 0.3], seed=3),
    "shuffle": lambda source, out: shuffle_datasets([source], out, seed=3),
    "convert": convert_dataset,
    "convert_compressed": lambda source, out: convert_dataset(source, out, way=StorageFormat("zstd", 5)),
    "convert_checked": lambda source, out: convert_dataset(source, out, way=StorageFormat("raw", checksums=True)),
    "convert_in_small_parts": lambda source, out: convert_dataset(
        source, out, way=StorageFormat("raw"), part_bytes=5 << 20
    ),
    "pack": lambda source, out: indexed_to_packed(IndexedDataset(source), out, "train", 64, 0),
}


def parts_of(folder: Path, dtype: Any = np.uint16) -> list[str]:
    """With lineage, all but one that is empty and one that has bytes past its last token."""
    found = [build_with_lineage(folder / f"p{n}", 30 + n, n, dtype) for n in range(2)]
    found.append(build_ours(folder / "empty", [], dtype))
    found.append(build_ours(folder / "p3", random_documents(np.random.default_rng(7), dtype, 20), dtype))
    with Path(f"{found[-1]}.bin").open("ab") as file:
        file.write(b"past the end")
    return found


def stored(parts: list[str], folder: str, ways: list[str]) -> list[str]:
    """The parts, plain, compressed, or with checksums; a compressed one cannot be merged with bytes past its end."""
    for part, way in zip(parts, ways, strict=True):
        clean = f"{part}-clean"
        merge_datasets([part], clean)
        convert_dataset(clean if way == "compressed" else part, f"{folder}/{Path(part).name}", way=STORED[way])
    return [f"{folder}/{Path(part).name}" for part in parts]


@pytest.fixture(params=["plain", "compressed", "checked", "plain on s3", "compressed on s3"])
def ends(request: pytest.FixtureRequest, tmp_path: Path, s3: Bucket) -> tuple[str, str]:
    """A virtual merge, and the real one."""
    way, _, remote = request.param.partition(" ")
    folder = s3.fresh() if remote else str(tmp_path / "data")
    parts = stored(parts_of(tmp_path), folder, [way] * 4)
    merge_virtually(parts, f"{folder}/virtual")
    merge_datasets(parts, f"{folder}/real")
    return f"{folder}/virtual", f"{folder}/real"


def objects(prefix: str) -> dict[str, bytes]:
    """All that lies under a prefix, by what follows it, but the file of `pack` that names its source."""
    fs, path = fsspec.url_to_fs(prefix)
    fs.invalidate_cache()
    names = [name for name in fs.find(path.rpartition("/")[0]) if path in name and not name.endswith(".packed.json")]
    return {name.removeprefix(path): fs.cat_file(name) for name in names}


def test_what_is_written_is_the_same(ends: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ends[0].rpartition("/")[0]
    local = "://" not in folder
    if local:
        monkeypatch.setattr(idx, "BLOCK_VALUES", 5)
    for name in WRITING if local else ("merge", "head", "split", "shuffle", "convert", "pack"):
        tool, made = WRITING[name], []
        for end in ends:
            out = f"{folder}/{name}-of-{end.rpartition('/')[2]}"
            tool(end, f"{out}/out")
            made.append(objects(f"{out}/out"))
        assert made[0] == made[1], name
        assert made[0], name
        assert name == "pack" or f"{END}" in "".join(made[0]), "lineage came along"


def test_what_is_found_is_the_same(ends: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    reports, other = [], f"{ends[0].rpartition('/')[0]}/p0"
    for end in ends:
        verified = [dataclasses.asdict(verify_dataset(end, **how)) for how in ({"vocab_size": 65536}, {"quick": True})]
        found = diff_datasets(end, other).to_json()
        assert main(["inspect", end, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        for each in (*verified, found, report):
            for name in ("prefix", "prefixes", "seconds", "stored", "checked_by"):
                each.pop(name, None)
        reports.append([verified, found, report])
    assert reports[0] == reports[1]
    assert diff_datasets(*ends).same


def test_its_idx_and_its_bin_are_readers(tmp_path: Path) -> None:
    parts = stored(parts_of(tmp_path), str(tmp_path / "data"), ["compressed"] * 4)
    merge_virtually(parts, tmp_path / "virtual")
    merge_datasets(parts, tmp_path / "real")
    source = open_source(Location.of(tmp_path / "virtual"))
    for reader, end in ((source.open_idx(), "idx"), (source.open_stored(), "bin.zst")):
        data = Path(f"{tmp_path}/real.{end}").read_bytes()
        assert bytes(read_whole(reader)) == data
        bounds = [0, 1, 33, 34, 35, 39, 77, len(data) // 2, len(data) - 9, len(data) - 1, len(data)]
        ranges = [(start, stop) for start in bounds for stop in bounds if start <= stop]
        assert [bytes(view) for view in reader.read(ranges)] == [data[start:stop] for start, stop in ranges]


def test_modes_come_along(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    parts = [build_ours(tmp_path / f"m{n}", random_documents(rng, np.int32, n), np.int32, True) for n in (9, 0, 20)]
    merge_virtually(parts, tmp_path / "virtual")
    merge_datasets(parts, tmp_path / "real")
    for name in ("merge_twice", "head", "split", "shuffle", "convert"):
        made = []
        for end in ("virtual", "real"):
            WRITING[name](f"{tmp_path}/{end}", f"{tmp_path}/{name}/{end}/out")
            made.append(objects(f"{tmp_path}/{name}/{end}/out"))
        assert made[0] == made[1], name
    text = build_ours(tmp_path / "text", [Document([7], [1], [])], np.int32)
    with pytest.raises(FormatError, match=r"text.idx: no modes, .*has them"):
        merge_virtually([*parts, text], tmp_path / "other")


def test_of_parts_compressed_and_not_only_moving_is_refused(tmp_path: Path) -> None:
    plain, folder = parts_of(tmp_path), str(tmp_path / "data")
    parts = stored(plain, folder, ["plain", "compressed", "checked", "checked"])
    merge_virtually(parts, f"{folder}/virtual")
    merge_datasets(plain, tmp_path / "real")
    with pytest.raises(
        ConfigError, match=r"virtual.parts.json: some parts are compressed .* convert .* --to TARGET --plain"
    ):
        merge_datasets([f"{folder}/virtual"], f"{folder}/out")
    for name in ("head", "split", "shuffle", "convert", "convert_compressed", "pack"):
        WRITING[name](f"{folder}/virtual", f"{folder}/{name}/out")
        WRITING[name](str(tmp_path / "real"), f"{tmp_path}/{name}/out")
        found, needed = objects(f"{folder}/{name}/out"), objects(f"{tmp_path}/{name}/out")
        for end in (".lineage.parquet", "-a.lineage.parquet", "-b.lineage.parquet"):  # p3 has none: its prefix differs
            assert (found.pop(end, None) is None) == (needed.pop(end, None) is None)
        assert found == needed, name
    found_sound = verify_dataset(f"{folder}/virtual", lineage=True)
    assert (found_sound.checked_by, found_sound.lineage) == ("in part", 61)


def test_some_parts_with_checksums_are_checked_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = stored(parts_of(tmp_path), str(tmp_path / "data"), ["checked", "plain", "plain", "plain"])
    merge_virtually(parts, tmp_path / "virtual")
    assert verify_dataset(tmp_path / "virtual").checked_by == "in part"
    assert main(["verify", f"{tmp_path}/virtual"]) == 0
    assert "; some parts have no checksums to compare them with" in capsys.readouterr().out
    whole = bytearray(Path(f"{parts[0]}.bin").read_bytes())
    whole[9] ^= 4
    with Path(f"{parts[0]}.bin").open("r+b") as file:
        file.write(whole)
    rewritten = merge_virtually(parts, tmp_path / "again")
    assert rewritten.num_sources == 4
    with pytest.raises(FormatError, match=r"p0\.bin: .*; document 0, token [0-9]+ of it, in the part .*/p0$"):
        verify_dataset(tmp_path / "again")


def test_a_token_beyond_the_vocabulary_is_named_by_its_part(tmp_path: Path) -> None:
    parts = [
        build_ours(tmp_path / f"p{n}", [Document([3, 4], [2], []), Document([n * 9], [1], [])], np.uint16)
        for n in range(3)
    ]
    merge_virtually(parts, tmp_path / "virtual")
    with pytest.raises(FormatError, match=r"parts.json: token 18, .*; document 5, token 0 of it, in the part .*/p2$"):
        verify_dataset(tmp_path / "virtual", vocab_size=10)


@pytest.mark.parametrize("name", ["head", "shuffle", "convert", "merge", "split"])
def test_a_part_is_never_written_to_nor_the_list(tmp_path: Path, name: str) -> None:
    parts = parts_of(tmp_path)
    merge_virtually(parts, tmp_path / "virtual")
    before = objects(f"{tmp_path}/p0")
    tools: dict[str, Tool] = {
        "head": lambda source, out: cut_dataset(source, [out], num_documents=3, overwrite=True),
        "shuffle": lambda source, out: shuffle_datasets([source], out, seed=1, overwrite=True),
        "convert": lambda source, out: convert_dataset(source, out, overwrite=True),
        "merge": lambda source, out: merge_datasets([source], out, overwrite=True),
        "split": lambda source, out: cut_dataset(source, [out], [0.5], seed=1, overwrite=True),
    }
    for target in (parts[0], f"{tmp_path}/virtual"):
        with pytest.raises(ConfigError, match=r"is read and written|is the virtual merge .* or a part of it"):
            tools[name](f"{tmp_path}/virtual", target)
    assert objects(f"{tmp_path}/p0") == before


def test_a_list_stands_in_the_way_of_a_dataset_and_goes_when_one_replaces_it(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    merge_virtually(parts, tmp_path / "all")
    for tool in (WRITING["merge"], WRITING["head"], WRITING["shuffle"], WRITING["convert"]):
        with pytest.raises(ObjectExistsError, match=r"all: holds .parts.json, needed a free"):
            tool(parts[0], f"{tmp_path}/all")
    merge_datasets(parts, tmp_path / "all", overwrite=True)
    assert sorted(objects(f"{tmp_path}/all")) == [".bin", ".idx", ".lineage.parquet"]


def test_a_part_replaced_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    merge_virtually(parts, tmp_path / "virtual")
    for name, tool in {
        "shuffle": lambda watch: shuffle_datasets([f"{tmp_path}/virtual"], f"{tmp_path}/out", seed=1, watch=watch),
        "head": lambda watch: cut_dataset(f"{tmp_path}/virtual", [f"{tmp_path}/out"], num_documents=60, watch=watch),
        "verify": lambda watch: verify_dataset(f"{tmp_path}/virtual", watch=watch),
        "diff": lambda watch: diff_datasets(f"{tmp_path}/virtual", parts[0], watch=watch),
        "convert": lambda watch: convert_dataset(f"{tmp_path}/virtual", f"{tmp_path}/out", watch=watch),
    }.items():
        seed = len(name) * 7

        def replace(seed: int = seed) -> None:
            build_with_lineage(tmp_path / "p1", 40, seed)

        with pytest.raises(ObjectChangedError, match="p1"):
            tool(AtEvent("", replace))
        left = [
            each
            for each in names_beside(f"{tmp_path}/out")
            if not each.endswith((".partial", "convert.json", "-parts"))
        ]
        assert left == [], name  # a convert goes on from these
        merge_virtually(parts, tmp_path / "virtual", overwrite=True)


def test_lineage_of_the_list_is_that_of_what_comes_out(tmp_path: Path) -> None:
    merge_virtually(parts_of(tmp_path), tmp_path / "virtual")
    cut_dataset(tmp_path / "virtual", [tmp_path / "head"], num_documents=40)
    assert read_lineage(tmp_path / "head") == read_lineage(tmp_path / "virtual")[:40]


def test_its_parts_are_warmed(tmp_path: Path, s3: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    base = s3.fresh()
    parts = stored(parts_of(tmp_path)[:2], base, ["plain", "compressed"])
    merge_virtually(parts, f"{base}/list")
    for fetched in (True, False):
        assert main(["cache", "warm", f"{base}/list", "--dir", f"{tmp_path}/cache", "--bytes", "1GiB", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["num_objects"], told["fetched_bytes"] > 0) == (4, fetched)


def test_shifted_numbers_are_read_by_any_bytes() -> None:
    content = np.arange(25_000, dtype="<i8")
    reader = ShiftedReader(MemoryObject(b"head" + (content - 5).tobytes()), 4, len(content), 5)
    data = content.tobytes()
    ranges = [(0, 0), (1, 9), (7, 8), (8, 16), (3, 100), (0, len(data)), (len(data) - 1, len(data))]
    assert [bytes(view) for view in reader.read(ranges)] == [data[start:stop] for start, stop in ranges]
    with pytest.raises(ShortReadError):
        reader.read([(0, len(data) + 1)])
