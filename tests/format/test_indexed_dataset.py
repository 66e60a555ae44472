"""IndexedDataset against Megatron's: the same tokens, byte for byte, from any store."""

from __future__ import annotations

import gc
import json
import runpy
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xxhash
from helpers.oracle import megatron
from helpers.random_datasets import DTYPES, Document, build_ours, build_theirs, random_documents

from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.format.prefix_advice import did_you_mean
from binidx.format.source import PairSource
from binidx.format.tokens import read_spans
from binidx.storage.location import Location

GOLDEN = Path(__file__).parent.parent / "golden"
EXPECTED = runpy.run_path(str(GOLDEN / "make.py"))["EXPECTED"]


def same(ours, theirs) -> bool:
    return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


def to_memory(prefix: str) -> str:
    """The pair, copied under memory://."""
    target = f"memory://indexed/{Path(prefix).name}"
    for end in (".idx", ".bin"):
        with fsspec.open(target + end, "wb") as out:
            out.write(Path(prefix + end).read_bytes())
    return target


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_files_of_megatron_say_what_was_written(name: str) -> None:
    documents, modes = EXPECTED[name]
    dataset = IndexedDataset(str(GOLDEN / name), multimodal=modes is not None)
    sequences = [sequence for document in documents for sequence in document]
    found = dataset[:] if modes is None else dataset[:][0]
    assert [tokens.tolist() for tokens in found] == sequences
    assert dataset.document_indices.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    if modes is not None:
        assert dataset.sequence_modes.tolist() == modes


