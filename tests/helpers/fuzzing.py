"""Damage to the files that binidx reads: each try ends in a value or in one error of binidx, within a memory limit.

    python -m helpers.fuzzing KIND TRIES SEED      prints {"read": ..., "refused": ...}; exit status 1 and each
                                                   different other end once, if there is one

Every kind begins with a file that is right, most of them from tests/golden/state, and changes bytes of it or, in JSON,
values. The number of a try and the seed give its bytes again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from binidx.errors import BinidxError
from binidx.index.cache.index_files import IndexFiles
from binidx.storage.location import Location

GOLDEN = Path(__file__).parents[1] / "golden" / "state" / "local"
MEMORY_BYTES = 2 << 30
"""Beyond what the process has once the kind is set up; threads reserve some of it for their stacks."""

NUMBERS = [0, 1, 2, 7, 8, 127, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**64 - 1]
RECORDED_TIME = 1_700_000_000
"""Of all local files of the golden state."""

VALUES: list[Any] = [
    None, True, False, *NUMBERS, -1, -(2**31), -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "0", "a", "\x00", "\ud800", "../..", "é" * 300, "s3://", "file:///dev/null", [], {}, [[]], [None], {"a": 1},
]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A file that is right, and what reads it; `repaired` gives damaged content its checksum again."""

    data: bytes
    read: Callable[[bytes], object]
    text: bool = False
    repaired: Callable[[bytes], bytes] = bytes


def mutated(kind: Kind, rng: random.Random) -> bytes:
    """One to four changes, now and then of another right file's kind: nothing, or far too much of it."""
    data = kind.data
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        with contextlib.suppress(RecursionError):  # two changes that nest, one in the other, are too deep for `json`
            data = changed_json(data, rng) if kind.text and rng.random() < 0.7 else changed_bytes(data, rng)
    return kind.repaired(data) if rng.random() < 0.7 else data


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 16, 100))
    way = rng.randrange(8)
    if way < 2 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if way == 2:
        size = rng.choice((1, 2, 4, 8))
        number = (rng.choice(NUMBERS) + rng.choice((0, 0, -1, 1))) % (1 << 8 * size)
        return data[:at] + number.to_bytes(size, "little") + data[at + size :]
    if way == 3:
        return data[:at] + rng.randbytes(length) + data[at + length :]
    if way == 4:
        return data[:at] + data[at + length :]
    if way == 5:
        start = rng.randrange(len(data) + 1)
        return data[:at] + data[start : start + length] + data[at:]
    if way == 6:
        return data[:at]
    return data[:at] + bytes(length) + data[at:]


def changed_json(data: bytes, rng: random.Random) -> bytes:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places = list(islice(containers(whole), 5000))
    if not places:
        return json.dumps(rng.choice(VALUES)).encode()
    inside = rng.choice(places)
    keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
    way = rng.randrange(6)
    value = nested(rng) if way == 0 else rng.choice(VALUES)
    if not keys or way == 1:
        if isinstance(inside, dict):
            inside[rng.choice(["", "a", "\x00", "type", "size", "0", "-1"])] = value
        else:
            inside.append(value)
        return json.dumps(whole).encode()
    key = rng.choice(keys)
    if way == 2:
        del inside[key]
    elif way == 3:
        other = rng.choice(places)
        inside[key] = json.loads(json.dumps(other))
    else:
        inside[key] = value
    return json.dumps(whole).encode()


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from containers(each)


def nested(rng: random.Random) -> Any:
    value: Any = 0
    for _ in range(rng.choice((10, 70, 400))):
        value = [value]
    return value


# The kinds, each in a folder of its own


def index(folder: Path) -> Kind:
    return pair(folder, "corpus/en", ".idx")


def virtual_parts(folder: Path) -> Kind:
    shutil.copytree(GOLDEN / "corpus", folder / "corpus")
    for path in (folder / "corpus").iterdir():
        os.utime(path, (RECORDED_TIME, RECORDED_TIME))
    return pair(folder, "stored/virtual", ".parts.json", text=True)


