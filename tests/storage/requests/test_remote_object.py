"""Objects of stores: the requests sent for them, wrong answers, and errors that name the URI and the way out."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

import fsspec
import pytest
from conftest import Bucket
from helpers.proxied_store import counts_in_flight
from servers.http_objects import Server, http_objects
from servers.latency_proxy import latency_proxy

from binidx.errors import (
    AccessError,
    ConfigError,
    MissingDriverError,
    ObjectNotFoundError,
    ShortReadError,
    StorageError,
    UnreachableError,
)
from binidx.storage.cache.memory import ChunkCache
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import MAX_REQUEST, RemoteObject
from binidx.storage.stores.direct import bounded_session
from binidx.storage.stores.driver_errors import translated
from binidx.storage.stores.fsspec_store import DIRECT_MAX_GAP, driver_options, open_filesystem
from binidx.storage.stores.signing import one_origin_session
from binidx.storage.writing.publish import create_object
from binidx.testing import ended_well, forked

DATA = bytes(range(250)) * 52_000  # 13 MB


@pytest.fixture(scope="module")
def uri(s3: Bucket) -> str:
    uri = f"{s3.fresh()}/data"
    with create_object(Location.of(uri)) as writer:
        writer.write(DATA)
    return uri


@pytest.fixture(scope="module")
def web() -> Iterator[Server]:
    with http_objects({"/bucket/data": DATA}) as server:
        yield server


@pytest.fixture(params=["http", "s3"])
def lying(request: pytest.FixtureRequest, web: Server) -> Iterator[RemoteObject]:
    """An object of a server that does not verify signatures and can be told to misbehave."""
    web.behaviour = "good"
    if request.param == "http":
        yield RemoteObject(Location.of(f"{web.endpoint}/bucket/data"))
    else:
        yield RemoteObject(Location.of("s3://bucket/data", {"endpoint_url": web.endpoint, "key": "k", "secret": "s"}))
    web.behaviour = "good"


def test_neighbours_share_a_request_and_others_go_alone(web: Server) -> None:
    reader = RemoteObject(Location.of(f"{web.endpoint}/bucket/data"))
    web.requests.clear()
    far = 10 + DIRECT_MAX_GAP + 11
    views = reader.read([(far, far + 5), (0, 10), (10, 20), (50, 60)])
    assert [bytes(view) for view in views] == [DATA[far : far + 5], DATA[:10], DATA[10:20], DATA[50:60]]
    assert sorted(str(header) for _, _, header in web.requests) == [f"bytes=0-{far + 4}"]
    web.requests.clear()
    reader.read([(far + 61, far + 70), (0, 10)])
    assert sorted(str(header) for _, _, header in web.requests) == ["bytes=0-9", f"bytes={far + 61}-{far + 69}"]


def test_a_huge_range_arrives_in_parts(web: Server) -> None:
    reader = RemoteObject(Location.of(f"{web.endpoint}/bucket/data"))
    web.requests.clear()
    assert bytes(reader.read([(0, len(DATA))])[0]) == DATA
    needed = [f"bytes=0-{MAX_REQUEST - 1}", f"bytes={MAX_REQUEST}-{len(DATA) - 1}"]
    assert sorted(str(header) for _, _, header in web.requests) == needed


def test_reading_nothing_asks_nothing(web: Server) -> None:
    reader = RemoteObject(Location.of(f"{web.endpoint}/bucket/data"))
    web.requests.clear()
    assert [bytes(view) for view in reader.read([(5, 5), (0, 0)])] == [b"", b""]
    assert web.requests == []


@pytest.mark.parametrize(("behaviour", "found"), [("short", 99), ("whole", len(DATA))])
def test_an_answer_of_the_wrong_length_is_refused(lying: RemoteObject, web: Server, behaviour: str, found: int) -> None:
    web.behaviour = behaviour
    with pytest.raises(ShortReadError, match=f"^{lying.uri}: {found} bytes for range 100-200, needed 100; "):
        lying.read([(100, 200)])
    web.behaviour = "good"
    assert bytes(lying.read([(100, 200)])[0]) == DATA[100:200]


@pytest.mark.parametrize(("size", "start", "found"), [(100, 0, "more than 100"), (101, 0, "all"), (200, 100, "all")])
def test_an_answer_without_an_end_is_not_read_to_it(
    lying: RemoteObject, web: Server, size: int, start: int, found: str
) -> None:
    web.objects["/bucket/small"] = DATA[:size]
    small = RemoteObject(Location.of(lying.uri.replace("data", "small"), lying.location.options))
    web.behaviour = "endless"
    needed = f"^{small.uri}: {found} bytes for range {start}-{start + 100}, needed 100; the store or .* honour ranges"
    with pytest.raises(ShortReadError, match=needed):
        small.read([(start, start + 100)])
    assert all(web.left.acquire(timeout=300) for _ in range(4))
    web.behaviour = "good"
    assert bytes(small.read([(0, 100)])[0]) == DATA[:100]


def test_forbidden_names_the_uri_and_the_way_out(lying: RemoteObject, web: Server) -> None:
    web.behaviour = "forbidden"
    with pytest.raises(AccessError, match=rf"^{lying.uri}: access denied .*; check the credentials, "):
        lying.read([(100, 200)])
    with pytest.raises(AccessError, match=rf"^{lying.uri}: access denied"):
        RemoteObject(Location.of(lying.uri, lying.location.options))


def test_requests_run_at_the_same_time(s3: Bucket, uri: str) -> None:
    ranges = [(place, place + 10) for place in range(0, len(DATA), 195_000)]
    with latency_proxy(s3.server.endpoint, delay_ms=0) as proxy:
        reader = RemoteObject(Location.of(uri, {"endpoint_url": proxy.endpoint}))
        counts = counts_in_flight(proxy, 32, lambda: reader.read(ranges))
    assert counts.requests == 67
    # s3fs alone would stop at 10; all 67 are rarely seen at one instant on a busy machine.
    assert 32 <= counts.most_at_once <= 67


def test_a_pool_the_user_set_is_the_bound(s3: Bucket, uri: str) -> None:
    ranges = [(place, place + 10) for place in range(0, len(DATA), 500_000)]
    with latency_proxy(s3.server.endpoint, delay_ms=0) as proxy:
        options = {"endpoint_url": proxy.endpoint, "config_kwargs": {"max_pool_connections": 3}}
        reader = RemoteObject(Location.of(uri, options))
        assert counts_in_flight(proxy, 3, lambda: reader.read(ranges)).most_at_once == 3


def test_what_was_read_is_counted(uri: str) -> None:
    reader = RemoteObject(Location.of(uri))
    reader.read([(0, 10), (20, 30), (0, 10)])
    assert (reader.stats.requests, reader.stats.bytes_asked, reader.stats.bytes_moved) == (1, 30, 30)
    assert reader.stats.seconds > 0


def test_the_etag_identifies_the_content(s3: Bucket) -> None:
    uri = s3.fresh()
    identities = []
    for data in (b"one", b"two"):
        with create_object(Location.of(uri)) as writer:
            writer.write(data)
        identities.append(RemoteObject(Location.of(uri)).identity)
    assert identities[0]["size"] == identities[1]["size"] == 3
    assert identities[0]["etag"] != identities[1]["etag"]


def test_unpickling_makes_no_request_and_repr_no_secret(web: Server) -> None:
    reader = RemoteObject(Location.of("s3://bucket/data", {"endpoint_url": web.endpoint, "key": "k", "secret": "hush"}))
    web.requests.clear()
    twin = pickle.loads(pickle.dumps(reader))
    assert web.requests == []
    assert (twin.size, twin.identity) == (reader.size, reader.identity)
    assert "hush" not in repr(twin)


def test_nothing_here_shows_its_options(web: Server) -> None:
    """They hold secrets, and what is shown ends in a log."""
    options = {"endpoint_url": web.endpoint, "key": "k", "secret": "hush"}
    reader = RemoteObject(Location.of("s3://bucket/data", options))
    fs, _ = open_filesystem(reader.uri, options)
    shown: list[object] = [
        reader,
        ChunkCache(reader),
        fs,
        reader.info,
        reader.location.store,
        vars(reader.location.store)["settings"],
    ]
    with contextlib.suppress(ZeroDivisionError), create_object(Location.of("s3://bucket/new", options)) as writer:
        shown += [writer, vars(writer)]
        raise ZeroDivisionError
    web.behaviour = "forbidden"
    for wrong in (options, {**options, "no_such_option": "hush"}):
        with pytest.raises((StorageError, ConfigError)) as caught:
            RemoteObject(Location.of("s3://bucket/data", wrong))
        shown.append(caught.value)
    web.behaviour = "good"
    assert "hush" not in " ".join(map(repr, shown))


def test_a_client_made_before_a_fork_is_never_used_after_it(uri: str) -> None:
    reader = RemoteObject(Location.of(uri))
    inherited = reader.location.store.fs
    its_loop = inherited.loop

    def child() -> None:
        assert bytes(reader.read([(1, 3)])[0]) == DATA[1:3]
        assert reader.location.store.fs is not inherited
        assert reader.location.store.fs.loop is not its_loop

    children = [forked(child) for _ in range(4)]
    assert bytes(reader.read([(7, 9)])[0]) == DATA[7:9]
    assert [ended_well(each) for each in children] == [True] * 4
    assert reader.location.store.fs is inherited


@pytest.mark.parametrize("store", ["s3", "http"])
def test_a_fork_leaves_the_connections_of_the_parent_alone(store: str, uri: str, web: Server) -> None:
    """Else the parent waits for ever on a socket that its own event loop no longer watches."""
    if store == "http":
        uri = f"{web.endpoint}/bucket/data"

    def read() -> None:
        # Nobody holds the reader: only fsspec's cache still knows its connections.
        assert bytes(RemoteObject(Location.of(uri)).read([(1, 3)])[0]) == DATA[1:3]

    read()
    assert ended_well(forked(read))
    read()


FORK_WHILE_READING = """
import os, sys, threading
from binidx.storage.open import open_object
from binidx.testing import forked, ended_well
from binidx.storage.stores.fsspec_store import driver_options, open_filesystem

