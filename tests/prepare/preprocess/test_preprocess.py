"""preprocess: the same bytes as Megatron's tool, however the work is cut and whoever does it."""

from __future__ import annotations

import gzip
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import xxhash
import zstandard
from conftest import Bucket
from helpers.conversion import names_beside
from helpers.preprocess_jobs import (
    EOD,
    corpus,
    files_of,
    job_of,
    run,
    texts,
    theirs,
    tokenizer_path,
    with_bos,
    write_lines,
)

from binidx import describe_tokenizer
from binidx.errors import ConfigError, FormatError, ObjectExistsError
from binidx.format.document_blocks import batch_by_size
from binidx.format.indexed_dataset import IndexedDataset
from binidx.jobs.parts import Shard
from binidx.jobs.progress import SilentWatcher
from binidx.prepare.preprocess.job import choose_part_bytes, plan_parts
from binidx.prepare.preprocess.preprocess import preprocess
from binidx.prepare.text.batch import Filters
from binidx.prepare.text.inputs import find_inputs


@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.parametrize("part_bytes", [1000, 7919, 1 << 30])
def test_the_bytes_are_megatrons_however_the_work_is_cut(part_bytes: int, append_eod: bool, tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    needed = theirs(inputs, tmp_path / "theirs", eod=0 if append_eod else None)
    run(job_of(inputs, tmp_path / "en", part_bytes=part_bytes, append_eod=append_eod))
    assert files_of(tmp_path / "en_text_document") == needed
    assert names_beside(f"{tmp_path}/en") == [
        f"en_text_document.{end}" for end in ("bin", "idx", "lineage.parquet", "manifest.json")
    ]


def test_lists_empty_texts_and_several_keys_are_stored_as_megatron_does(tmp_path: Path) -> None:
    rows = [
        {"text": "", "parts": ["one", "two words"]},
        {"text": "a", "parts": []},
        {"text": ["", "b", "", "c"], "parts": "plain"},
        {"text": [], "parts": [""]},
        {"text": "last", "parts": ["", "end", ""]},
    ]
    inputs = [write_lines(tmp_path / "in.jsonl", rows)]
    report = run(job_of(inputs, tmp_path / "en", keys=("text", "parts"), part_bytes=60))
    for key in ("text", "parts"):
        assert files_of(tmp_path / f"en_{key}_document") == theirs(inputs, tmp_path / f"theirs_{key}", key)
    counts = report.manifests["parts"]["counts"]
    assert (counts["num_documents"], counts["num_empty"]) == (5, 1)


def test_a_tokenizer_with_a_bos_is_followed(tmp_path: Path) -> None:
    path = with_bos(tmp_path)
    inputs = [write_lines(tmp_path / "in.jsonl", [{"text": text} for text in ["", *texts(20)]])]
    run(job_of(inputs, tmp_path / "en", tokenizer=describe_tokenizer(path, eod=EOD)))
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs", path=path)


def test_every_format_gives_the_same_dataset(tmp_path: Path) -> None:
    plain = corpus(tmp_path / "in", files=1)[0]
    lines = Path(plain).read_bytes()
    (tmp_path / "en.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "en.jsonl.zst").write_bytes(zstandard.compress(lines))
    rows = [json.loads(line) for line in lines.splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "en.parquet", row_group_size=50)
    needed = theirs([plain], tmp_path / "theirs")
    for end in ("jsonl.gz", "jsonl.zst", "parquet"):
        run(job_of([f"{tmp_path}/en.{end}"], tmp_path / end, id_key="id"))
        assert files_of(f"{tmp_path}/{end}_text_document") == needed
        lineage = parquet.read_table(f"{tmp_path}/{end}_text_document.lineage.parquet").to_pydict()
        assert lineage["row"] == list(range(200))
        assert lineage["id"] == [row["id"] for row in rows]


def test_lineage_says_file_line_byte_and_hash_of_every_document(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    Path(inputs[1]).write_bytes(b"\n\n" + Path(inputs[1]).read_bytes())
    run(job_of(inputs, tmp_path / "en", id_key="id"))
    dataset = IndexedDataset(str(tmp_path / "en_text_document"))
    found = parquet.read_table(tmp_path / "en_text_document.lineage.parquet")
    assert len(found) == len(dataset.document_indices) - 1 == 400
    bounds = dataset.document_indices
    for document, told in enumerate(found.to_pylist()):
        line = Path(told["source"]).read_bytes()[told["byte"] :].split(b"\n")[0]
        assert line == Path(told["source"]).read_bytes().split(b"\n")[told["row"]]
        assert json.loads(line)["id"] == told["id"]
        tokens = [dataset[number] for number in range(bounds[document], bounds[document + 1])]
        data = np.concatenate([np.empty(0, np.uint16), *tokens]).astype(np.uint16).tobytes()
        assert xxhash.xxh3_64_intdigest(data) == told["hash"]


def test_lineage_takes_few_bytes_a_document(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", count=5000)
    run(job_of(inputs, tmp_path / "en", part_bytes=1 << 20))
    assert (tmp_path / "en_text_document.lineage.parquet").stat().st_size < 20 * 10_000


def test_compressed_datasets_hold_the_same_tokens(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    needed = theirs(inputs, tmp_path / "theirs")
    run(job_of(inputs, tmp_path / "en", codec="zstd"))
    group_slices, index = files_of(tmp_path / "en_text_document", ".bin.zst")
    plain = zstandard.ZstdDecompressor().stream_reader(group_slices, read_across_frames=True).read()
    assert (plain, index) == needed


class Told(SilentWatcher):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


def test_an_input_that_is_named_twice_is_stored_twice_and_told_of(tmp_path: Path) -> None:
    one, watch = corpus(tmp_path / "in", files=1)[0], Told()
    report = run(job_of([one, f"{tmp_path}/in/*.jsonl"], tmp_path / "en"), watch=watch)
    assert watch.said == [f"{one}: named 2 times; its documents will be stored 2 times"]
    assert files_of(tmp_path / "en_text_document") == theirs([one, one], tmp_path / "theirs")
    assert report.manifests["text"]["counts"]["num_rows"] == 400
    rows = parquet.read_table(tmp_path / "en_text_document.lineage.parquet")["row"].to_pylist()
    assert rows == [*range(200), *range(200)]


def test_no_text_is_an_empty_dataset(tmp_path: Path) -> None:
    for codec, suffix in (("raw", ".bin"), ("zstd", ".bin.zst")):
        empty = write_lines(tmp_path / "in.jsonl", [])
        run(job_of([empty], tmp_path / codec, codec=codec))
        assert len(IndexedDataset(f"{tmp_path}/{codec}_text_document")) == 0
        assert files_of(f"{tmp_path}/{codec}_text_document", suffix)[1] == theirs([empty], tmp_path / "theirs")[1]


def test_s3_to_s3_is_the_same_dataset(s3: Bucket, tmp_path: Path) -> None:
    inputs, base = corpus(tmp_path / "in"), s3.fresh()
    fs, path = fsspec.url_to_fs(base)
    for name in inputs:
        fs.put(name, f"{path}/in/{Path(name).name}")
    run(job_of([f"{base}/in/*.jsonl"], f"{base}/en"))
    assert files_of(f"{base}/en_text_document") == theirs(inputs, tmp_path / "theirs")
    fs.invalidate_cache()
    left = [name.rsplit("/", 1)[1] for name in fs.find(path) if "/in/" not in name]
    assert sorted(left) == [f"en_text_document.{end}" for end in ("bin", "idx", "lineage.parquet", "manifest.json")]


def test_a_finished_job_is_left_alone_and_another_is_not_written_over(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    first = run(job_of(inputs, tmp_path / "en"))
    before = (tmp_path / "en_text_document.bin").stat()  # a read may change the atime alone
    again = run(job_of(inputs, tmp_path / "en"))
    assert (again.parts_made, again.manifests) == (0, first.manifests)
    now = (tmp_path / "en_text_document.bin").stat()
    assert (now.st_ino, now.st_size, now.st_ctime_ns) == (before.st_ino, before.st_size, before.st_ctime_ns)
    with pytest.raises(ObjectExistsError, match=r"en_text_document: holds \.bin, \.idx"):
        run(job_of(inputs, tmp_path / "en", append_eod=False))
    run(job_of(inputs, tmp_path / "en", append_eod=False), overwrite=True)
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs", eod=None)


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_parts_of_another_job_are_dropped_by_overwrite(where: str, tmp_path: Path, s3: Bucket) -> None:
    inputs, base = corpus(tmp_path / "in"), s3.fresh() if where == "s3" else str(tmp_path)
    bad = write_lines(tmp_path / "in" / "2.jsonl", ["{"])
    with pytest.raises(FormatError, match="malformed"):
        run(job_of([*inputs, bad], f"{base}/en"))
    assert len(below(f"{base}/en-parts")) > 4
    run(job_of([*inputs, bad], f"{base}/en", on_error="skip"), overwrite=True)
    assert below(f"{base}/en-parts") == []


def below(uri: str) -> list[str]:
    """Names of all objects there."""
    fs, path = fsspec.url_to_fs(uri)
    fs.invalidate_cache()
    return [name for name in fs.find(path) if name != path]  # SeaweedFS keeps a folder for a while


def test_parts_of_another_job_are_named_by_what_differs(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    bad = write_lines(tmp_path / "in" / "2.jsonl", ["{"])
    with pytest.raises(FormatError, match=r"2.jsonl: line 1, byte 0: malformed"):
        run(job_of([*inputs, bad], tmp_path / "en"))
    with pytest.raises(
        ObjectExistsError,
        match="parts of another job, which differs in append_eod; finish that job",
    ):
        run(job_of([*inputs, bad], tmp_path / "en", append_eod=False))
    with pytest.raises(
        ObjectExistsError,
        match=r"of other inputs: .*0\.jsonl, .*1\.jsonl, .*2\.jsonl; finish that job, or give --overwrite",
    ):
        run(job_of(inputs, tmp_path / "en"))
    with pytest.raises(ObjectExistsError, match="of inputs that changed since, or of another --part-bytes or --format"):
        run(job_of([*inputs, bad], tmp_path / "en", part_bytes=6000))
    other = describe_tokenizer(tokenizer_path(), eod="<pad>")
    with pytest.raises(ObjectExistsError, match="which differs in tokenizer eod, filters min_characters; finish"):
        run(job_of([*inputs, bad], tmp_path / "en", tokenizer=other, filters=Filters(2)))
    run(job_of(inputs, tmp_path / "en"), overwrite=True)
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")


def test_a_job_that_failed_before_it_made_a_part_is_in_nobodys_way(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    # One thread: of another a part may still be in work, as the executor is not that of the job.
    with ThreadPoolExecutor(1) as thread, pytest.raises(FormatError, match="missing key: 'body' is not among"):
        preprocess(job_of(inputs, tmp_path / "en", keys=("body",)), executor=thread, workers=1)
    assert not (tmp_path / "en-parts").exists()
    (tmp_path / "array.json").write_text('[{"text": "a"}]')
    with pytest.raises(FormatError, match=r"one JSON array needs a line for each row: jq -c"):
        run(job_of([str(tmp_path / "array.json")], tmp_path / "array"))
    run(job_of(inputs, tmp_path / "en"))
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")
    assert not (tmp_path / "en-parts").exists()


@pytest.mark.parametrize("where", ["disk", "file", "s3"])
def test_a_job_may_write_into_the_folder_that_it_reads(where: str, tmp_path: Path, s3: Bucket) -> None:
    inputs = corpus(tmp_path / "in")
    bad = write_lines(tmp_path / "in" / "2.jsonl", ["{"])
    folder = {"disk": f"{tmp_path}/in", "file": f"file://{tmp_path}/in", "s3": s3.fresh()}[where]
    if where == "s3":
        fsspec.filesystem("s3").put([*inputs, bad], f"{folder}/")
    job = job_of([f"{folder}/"], f"{folder}/en", on_error="quarantine")
    preprocess(job, shard=Shard(0, 2), executor=ThreadPoolExecutor(1))
    report = run(job)
    assert report.parts_made < report.parts
    assert files_of(f"{folder}/en_text_document") == theirs(inputs, tmp_path / "theirs")
    again = run(replace(job, inputs=(f"{folder}/*.jsonl",)))
    assert (again.parts_made, len(again.manifests["text"]["sources"])) == (0, 3)


def test_a_name_that_tells_no_format_is_read_as_the_one_that_is_said(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", files=1)
    Path(inputs[0]).rename(tmp_path / "part-00000")
    run(job_of([str(tmp_path / "part-00000")], tmp_path / "en", format="jsonl"))
    assert files_of(tmp_path / "en_text_document") == theirs([str(tmp_path / "part-00000")], tmp_path / "theirs")


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        r"on_error: unknown .found stop": {"on_error": "stop"},
        r"codec: unknown .found lz4": {"codec": "lz4"},
        r"keys: repeated .found a, a, need each once": {"keys": ("a", "a")},
        "inputs, keys: found none": {"keys": ()},
        r"part_bytes: too small .found 0": {"part_bytes": 0},
        r"min_tokens, max_tokens: not a range .found 10, 5, need 0 or more": {"min_tokens": 10, "max_tokens": 5},
        "compared_share: found 2, need 0 to 1": {"compared_share": 2},
    }
    for message, options in cases.items():
        with pytest.raises(ConfigError, match=message):
            job_of(["x.jsonl"], tmp_path / "en", **options)
    with pytest.raises(ConfigError, match=r"workers: too few .found 0, need 1 or more"):
        preprocess(job_of(["x.jsonl"], tmp_path / "en"), workers=0)
    for inputs, output in (([""], "out"), (["x.jsonl"], "")):
        with pytest.raises(ConfigError, match="inputs, output: found an empty name, need paths or URIs"):
            job_of(inputs, output)
    with pytest.raises(ConfigError, match="a folder; give a prefix such as out/en"):
        job_of(["x.jsonl"], "out/")
    with pytest.raises(ConfigError, match="append_eod needs an EOD"):
        job_of(["x.jsonl"], "out", tokenizer=describe_tokenizer(job_of(["x"], "y").tokenizer.uri))


def test_a_part_keeps_its_name_until_what_decides_its_bytes_changes(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    found = find_inputs(inputs)
    names = [part.name for part in plan_parts(job_of(inputs, "a"), found)]
    for same in ({"engine": "hf"}, {"compared_share": 0.5}, {"on_error": "skip"}):
        assert [part.name for part in plan_parts(job_of(inputs, "b", **same), found)] == names
    for other in ({"append_eod": False}, {"min_tokens": 3}, {"keys": ("id",)}, {"codec": "zstd"}):
        assert not {part.name for part in plan_parts(job_of(inputs, "a", **other), found)} & set(names)
    Path(inputs[1]).write_bytes(Path(inputs[1]).read_bytes() + b"\n")
    changed = [part.name for part in plan_parts(job_of(inputs, "a"), find_inputs(inputs))]
    assert set(changed) & set(names) == set(names[: len(set(changed) & set(names))])
    assert len(set(changed) & set(names)) > 0


def test_small_neighbours_share_a_part_and_parts_follow_the_size_of_all() -> None:
    sizes = [5, 5, 5, 1, 10, 5, 10, 6, 0, 16]
    groups = [sizes[first:last] for first, last in batch_by_size(np.cumsum([0, *sizes]), 15)]
    assert groups == [[5, 5, 5], [1, 10], [5, 10], [6, 0], [16]]
    assert [*batch_by_size(np.array([0]), 15)] == []
    assert [choose_part_bytes(total) >> 20 for total in (0, 1 << 28, 1 << 32, 1 << 37, 1 << 41)] == [
        4,
        16,
        64,
        256,
        512,
    ]


def test_a_part_of_a_byte_is_refused_with_a_size_that_is_not(tmp_path: Path) -> None:
    inputs = [write_lines(tmp_path / "in.jsonl", texts(400))]
    size = sum(os.stat(path).st_size for path in inputs)
    assert size > 2000
    with pytest.raises(ConfigError, match=rf"part_bytes: found 1, which is {size:,} parts of {size:,} bytes") as error:
        plan_parts(job := job_of(inputs, tmp_path / "en", part_bytes=1), find_inputs(inputs))
    least = int(str(error.value).split("need at least ")[1].split(";")[0].replace(",", ""))
    assert len(plan_parts(replace(job, part_bytes=least), find_inputs(inputs))) <= 2000


def test_an_input_too_large_for_a_part_that_cannot_be_cut_is_told_of(tmp_path: Path) -> None:
    watch = Told()
    for name, size in (("a.jsonl.gz", 600 << 20), ("b.jsonl", 600 << 20), ("c.jsonl.gz", 1 << 20)):
        (tmp_path / name).write_bytes(b"{")
        os.truncate(tmp_path / name, size)  # of no blocks on the disk
    with pytest.raises(FormatError):
        run(job_of([str(tmp_path)], tmp_path / "out" / "en", part_bytes=64 << 20), watch=watch)
    assert watch.said == [
        f"{tmp_path}/a.jsonl.gz: 600 MiB that cannot be cut, the largest of 1 such inputs: one worker reads each; "
        "docs/reference/text-inputs.md lists the formats that can be cut"
    ]


def test_split_sentences_are_sequences_of_their_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk
    from nltk.tokenize.punkt import PunktTokenizer, PunktTrainer, save_punkt_params

    place = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "english"
    place.parent.mkdir(parents=True)
    place.mkdir(mode=0o700)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    text = "The sea wrote tokens. It did so quietly! In the end, who knows? " * 30
    save_punkt_params(PunktTrainer(text).get_params(), str(place))
    rows = [text[: 7 * number] for number in range(20)]
    inputs = [write_lines(tmp_path / "in.jsonl", [{"text": row} for row in rows])]
    cut = [PunktTokenizer("english").tokenize(row) for row in rows]
    sentences = [write_lines(tmp_path / "cut.jsonl", [{"text": row} for row in cut])]
    run(job_of(inputs, tmp_path / "en", split_sentences=True, part_bytes=300))
    assert files_of(tmp_path / "en_text_sentence") == theirs(sentences, tmp_path / "theirs")


def test_gcs_composes_the_parts(gs: str, tmp_path: Path) -> None:
    inputs, target = corpus(tmp_path / "in"), f"{gs}/{tmp_path.name}/en"
    run(job_of(inputs, target, part_bytes=1000))  # more than the 32 that one compose takes
    assert files_of(f"{target}_text_document") == theirs(inputs, tmp_path / "theirs")
    fs, path = fsspec.url_to_fs(target)
    fs.invalidate_cache()
    left = sorted(name.rsplit("/", 1)[1] for name in fs.find(path.rpartition("/")[0]))
    assert left == [f"en_text_document.{end}" for end in ("bin", "idx", "lineage.parquet", "manifest.json")]
