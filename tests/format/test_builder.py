"""IndexedDatasetBuilder: Megatron's files byte for byte, in bounded memory, and never half of one."""

from __future__ import annotations

import gc
import queue
import tracemalloc
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from helpers.oracle import megatron
from helpers.random_datasets import DTYPES, Document, build_ours, build_theirs, random_documents

from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage.threads import background

THREE = [Document([1, 2, 3], [2, 1], []), Document([], [], []), Document([4], [0, 1], [])]


def pair(prefix) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_megatrons_byte_for_byte(dtype, tmp_path: Path) -> None:
    for seed in range(40):
        multimodal, by_item = bool(seed & 1), bool(seed & 2)
        documents = random_documents(np.random.default_rng(seed), dtype, seed % 7)
        theirs = build_theirs(tmp_path / "theirs", documents, dtype, multimodal, by_item)
        ours = build_ours(tmp_path / "ours", documents, dtype, multimodal, by_item)
        assert pair(ours) == pair(theirs)
        tokens = np.concatenate([np.asarray(document.tokens, dtype) for document in documents] or [np.array([], dtype)])
        dataset = IndexedDataset(ours, multimodal)
        assert dataset.read([(i, 0, int(n)) for i, n in enumerate(dataset.sequence_lengths)]) is not None
        assert b"".join(sequence.tobytes() for sequence in dataset.read(all_spans(dataset))) == tokens.tobytes()


def all_spans(dataset: IndexedDataset) -> list[tuple[int, int, int]]:
    return [(number, 0, int(length)) for number, length in enumerate(dataset.sequence_lengths)]


@pytest.mark.parametrize("multimodal", [False, True])
def test_merged_files_are_megatrons_byte_for_byte(multimodal: bool, tmp_path: Path) -> None:
    for seed in range(4):  # their add_index collects garbage, 0.2 s each time
        rng = np.random.default_rng(seed)
        documents = [random_documents(rng, np.int32, seed % 4 + 1) for _ in range(3)]
        parts = [build_theirs(tmp_path / f"part{i}", each, np.int32, multimodal) for i, each in enumerate(documents)]
        for prefix, kind in (("ours", IndexedDatasetBuilder), ("theirs", megatron.indexed.IndexedDatasetBuilder)):
            builder = kind(f"{tmp_path / prefix}.bin", np.int32, multimodal)
            builder.add_document([1, 2], [2], [1] if multimodal else None)
            for part in parts:
                builder.add_index(part)
            builder.add_document([3], [1], [2] if multimodal else None)
            builder.finalize(f"{tmp_path / prefix}.idx")
        assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")


def test_a_document_goes_on_until_it_is_ended(tmp_path: Path) -> None:
    part = build_theirs(tmp_path / "part", THREE, np.int32)
    for prefix, kind in (("ours", IndexedDatasetBuilder), ("theirs", megatron.indexed.IndexedDatasetBuilder)):
        builder = kind(f"{tmp_path / prefix}.bin")
        builder.add_item(torch.tensor([1, 2]))
        builder.add_document([3], [1])
        builder.add_item(torch.tensor([4]))
        builder.add_index(part)
        builder.end_document()
        builder.finalize(f"{tmp_path / prefix}.idx")
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3], np.uint16),
        np.array([1, 2, 3], np.int64),
        np.array([1, 2, 3], ">u2"),
        np.array([9, 1, 9, 2, 9, 3], np.uint16)[1::2],
        np.array([1.0, 2.0, 3.0]),
        ["1", "2", "3"],
        torch.tensor([1, 2, 3]),
        torch.tensor([[9, 1], [9, 2], [9, 3]])[:, 1],
        memoryview(b"\1\2\3"),
    ],
)
def test_whatever_holds_the_tokens_they_come_out_the_same(tokens, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint16) as builder:
        builder.add_item(tokens)
        builder.end_document()
        builder.add_document(tokens, [1, 2])
        builder.finalize(f"{tmp_path}/en.idx")
    found = IndexedDataset(f"{tmp_path}/en")
    assert [sequence.tolist() for sequence in found] == [[1, 2, 3], [1], [2, 3]]