def pair(folder: Path, prefix: str, suffix: str, *, text: bool = False) -> Kind:
    from binidx.format.indexed_dataset import IndexedDataset

    (folder / "stored").mkdir()
    for path in GOLDEN.glob(f"{prefix}.*"):
        shutil.copy2(path, folder / "stored")
    name = str(folder / "stored" / Path(prefix).name)

    def read(data: bytes) -> object:
        Path(name + suffix).write_bytes(data)
        with open_indexed(IndexedDataset, name) as dataset:
            count = len(dataset)
            spans = [(number, 0, int(dataset.sequence_lengths[number])) for number in {0, count // 2, count - 1}]
            return dataset.document_indices, dataset.read(spans) if count else None

    return Kind(Path(name + suffix).read_bytes(), read, text)


@contextlib.contextmanager
def open_indexed(kind: Any, name: str) -> Iterator[Any]:
    yield kind(name)


def in_memory(name: str) -> Any:
    from binidx.storage.adapters import InMemory

    return InMemory(name, (GOLDEN / name).read_bytes())


def seek_table(folder: Path) -> Kind:
    from binidx.storage.adapters import InMemory
    from binidx.storage.codecs.segments import SegmentedObject

    def read(data: bytes) -> object:
        opened = SegmentedObject(InMemory("a.bin.zst", data))
        return opened.read([(0, min(opened.size, 1 << 20)), (max(0, opened.size - 100), opened.size)])

    return Kind((GOLDEN / "stored" / "zst.bin.zst").read_bytes(), read)


def checksums(folder: Path) -> Kind:
    from binidx.storage.adapters import InMemory
    from binidx.storage.codecs.checksums import CheckedObject

    tokens = in_memory("stored/sums.bin")

    def read(data: bytes) -> object:
        opened = CheckedObject(tokens, InMemory("a.bin.xxh3", data))
        return opened.read([(0, opened.size)])

    return Kind((GOLDEN / "stored" / "sums.bin.xxh3").read_bytes(), read)


def bundle(folder: Path) -> Kind:
    import xxhash

    from binidx.format.prefix_listing import HEADER, format_bundle, parse_bundle

    files = {}
    for name in ("en", "de", "sentences"):
        data = memoryview((GOLDEN / "corpus" / f"{name}.idx").read_bytes())
        files[f"s3://b/{name}"] = {"size": len(data), "ETag": f'"{name}"'}, data

    def read(data: bytes) -> object:
        found = parse_bundle(memoryview(data), "a.bundle")
        return [found.find(prefix, identity) for prefix, (identity, _) in files.items()]

    def repaired(data: bytes) -> bytes:
        """With the checksum of its table, whose values change, too."""
        if len(data) < HEADER.size:
            return data
        size = min(HEADER.unpack_from(data)[1], len(data))
        table, rest = data[HEADER.size : HEADER.size + size], data[HEADER.size + size :]
        table = changed_json(table, random.Random(len(data) * 31 + sum(data[-20:])))
        return HEADER.pack(data[:8], len(table), xxhash.xxh3_64_intdigest(table)) + table + rest

    return Kind(b"".join(map(bytes, format_bundle(files, list(files)))), read, repaired=repaired)


def index_manifest(folder: Path) -> Kind:
    from binidx.index.cache.index_cache import IndexCache, has_fingerprint
    from binidx.index.cache.manifest import INDEX_MANIFEST_FILE, checksum_fields, parse_manifest

    [path] = sorted(GOLDEN.glob("cache/*-GPTDataset-train-binidx.json"))[:1]
    for each in GOLDEN.glob(f"cache/{path.name.removesuffix('-binidx.json')}*"):
        shutil.copy2(each, folder)
    cache = IndexCache(IndexFiles(Location.of(folder), path.name.removesuffix("-binidx.json")))
    written = json.loads(path.read_text())
    needed, names = written["fingerprint"], list(written["arrays"])

    def read(data: bytes) -> object:
        (folder / path.name).write_bytes(data)
        loaded = cache.load(needed, names), cache.open_ranges(names, lambda each: has_fingerprint(each, needed))
        parse_manifest(data, "a-binidx.json")  # raises what the cache only logs
        return loaded

    def repaired(data: bytes) -> bytes:
        try:
            fields = INDEX_MANIFEST_FILE.parse(data, "x")
        except BinidxError:
            return data
        if not isinstance(fields, dict):
            return data
        fields.pop("xxh3_64", None)
        return json.dumps({**fields, "xxh3_64": checksum_fields(fields)}).encode()

    return Kind(path.read_bytes(), read, True, repaired)


def cached_array(folder: Path) -> Kind:
    from binidx.index.cache.index_files import parse_npy

    [path] = sorted(GOLDEN.glob("cache/*-sample_index.npy"))[:1]

    def read(data: bytes) -> object:
        with contextlib.suppress(ValueError, TypeError):  # its callers build the index again
            return parse_npy(memoryview(data))
        return None

    return Kind(path.read_bytes(), read)


def run_json(folder: Path) -> Kind:
    from binidx.run.run_file import Run

    def read(data: bytes) -> object:
        (folder / "run.json").write_bytes(data)
        run = Run.load(str(folder / "run.json"))
        return run.schedule.samples_before(3), run.config

    return Kind((GOLDEN / "runs" / "staged.json").read_bytes(), read, text=True)


def packed_json(folder: Path) -> Kind:
    from binidx.packed.packed_run import load_packed_run

    described = json.loads((GOLDEN / "runs" / "packed.json").read_text())
    for each in described["sets"]:
        each["files"] = [str(GOLDEN / name) for name in each["files"]]

    def read(data: bytes) -> object:
        (folder / "packed.json").write_bytes(data)
        order = load_packed_run(str(folder / "packed.json"))
        return order.fingerprint, order.num_steps()

    return Kind(json.dumps(described).encode(), read, text=True)


def packed_names(folder: Path) -> Kind:
    """The text file of names that a packed.json may give instead of a list."""
    from binidx.packed.packed_run import load_packed_run

    described = json.loads((GOLDEN / "runs" / "packed.json").read_text())
    names = "\n".join(str(GOLDEN / name) for name in described["sets"][0]["files"])
    described["sets"] = [{**described["sets"][0], "files": str(folder / "names.txt")}]
    (folder / "packed.json").write_text(json.dumps(described))

    def read(data: bytes) -> object:
        (folder / "names.txt").write_bytes(data)
        return load_packed_run(str(folder / "packed.json")).fingerprint

    return Kind(names.encode(), read)


def packed_chunk(folder: Path) -> Kind:
    from binidx.packed.packed_files import PackedFiles

    [path] = sorted(GOLDEN.glob("packed/en/*"))[:1]

    def read(data: bytes) -> object:
        (folder / "a.bin").write_bytes(data)
        files = PackedFiles([str(folder / "a.bin")], 5)
        return files.read([0, 0], [0, files.num_blocks - 1])

    return Kind(path.read_bytes(), read)


def loader_state(folder: Path) -> Kind:
    import binidx

    shutil.copytree(GOLDEN / "corpus", folder / "corpus")
    from helpers.gpt_data import TOKENIZER

    config = binidx.GPTDatasetConfig(
        1, 16, ([str(folder / "corpus" / "en")], None), split="1,0,0", tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    dataset = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [40, 0, 0], lambda: True, config).build()[0]
    loader = binidx.build_pretraining_data_loader(dataset, 0, 2, 0, 1, dataloader_type="single")
    assert loader is not None

    def read(data: bytes) -> object:
        try:
            state = json.loads(data)
        except (ValueError, RecursionError):
            return None
        loader.load_state_dict(state)
        return loader.consumed_samples

    return Kind(json.dumps({**loader.state_dict(), "consumed_samples": 6}).encode(), read, text=True)


def convert_journal(folder: Path) -> Kind:
    from binidx.corpus.convert import convert_dataset
    from binidx.corpus.copies.convert_owner import ConvertOwner
    from binidx.storage.steps import run

    prefix, target, tries = str(GOLDEN / "corpus" / "en"), str(folder / "en"), iter(range(1 << 60))
    [partial] = (GOLDEN / "converted").glob("*.partial")

    def read(data: bytes) -> object:
        (folder / "en.convert.json").write_bytes(data)
        found = run(ConvertOwner(Location.of(target)).read_steps())
        if next(tries) % 20 == 0:  # takes some milliseconds
            for each in folder.glob("en.*"):
                if each.name != "en.convert.json":
                    each.unlink()
            shutil.copy2(partial, folder)
            convert_dataset(prefix, target)
            for end in ("bin", "idx"):
                assert Path(f"{prefix}.{end}").read_bytes() == Path(f"{target}.{end}").read_bytes()
        return found

    return Kind((GOLDEN / "converted" / "en.convert.json").read_bytes(), read, text=True)


def json_file(name: str) -> Callable[[Path], Kind]:
    def kind(folder: Path) -> Kind:
        from test_json_models import KINDS as FILES

        file, data = FILES[name]
        return Kind(data, lambda data: file.decode(data, name), text=True)

    return kind


def dataset_manifest(folder: Path) -> Kind:
    from test_json_models import KINDS as FILES

    from binidx.format.sidecars.dataset_manifest import read_manifest
    from binidx.prepare.preprocess.preprocess import machines_of

    path = folder / "a.manifest.json"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        found = read_manifest(Location.of(str(path)))
        assert found is not None
        return machines_of({"text": found}), found.get("counts", {}).get("dropped", {}), found.get("plan")

    return Kind(FILES["dataset manifest"][1], read, text=True)


def part_record(folder: Path) -> Kind:
    from test_json_models import RECORD

    from binidx.prepare.preprocess.job_files import RECORD_FILE

    def read(data: bytes) -> object:
        found = RECORD_FILE.decode(data, "a.json")
        return found.valid_for("skip"), found.counts, found.num_tokens, RECORD_FILE.encode(found)

    return Kind(RECORD_FILE.encode(RECORD), read, text=True)


def job_record(folder: Path) -> Kind:
    from helpers.preprocess_jobs import job_of
    from test_json_models import KINDS as FILES

    from binidx.prepare.preprocess.job_files import JobFiles

    files = JobFiles(job_of(["a"], folder / "en"), [])
    return Kind(FILES["job"][1], files.describe_difference, text=True)


def lineage(folder: Path) -> Kind:
    import numpy as np

    from binidx.corpus.lineage.lineage_writer import LineageWriter, build_lineage_table
    from binidx.format.sidecars.lineage import documents_at, documents_with_id, read_origins

    path, count = folder / "a.lineage.parquet", 50
    writer, numbers = LineageWriter(Location.of(str(path))), np.arange(count)
    names: list[Any] = [None if number % 3 else f"id-{number}" for number in range(count)]
    hashes = numbers.astype(np.uint64)
    writer.write(build_lineage_table(["a", "b"], numbers.astype(np.int32) % 2, numbers, numbers, names, hashes))
    writer.publish()

    def read(data: bytes) -> object:
        path.write_bytes(data)
        prefix = str(folder / "a")
        return (
            documents_with_id(Location.of(prefix), "id-3"),
            documents_at(Location.of(prefix), "b", 7),
            read_origins(Location.of(prefix), [1, 40]),
        )

    return Kind(path.read_bytes(), read)


TEXTS = ["The sea", "", " a <tool>  b", "é漢字 1234\n", "<|endoftext|> x"]


def tokenizer(kind: str, suffix: str) -> Callable[[Path], Kind]:
    def made(folder: Path) -> Kind:
        from helpers import trained_tokenizers

        from binidx import describe_tokenizer
        from binidx.prepare.tokenizers.engine_choice import choose_engine, reference_engine

        path = folder / f"tokenizer{suffix}"
        if suffix == ".model":
            trained_tokenizers.train_sentencepiece(path, model_type="bpe", byte_fallback=True)
        elif suffix == ".txt":
            path.write_text("[UNK]\n[CLS]\nthe\nsea\n##s\n漢\n" * 3)
        else:
            trained_tokenizers.save(kind, folder)
        whole, texts = path.read_bytes(), trained_tokenizers.buffers(TEXTS)
        # In most tries only the end of a vocabulary is there to be changed: else few changes meet anything else.
        small = shortened(whole) if suffix == ".json" else whole

        def read(data: bytes) -> object:
            path.write_bytes(data)
            spec = describe_tokenizer(str(path))
            return choose_engine(spec).encode(*texts), reference_engine(spec).encode(*texts)

        return Kind(small, read, text=suffix == ".json")

    return made


def shortened(whole: bytes) -> bytes:
    """A tokenizer.json with its first 300 entries, and the merges between them."""
    found = json.loads(whole)
    model = found["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {entry: number for entry, number in model["vocab"].items() if number < 300}
        model["merges"] = [
            pair for pair in model.get("merges") or [] if all(p in model["vocab"] for p in (*pair, "".join(pair)))
        ]
    return json.dumps(found).encode()


def tokenizer_config(folder: Path) -> Kind:
    from helpers import trained_tokenizers

    from binidx import describe_tokenizer

    trained_tokenizers.save("gpt2", folder)
    token = {"content": "<|endoftext|>", "special": True, "lstrip": False}
    config = {"eos_token": token, "added_tokens_decoder": {"0": token}, "tokenizer_class": "GPT2Tokenizer"}

    def read(data: bytes) -> object:
        (folder / "tokenizer_config.json").write_bytes(data)
        return describe_tokenizer(str(folder))

    return Kind(json.dumps(config).encode(), read, text=True)


def text(name: str) -> Callable[[Path], Kind]:
    def made(folder: Path) -> Kind:
        return Kind(text_bytes(name), lambda data: read_text(folder / name, data))

    return made


def text_bytes(name: str) -> bytes:
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as parquet
    import zstandard

    values = [{"text": f"some text {number} é", "id": number, "more": [number, {}]} for number in range(40)]
    lines = b"".join(json.dumps(value).encode() + b"\n" for value in values)
    if name.endswith(".parquet"):
        out = io.BytesIO()
        columns = {"text": [f"some text {n}" for n in range(60)], "id": list(range(60)), "more": [["a", None]] * 60}
        parquet.write_table(pa.table(columns), out, row_group_size=25, compression="zstd", write_page_checksum=False)
        return out.getvalue()
    if name.endswith(".gz"):
        return gzip.compress(lines[:800]) + gzip.compress(lines[800:])
    if name.endswith(".zst"):
        return zstandard.compress(lines[:800]) + zstandard.compress(lines[800:])
    return lines


def read_text(path: Path, data: bytes) -> object:
    """As a job reads it that leaves out problems; its counts must add up."""
    from binidx.format.sidecars.dataset_manifest import RowCounts
    from binidx.prepare.text.inputs import find_inputs
    from binidx.prepare.text.read import read_slice
    from binidx.prepare.text.slices import Extent, check_extents, plan_slices

    path.write_bytes(data)
    extents = []
    for piece in plan_slices(find_inputs(str(path), damaged_too=True), 500):
        counts, extent = RowCounts(), Extent()
        for (batch,) in read_slice(piece, id_key="id", extent=extent):
            counts.num_rows += batch.num_rows
            counts.num_documents += batch.num_documents
            counts.drop(batch.dropped)
            for problem in batch.problems:
                counts.drop({problem.kind: 1})
        counts.check(str(path))
        extents.append((piece, extent))
    check_extents(extents)
    return extents


KINDS: dict[str, Callable[[Path], Kind]] = {
    "idx": index,
    "seek table": seek_table,
    "checksums": checksums,
    "parts.json": virtual_parts,
    "dataset manifest": dataset_manifest,
    "idx bundle": bundle,
    "index manifest": index_manifest,
    "cached array": cached_array,
    "run.json": run_json,
    "packed.json": packed_json,
    "packed names": packed_names,
    "packed chunk": packed_chunk,
    "loader state": loader_state,
    "convert journal": convert_journal,
    "job": job_record,
    "part record": part_record,
    "orders": json_file("orders"),
    "baked": json_file("baked"),
    "read plan": json_file("read plan"),
    "claim": json_file("claim"),
    "cached object": json_file("cached object"),
    "lineage": lineage,
    "tokenizer.json": tokenizer("cl100k", ".json"),
    "tokenizer.json, sentencepiece": tokenizer("sentencepiece-like", ".json"),
    "tokenizer.model": tokenizer("", ".model"),
    "vocab.txt": tokenizer("", ".txt"),
    "tokenizer_config.json": tokenizer_config,
    "jsonl": text("a.jsonl"),
    "jsonl.gz": text("a.jsonl.gz"),
    "jsonl.zst": text("a.jsonl.zst"),
    "parquet": text("a.parquet"),
}


def fuzz(name: str, tries: int, seed: int) -> tuple[dict[str, int], dict[str, str]]:
    """Try so many files of a kind. Return how many ended how, and the first of each kind of other end, in words."""
    ends, others = {"read": 0, "refused": 0}, dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        kind = KINDS[name](Path(folder))
        kind.read(kind.data)
        for number in range(tries):
            data = mutated(kind, random.Random(f"{name} {seed} {number}"))
            try:
                kind.read(data)
                ends["read"] += 1
            except BinidxError as error:
                ends["refused"] += 1
                if "\n" in str(error).strip() or not str(error):
                    others.setdefault("not one line", f"try {number}: {error}")
            except Exception as error:
                [*_, frame] = traceback.extract_tb(error.__traceback__)
                text = f"try {number}: {data[:2000]!r}\n{''.join(traceback.format_exception(error))}"
                others.setdefault(f"{type(error).__name__} at {frame.filename}:{frame.lineno}", text)
    return ends, others


def limit_memory() -> None:
    """Limit the memory of this process to what it has and `MEMORY_BYTES`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    name, tries, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        KINDS[name](Path(folder))  # imports what the kind needs
    limit_memory()
    ends, others = fuzz(name, tries, seed)
    print(json.dumps(ends))
    if others:
        sys.exit("\n".join(f"{name}, seed {seed}: {end}; {text}" for end, text in others.items()))


if __name__ == "__main__":
    main()
