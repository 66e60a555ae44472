"""Files of other libraries: brought over and back with the same documents, and refused where they are damaged."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from conftest import Bucket

import binidx
from binidx.corpus.formats.folders import format_shard
from binidx.corpus.formats.peer_formats import FORMATS, export_dataset, import_dataset
from binidx.errors import BinidxError, ConfigError, FormatError, ObjectExistsError, ObjectNotFoundError
from binidx.tools import main

EOD = 0
PEERS = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
LENGTHS = [int(length) for length in np.random.default_rng(0).integers(1, 400, 100)]
DOCUMENTS = [np.append(np.arange(1, length) % 250 + 1, EOD).astype(np.uint16) for length in LENGTHS]
STREAM = np.concatenate(DOCUMENTS)


def build(prefix: str, dtype: type[np.number[Any]] = np.uint16) -> str:
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for number, each in enumerate(DOCUMENTS):
            half = len(each) // 2 * (number % 3 == 0)  # some have two sequences
            builder.add_document(each, [half, len(each) - half] if half else [len(each)])
        builder.finalize(f"{prefix}.idx")
    return prefix


def assert_brought_over(prefix: str, dtype: Any = np.uint16) -> None:
    found = binidx.IndexedDataset(prefix)
    assert found.index.dtype is dtype
    assert len(found) == len(DOCUMENTS) == len(found.document_indices) - 1
    assert all(np.array_equal(each, needed) for each, needed in zip(found[:], DOCUMENTS, strict=True))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("name", FORMATS)
def test_a_dataset_goes_out_and_comes_back(name: str, dtype: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("binidx.corpus.formats.peer_files.FILE_BYTES", 4_000)  # several files
    eod = EOD if FORMATS[name].needs_eod else None
    out = export_dataset(name, build(f"{tmp_path}/en", dtype), f"{tmp_path}/out/en", eod=eod)
    stored = np.dtype(dtype).name if name == "olmo" else None
    back = import_dataset(name, out.files, f"{tmp_path}/back", eod=eod, stored_dtype=stored)
    assert back.digest == out.digest
    if FORMATS[name].suffix:
        for number, source in enumerate((f"{tmp_path}/out/en", f"{tmp_path}/out/en/*{FORMATS[name].suffix}")):
            again = import_dataset(name, [source], f"{tmp_path}/{number}", eod=eod, stored_dtype=stored)
            assert again.digest == out.digest
        (tmp_path / "none").mkdir()
        (tmp_path / "none" / "x").touch()
        with pytest.raises(ObjectNotFoundError, match=f"no {FORMATS[name].suffix} file in it"):
            import_dataset(name, [f"{tmp_path}/none"], f"{tmp_path}/x", eod=eod)
    if (mark := FORMATS[name].mark).startswith("/"):
        (tmp_path / "no").mkdir()
        with pytest.raises(ObjectNotFoundError, match=f"no such .*; {name} needs the folder with {mark[1:6]}"):
            import_dataset(name, [f"{tmp_path}/no"], f"{tmp_path}/x", eod=eod)
    assert_brought_over(f"{tmp_path}/back", dtype)
    with pytest.raises(ObjectExistsError):
        export_dataset(name, f"{tmp_path}/en", f"{tmp_path}/out/en", eod=eod)
    with pytest.raises(ObjectExistsError, match="holds a dataset"):
        import_dataset(name, out.files, f"{tmp_path}/back", eod=eod, stored_dtype=stored)


def test_it_works_in_a_store_and_from_the_command_line(
    s3: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, shards = build(f"{tmp_path}/en"), f"{s3.fresh()}/shards"
    assert main(["export", "mds", f"{prefix}.bin", "--to", shards, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == len(DOCUMENTS)
    assert main(["import", "mds", shards, "--to", f"{shards}-back"]) == 0
    assert capsys.readouterr().out.endswith(f"100 documents, {len(STREAM):,} tokens of uint16; read back and equal\n")
    assert_brought_over(f"{shards}-back")
    assert main(["import", "olmo", f"{prefix}.bin", "--to", f"{tmp_path}/x"]) == 2
    assert "--eod: " in capsys.readouterr().err


def mds_folder(folder: Path, items: list[Any], encoding: str, compression: str | None) -> str:
    """As MDSWriter writes it, with columns before and after the tokens."""
    folder.mkdir()
    samples = []
    for number, each in enumerate(items):
        text, values = b"x" * number, each.tobytes()
        shape = bytes([1 << 2 | 1]) + np.uint16(len(each)).tobytes()
        head = {"bytes": b"", "ndarray": bytes([16]) + shape, "ndarray:uint16": shape}[encoding]
        data = head + values
        sizes = np.array([len(text), len(data)], "<u4").tobytes()
        samples.append(sizes + np.int64(number).tobytes() + text + data)
    plain = format_shard(b"{}", samples)
    stored = {None: lambda data: data, "zstd:3": zstandard.compress, "gz": gzip.compress}[compression](plain)
    (folder / "shard.00000.mds").write_bytes(stored)
    file = {"basename": "shard.00000.mds", "bytes": len(stored), "hashes": {}}
    shard = {
        "column_names": ["id", "text", "tokens"], "column_encodings": ["int", "str", encoding],
        "column_sizes": [8, None, None], "compression": compression, "format": "mds", "hashes": [],
        "raw_data": file | {"bytes": len(plain)}, "zip_data": None if compression is None else file,
        "samples": len(items), "version": 2,
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
    return str(folder)


@pytest.mark.parametrize(
    ("encoding", "compression"), [("ndarray:uint16", None), ("ndarray", "zstd:3"), ("bytes", "gz")]
)
def test_shards_with_other_columns_are_brought_over(encoding: str, compression: str | None, tmp_path: Path) -> None:
    stored = "uint16" if encoding == "bytes" else None
    folder = mds_folder(tmp_path / "shards", DOCUMENTS, encoding, compression)
    import_dataset("mds", [folder], f"{tmp_path}/en", stored_dtype=stored)
    assert_brought_over(f"{tmp_path}/en")
    packed = mds_folder(tmp_path / "packed", np.split(STREAM, range(512, len(STREAM), 512)), encoding, compression)
    import_dataset("mds", [packed], f"{tmp_path}/cut", stored_dtype=stored, eod=EOD)
    assert_brought_over(f"{tmp_path}/cut")


@pytest.mark.parametrize("dtype", ["<u2", "<i8"])
def test_chunks_of_litdata_are_brought_over(dtype: str, tmp_path: Path) -> None:
    chunks = []
    for number, items in enumerate((DOCUMENTS[:70], DOCUMENTS[70:])):
        data = format_shard(b"", [each.astype(dtype).tobytes() for each in items])
        (tmp_path / f"chunk-0-{number}.bin").write_bytes(data)
        chunks.append({"filename": f"chunk-0-{number}.bin", "dim": sum(map(len, items)), "chunk_size": len(items)})
    config = {"compression": None, "data_format": [f"no_header_tensor:{20 if dtype == '<u2' else 18}"]}
    (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    import_dataset("litdata", [str(tmp_path)], f"{tmp_path}/en")
    assert_brought_over(f"{tmp_path}/en", np.uint16 if dtype == "<u2" else np.int32)


def test_hugging_face_reads_what_we_write_and_we_what_it_writes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    export_dataset("arrow", build(f"{tmp_path}/en"), f"{tmp_path}/ours")
    rows = datasets.load_from_disk(f"{tmp_path}/ours")["input_ids"]
    assert all(np.array_equal(each, needed) for each, needed in zip(rows, DOCUMENTS, strict=True))
    datasets.Dataset.from_dict({"id": [*range(100)], "tokens": DOCUMENTS}).save_to_disk(f"{tmp_path}/theirs")
    import_dataset("arrow", [f"{tmp_path}/theirs"], f"{tmp_path}/back", dtype="uint16")
    assert_brought_over(f"{tmp_path}/back")


READ_AS_OLMO = """
import sys
import numpy as np
from olmo_core.data import NumpyDatasetDType, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.data.utils import iter_document_indices

