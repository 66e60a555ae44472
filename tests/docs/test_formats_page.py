"""docs/reference/formats.md describes the files: readers that are nothing but its tables read the golden files."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import xxhash
import zstandard
from helpers.pages import python_blocks, read_page

import binidx
from binidx.corpus.copies.convert_owner import ConvertOwner
from binidx.run.global_order import GlobalOrder
from binidx.run.schedule import BatchSchedule
from binidx.storage.location import Location
from binidx.storage.steps import run

PAGE = read_page("reference/formats")
GOLDEN = Path(__file__).parents[1] / "golden"
LOCAL, STORED = GOLDEN / "state/local", GOLDEN / "state/s3"
TYPES = {"u8": "u1", "i8": "i1", "u32": "<u4", "i32": "<i4", "u64": "<u8", "i64": "<i8", "f64": "<f8", "token": "<u2"}


def rows(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    section = re.split(rf"^#+ {re.escape(heading)}$", PAGE, flags=re.M)[1]
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.M)
    assert table is not None, heading
    return [[cell.strip().replace("\\*", "*") for cell in row[1:-1].split(" | ")] for row in table[1].splitlines()]


def parse(heading: str, data: bytes, **known: Any) -> dict[str, Any]:
    """The values of a file, read by the offsets, types and names of its table."""
    found = dict(known)
    for offset, kind, name, *_ in rows(heading):
        start, typed = eval(offset, found), re.fullmatch(r"`(\w+)(?:\[(.*)\])?`", kind)
        if typed is None:  # a gap
            continue
        if typed[2] == ":":
            found[name] = data[start:]
            continue
        dtype = np.dtype(TYPES.get(typed[1]) or f"V{int(typed[1].removesuffix('s'))}")
        count = eval(typed[2], found) if typed[2] else 1
        if start + count * dtype.itemsize > len(data):  # an optional array
            assert name == "sequence_modes"
            continue
        array = np.frombuffer(data, dtype, count, start)
        found[name] = array if typed[2] else array[0].tobytes() if dtype.kind == "V" else array[0].item()
    return found


@pytest.mark.parametrize("name", ["int32", "uint8", "float64", "empty", "limits", "multimodal"])
def test_an_idx_is_read_by_its_table(name: str) -> None:
    found = parse(".idx", (GOLDEN / f"{name}.idx").read_bytes())
    modes = name == "multimodal"
    opened = binidx.IndexedDataset(str(GOLDEN / name), multimodal=modes)
    assert (found["magic"], found["version"]) == (b"MMIDIDX\0\0", 1)
    assert (found["sequence_lengths"] == opened.sequence_lengths).all()
    assert (found["document_indices"] == opened.document_indices).all()
    assert ("sequence_modes" in found) == modes
    codes = dict(re.findall(r"^\| (\d) \| (u?(?:int|float)\d+) \|$", PAGE, re.M))
    assert codes[str(found["code"])] == np.dtype(opened.index.dtype).name


def test_its_example_reads_a_dataset() -> None:
    [example] = python_blocks(PAGE)
    names: dict[str, Any] = {"prefix": str(LOCAL / "corpus/en")}
    exec(example, names)
    assert (names["first"] == binidx.IndexedDataset(names["prefix"])[0]).all()


def test_a_compressed_bin_is_read_by_its_tables() -> None:
    data, plain = (LOCAL / "stored/zst.bin.zst").read_bytes(), (LOCAL / "corpus/en.bin").read_bytes()
    count = struct.unpack("<I", data[-9:-5])[0]
    size = 17 + 8 * count
    table = parse("Seek table", data[-size:], N=count)
    assert (table["magic"], table["following"], table["end"]) == (0x184D2A5E, size - 8, 0x8F92EAB1)
    mark = parse("Mark", data[-size - 32 : -size])
    assert (mark["magic"], mark["following"], mark["tag"]) == (0x184D2A50, 24, b"binidx\0\1")
    entries = table["entries"].reshape(-1, 2)
    assert mark["plain_bytes"] == len(plain)
    assert mark["digest"] == xxhash.xxh3_64_intdigest(entries[:-1].tobytes())
    ends = np.cumsum(entries[:-1, 0]).tolist()
    frames = [data[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    assert b"".join(zstandard.decompress(each) for each in frames) == plain


def test_checksums_are_read_by_their_table() -> None:
    plain = (LOCAL / "stored/sums.bin").read_bytes()
    data = (LOCAL / "stored/sums.bin.xxh3").read_bytes()
    found = parse(".bin.xxh3", data)
    assert found["digest"] == xxhash.xxh3_64_intdigest(data[:24])
    blocks = [plain[start : start + found["B"]] for start in range(0, found["N"], found["B"])]
    assert found["sums"].tolist() == [xxhash.xxh3_64_intdigest(each) for each in blocks]


def test_a_bundle_is_read_by_its_table() -> None:
    [path] = STORED.glob("cache/*.bundle")
    found = parse("Idx bundle", path.read_bytes())
    assert found["digest"] == xxhash.xxh3_64_intdigest(found["table"].tobytes())
    for prefix, first, size, checksum, identity in json.loads(found["table"].tobytes()):
        data = found["files"][first : first + size]
        assert data == (STORED / f"{prefix.removeprefix('s3://golden-state/')}.idx").read_bytes()
        assert (checksum, identity["size"]) == (xxhash.xxh3_64_hexdigest(data), size)


def test_a_packed_file_is_read_by_its_table() -> None:
    found = parse("Packed files (LITPKDS)", (LOCAL / "packed/en/en_0000000000.bin").read_bytes())
    assert (found["magic"], found["version"], found["code"]) == (b"LITPKDS", 1, 8)
    tokens = np.fromfile(LOCAL / "corpus/en.bin", "<u2", found["N"])
    assert (found["tokens"] == tokens).all()


def test_a_cached_block_is_read_by_its_tables() -> None:
    for meta in (GOLDEN / "state/disk-cache/objects").glob("*/meta.json"):
        about, key = json.loads(meta.read_text()), meta.parent.name
        assert key == hashlib.blake2b(meta.read_bytes(), digest_size=16).hexdigest()
        chunks = -(-about["size"] // about["chunk_bytes"])
        block = parse("Block", (meta.parent / "00000000.block").read_bytes(), n=chunks)
        assert block["data"] == (LOCAL / "corpus/en.bin").read_bytes()
        for number, digest in enumerate(block["sums"]):
            chunk = block["data"][number * about["chunk_bytes"] :][: about["chunk_bytes"]]
            assert digest.tobytes() == xxhash.xxh3_128_digest(chunk, seed=int(key[:15], 16) + number)
    usage = parse("Usage", (GOLDEN / "state/disk-cache/usage").read_bytes())
    assert usage["bytes"] > 0
    assert usage["failed"] == 0.0 < usage["counted"]


def test_a_read_plan_is_read_by_its_tables(tmp_path: Path) -> None:
    run = binidx.load_dataset(str(LOCAL / "corpus/en"), 24, num_samples=200)
    order = binidx.RunOrder.of_dataset(run.wrapped, GlobalOrder(BatchSchedule(1, 1, 1), len(run)))
    plan = binidx.plan_reads(order, range(100))
    binidx.write_read_plan(order, str(tmp_path), plan)
    about = (tmp_path / "readplan.json").read_bytes()
    assert (tmp_path / "draft.json").read_bytes() == about
    named = {name for row in rows("Read plans") for name in re.findall(r"`([^`]+)`", row[0])}
    found = {*paths(json.loads(about))}
    assert named <= found
    assert {path.split("[")[0] for path in named} == {re.split(r"[.\[]", path)[0] for path in found}
    data, tokens = (tmp_path / "000000000000.rows").read_bytes(), np.fromfile(LOCAL / "corpus/en.bin", "<u2")

    def seed(first: int, stop: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{xxhash.xxh3_128_hexdigest(about)} {first} {stop}".encode())

    end = data[-16:]
    table = parse("End of a part", end, B=2)
    assert table["digest"] == xxhash.xxh3_64_intdigest(end[:-8], seed(0, 100))
    assert sum(table["sizes"]) == len(data) - len(end)
    begin = 0
    for first, size in zip((0, 64), table["sizes"].tolist(), strict=True):
        count, whole = min(64, 100 - first), data[begin : begin + size]
        block = parse("Block of a read plan", whole, N=count, P=(size - 8 - 6 * count) // 10)
        assert block["digest"] == xxhash.xxh3_64_intdigest(whole[:-8], seed(first, first + count))
        pieces = iter(struct.iter_unpack("<IHI", block["pieces"].tobytes()))
        for number, (num_pieces, source) in enumerate(struct.iter_unpack("<IH", block["samples"].tobytes())):
            own = [next(pieces) for _ in range(num_pieces)]
            starts = [(low + (high << 32)) // 2 for low, high, _ in own]
            text = [tokens[start : start + length] for start, (_, _, length) in zip(starts, own, strict=True)]
            assert source == 0
            assert (np.concatenate(text)[:24] == run[first + number]["tokens"].numpy()).all()
        begin += size


JSON_FILES = {
    ".parts.json": "local/stored/virtual.parts.json",
    "Dataset manifest": "s3/finished/en_text_document.manifest.json",
    "Index manifest": "local/cache/11a29178f75c362c51c662b114819238-GPTDataset-train-binidx.json",
    "Orders record": "local/cache/00b17646b2e58e9da3b2a505dc5f72d3-binidx-orders.json",
    "run.json": "local/runs/run.json",
    "Baked runs": "local/baked/baked.json",
    "Quarantine": "s3/finished/en.quarantine.jsonl",
    "Record of a part": "s3/unfinished/en-parts/e0128738b0767fb46c0513d7ff5410d2.json",
    "Meta of a cached object": "disk-cache/objects/7a2f13c88f902004fbe0cfb8adfbc791/meta.json",
}


def paths(value: Any, before: str = "") -> Iterator[str]:
    """The paths of all fields of a JSON value: `parts[].idx`."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield f"{before}.{name}".lstrip(".")
            yield from paths(each, f"{before}.{name}".lstrip("."))
    for each in value if isinstance(value, list) else ():
        yield from paths(each, f"{before}[]")