uri, size = sys.argv[1], int(sys.argv[2])
needed = lambda start, stop: (bytes(range(250)) * (stop // 250 + 1))[start:stop]
reader = open_object(uri)
busy = True

def read_on():
    place = 0
    while busy:
        place = (place + 70_001) % (size - 20)
        assert bytes(reader.read([(place, place + 20)])[0]) == needed(place, place + 20)

def child():
    for place in range(0, size - 20, 999_983):
        assert bytes(reader.read([(place, place + 20)])[0]) == needed(place, place + 20)

threads = [threading.Thread(target=read_on) for _ in range(4)]
for thread in threads:
    thread.start()
children = [forked(child) for _ in range(6)]
good = [ended_well(each) for each in children]
busy = False
for thread in threads:
    thread.join()
sys.exit(not all(good))
"""


def test_forks_read_right_while_the_parents_threads_read(uri: str) -> None:
    subprocess.run([sys.executable, "-c", FORK_WHILE_READING, uri, str(len(DATA))], check=True, timeout=1200)


@pytest.mark.parametrize(
    ("uri", "error", "message"),
    [
        ("{bucket}/nope", ObjectNotFoundError, "{bucket}/nope: no such object"),
        ("{bucket}", ObjectNotFoundError, "{bucket}: found a directory, needed an object"),
        ("s3://no-such-bucket/x", ObjectNotFoundError, "s3://no-such-bucket: no such bucket"),
        ("s3://", ObjectNotFoundError, "s3://: found a directory"),
        ("s3://Not_A_Bucket!/x", StorageError, "s3://Not_A_Bucket!/x: ParamValidationError: "),
        ("memory://nope", ObjectNotFoundError, "memory://nope: no such object"),
        ("{web}/nope", ObjectNotFoundError, "{web}/nope: no such object"),
        ("http://127.0.0.1:1/x", UnreachableError, "http://127.0.0.1:1/x: ClientConnectorError: Cannot connect"),
        ("foo://x", ConfigError, "foo://x: Protocol not known: foo; needed a path or a protocol that fsspec knows"),
        ("simplecache::foo://x", ConfigError, "simplecache::foo://x: "),
        ("://x", ObjectNotFoundError, "://x: no such object"),
    ],
)
def test_errors_begin_with_the_uri(s3: Bucket, web: Server, uri: str, error: type[Exception], message: str) -> None:
    names = {"bucket": s3.uri, "web": web.endpoint}
    with pytest.raises(error) as caught:
        open_object(uri.format(**names))
    assert str(caught.value).startswith(message.format(**names))


def test_a_wrong_secret_is_access_denied(s3: Bucket, uri: str) -> None:
    with pytest.raises(AccessError, match=rf"^{uri}: access denied .*; check the credentials"):
        open_object(uri, storage_options={"key": s3.server.key, "secret": "wrong"})


def test_an_option_nobody_knows_is_named_with_the_uri() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^s3://b/k: TypeError: .*no_such_option'; correct storage_options, which are those of s3fs$",
    ):
        open_object("s3://b/k", storage_options={"no_such_option": 1})
    missing = str(translated("hf://gpt2/tokenizer.json", ConnectionRefusedError("no network")))
    assert missing.endswith("check the endpoint and the network, or name a local copy of tokenizer.json")


def run_python(code: str, **environment: str) -> str:
    """Last line of the standard error of a fresh Python."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("AWS_")}, **environment},
    )
    return ended.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("module", "uri", "needed"),
    [
        ("s3fs", "s3://b/k", "s3://b/k: needs s3fs; pip install 'binidx[s3]'"),
        ("gcsfs", "gs://b/k", "gs://b/k: needs gcsfs; pip install 'binidx[gcs]'"),
        ("aiohttp", "https://h/k", "https://h/k: needs aiohttp; pip install aiohttp"),
        ("paramiko", "sftp://h/k", 'sftp://h/k: SFTPFileSystem requires "paramiko" to be installed'),
    ],
)
def test_a_missing_driver_is_named_with_its_remedy(module: str, uri: str, needed: str) -> None:
    # None in sys.modules is how Python itself marks a module that is not there.
    code = f"import sys; sys.modules[{module!r}] = None; import binidx; binidx.open_object({uri!r})"
    assert run_python(code) == f"{MissingDriverError.__module__}.MissingDriverError: {needed}"


