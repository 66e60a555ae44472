"""Files of other libraries that break one rule each, and the message of each."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from conftest import Bucket

import binidx
from binidx.corpus.formats.folders import format_shard
from binidx.corpus.formats.peer_formats import FORMATS, export_dataset, import_dataset
from binidx.errors import BinidxError, ConfigError, FormatError
from binidx.storage.location import Location
from binidx.storage.writing.publish import write_object
from binidx.tools import main

EOD = 0
DOCUMENTS = [np.array(each, np.uint16) for each in ([5, 6, EOD], [7, EOD], [8, 9, 10, EOD])]


def mds(folder: Path, data: bytes | None = None, **fields: Any) -> str:
    """A folder of one shard with the columns `id` and `tokens`, and other fields of it."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = format_shard(b"{}", [item(each) for each in DOCUMENTS])
    (folder / "a.mds").write_bytes(plain if data is None else data)
    shard = {
        "column_names": ["id", "tokens"], "column_encodings": ["int", "ndarray:uint16"], "column_sizes": [8, None],
        "compression": None, "format": "mds", "hashes": [], "samples": 3, "version": 2, "zip_data": None,
        "raw_data": {"basename": "a.mds", "bytes": len(plain), "hashes": {}},
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"shards": [shard | fields], "version": 2}))
    return str(folder)


def item(document: Any) -> bytes:
    data: bytes = bytes([1 << 2, len(document)]) + document.tobytes()
    return np.array([len(data), 0, 0], "<u4").tobytes() + data


def litdata(folder: Path, data: bytes | None = None, compression: str | None = None, **fields: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    plain = format_shard(b"", [each.tobytes() for each in DOCUMENTS])
    (folder / "a.bin").write_bytes(plain if data is None else data)
    chunk = {"filename": "a.bin", "chunk_bytes": sum(each.nbytes for each in DOCUMENTS), "chunk_size": 3, "dim": 9}
    config = {"compression": compression, "data_format": ["no_header_tensor:20"]}
    (folder / "index.json").write_text(json.dumps({"chunks": [chunk | fields], "config": config}))
    return str(folder)


def arrow(folder: Path, rows: Any = None, name: str = "a.arrow") -> str:
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"input_ids": pa.array(rows or [each.tolist() for each in DOCUMENTS])})
    with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    return str(folder)