UNFIT = [
    (np.uint16, [1, 70000], "token 70000 at position 1, uint16 holds 0 to 65535"),
    (np.uint16, np.array([70000, 1]), "token 70000 at position 0, uint16 holds"),
    (np.uint16, torch.tensor([3, -1]), "token -1 at position 1, uint16 holds"),
    (np.uint8, np.array([[1, 2], [256, 3]], np.uint64), "token 256 at position 2, uint8 holds 0 to 255"),
    (np.int8, np.array([200], np.uint8), "token 200 at position 0, int8 holds -128 to 127"),
    (np.int32, np.array([2**31], np.uint32), "token 2147483648 at position 0, int32 holds"),
    (np.int32, np.array([2**31], np.float32), "token 2147483648.0 at position 0, int32 holds"),
    (np.int64, np.array([2**63], np.uint64), "token 9223372036854775808 at position 0, int64 holds"),
    (np.int64, [2.0**63], "at position 0, int64 holds"),
    (np.int32, [1.0, 0.5], "token 0.5 at position 1, int32 holds"),
    (np.int32, [float("nan")], "token nan at position 0, int32 holds"),
    (np.int32, [float("inf")], "token inf at position 0, int32 holds"),
    (np.float32, [1e39], r"token 1e\+39 at position 0, float32 holds"),
    (np.float32, [2**24 + 1], "token 16777217 at position 0, float32 holds -16777216 to 16777216"),
    (np.float64, [2**53 + 1], "token 9007199254740993 at position 0, float64 holds"),
    (np.int32, [2**70], "tokens of type object, needed numbers of at most 64 bits"),
    (np.int32, ["1", "a"], "tokens as text, needed numbers of type int32 .*'a'"),
    (np.int32, ["1.5"], "tokens as text, needed numbers of type int32 .*'1.5'"),
    (np.uint16, ["1", "70000"], "token 70000 at position 1, uint16 holds"),
    (np.int64, ["1" * 30], "tokens as text, needed numbers of type int64"),
    (np.float32, ["1e39"], r"token 1e\+39 at position 0, float32 holds"),
    (np.int32, [1j], "tokens of type complex128, needed numbers"),
]


@pytest.mark.parametrize(("dtype", "tokens", "message"), UNFIT)
def test_a_token_that_does_not_fit_is_an_error_before_anything_is_written(
    dtype, tokens, message, tmp_path: Path
) -> None:
    with IndexedDatasetBuilder(f"{tmp_path}/en.bin", dtype) as builder:
        builder.add_document([7], [1])
        for add in (builder.add_item, lambda tokens: builder.add_document(tokens, [np.size(tokens)])):
            with pytest.raises(FormatError, match=rf"en.bin: .*{message}"):
                add(tokens)
        builder.finalize(f"{tmp_path}/en.idx")
    assert [sequence.tolist() for sequence in IndexedDataset(f"{tmp_path}/en")] == [[7]]


