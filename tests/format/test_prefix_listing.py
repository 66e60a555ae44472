"""Many prefixes of a folder are opened by what two lists of it agree on, and never as a pair that was none."""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from conftest import Bucket
from helpers.random_datasets import Document, build_ours
from hypothesis import given
from hypothesis import strategies as st
from servers.latency_proxy import latency_proxy

from binidx.format import prefix_listing as listing
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.prefix_listing import MIN_LISTED_PREFIXES, ListedPair, group_prefixes
from binidx.storage.location import Location
from binidx.storage.requests import remote_object as storage_listing
from binidx.storage.requests.remote_object import list_objects, object_identity, stretches_of
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.gcs import GcsStore
from binidx.storage.stores.s3 import S3Store
from binidx.storage.writing.publish import create_object, delete_object


def number(n: int, length: int = 1) -> list[Document]:
    """Dataset `n`: 20 + n sequences of tokens that are all n."""
    return [Document([n] * (20 + n) * length, [length] * (20 + n), [])]


def located(uris: Iterable[str]) -> list[Location]:
    return [Location.of(uri) for uri in uris]


def open_listed(prefix: str, found: dict[str, ListedPair]) -> IndexedDataset:
    return IndexedDataset(prefix, listed=found.get(prefix))


def read_all(prefix: str, found: dict[str, ListedPair]) -> list[int]:
    return np.concatenate(open_listed(prefix, found)[:]).tolist()


@pytest.fixture(params=["s3", "gs"])
def prefixes(request: pytest.FixtureRequest) -> list[str]:
    """MANY prefixes of one folder, the n-th with dataset n."""
    store = request.getfixturevalue(request.param)
    folder = store.fresh() if request.param == "s3" else f"{store}/listed-{uuid.uuid4().hex}"
    return [build_ours(f"{folder}/p{n}", number(n), np.uint16) for n in range(MIN_LISTED_PREFIXES)]