def test_the_table_of_the_owner_of_a_target_names_its_fields(tmp_path: Path) -> None:
    owner = ConvertOwner(Location.of(f"{tmp_path}/en"))
    run(owner.take_steps(None))
    owner.save("bin", "t")
    named = [name for row in rows("Owner of a target") for name in re.findall(r"`([^`]+)`", row[0])]
    assert named == ["binidx_convert", "owner", "objects.*.token", "objects.*.published"]
    written = {*paths(json.loads((tmp_path / "en.convert.json").read_text()))}
    assert written == {"objects", "objects.bin", *(name.replace("*", "bin") for name in named)}


@pytest.mark.parametrize("heading", JSON_FILES)
def test_the_table_of_a_json_file_names_its_fields(heading: str) -> None:
    found = {*paths(json.loads((GOLDEN / "state" / JSON_FILES[heading]).read_text()))}
    named = [name for row in rows(heading) for name in re.findall(r"`([^`]+)`", row[0])]
    for name in named:  # `*` is any name
        assert any(re.fullmatch(re.escape(name).replace(r"\*", "[^.]+"), path) for path in found), name
    tops = {re.split(r"[.\[]", name)[0] for name in named}
    assert {path for path in found if not re.search(r"[.\[]", path)} == tops


def test_the_index_manifest_is_hashed_as_the_page_says() -> None:
    fields = json.loads((GOLDEN / "state" / JSON_FILES["Index manifest"]).read_text())
    checksum = fields.pop("xxh3_64")
    assert checksum == xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("heading", "path", "tag"),
    [
        ("Lineage", STORED / "finished/en_text_document.lineage.parquet", {"lineage"}),
        ("Orders", LOCAL / "orders/run/steps-000000000-000000002.parquet", {"fingerprint", "steps"}),
    ],
)
def test_the_table_of_a_parquet_file_names_its_columns(heading: str, path: Path, tag: set[str]) -> None:
    schema = pyarrow.parquet.read_schema(path)
    named = [name for row in rows(heading) for name in re.findall(r"`([^`]+)`", row[0])]
    assert schema.names == named
    assert tag <= json.loads(schema.metadata[b"binidx"]).keys()


def test_every_array_of_an_index_cache_is_named() -> None:
    named = {name for row in rows("Indices") for name in re.findall(r"`([^`]+)`", row[0])}
    written = {re.sub(r"^.*-", "", path.name) for path in [*LOCAL.glob("cache/*"), *LOCAL.glob("stage-cache/*")]}
    assert {name for name in written if name.endswith(".npy")} == {name for name in named if name.endswith(".npy")}