@pytest.mark.parametrize("store", ["mmap", "file", "memory"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_access_gives_what_megatron_gives(dtype, store: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for multimodal in (False, True):
        prefix = build_theirs(tmp_path / f"d{multimodal}", random_documents(rng, dtype, 12), dtype, multimodal)
        theirs = megatron.indexed.IndexedDataset(prefix, multimodal)
        ours = IndexedDataset(to_memory(prefix) if store == "memory" else prefix, multimodal, mmap=store == "mmap")
        assert len(ours) == len(theirs)
        assert ours.index.dtype is theirs.index.dtype is dtype
        for name in ("sequence_lengths", "document_indices"):
            assert same(getattr(ours, name), getattr(theirs, name))
        numbers = [0, -1, len(ours) - 1, -len(ours), np.int32(2), np.int64(-3), np.uint8(1)]
        numbers += rng.integers(-len(ours), len(ours), 20).tolist()
        for number in numbers:
            check_item(ours[number], theirs[number], multimodal)
            length = int(theirs.sequence_lengths[number])
            offset = int(rng.integers(0, length + 1))
            count = int(rng.integers(0, length - offset + 1))
            check_item(ours.get(number), theirs.get(number), multimodal)
            check_item(ours.get(number, offset), theirs.get(number, offset), multimodal)
            check_item(ours.get(number, offset, count), theirs.get(number, offset, count), multimodal)
        for wanted in (slice(None), slice(3, 9), slice(-4, None), slice(0, 1), slice(2, 10**9)):
            check_slice(ours[wanted], theirs[wanted], multimodal)


def check_item(ours, theirs, multimodal: bool) -> None:
    if multimodal:
        assert ours[1] == theirs[1]
        assert ours[1].dtype == np.int8
        ours, theirs = ours[0], theirs[0]
    assert same(ours, theirs)


def check_slice(ours, theirs, multimodal: bool) -> None:
    if multimodal:
        assert same(ours[1], theirs[1])
        ours, theirs = ours[0], theirs[0]
    assert len(ours) == len(theirs)
    assert all(map(same, ours, theirs))


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    """Five sequences of 3, 0, 2, 4, 1 tokens, uint16, numbered from 10 on."""
    documents = [Document(np.arange(10, 15), [3, 0, 2], []), Document(np.arange(15, 20), [4, 1], [])]
    return IndexedDataset(build_ours(tmp_path / "five", documents, np.uint16))


def test_an_empty_slice_is_an_empty_list_where_megatron_gives_one_empty_array(dataset: IndexedDataset) -> None:
    theirs = megatron.indexed.IndexedDataset(dataset.path_prefix)
    assert [array.tolist() for array in theirs[2:2]] == [[]]
    assert dataset[2:2] == dataset[4:1] == dataset[99:] == []


def test_iteration_ends(dataset: IndexedDataset) -> None:
    assert [tokens.tolist() for tokens in dataset] == [[10, 11, 12], [], [13, 14], [15, 16, 17, 18], [19]]


def test_spans_are_located_in_bytes_and_read_in_the_order_asked(dataset: IndexedDataset) -> None:
    spans = [(3, 1, 2), (0, 0, 3), (3, 1, 2), (1, 0, 0), (4, 1, 0), (-1, 0, 1)]
    assert dataset.locate(spans) == [(12, 16), (0, 6), (12, 16), (6, 6), (20, 20), (18, 20)]
    found = [tokens.tolist() for tokens in dataset.read(spans)]
    assert found == [[16, 17], [10, 11, 12], [16, 17], [], [], [19]]
    assert dataset.locate([]) == dataset.read([]) == []


def test_spans_of_numpy_integers_do_not_overflow(dataset: IndexedDataset) -> None:
    with pytest.raises(ValueError, match="2147483647 tokens from 2147483647 of sequence 0, which has 3"):
        dataset.locate([(np.int32(0), np.int32(2**31 - 1), np.int32(2**31 - 1))])


def test_many_datasets_are_read_in_one_go(dataset: IndexedDataset) -> None:
    remote = IndexedDataset(to_memory(dataset.path_prefix))
    found = read_spans([(dataset, [(0, 1, 2)]), (remote, [(3, 0, 4), (2, 0, 1)]), (dataset, [])])
    assert [[tokens.tolist() for tokens in part] for part in found] == [[[11, 12]], [[15, 16, 17, 18], [13]], []]


@pytest.mark.parametrize("number", [5, -6, 2**40])
def test_a_sequence_that_is_not_there_is_an_index_error(dataset: IndexedDataset, number: int) -> None:
    for ask in (dataset.__getitem__, dataset.get, lambda i: dataset.read([(i, 0, 0)])):
        with pytest.raises(IndexError, match=f"five: sequence {number}, it has 5"):
            ask(number)


@pytest.mark.parametrize("span", [(0, 0, 4), (0, 4, 0), (0, -1, 1), (0, 2, -1), (1, 0, 1), (4, 1, 1)])
def test_tokens_outside_the_sequence_are_a_value_error(dataset: IndexedDataset, span: tuple[int, int, int]) -> None:
    message = f"five: {span[2]} tokens from {span[1]} of sequence {span[0]}, which has"
    for ask in (dataset.get, lambda *span: dataset.locate([span])):
        with pytest.raises(ValueError, match=message):
            ask(*span)


def test_an_offset_past_the_end_is_a_value_error(dataset: IndexedDataset) -> None:
    with pytest.raises(ValueError, match="0 tokens from 4 of sequence 0, which has 3"):
        dataset.get(0, 4)


def test_an_index_that_is_no_number_and_a_prefix_that_is_no_path_are_named(dataset: IndexedDataset) -> None:
    for key in ("0", 0.0, None, slice(2)):
        with pytest.raises(TypeError, match=rf"five: index of type {type(key).__name__}, needed an integer or"):
            dataset.get(key)
    for prefix in (None, 3, ""):
        with pytest.raises(ConfigError, match=f"^path_prefix: found {prefix!r}, needs a path or URI"):
            IndexedDataset(prefix)


def test_other_keys_are_refused_as_megatron_refuses_them(dataset: IndexedDataset) -> None:
    theirs = megatron.indexed.IndexedDataset(dataset.path_prefix)
    for either in (dataset, theirs):
        for step in (slice(None, None, 2), slice(None, None, -1)):
            with pytest.raises(ValueError, match=r"(?i)slice"):
                either[step]
        for key in (1.0, "1", [0, 1], None, np.array([1, 2])):
            with pytest.raises(TypeError):
                either[key]


def test_modes_of_a_text_dataset_say_how_to_get_them(dataset: IndexedDataset) -> None:
    with pytest.raises(ConfigError, match="five: opened as text, modes need multimodal=True"):
        dataset.sequence_modes  # noqa: B018


def test_identity_is_that_of_the_index_wherever_it_lies(dataset: IndexedDataset, tmp_path: Path) -> None:
    assert IndexedDataset(to_memory(dataset.path_prefix)).identity == dataset.identity
    documents = [Document(np.arange(10, 15), [3, 0, 2], []), Document(np.arange(15, 20), [4, 1], [])]
    for change in ([3, 1, 1], [2, 1, 2], [5]):
        documents[0].lengths = change
        assert IndexedDataset(build_ours(tmp_path / "other", documents, np.uint16)).identity != dataset.identity
    json.dumps(dataset.identity)


def test_the_digest_of_an_index_is_xxh3_of_lengths_and_bounds(dataset: IndexedDataset) -> None:
    content = dataset.sequence_lengths.tobytes() + dataset.document_indices.tobytes()
    assert dataset.identity["index_digest"] == xxhash.xxh3_128_hexdigest(content)


def test_what_it_gives_cannot_be_written_to(dataset: IndexedDataset) -> None:
    for array in (
        dataset[0],
        dataset[:][2],
        dataset.sequence_lengths,
        IndexedDataset(to_memory(dataset.path_prefix))[0],
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_a_dataset_outlives_its_reader(dataset: IndexedDataset, tmp_path: Path) -> None:
    tokens = IndexedDataset(dataset.path_prefix)[3]
    (tmp_path / "five.bin").unlink()
    assert tokens.tolist() == [15, 16, 17, 18]


def opening_fails(prefix: str) -> str:
    """What Megatron says. Its half-made object leaks a file, so nothing may hold on to the traceback."""
    try:
        megatron.indexed.IndexedDataset(prefix)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Megatron's destructor
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_a_dataset_without_tokens_opens_where_megatrons_does_not(lengths: list[int], tmp_path: Path) -> None:
    prefix = build_theirs(tmp_path / "none", [Document([], lengths, [])], np.int32)
    assert opening_fails(prefix) == "cannot mmap an empty file"
    gc.collect()
    for where in (prefix, to_memory(prefix)):
        ours = IndexedDataset(where)
        assert [tokens.tolist() for tokens in ours[:]] == [[]] * len(lengths)
        assert ours.read([(i, 0, 0) for i in range(len(lengths))] * 2) is not None


def test_a_bin_shorter_than_its_index_fails_at_open(dataset: IndexedDataset, tmp_path: Path) -> None:
    with (tmp_path / "five.bin").open("r+b") as file:
        file.truncate(19)
    for where in (dataset.path_prefix, to_memory(dataset.path_prefix)):
        with pytest.raises(FormatError, match=r"five.bin: 19 bytes, its .idx needs 20 \(10 tokens of uint16\)"):
            IndexedDataset(where)


def test_bytes_after_the_last_token_do_no_harm(dataset: IndexedDataset, tmp_path: Path) -> None:
    with (tmp_path / "five.bin").open("ab") as file:
        file.write(b"xyz")
    assert IndexedDataset(dataset.path_prefix)[-1].tolist() == [19]


@pytest.mark.parametrize("end", [".idx", ".bin"])
def test_a_missing_half_is_named(dataset: IndexedDataset, end: str, tmp_path: Path) -> None:
    (tmp_path / f"five{end}").unlink()
    with pytest.raises(ObjectNotFoundError, match=f"five{end}"):
        IndexedDataset(dataset.path_prefix)
    assert not IndexedDataset.exists(dataset.path_prefix)


def test_exists_asks_any_store(dataset: IndexedDataset) -> None:
    assert IndexedDataset.exists(dataset.path_prefix)
    assert IndexedDataset.exists(to_memory(dataset.path_prefix))
    assert not IndexedDataset.exists("memory://indexed/nothing-here")


def test_paths_are_welcome(dataset: IndexedDataset, tmp_path: Path) -> None:
    assert IndexedDataset.exists(tmp_path / "five")
    assert not IndexedDataset.exists(tmp_path / "six")
    with IndexedDatasetBuilder(tmp_path / "two.bin", np.uint16) as builder:
        builder.add_index(tmp_path / "five")
        builder.finalize(tmp_path / "two.idx")
    assert IndexedDataset(tmp_path / "two").path_prefix == f"{tmp_path}/two"
    assert IndexedDataset(tmp_path / "two")[3].tolist() == [15, 16, 17, 18]


def test_a_prefix_is_only_concatenated(dataset: IndexedDataset, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    for end in (".idx", ".bin"):
        shutil.copy(dataset.path_prefix + end, tmp_path / "dir" / end)
        shutil.copy(dataset.path_prefix + end, tmp_path / f"a.b_c{end}")
    for prefix in (f"{tmp_path}/dir/", tmp_path / "a.b_c"):
        assert IndexedDataset(prefix)[0].tolist() == [10, 11, 12]


def test_a_prefix_without_a_dataset_names_the_datasets_that_begin_with_it(tmp_path: Path) -> None:
    path = build_ours(tmp_path / "en_text_document", [Document(np.arange(3, dtype=np.uint8), [3], [])], np.uint8)
    for prefix in (tmp_path / "en", tmp_path / "en_"):
        for opened in (IndexedDataset, lambda prefix: PairSource(Location.of(str(prefix)))):
            with pytest.raises(ObjectNotFoundError, match=f"no such file; did you mean {path}\\?$"):
                opened(prefix)
    bucket = did_you_mean(Location.of("s3://corpus"))
    assert bucket == "; s3://corpus is a bucket, needs a prefix in it such as s3://corpus/en"
    (text := tmp_path / "en.jsonl").write_text("{}")
    for prefix, way in (
        (tmp_path, f"did you mean {path}"),
        (text, f"{text} is a file, and no dataset; binidx preprocess"),
        (f"{path},{tmp_path}/fr", "several datasets"),
        (f"0.7 {path} 0.3 fr", "several datasets"),
    ):
        with pytest.raises(ObjectNotFoundError, match=f"no such file; .*{way}"):
            IndexedDataset(prefix)
    (tmp_path / "en_text_document.bin").unlink()
    for prefix in (path, str(tmp_path / "fr")):
        with pytest.raises(ObjectNotFoundError, match=r"no such file$"):
            IndexedDataset(prefix)
