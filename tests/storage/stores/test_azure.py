"""Azure through adlfs against Azurite: the contracts, and the whole way from text to samples over abfs://."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, assert_same_sample
from helpers.preprocess_jobs import EOD, corpus, tokenizer_path
from servers.azurite import ACCOUNT, AzureServer

import binidx
from binidx.errors import AccessError, ObjectChangedError, ObjectNotFoundError
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import RemoteObject, object_exists, read_small
from binidx.storage.store_protocols import Store
from binidx.storage.stores.direct import DirectStore
from binidx.storage.writing.publish import create_object
from binidx.testing import check_object_store, check_range_reader
from binidx.tools import main

HOST = f"{ACCOUNT}.dfs.core.windows.net"


@pytest.fixture
def container(abfs: AzureServer) -> str:
    """The name of an empty container."""
    return abfs.make_container(f"c{uuid.uuid4().hex}").removeprefix("abfs://")


def put(uri: str, data: bytes) -> str:
    with create_object(Location.of(uri)) as out:
        out.write(data)
    return uri


@pytest.mark.parametrize("form", ["az://{}", f"abfss://{{}}@{HOST}"])
def test_the_store_keeps_its_contract(container: str, form: str) -> None:
    base = form.format(container)

    def make(name: str, data: bytes) -> tuple[Store, str]:
        return Location(f"{base}/{name}").store, put(f"{base}/{name}", data)

    check_object_store(make)


def test_readers_keep_their_contract(container: str) -> None:
    check_range_reader(lambda data: open_object(put(f"abfs://{container}/{len(data)}", data), cache=False))


def test_ranges_are_requested_directly(container: str) -> None:
    reader = RemoteObject(Location.of(put(f"abfs://{container}/a b", bytes(range(250)))))
    assert bytes(reader.read([(7, 90)])[0]) == bytes(range(7, 90))
    assert isinstance(reader.location.store, DirectStore)
    address = reader.location.store.route(reader.info).address
    assert address is not None
    assert address.connections is not None
    assert address.connections.idle


def test_a_stream_appears_when_it_ends_and_not_if_it_is_broken_off(container: str) -> None:
    uri, options = f"abfs://{container}/deep/stream", {"blocksize": 60_000, "default_block_size": 50_000}
    data, seen = np.random.default_rng(0).bytes(200_000), list[bool]()

    def stop() -> None:
        raise KeyboardInterrupt

    def write(before_publish: Callable[[], object]) -> None:
        with create_object(Location.of(uri, options), before_publish=before_publish) as out:
            for start in range(0, len(data), 7_000):
                out.write(data[start : start + 7_000])

    with pytest.raises(KeyboardInterrupt):
        write(stop)
    write(lambda: seen.append(object_exists(Location.of(uri))))
    assert seen == [False]
    assert bytes(open_object(uri, cache=False).read([(0, len(data))])[0]) == data


@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
@pytest.mark.parametrize("more", [0, 100])
def test_a_replaced_object_gives_an_error(container: str, cache: str, more: int, tmp_path: Path) -> None:
    uri = put(f"abfs://{container}/data", bytes(300_000))
    options = {"binidx": {"cache_dir": str(tmp_path)}} if cache == "disk" else {}
    reader = open_object(uri, storage_options=options, cache=cache != "none")
    assert bytes(reader.read([(0, 10)])[0]) == bytes(10)
    put(uri, b"n" * (300_000 + more))
    with pytest.raises(ObjectChangedError, match=f"^{uri}: changed since it was opened"):
        reader.read([(200_000, 200_010)])


def test_errors_name_the_object(container: str) -> None:
    uri = f"abfs://{container}@{HOST}/none"
    with pytest.raises(ObjectNotFoundError, match=f"^{uri}: no such object$"):
        open_object(uri)
    wrong = {"connection_string": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey=AAAA;"}
    server = fsspec.filesystem("abfs").service_client.url
    wrong["connection_string"] += f"BlobEndpoint={server.rstrip('/')};"
    with pytest.raises(AccessError, match="AZURE_STORAGE_ACCOUNT_KEY"):
        open_object(uri, storage_options=wrong)


def test_found_objects_keep_the_account_of_the_pattern(container: str) -> None:
    for root in (f"abfs://{container}", f"abfs://{container}@{HOST}", f"abfs://{HOST}/{container}"):
        uris = [put(f"{root}/text/{name}.jsonl", b"{}") for name in ("a", "b")]
        assert sorted(Location(root).store.find(f"{root}/text/?.jsonl", pattern=True)) == uris
        for folder in (f"{root}/text/", f"{root}/text", f"{root}/", root):
            assert sorted(Location(root).store.find(folder, pattern=False)) == uris


def batches(prefix: str, indices: Any, options: Any = None, **loader: Any) -> list[Any]:
    config = binidx.GPTDatasetConfig(
        random_seed=3, sequence_length=32, blend=([prefix], None), split="1,0,0", tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=str(indices),
        cache_small_indices=True, storage_options=options,
    )  # fmt: skip
    train = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [300, 0, 0], lambda: True, config).build()[0]
    return [*(binidx.build_pretraining_data_loader(train, 0, 8, **loader) or ())]


@pytest.mark.usefixtures("local_workers_are_threads")
def test_text_becomes_samples_without_leaving_azure(abfs: AzureServer, tmp_path: Path, capsys: Any) -> None:
    """Preprocess, convert, train, index caches and the disk cache: all equal to those of a disk."""
    texts = [f"abfs://{abfs.make_container(f'{name}{uuid.uuid4().hex}')[7:]}@{HOST}" for name in ("web", "books")]
    files = corpus(tmp_path / "text", count=300)
    for container, path in zip(texts, files, strict=True):
        put(f"{container}/en.jsonl", Path(path).read_bytes())
    base = abfs.make_container(f"c{uuid.uuid4().hex}")
    given = ["--tokenizer", tokenizer_path(), "--eod", EOD, "--append-eod", "--workers", "1"]
    assert main(["preprocess", *[f"{each}/en.jsonl" for each in texts], "--to", f"{base}/en", *given]) == 0
    assert main(["preprocess", *files, "--to", str(tmp_path / "en"), *given]) == 0
    remote, local = f"{base}/en_text_document", str(tmp_path / "en_text_document")
    assert main(["diff", local, remote]) == 0
    sources = json.loads(read_small(Location.of(f"{remote}.manifest.json")))
    assert [f"{each}/en.jsonl" in json.dumps(sources) for each in texts] == [True, True]
    assert main(["convert", remote, "--to", f"{base}/deep/zipped", "--compress"]) == 0
    assert main(["convert", f"{base}/deep/zipped", "--to", str(tmp_path / "back"), "--plain"]) == 0
    assert Path(tmp_path / "back.bin").read_bytes() == Path(f"{local}.bin").read_bytes()
    needed = batches(local, tmp_path / "indices")
    for workers in ({}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        options = {"binidx": {"cache_dir": str(tmp_path / "cache")}} if workers else {}
        for found, right in zip(batches(remote, f"{base}/indices", options, **workers), needed, strict=True):
            assert_same_sample(found, right)
    capsys.readouterr()
