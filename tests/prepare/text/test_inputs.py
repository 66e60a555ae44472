"""Names of inputs become objects, in an order that nobody's store decides."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.reader_stacks import STORES, Shelf

from binidx.errors import ConfigError, ObjectNotFoundError, StorageError
from binidx.prepare.text.inputs import find_inputs, format_of
from binidx.prepare.text.read import FORMATS

NAMES = [
    "sub-b/g.jsonl",
    "b.jsonl",
    "a.jsonl",
    "sub/c.jsonl",
    "sub/deep/d.jsonl",
    "_temporary/e.jsonl",
    ".f.jsonl",
    "notes.txt",
    "_SUCCESS",
]
LISTED = ["file", "mapped", "memory", "s3", "gs"]
"""Stores that can list."""


@pytest.fixture(params=LISTED)
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Shelf:
    found = Shelf(STORES[request.param], request, tmp_path)
    for name in NAMES:
        if request.param in ("file", "mapped"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        found.put(b"{}", name)
    return found


def names(shelf: Shelf, *patterns: str, **options: str) -> list[str]:
    inputs = find_inputs([f"{shelf.base}/{each}" for each in patterns], **options)
    assert all(each.size == 2 and len(each.identity) > 1 for each in inputs)
    base = shelf.base.removeprefix("file://")
    return [each.uri.removeprefix("file://").removeprefix(base)[1:] for each in inputs]


def test_names_stay_in_their_order_and_globs_are_sorted(shelf: Shelf) -> None:
    assert names(shelf, "b.jsonl", "a.jsonl") == ["b.jsonl", "a.jsonl"]
    assert names(shelf, "sub/c.jsonl", "[ab].jsonl") == ["sub/c.jsonl", "a.jsonl", "b.jsonl"]
    assert names(shelf, "**/[cd].jsonl") == ["sub/c.jsonl", "sub/deep/d.jsonl"]
    assert names(shelf, "a.jsonl", "a.jsonl") == ["a.jsonl", "a.jsonl"]


def test_a_folder_is_all_below_it_whose_name_tells_a_format(shelf: Shelf) -> None:
    assert names(shelf, "") == ["a.jsonl", "b.jsonl", "sub-b/g.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl"]
    assert names(shelf, "sub/") == ["sub/c.jsonl", "sub/deep/d.jsonl"]
    assert names(shelf, "sub") == ["sub/c.jsonl", "sub/deep/d.jsonl"]
    everything = ["a.jsonl", "b.jsonl", "notes.txt", "sub-b/g.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl"]
    assert names(shelf, "", format="jsonl") == everything


@pytest.mark.parametrize("name", ["none.jsonl", "none*.jsonl", "none/", "none"])
def test_a_name_that_matches_nothing_is_an_error(shelf: Shelf, name: str) -> None:
    with pytest.raises(ObjectNotFoundError, match="none"):
        names(shelf, "a.jsonl", name)


def test_a_folder_without_inputs_is_an_error(shelf: Shelf) -> None:
    shelf.put(b"", "notes.d/x.txt") if "://" in shelf.base and not shelf.base.startswith("file") else None
    if shelf.base.startswith("file"):
        (shelf.directory / "notes.d").mkdir()
        (shelf.directory / "notes.d" / "x.txt").write_bytes(b"")
    with pytest.raises(ObjectNotFoundError, match=r"need one that ends in \.jsonl"):
        names(shelf, "notes.d/")


def test_what_stands_beside_a_dataset_is_no_input_of_its_folder(shelf: Shelf) -> None:
    for end in (".bin", ".idx", ".manifest.json", ".lineage.parquet", ".quarantine.jsonl", ".parts.json"):
        shelf.put(b"{}", f"sub/en{end}")
    assert names(shelf, "sub") == ["sub/c.jsonl", "sub/deep/d.jsonl"]
    assert names(shelf, "sub/*.jsonl") == ["sub/c.jsonl", "sub/en.quarantine.jsonl"]


def test_a_name_that_tells_no_format_needs_one_said(shelf: Shelf) -> None:
    shelf.put(b"{}", "notes.md")
    with pytest.raises(ConfigError, match=r"notes.md: unknown format"):
        names(shelf, "notes.md")
    assert names(shelf, "notes.md", format="jsonl") == ["notes.md"]
    with pytest.raises(ConfigError, match="found 'xls', need one of jsonl,"):
        names(shelf, "notes.md", format="xls")


def test_an_object_of_a_name_with_wildcards_is_that_object(shelf: Shelf) -> None:
    for name in ("a[1].jsonl", "a1.jsonl"):
        shelf.put(b"{}", name)
    assert names(shelf, "a[1].jsonl") == ["a[1].jsonl"]
    assert names(shelf, "a[12].jsonl") == ["a1.jsonl"]


def test_formats_are_told_by_names() -> None:
    told = {"a.jsonl": "jsonl", "a.json": "jsonl", "a.ndjson.gz": "jsonl.gz", "a.json.zst": "jsonl.zst"}
    told |= {"s3://b/a.parquet": "parquet", "https://h/a.jsonl?token=x": "jsonl"}
    told |= {"a.csv": "csv", "a.csv.gz": "csv.gz", "a.csv.zst": "csv.zst", "a.arrow": "arrow"}
    told |= {"a.warc": "warc", "a.warc.wet.gz": "warc.gz", "a.wet.zst": "warc.zst"}
    assert {name: format_of(name) for name in told} == told
    assert {*told.values()} == {name for name in FORMATS if not name.startswith("txt")}


def test_a_url_with_a_query_is_one_object(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    shelf = Shelf(STORES["http"], request, tmp_path)
    uri = shelf.put(b"{}", "a.jsonl")
    assert [each.uri for each in find_inputs(f"{uri}?a=[1]")] == [f"{uri}?a=[1]"]


def test_a_store_that_cannot_be_reached_says_so() -> None:
    with pytest.raises(StorageError, match=r"http://127\.0\.0\.1:1/a\.jsonl"):
        find_inputs("http://127.0.0.1:1/a.jsonl", storage_options={"binidx": {"deadline_seconds": 1}})


@pytest.mark.parametrize("format", FORMATS)
def test_a_pipe_is_refused_for_nothing_of_it_would_be_read(format: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: a pipe or a device .need a file"):
        find_inputs(tmp_path / "pipe", format=format)