def olmo(folder: Path, rows: str | bytes | None, tokens: Any = None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (np.concatenate(DOCUMENTS) if tokens is None else tokens).tofile(folder / "a.npy")
    if rows is not None:
        (folder / "a.csv.gz").write_bytes(rows if isinstance(rows, bytes) else gzip.compress(rows.encode()))
    return str(folder / "a.npy")


def imported(format: str, source: str, **options: Any) -> list[list[int]]:
    target = f"{source}-imported"
    import_dataset(format, [source], target, overwrite=True, **options)
    return documents_of(target)


def documents_of(prefix: str) -> list[list[int]]:
    dataset = binidx.IndexedDataset(prefix)
    bounds = dataset.document_indices.tolist()
    return [np.concatenate(dataset[a:b]).tolist() for a, b in itertools.pairwise(bounds)]


BOUNDS = "0,3,id,src,1\n3,4,id,src,2\n4,9,id,src,3\n"


def test_documents_of_olmo_are_those_of_its_file_of_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = olmo(tmp_path / "olmo", BOUNDS)
    command = ["import", "olmo", source, "--to", f"{tmp_path}/en", "--stored-dtype", "uint16", "--eod", "0"]
    assert main(command) == 0
    assert "bounds by .csv.gz in 1 files, by EOD in 0" in capsys.readouterr().err
    assert documents_of(f"{tmp_path}/en") == [[5, 6, EOD], [7], [EOD, 8, 9, 10, EOD]]
    (tmp_path / "olmo" / "a.csv.gz").unlink()
    assert main([*command, "--overwrite"]) == 0
    assert "bounds by .csv.gz in 0 files, by EOD in 1" in capsys.readouterr().err
    assert documents_of(f"{tmp_path}/en") == [each.tolist() for each in DOCUMENTS]


def test_files_of_bounds_are_found_in_a_store_and_mixed_with_others(s3: Bucket, tmp_path: Path) -> None:
    folder = s3.fresh()
    for name, rows in (("a", BOUNDS), ("b", None)):
        for path in Path(olmo(tmp_path / name, rows)).parent.iterdir():
            write_object(Location.of(f"{folder}/{path.name.replace('a.', f'{name}.', 1)}"), [path.read_bytes()])
    import_dataset("olmo", [folder], f"{tmp_path}/en", stored_dtype="uint16", eod=EOD)
    bounded, cut = [[5, 6, EOD], [7], [EOD, 8, 9, 10, EOD]], [each.tolist() for each in DOCUMENTS]
    assert documents_of(f"{tmp_path}/en") == bounded + cut


def test_tokens_of_olmo_in_no_document_are_left_out_and_counted(tmp_path: Path) -> None:
    said: list[str] = []

    class Watcher:
        def begin(self, *_: object) -> None: ...
        def advance(self, count: int) -> None: ...
        def say(self, message: str) -> None:
            said.append(message)

    source = olmo(tmp_path, "0,3\n4,8\n")
    import_dataset("olmo", [source], f"{tmp_path}/en", stored_dtype="uint16", eod=EOD, watch=Watcher())
    assert documents_of(f"{tmp_path}/en") == [[5, 6, EOD], [EOD, 8, 9, 10]]
    assert f"{source}: 2 of 9 tokens are in no document, so left out" in said


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,3\n2,9\n", "row 2: found b'2,9\\n', need start,end of a document in the tokens 3 to 9"),
        ("0,3\n3,10\n", "row 2: found b'3,10"),
        ("0,3\n3,3\n", "row 2: found b'3,3"),
        ("-1,3\n", "row 1: found b'-1,3"),
        ("start,end\n", "row 1: found b'start,end"),
        ("0\n", "row 1: found b'0"),
        ("0,1_0\n", "row 1: found b'0,1_0"),
        ("9" * 5000 + ",3\n", "row 1: found b'999"),
        ("0,9," + "x" * 70_000 + "\n", "row 2: found b'xxx"),
        (b"0,3\n", "a.csv.gz: damaged: Not a gzipped file"),
        (gzip.compress(BOUNDS.encode(), mtime=0)[:-9], "a.csv.gz: damaged: "),
    ],
)
def test_bounds_of_olmo_that_break_a_rule_are_refused(rows: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        imported("olmo", olmo(tmp_path, rows), stored_dtype="uint16", eod=EOD)
    assert message in str(caught.value)


NAMES = ["../secret.bin", "/etc/passwd", "b/../../secret.bin", "..", "..\\secret.bin", "%2e%2e/secret.bin"]


@pytest.mark.parametrize("name", NAMES)
def test_an_index_names_no_file_outside_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(format_shard(b"", [b"secret"]))
    for format, source in (
        ("mds", mds(tmp_path / "mds", raw_data={"basename": name, "bytes": 1})),
        ("mds", mds(tmp_path / "zip", zip_data={"basename": name, "bytes": 1})),
        ("litdata", litdata(tmp_path / "litdata", filename=name)),
        ("arrow", arrow(tmp_path / "arrow", name=name)),
    ):
        with pytest.raises(FormatError) as caught:
            imported(format, source)
        assert f"names {name!r}, need a file in the folder" in str(caught.value)


def test_an_index_names_files_in_folders_below_it(tmp_path: Path) -> None:
    source = mds(tmp_path, raw_data={"basename": "0/a.mds", "bytes": (Path(mds(tmp_path)) / "a.mds").stat().st_size})
    (tmp_path / "0").mkdir()
    (tmp_path / "a.mds").rename(tmp_path / "0" / "a.mds")
    assert imported("mds", source) == [each.tolist() for each in DOCUMENTS]


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"zstd:3": zstandard.compress, "gz": gzip.compress}


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_shard_inflates_to_the_bytes_that_its_index_declares(compression: str, tmp_path: Path) -> None:
    compress = COMPRESS[compression]
    plain = format_shard(b"{}", [item(each) for each in DOCUMENTS])
    right = {"compression": compression, "zip_data": {"basename": "a.mds", "bytes": 1}}
    assert imported("mds", mds(tmp_path / "right", compress(plain), **right)) == [each.tolist() for each in DOCUMENTS]
    with pytest.raises(FormatError, match=rf"a.mds: inflates to more than the {len(plain)} bytes that index.json"):
        imported("mds", mds(tmp_path / "mds", compress(plain + bytes(1)), **right))
    plain = format_shard(b"", [each.tobytes() for each in DOCUMENTS])
    assert imported("litdata", litdata(tmp_path / "a", compress(plain), compression)) == [
        each.tolist() for each in DOCUMENTS
    ]
    with pytest.raises(FormatError, match=rf"a.bin: inflates to more than the {len(plain)} bytes that index.json"):
        imported("litdata", litdata(tmp_path / "litdata", compress(plain + bytes(1)), compression))