def test_no_credentials_names_the_uri_and_the_way_out() -> None:
    found = run_python(
        "import binidx; binidx.open_object('s3://b/k')",
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        AWS_ENDPOINT_URL="http://127.0.0.1:1",
    )
    assert "AccessError: s3://b/k: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in found
    assert "storage_options={'anon': True}" in found


def test_gs_is_gcsfs() -> None:
    fs, path = open_filesystem("gs://bucket/key", {"token": "anon", "project": "p"})
    assert type(fs).__module__.startswith("gcsfs")
    assert path == "bucket/key"


UNSIGNED = {"s3": {"payload_signing_enabled": False}}
SIGNED = {**UNSIGNED, "http_session_cls": one_origin_session(())}


@pytest.mark.parametrize(
    ("uri", "given", "needed"),
    [
        ("memory://x", {}, {}),
        ("s3://b/k", {}, {"use_listings_cache": False, "config_kwargs": {"max_pool_connections": 64, **SIGNED}}),
        (
            "s3://b/k",
            {"anon": True, "config_kwargs": {"max_pool_connections": 7}, "use_listings_cache": True},
            {"anon": True, "config_kwargs": {"max_pool_connections": 7, **UNSIGNED}, "use_listings_cache": True},
        ),
        (
            "s3://b/k",
            {"use_listings_cache": True, "config_kwargs": {"s3": {"payload_signing_enabled": True, "a": 1}}},
            {
                "use_listings_cache": True,
                "config_kwargs": {
                    **SIGNED,
                    "max_pool_connections": 64,
                    "s3": {"payload_signing_enabled": True, "a": 1},
                },
            },
        ),
        (
            "gs://b/k",
            {"token": "anon", "session_kwargs": {"headers": {"X-A": "a"}}},
            {
                "token": "anon",
                "use_listings_cache": False,
                "session_kwargs": {
                    **bounded_session(()),
                    "headers": {"Accept-Encoding": "identity", "X-A": "a"},
                },
            },
        ),
    ],
)
def test_our_defaults_give_way_to_the_users(
    uri: str, given: dict[str, object], needed: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    before = repr(given)
    assert driver_options(uri, given) == needed
    assert repr(given) == before


def test_a_new_endpoint_in_the_environment_is_obeyed_at_once(s3: Bucket, uri: str) -> None:
    RemoteObject(Location.of(uri)).read([(0, 1)])
    with latency_proxy(s3.server.endpoint, delay_ms=0) as proxy, proxy.in_environment():
        RemoteObject(Location.of(uri)).read([(0, 1)])
        assert proxy.counts().requests == 2
    RemoteObject(Location.of(uri)).read([(0, 1)])


@pytest.mark.parametrize(
    "given",
    [{"endpoint_url": "http://mine"}, {"client_kwargs": {"endpoint_url": "http://mine"}}],
    ids=["own", "client"],
)
def test_an_endpoint_in_the_options_beats_the_environment(given: dict[str, object]) -> None:
    assert "http://mine" in repr(driver_options("s3://b/k", given))
    assert driver_options("s3://b/k", given).get("endpoint_url") == given.get("endpoint_url")


def test_fsspecs_own_configuration_is_kept() -> None:
    fsspec.config.conf["s3"] = {"config_kwargs": {"retries": {"mode": "adaptive"}}}
    try:
        assert driver_options("s3://b/k", {})["config_kwargs"] == {
            "max_pool_connections": 64,
            "retries": {"mode": "adaptive"},
            **SIGNED,
        }
    finally:
        del fsspec.config.conf["s3"]
