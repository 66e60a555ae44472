"""A list of parts opens as what a merge of them makes, number by number, and a part that changed is named."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER, assert_same_sample
from helpers.random_datasets import Document, build_ours, random_documents
from servers.http_objects import Server, http_objects
from servers.latency_proxy import latency_proxy

import binidx
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_datasets, merge_virtually
from binidx.corpus.verify import verify_dataset
from binidx.errors import ConfigError, FormatError, ObjectChangedError, ObjectExistsError, ObjectNotFoundError
from binidx.format.source import open_source
from binidx.format.virtual import relative_part, resolve_part
from binidx.run.plan.inventory import open_files
from binidx.storage.adapters import JoinedReader
from binidx.storage.location import Location
from binidx.storage.ranges import read_many
from binidx.storage.stores.local import LocalFile
from binidx.storage.stores.registry import place_of
from binidx.testing import MemoryObject, check_range_reader
from binidx.tools import main

NUM_PARTS = 5


def write_parts(directory: Path, *, modes: bool = False) -> list[str]:
    """Parts of random documents, some empty; one of none at all; one with bytes past its last token."""
    rng = np.random.default_rng(5)
    found = [
        build_ours(directory / f"p{n}", random_documents(rng, np.uint16, 0 if n == 1 else 30), np.uint16, modes)
        for n in range(NUM_PARTS)
    ]
    with open(f"{found[2]}.bin", "ab") as file:
        file.write(b"past the end")
    return found


def both(parts: list[str], directory: Path, **options) -> tuple[binidx.IndexedDataset, binidx.IndexedDataset]:
    """The virtual merge, and the real one."""
    merge_virtually(parts, directory / "virtual")
    return binidx.IndexedDataset(directory / "virtual", **options), binidx.IndexedDataset(directory / "real", **options)


def assert_equal(virtual: binidx.IndexedDataset, real: binidx.IndexedDataset) -> None:
    for name in ("sequence_lengths", "sequence_pointers", "document_indices"):
        found, needed = getattr(virtual.index, name), getattr(real.index, name)
        assert (found.dtype, found.tolist()) == (needed.dtype, needed.tolist())
        assert not found.flags.writeable
    assert virtual.identity == real.identity
    assert virtual.bin_reader.size == real.bin_reader.size
    for found, needed in zip(virtual[:], real[:], strict=True):
        assert found.tolist() == needed.tolist()
    spans = [(each, 0, virtual.sequence_lengths[each].item()) for each in [7, 3, len(virtual) - 1, 40, 3]]
    assert [each.tolist() for each in virtual.read(spans)] == [each.tolist() for each in real.read(spans)]


@pytest.mark.parametrize("mmap", [True, False])
def test_it_is_what_a_merge_makes(tmp_path: Path, mmap: bool) -> None:
    parts = write_parts(tmp_path)
    merge_datasets(parts, tmp_path / "real")
    assert_equal(*both(parts, tmp_path, mmap=mmap))


def test_modes_come_along(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, modes=True)[2:]
    merge_datasets(parts, tmp_path / "real")
    virtual, real = both(parts, tmp_path, multimodal=True)
    assert virtual.sequence_modes.tolist() == real.sequence_modes.tolist()


def test_its_parts_may_lie_in_several_stores_and_be_compressed(tmp_path: Path, s3: Bucket, gs: str) -> None:
    parts = write_parts(tmp_path)
    merge_datasets(parts, tmp_path / "real")
    places = [f"{s3.fresh()}/p", f"{gs}/{tmp_path.name}/p", f"{tmp_path}/compressed"]
    for part, place in zip(parts, places, strict=False):
        convert_dataset(part, place, way=StorageFormat(codec="zstd" if place.endswith("compressed") else None))
    options = {"binidx": {"parts_from": "s3://test-bucket, gs://test-bucket"}}
    virtual, real = both([*places, *parts[3:]], tmp_path, storage_options=options)
    assert_equal(virtual, real)
    assert_equal(pickle.loads(pickle.dumps(virtual)), real)


@pytest.mark.parametrize("remote", [False, True])
def test_a_gpt_dataset_over_it_has_the_order_and_the_samples_of_the_real(tmp_path: Path, s3: Bucket, remote) -> None:
    parts = write_parts(tmp_path)
    merge_datasets(parts, tmp_path / "real")
    if remote:
        base = s3.fresh()
        for n, part in enumerate(parts):
            convert_dataset(part, f"{base}/p{n}")
        parts = [f"{base}/p{n}" for n in range(NUM_PARTS)]
    merge_virtually(parts, tmp_path / "virtual")
    options = {"binidx": {"parts_from": place_of(parts[0])}}
    built = [
        binidx.BlendedMegatronDatasetBuilder(
            binidx.GPTDataset,
            [200, 10, 0],
            lambda: True,
            binidx.GPTDatasetConfig(
                random_seed=3, sequence_length=16, blend=([f"{tmp_path}/{name}"], None), split="9,1,0",
                tokenizer=TOKENIZER, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
                storage_options=options,
            ),
        ).build()
        for name in ("virtual", "real")
    ]  # fmt: skip
    for virtual, real in zip(built[0][:2], built[1][:2], strict=True):
        assert len(virtual) == len(real) > 0
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert (getattr(virtual, name) == getattr(real, name)).all()
        for found, needed in zip(
            virtual.__getitems__(range(len(real))), real.__getitems__(range(len(real))), strict=True
        ):
            assert_same_sample(found, needed)
        assert_same_sample(virtual[1], real[1])


def test_all_parts_are_read_at_the_same_time(s3: Bucket, tmp_path: Path) -> None:
    base = s3.fresh()
    parts = [build_ours(f"{base}/p{n}", [Document([n] * 9, [9], [])], np.uint16) for n in range(NUM_PARTS)]
    merge_virtually(parts, f"{base}/all")
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        dataset = binidx.IndexedDataset(f"{base}/all")
        proxy.become(delay_ms=1500)
        proxy.reset()
        assert [each[0].item() for each in dataset.read([(n, 4, 1) for n in range(NUM_PARTS)])] == [*range(NUM_PARTS)]
        log = proxy.log()
    assert len(log) == NUM_PARTS
    assert max(each.began for each in log) < min(each.ended or 0 for each in log)


def test_a_part_that_changed_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    merge_virtually(parts, tmp_path / "virtual")
    build_ours(parts[3], [Document([7], [1], [])], np.uint16)
    with pytest.raises(
        ObjectChangedError, match=r"p3\.idx: changed since .*virtual.parts.json was written \(.*, now .*\); bring"
    ):
        binidx.IndexedDataset(tmp_path / "virtual")
    Path(f"{parts[3]}.idx").unlink()
    with pytest.raises(ObjectNotFoundError, match=r"p3\.idx: no such file"):
        binidx.IndexedDataset(tmp_path / "virtual")


def test_it_moves_with_the_parts_that_lie_beside_it(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    merge_virtually(parts, tmp_path / "virtual")
    needed = binidx.IndexedDataset(tmp_path / "virtual").identity
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-moved")  # keeps times, as cp -p does
    for part in parts:
        Path(f"{part}.idx").unlink()
    assert binidx.IndexedDataset(f"{tmp_path}-moved/virtual").identity == needed


@pytest.mark.parametrize(
    ("uri", "named", "place"),
    [
        ("s3://b/x/all.parts.json", "en/0", "s3://b/x/en/0"),
        ("s3://b/x/all.parts.json", "gs://c/0", "gs://c/0"),
        ("/data/all.parts.json", "0", "/data/0"),
        ("/data/all.parts.json", "/else/0", "/else/0"),
    ],
)
def test_a_prefix_is_taken_from_the_folder_of_the_list(uri: str, named: str, place: str) -> None:
    assert resolve_part(uri, named) == place
    assert relative_part(uri, place) == named


def serve(server: Server, name: str, prefix: Path | str) -> str:
    """Put a pair of files, or a list, on a server of objects; return its prefix there."""
    for end in (".bin", ".idx", ".parts.json"):
        if Path(f"{prefix}{end}").exists():
            server.objects[f"/{name}{end}"] = Path(f"{prefix}{end}").read_bytes()
    return f"{server.endpoint}/{name}"


def test_credentials_never_follow_a_list_to_another_host(tmp_path: Path, web: Server) -> None:
    part = build_ours(tmp_path / "part", [Document([5, 6, 7], [3], [])], np.uint16)
    secret: dict[str, Any] = {"headers": {"Authorization": "Bearer of-the-user"}}
    with http_objects({}) as other:
        merge_virtually([serve(other, "part", part)], tmp_path / "list")
        there = serve(web, "list", tmp_path / "list")
        other.requests.clear()
        location = Location.of(there, secret)
        for tool in (
            lambda at: binidx.IndexedDataset(at.uri, storage_options=at.options),
            open_source,
            lambda at: open_files(at, None),
        ):
            with pytest.raises(ConfigError, match=rf"list.parts.json: .*\(found {other.endpoint}/part, .*PARTS_FROM="):
                tool(location)
        assert other.requests == []

        allowed = {**secret, "binidx": {"parts_from": other.endpoint}}
        other.authorizations.clear()
        dataset = pickle.loads(pickle.dumps(binidx.IndexedDataset(there, storage_options=allowed)))
        assert dataset[0].tolist() == [5, 6, 7]
        assert open_source(Location.of(there, allowed)).plain_bytes() == 6
        assert web.authorizations[-1] == "Bearer of-the-user"
        assert {*other.authorizations} == {None}

        own = {"binidx": {"parts_from": {other.endpoint: {"headers": {"Authorization": "Bearer of-the-other"}}}}}
        other.authorizations.clear()
        assert binidx.IndexedDataset(there, storage_options={**secret, **own})[0].tolist() == [5, 6, 7]
        assert {*other.authorizations} == {"Bearer of-the-other"}


def test_a_list_of_a_server_opens_no_local_file(tmp_path: Path, web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    merge_virtually(write_parts(tmp_path), tmp_path / "virtual")
    whole = json.loads((tmp_path / "virtual.parts.json").read_text())
    for part in whole["parts"]:
        part["prefix"] = f"{tmp_path}/{part['prefix']}"
    web.objects["/local.parts.json"] = json.dumps(whole).encode()
    with pytest.raises(ConfigError, match=rf"\(found {tmp_path}/p0, needed {web.endpoint}\); .*_FROM=file://"):
        binidx.IndexedDataset(f"{web.endpoint}/local")
    monkeypatch.setenv("BINIDX_PARTS_FROM", "s3://else,file://")
    needed = binidx.IndexedDataset(tmp_path / "virtual").identity
    assert binidx.IndexedDataset(f"{web.endpoint}/local").identity == needed


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("s3://bucket/a/b", "s3://bucket"),
        ("http://user@host:80/a?b/c", "http://user@host:80"),
        ("https://host?@other/x", "https://host?@other"),
        ("/data/a", "file://"),
        ("a", "file://"),
        ("file:///data", "file://"),
        ("simplecache::s3://bucket/a", "simplecache::s3://bucket"),
        ("simplecache::file:///etc/x", "simplecache::file://"),
        ("abfs://box@account/a::/etc/x", "abfs://box@account"),
        ("sftp://box@account/a::/etc/x", "sftp://box@account"),
        ("s3://bucket/a::/etc/x", "s3://bucket"),
    ],
)
def test_the_place_of_a_uri_is_its_scheme_and_its_host_or_bucket(uri: str, place: str) -> None:
    assert place_of(uri) == place


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"format": "binidx-parts", "version": 2, "dtype": "uint16", "parts": []}',
     b'{"format": "binidx-parts", "version": 1, "dtype": "uint16", "parts": []}',
     b'{"format": "binidx-parts", "version": 1, "dtype": "uint16", "parts": [{"prefix": "x"}]}', b"\xff" * 9],
)  # fmt: skip
def test_what_is_no_list_is_an_error_that_says_who_writes_one(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "virtual.parts.json").write_bytes(text)
    with pytest.raises(
        FormatError, match=r"virtual.parts.json: .*; needed binidx-parts 1, as binidx merge --virtual wr"
    ):
        binidx.IndexedDataset(tmp_path / "virtual")


def test_counts_that_a_part_has_not_are_an_error(tmp_path: Path) -> None:
    merge_virtually(write_parts(tmp_path), tmp_path / "virtual")
    path = tmp_path / "virtual.parts.json"
    whole = json.loads(path.read_text())
    whole["parts"][2]["tokens"] += 1
    path.write_text(json.dumps(whole))
    with pytest.raises(FormatError, match=r"p2\.idx: \(dtype, sequences, tokens\) are "):
        binidx.IndexedDataset(tmp_path / "virtual")
    for where, value in (("tokens", -1), ("sequences", "3"), ("dtype", "nonsense"), ("dtype", "uint32")):
        wrong = json.loads(path.read_text())
        (wrong if where == "dtype" else wrong["parts"][2])[where] = value
        (tmp_path / "wrong.parts.json").write_text(json.dumps(wrong))
        for tool in (lambda at: binidx.IndexedDataset(at.uri), open_source):
            with pytest.raises(FormatError, match=rf"wrong.parts.json: .*({where}|nonsense).*; needed binidx-parts 1"):
                tool(Location.of(tmp_path / "wrong"))
    for end in ("sequences", "tokens"):
        wrong = json.loads(path.read_text())
        wrong["parts"][2][end] += 1
        (tmp_path / "wrong.parts.json").write_text(json.dumps(wrong))
        with pytest.raises(FormatError, match=r"wrong.parts.json|p2.bin: .* bytes"):
            verify_dataset(tmp_path / "wrong")


def test_what_cannot_be_a_virtual_merge_is_refused(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    other = build_ours(tmp_path / "other", [Document([7], [1], [])], np.int32)
    with pytest.raises(FormatError, match="other: dtype int32, needed uint16"):
        merge_virtually([*parts, other], tmp_path / "virtual")
    merge_virtually(parts, tmp_path / "virtual")
    with pytest.raises(ConfigError, match="is itself a virtual merge"):
        merge_virtually([tmp_path / "virtual"], tmp_path / "twice")
    with pytest.raises(ObjectExistsError, match=r"virtual\.parts\.json: "):
        merge_virtually(parts[1:], tmp_path / "virtual")
    merge_virtually(parts[1:], tmp_path / "virtual", overwrite=True)
    with pytest.raises(ObjectExistsError, match="p0: holds a dataset"):
        merge_virtually(parts[1:], parts[0], overwrite=True)


def test_the_command_says_what_it_listed(tmp_path: Path, capsys) -> None:
    parts = write_parts(tmp_path)
    assert main(["merge", *parts, "--to", f"{tmp_path}/virtual", "--virtual"]) == 0
    assert f"{tmp_path}/virtual: a list of 5 datasets\n  120 documents, " in capsys.readouterr().out


def test_joined_objects_keep_the_contract_of_readers(tmp_path: Path) -> None:
    def make(data: bytes) -> JoinedReader:
        cuts = [0, len(data) // 3, len(data) // 3, len(data) // 2, len(data)]
        texts = [data[start:stop] for start, stop in itertools.pairwise(cuts)]
        mapped = tmp_path / str(len(data))
        mapped.write_bytes(texts[2] + b"more")
        parts = [
            MemoryObject(texts[0] + b"x"),
            MemoryObject(b""),
            LocalFile(mapped),
            MemoryObject(texts[3]),
        ]
        return JoinedReader("joined", parts, [len(text) for text in texts])

    check_range_reader(make)


def test_a_joined_reader_among_others_gets_its_own_answers() -> None:
    parts = [MemoryObject(b"abcde"), MemoryObject(b"fghij")]
    joined, other = JoinedReader("joined", parts, [4, 5]), MemoryObject(b"0123456789")
    found = read_many([(other, [(1, 3)]), (joined, [(3, 6), (0, 0), (4, 5)]), (other, [])])
    assert [[bytes(view) for view in each] for each in found] == [[b"12"], [b"dfg", b"", b"f"], []]


@pytest.mark.parametrize(
    "command",
    [
        "cache warm",
        "convert",
        "cut head",
        "cut sample",
        "cut split",
        "diff",
        "export",
        "inspect",
        "merge",
        "shuffle",
        "verify",
    ],
)
def test_the_help_of_a_command_says_that_it_takes_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert "a virtual merge" in " ".join(capsys.readouterr().out.split())


def test_it_exists(tmp_path: Path) -> None:
    merge_virtually(write_parts(tmp_path), tmp_path / "virtual")
    assert binidx.IndexedDataset.exists(tmp_path / "virtual")
    assert not binidx.IndexedDataset.exists(tmp_path / "other")