def test_an_item_of_half_a_token_is_refused(tmp_path: Path) -> None:
    source = litdata(tmp_path, format_shard(b"", [b"\5\0\6"]), chunk_bytes=3, chunk_size=1)
    with pytest.raises(FormatError, match=re.escape("a.bin: an item of 3 bytes, need a multiple of 2")):
        imported("litdata", source)


BOMB = """
import resource, sys
from binidx.corpus.formats.peer_formats import import_dataset
from binidx.errors import FormatError
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (1 << 29)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    import_dataset("mds", [sys.argv[1]], sys.argv[2])
except FormatError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
@pytest.mark.parametrize("declared", [1 << 20, 1 << 50], ids=["honest index", "hostile index"])
def test_a_small_shard_does_not_fill_the_memory(declared: int, tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor().compressobj()
    data = b"".join([bomb.compress(bytes(1 << 24)) for _ in range(64)]) + bomb.flush()
    assert len(data) < 100_000
    raw, packed = {"basename": "b.mds", "bytes": declared}, {"basename": "a.mds", "bytes": len(data)}
    folder = mds(tmp_path / "mds", data, compression="zstd", raw_data=raw, zip_data=packed)
    ended = subprocess.run(
        [sys.executable, "-c", BOMB, folder, f"{tmp_path}/en"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search("a.mds: .*inflates to more than", ended.stdout)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"column_encodings": ["int"]}, "index.json: 2 columns, (1, 2) encodings and sizes; need as many of each"),
        ({"column_sizes": [8]}, "index.json: 2 columns, (2, 1) encodings and sizes; need as many of each"),
        ({"column_sizes": [-8, None]}, "$.shards[0].column_sizes[0]"),
        ({"column_sizes": [9, None]}, "no sample of these columns: columns of"),
        ({"column_sizes": [4, None]}, "no sample of these columns: columns of"),
        ({"column_encodings": ["int", "ndarray:float16"]}, "no sample of these columns: 'float16'"),
        ({"column_encodings": ["int", "ndarray:O"]}, "no sample of these columns: 'O'"),
        ({"column_encodings": ["int", "ndarray:x"]}, "no sample of these columns: 'x'"),
        ({"raw_data": {"basename": ""}}, "missing required field bytes"),
        ({"raw_data": {"basename": "", "bytes": 1}}, "names '', need a file in the folder"),
    ],
)
def test_columns_of_mds_that_break_a_rule_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        imported("mds", mds(tmp_path / "mds", **fields))
    assert message in str(caught.value)


@pytest.mark.parametrize("rows", [[[1, None, 3]], [[1], None]])
def test_a_null_of_arrow_is_refused(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="column input_ids has nulls, need integers"):
        imported("arrow", arrow(tmp_path / "arrow", rows))


def test_an_end_of_nanotron_or_neox_before_the_last_is_refused(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "a.ds")
    np.array([5, 3, 9], "<u8").tofile(tmp_path / "a.ds.index")
    with pytest.raises(FormatError, match=r"a.ds: 18 bytes, its .index descends, or ends at \[9\]"):
        imported("nanotron", f"{tmp_path}/a.ds")
    [prefix] = export_dataset("neox", dataset(tmp_path), f"{tmp_path}/neox").files
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    for bounds in ([0, 2, 1, 3], [0, 1, 2, 9], [0, 1, 2, -1], [0, 1, 2, 2]):
        data[-32:] = np.array(bounds, "<i8").tobytes()
        Path(f"{prefix}.idx").write_bytes(data)
        with pytest.raises(FormatError, match=r"neox.idx: type 8, 3 sizes; need integers, 3 sizes in order"):
            imported("neox", prefix)


def test_tokens_with_a_header_are_not_read_as_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.concatenate(DOCUMENTS))
    with pytest.raises(FormatError, match=r"a.npy: begins with NumPy's header, need tokens alone; .*tofile"):
        imported("olmo", f"{tmp_path}/a.npy", stored_dtype="uint16", eod=EOD)


def dataset(folder: Path, documents: Any = DOCUMENTS, dtype: Any = np.uint16) -> str:
    with binidx.IndexedDatasetBuilder(f"{folder}/own.bin", dtype) as builder:
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(f"{folder}/own.idx")
    return f"{folder}/own"


@pytest.fixture(scope="module")
def of_each_format(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Format -> what a user names: a folder, or the prefix of neox."""
    folder = tmp_path_factory.mktemp("formats")
    own = dataset(folder)
    for name in FORMATS:
        export_dataset(name, own, f"{folder}/{name}/en", eod=EOD if FORMATS[name].needs_eod else None)
    return {name: f"{folder}/{name}/en" for name in FORMATS}