def test_tokens_at_the_limits_of_their_type_fit(tmp_path: Path) -> None:
    for dtype in (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64):
        limits = [int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)]
        with IndexedDatasetBuilder(f"{tmp_path}/en.bin", dtype) as builder:
            builder.add_document(limits, [2])
            builder.finalize(f"{tmp_path}/en.idx")
        assert IndexedDataset(f"{tmp_path}/en")[0].tolist() == limits


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 1], "lengths add up to 2, the document has 3 tokens"),
        ([], "lengths add up to 0, the document has 3 tokens"),
        ([4], "lengths add up to 4, the document has 3 tokens"),
        ([4, -1], "lengths -1 to 4, needed 0 to 2147483647"),
    ],
)
def test_lengths_must_tile_the_document(lengths, message, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(f"{tmp_path}/en.bin") as builder:
        with pytest.raises(FormatError, match=f"en.bin: {message}"):
            builder.add_document([1, 2, 3], lengths)
        builder.finalize(f"{tmp_path}/en.idx")
    assert len(IndexedDataset(f"{tmp_path}/en")) == 0


def test_modes_are_checked(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(f"{tmp_path}/en.bin", multimodal=True) as builder:
        with pytest.raises(FormatError, match="1 modes, needed one for each of 2 sequences"):
            builder.add_document([1, 2], [1, 1], [0])
        with pytest.raises(FormatError, match=r"\(modes\): token 128 at position 0, int8 holds -128 to 127"):
            builder.add_item([1], 128)
        builder.add_document([1, 2], [1, 1])
        builder.finalize(f"{tmp_path}/en.idx")
    assert IndexedDataset(f"{tmp_path}/en", multimodal=True).sequence_modes.tolist() == [0, 0]
    with IndexedDatasetBuilder(f"{tmp_path}/text.bin") as builder, pytest.raises(ConfigError, match="multimodal=True"):
        builder.add_item([1], 2)


def test_a_forgotten_end_document_is_an_error_that_can_be_mended(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/en.bin")
    builder.add_item([1, 2])
    with pytest.raises(FormatError, match=r"en.idx: 1 sequences after the last document bound; call end_document\(\)"):
        builder.finalize(f"{tmp_path}/en.idx")
    assert not IndexedDataset.exists(f"{tmp_path}/en")
    builder.end_document()
    builder.finalize(f"{tmp_path}/en.idx")
    assert IndexedDataset(f"{tmp_path}/en")[0].tolist() == [1, 2]


def test_a_type_the_format_lacks_fails_before_a_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="dtype: uint32, needed one of"):
        IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint32)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("how", ["error", "close", "forgotten"])
def test_without_finalize_nothing_appears_and_nothing_is_left(how: str, tmp_path: Path) -> None:
    old = build_ours(tmp_path / "en", THREE, np.int32)
    before = pair(old)
    builder = IndexedDatasetBuilder(f"{tmp_path}/en.bin")
    builder.add_document([5], [1])
    if how == "error":
        with pytest.raises(ZeroDivisionError), builder:
            1 / 0  # noqa: B018
    if how == "close":
        builder.close()
    del builder
    gc.collect()
    done = queue.SimpleQueue[None]()
    background().tokens.put(lambda: done.put(None))  # behind the token of a forgotten builder
    done.get(timeout=600)
    assert pair(old) == before
    assert left_in(tmp_path) == ["en.bin", "en.idx"]


def test_a_builder_is_used_once(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/en.bin")
    builder.finalize(f"{tmp_path}/en.idx")
    for again in (builder.end_document, lambda: builder.add_item([1]), lambda: builder.finalize("x")):
        with pytest.raises(ValueError, match=r"builder is closed$"):
            again()


def test_a_failed_merge_writes_nothing(tmp_path: Path) -> None:
    other = build_ours(tmp_path / "other", THREE, np.uint16)
    short = build_ours(tmp_path / "short", THREE, np.int32)
    Path(f"{short}.bin").write_bytes(b"123")
    with IndexedDatasetBuilder(f"{tmp_path}/en.bin") as builder:
        with pytest.raises(FormatError, match="other: dtype uint16, needed int32"):
            builder.add_index(other)
        with pytest.raises(FormatError, match=r"short.bin: 3 bytes, its .idx needs 16"):
            builder.add_index(short)
        with pytest.raises(ObjectNotFoundError, match="nowhere"):
            builder.add_index(f"{tmp_path}/nowhere")
        builder.finalize(f"{tmp_path}/en.idx")
    with (
        IndexedDatasetBuilder(f"{tmp_path}/multi.bin", multimodal=True) as builder,
        pytest.raises(FormatError, match="no modes, multimodal=True needs 4 bytes"),
    ):
        builder.add_index(build_ours(tmp_path / "text", THREE, np.int32))
    assert len(IndexedDataset(f"{tmp_path}/en")) == 0


def test_bytes_after_the_last_token_stay_behind_where_megatron_shifts_what_follows(tmp_path: Path) -> None:
    part = build_ours(tmp_path / "part", THREE, np.int32)
    with Path(f"{part}.bin").open("ab") as file:
        file.write(np.int32(777).tobytes())
    found = {}
    for prefix, kind in (("ours", IndexedDatasetBuilder), ("theirs", megatron.indexed.IndexedDatasetBuilder)):
        builder = kind(f"{tmp_path / prefix}.bin")
        builder.add_index(part)
        builder.add_document([5], [1])
        builder.finalize(f"{tmp_path / prefix}.idx")
        found[prefix] = IndexedDataset(str(tmp_path / prefix))[-1].tolist()
    assert found == {"ours": [5], "theirs": [777]}


def test_any_uri_is_written_and_merged_from(tmp_path: Path) -> None:
    local = build_ours(tmp_path / "en", THREE, np.int32)
    base = f"memory://{uuid.uuid4().hex}"
    build_ours(f"{base}/en", THREE, np.int32)
    with IndexedDatasetBuilder(f"{base}/two.bin") as builder:
        builder.add_index(f"{base}/en")
        builder.add_index(local)
        builder.finalize(f"{base}/two.idx")
    with fsspec.open(f"{base}/en.bin", "rb") as data, fsspec.open(f"{base}/en.idx", "rb") as index:
        assert (data.read(), index.read()) == pair(local)
    assert [sequence.tolist() for sequence in IndexedDataset(f"{base}/two")] == [[1, 2], [3], [], [4]] * 2


def test_a_million_sequences_take_a_bounded_memory(tmp_path: Path) -> None:
    block = np.zeros(1000, np.uint16)
    lengths = [1] * 1000
    tracemalloc.start()
    try:
        with IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint16, multimodal=True) as builder:
            for _ in range(1000):
                builder.add_document(block, lengths)
            builder.finalize(f"{tmp_path}/en.idx")
        built = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        with IndexedDatasetBuilder(f"{tmp_path}/two.bin", np.uint16, multimodal=True) as builder:
            for _ in range(2):
                builder.add_index(f"{tmp_path}/en")
            builder.finalize(f"{tmp_path}/two.idx")
        merged = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # One Python int alone is 28 bytes, so lists would take 36 MB and more; the .idx has 13 MB.
    assert max(built, merged) < 8 << 20
    assert len(IndexedDataset(f"{tmp_path}/two")) == 2_000_000