path, work = sys.argv[1:]
data = NumpyFSLDatasetConfig(
    tokenizer=TokenizerConfig(vocab_size=256, eos_token_id=0, pad_token_id=0), paths=[path], sequence_length=64,
    dtype=NumpyDatasetDType.uint16, work_dir=work,
).build()
data.prepare()
tokens = [np.asarray(data[number]["input_ids"]) for number in range(len(data))]
bounds = [*iter_document_indices(path, eos_token_id=0, dtype=np.uint16)]
np.savez(path + ".npz", tokens=np.concatenate(tokens), lengths=[stop - start for start, stop in bounds])
"""


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.exists(), reason="needs the environment of `make bench-peers`")
def test_olmo_core_reads_the_tokens_and_documents_that_we_write(tmp_path: Path) -> None:
    [path] = export_dataset("olmo", build(f"{tmp_path}/en"), f"{tmp_path}/olmo", eod=EOD).files
    subprocess.run([PEERS, "-c", READ_AS_OLMO, path, f"{tmp_path}/work"], check=True, env={"HOME": str(tmp_path)})
    read = np.load(f"{path}.npz")
    assert len(read["tokens"]) == len(STREAM) // 64 * 64
    assert np.array_equal(read["tokens"], STREAM[: len(read["tokens"])])
    assert read["lengths"].tolist() == [*map(len, DOCUMENTS)]


READ_AS_NANOTRON = """
import sys
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from datatrove.utils.dataset import DatatroveFolderDataset
import numpy as np