@pytest.fixture
def when_listed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`when_listed(acts)`: right after the n-th list, the n-th act."""

    def arrange(*acts: Callable[[], object]) -> None:
        waiting = list(acts)

        def meddled(*arguments, **options):
            found = list_objects(*arguments, **options)
            if waiting:
                waiting.pop(0)()
            return found

        monkeypatch.setattr(listing, "list_objects", meddled)

    return arrange


def test_many_prefixes_cost_two_lists_and_one_request_each(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BINIDX_HEDGE", "0")  # a busy machine is slow to answer
    folder = s3.fresh()
    prefixes = [build_ours(f"{folder}/p{n}", number(n), np.uint16) for n in range(MIN_LISTED_PREFIXES)]
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        for asked in ([2, MIN_LISTED_PREFIXES], [2, 0]):  # the second time all lie in the index_dir
            proxy.reset()
            found = ListedPair.list_all(located(prefixes))
            datasets = [open_listed(prefix, found) for prefix in prefixes]
            log = proxy.log()
            assert [each.range.startswith("bytes") for each in log] == [False] * asked[0] + [True] * asked[1]
            assert [len(each) for each in datasets] == [20 + n for n in range(MIN_LISTED_PREFIXES)]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "manifests"])
def test_a_listed_manifest_is_read_only_where_the_sizes_differ(
    beside: bool, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINIDX_HEDGE", "0")
    folder = s3.fresh()
    prefixes = [build_ours(f"{folder}/p{n}", number(n), np.uint16) for n in range(MIN_LISTED_PREFIXES)]
    with create_object(Location.of(f"{prefixes[3]}.bin")) as writer:
        writer.write(bytes(47))
    for n, prefix in enumerate(prefixes if beside else []):
        counts = {"documents": 1, "sequences": 20 + n, "tokens": 20 + n + (n == 5)}  # that of 5 is not read
        with create_object(Location.of(f"{prefix}.manifest.json")) as writer:
            writer.write(json.dumps({"binidx_manifest": 1, "dataset": counts}).encode())
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        found = ListedPair.list_all(located(prefixes))
        proxy.reset()
        for prefix in prefixes:
            open_listed(prefix, found)
        asked = [each.path.rpartition("/")[2] for each in proxy.log()]
    read = [f"p{n}.idx" for n in range(MIN_LISTED_PREFIXES)] + ["p3.manifest.json"] * beside
    assert sorted(asked) == sorted(read)


def test_prefixes_in_a_folder_each_are_listed_together(s3: Bucket) -> None:
    folder = s3.fresh()
    prefixes = [build_ours(f"{folder}/{n}/data", number(n), np.uint16) for n in range(MIN_LISTED_PREFIXES)]
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        found = ListedPair.list_all(located(prefixes))
        assert [read_all(prefix, found) for prefix in prefixes] == [[n] * (20 + n) for n in range(MIN_LISTED_PREFIXES)]
        lists = [each for each in proxy.log() if not each.path.endswith((".bin", ".idx"))]
        assert len(lists) == 2, lists


def test_folders_with_too_much_between_them_are_not_listed_to_the_end(prefixes, monkeypatch) -> None:
    for store in (S3Store, GcsStore):
        monkeypatch.setattr(store, "list_page", _endless)
    apart = [f"{prefix}-folder/data" for prefix in prefixes]
    assert list_objects(located(f"{prefix}.bin" for prefix in apart), most_pages=3) is None
    assert not ListedPair.list_all(located(apart))


async def _endless(_store, wanted):
    name = f"{wanted.after}{'0' * 9}{wanted.token}"
    return {name: ObjectInfo(name, 1, {"size": 1, "etag": "x"})}, wanted.token + "1"


def test_prefixes_go_together_by_folder_else_by_bucket() -> None:
    one, apart = (
        [f"s3://a/x/{n}" for n in range(MIN_LISTED_PREFIXES)],
        [f"s3://a/{n}/p" for n in range(MIN_LISTED_PREFIXES)],
    )
    few = [f"s3://b/{n}" for n in range(MIN_LISTED_PREFIXES - 1)]
    assert group_prefixes(located([*one, *few, *apart, "/local/p"])) == [located(one), located(apart)]


def test_what_lists_tell_identifies_an_object_as_looking_at_it_does(prefixes) -> None:
    names = [f"{prefix}.idx" for prefix in prefixes]
    found = list_objects(located(names), most_pages=2)
    assert {name: found[name].identity for name in names} == {
        name: object_identity(Location.of(name)) for name in names
    }


def test_what_was_opened_by_a_list_is_read_and_found_again_in_another_process(prefixes) -> None:
    found = ListedPair.list_all(located(prefixes))
    assert [*found] == prefixes
    opened = [open_listed(prefix, found) for prefix in prefixes]

    for n, dataset in enumerate(opened):
        assert np.concatenate(pickle.loads(pickle.dumps(dataset))[:]).tolist() == [n] * (20 + n)


@pytest.mark.parametrize("after", [0, 1])  # after the first list, after the second
@pytest.mark.parametrize(("new", "length"), [(3, 1), (2, 4)])  # another .idx, a .bin of another size
def test_a_dataset_replaced_around_a_list_is_opened_anew(prefixes, when_listed, after, new, length) -> None:
    acts = [lambda: None, lambda: None]
    acts[after] = lambda: build_ours(prefixes[2], number(new, length), np.uint16)
    when_listed(*acts)
    found = ListedPair.list_all(located(prefixes))
    assert read_all(prefixes[2], found) == [new] * (20 + new) * length
    assert read_all(prefixes[4], found) == [4] * 24


def test_a_writer_between_its_files_leaves_no_pair(prefixes, when_listed) -> None:
    def half() -> None:
        delete_object(Location.of(f"{prefixes[2]}.idx"))
        with create_object(Location.of(f"{prefixes[2]}.bin")) as out:
            out.write(b"12" * 40)

    when_listed(half, lambda: build_ours(prefixes[2], number(6), np.uint16))
    found = ListedPair.list_all(located(prefixes))
    assert prefixes[2] not in found
    assert read_all(prefixes[2], found) == [6] * 26


def test_few_prefixes_and_local_ones_are_not_listed(prefixes, tmp_path) -> None:
    local = [build_ours(tmp_path / f"p{n}", number(n), np.uint16) for n in range(MIN_LISTED_PREFIXES)]
    assert not ListedPair.list_all(located([*prefixes[1:], *local]))


def test_lists_in_stretches_find_what_one_finds(prefixes, monkeypatch) -> None:
    for prefix in prefixes:
        with create_object(Location.of(f"{prefix}.bin.xxh3")) as out:
            out.write(b"sums")
    names = [f"{prefix}.{end}" for prefix in prefixes for end in ("bin", "idx")]
    whole = list_objects(located(names), most_pages=2)
    assert len(whole) == 3 * MIN_LISTED_PREFIXES
    for count in (1, 3, 4):
        monkeypatch.setattr(storage_listing, "NAMES_AT_ONCE", count)
        assert list_objects(located(names), most_pages=20) == whole


@given(st.lists(st.text(alphabet="-.0a", min_size=1), min_size=2, unique=True), st.integers(1, 5))
def test_stretches_have_each_name_and_all_between(names: list[str], count: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_listing, "NAMES_AT_ONCE", count)
        stretches = stretches_of(names)
    for name in [*names, f"{min(names)}!"]:
        assert any(after < name <= stop for after, stop in stretches) or name > max(names)


def test_a_folder_of_too_many_other_objects_is_not_listed_to_its_end(prefixes) -> None:
    assert list_objects(located(f"{prefix}.bin" for prefix in prefixes), most_pages=0) is None