@pytest.mark.parametrize("given", FORMATS)
@pytest.mark.parametrize("name", FORMATS)
def test_another_format_is_named(name: str, given: str, of_each_format: dict[str, str], tmp_path: Path) -> None:
    source = of_each_format[given]
    if name == given:
        return
    with pytest.raises(ConfigError) as caught:
        import_dataset(name, [source], f"{tmp_path}/x", eod=EOD, stored_dtype="uint16")
    assert str(caught.value) == f"{source}: is of {FORMATS[given].peer}; use binidx import {given}"


def test_a_dtype_that_takes_twice_the_bytes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    source = arrow(tmp_path / "arrow", [[4095, 1], [2]])  # of int64
    assert main(["import", "arrow", source, "--to", f"{tmp_path}/en"]) == 0
    assert "en: of int32; its ids, up to 4,095, fit --dtype uint16" in capsys.readouterr().err
    assert main(["import", "arrow", source, "--to", f"{tmp_path}/en", "--dtype", "int32", "--overwrite"]) == 0
    for number, wide in enumerate((65536, -1)):
        assert (
            main(["import", "arrow", arrow(tmp_path / str(number), [[wide]]), "--to", f"{tmp_path}/wide{number}"]) == 0
        )
    assert "fit --dtype" not in capsys.readouterr().err


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_end_in_errors_of_binidx(name: str, of_each_format: dict[str, str], tmp_path: Path) -> None:
    folder, target = Path(of_each_format[name]).parent, f"{tmp_path}/x"
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".metadata"}
    if name == "olmo":
        [npy] = files
        files[npy.with_suffix(".csv.gz")] = gzip.compress(BOUNDS.encode())
    limit = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), limit[1]))
    try:
        for number in range(300):
            rng = random.Random(f"{name} {number}")
            path = rng.choice([*files])
            for each, data in files.items():
                each.write_bytes(damaged(data, rng) if each == path else data)
            with contextlib.suppress(BinidxError):
                import_dataset(name, [of_each_format[name]], target, eod=EOD, stored_dtype="uint16", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
        for each, data in files.items():
            each.write_bytes(data)
        if name == "olmo":
            npy.with_suffix(".csv.gz").unlink()


NUMBERS = [0, 1, 127, 255, 65535, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut, changed or random bytes, or another number at some place."""
    at, way = rng.randrange(len(data) + 1), rng.randrange(5)
    if way == 0:
        return data[:at]
    if way == 1:
        return data[:at] + rng.randbytes(rng.choice((1, 8, 100))) + data[at:]
    if way == 2:
        return rng.randbytes(rng.choice((0, 1, 7, 100, 1000)))
    if way == 3:
        at, size = at // 8 * 8, rng.choice((1, 2, 4, 8))
        number = rng.choice(NUMBERS) % (1 << 8 * size)
        return data[:at] + number.to_bytes(size, "little") + data[at + size :]
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if at < len(data) else data + b"}"