folder, token_bytes, documents = sys.argv[1], int(sys.argv[2]), sys.argv[3]
data = DatatroveFolderDataset(
    folder, seq_len=63, token_size=token_bytes, recursive=False, shuffle=False, return_positions=True
)
read = [data[number] for number in range(len(data))]
names = "input_ids", "positions"
np.savez(folder + ".npz", **{name: np.concatenate([each[name] for each in read]) for name in names})
file = TokenizedFile(folder + "-theirs", "00000.ds", token_size=token_bytes, save_final_metadata=True)
for each in np.load(documents).values():
    file.write(each.tolist(), None)
file.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.exists(), reason="needs the environment of `make bench-peers`")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_datatrove_reads_what_we_write_for_nanotron_and_we_what_it_writes(dtype: Any, tmp_path: Path) -> None:
    export_dataset("nanotron", build(f"{tmp_path}/en", dtype), f"{tmp_path}/ds")
    np.savez(tmp_path / "documents.npz", *DOCUMENTS)
    size = str(np.dtype(dtype).itemsize)
    told = [str(PEERS), "-c", READ_AS_NANOTRON, f"{tmp_path}/ds", size, f"{tmp_path}/documents.npz"]
    subprocess.run(told, check=True, env={"HOME": str(tmp_path)})
    read = np.load(tmp_path / "ds.npz")
    assert len(STREAM) - 64 < len(read["input_ids"]) <= len(STREAM)
    assert np.array_equal(read["input_ids"], STREAM[: len(read["input_ids"])])
    in_document = np.concatenate([np.arange(len(each)) for each in DOCUMENTS])[: len(read["positions"])]
    begins = in_document == 0
    begins[::64] = True  # they count from the start of a sample, too
    assert np.array_equal(read["positions"] == 0, begins)
    import_dataset("nanotron", [f"{tmp_path}/ds-theirs"], f"{tmp_path}/back")
    assert_brought_over(f"{tmp_path}/back", dtype)


def test_an_array_of_olmo_ends_its_last_document(tmp_path: Path) -> None:
    STREAM[:-1].astype(np.uint32).tofile(tmp_path / "a.npy")
    STREAM.astype(np.uint32).tofile(tmp_path / "b.npy")
    files = [f"{tmp_path}/a.npy", f"{tmp_path}/b.npy"]
    done = import_dataset("olmo", files, f"{tmp_path}/en", eod=EOD, stored_dtype="uint32")
    assert (done.documents, done.tokens, done.dtype) == (200, 2 * len(STREAM) - 1, "int32")


def test_what_a_format_cannot_hold_or_is_damaged_is_refused(tmp_path: Path) -> None:
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/odd.bin", np.uint16) as builder:
        builder.add_document([5, EOD, 7], [3])
        builder.add_document([], [0])
        builder.finalize(f"{tmp_path}/odd.idx")
    with pytest.raises(FormatError, match=r"other documents than were written .*an EOD inside a document"):
        export_dataset("olmo", f"{tmp_path}/odd", f"{tmp_path}/odd-olmo", eod=EOD)
    with pytest.raises(FormatError, match="does not end in the EOD"):
        export_dataset("llmc", f"{tmp_path}/odd", f"{tmp_path}/odd-llmc", eod=EOD)
    with pytest.raises(FormatError, match="no tokens, which MDS cannot hold"):
        export_dataset("mds", f"{tmp_path}/odd", f"{tmp_path}/odd-mds")
    with pytest.raises(ConfigError, match="format: unknown"):
        export_dataset("webdataset", f"{tmp_path}/odd", f"{tmp_path}/out")
    for name in FORMATS:
        eod = EOD if FORMATS[name].needs_eod else None
        files = export_dataset(name, build(f"{tmp_path}/en"), f"{tmp_path}/{name}/en", eod=eod).files
        for path in [*tmp_path.glob(f"{name}/**/*")]:
            if path.is_file() and path.suffix != ".metadata" and path.name != "dataset_info.json":
                data = path.read_bytes()
                path.write_bytes(data[: len(data) * 2 // 3 | 1])
                with pytest.raises(BinidxError):
                    import_dataset(name, files, f"{tmp_path}/cut-{name}", eod=eod, stored_dtype="uint16")
                path.write_bytes(data)
