"""Names are built in, registered or installed; each stands for one thing, and is looked up as late as possible."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.published import write_package
from helpers.put_only_store import PutOnlyStore
from helpers.registering import registered_codec, registered_store, unregister
from helpers.toy_store import ToyStore
from servers.latency_proxy import latency_proxy

import binidx
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.errors import ConfigError
from binidx.registries import Registrations
from binidx.storage.codecs.segments import SegmentedObject, SegmentWriter
from binidx.storage.location import Location
from binidx.storage.open import CODECS, Codec, codec_named
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.location import Location
from binidx.storage.stores.registry import STORES

TOY = Codec(SegmentedObject, SegmentWriter)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "file", "memory"])
def test_built_in_stores_cannot_be_replaced(scheme: str) -> None:
    with pytest.raises(ConfigError, match=f"^store '{scheme}': built in, cannot be replaced; choose another name"):
        binidx.register_store(scheme, ToyStore)


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_built_in_codecs_cannot_be_replaced(suffix: str) -> None:
    with pytest.raises(ConfigError, match=f"^codec '{suffix}': built in, cannot be replaced"):
        binidx.register_codec(suffix, TOY)


@pytest.mark.parametrize(
    ("register", "name"),
    [(binidx.register_store, "s3://"), (binidx.register_store, ""), (binidx.register_codec, "zz")],
)
def test_names_that_no_uri_can_have_are_refused(register: Callable[[str, object], None], name: str) -> None:
    with pytest.raises(ConfigError, match=f"not a name \\(found '{name}', need "):
        register(name, TOY)


def test_a_name_stands_for_one_class_which_may_be_registered_again() -> None:
    with registered_store("toy", ToyStore):
        binidx.register_store("toy", ToyStore)
        with pytest.raises(
            ConfigError,
            match=r"^store 'toy': registered twice \(found helpers.toy_store:ToyStore and "
            r"helpers.put_only_store:PutOnlyStore, need one\); remove one of them",
        ):
            binidx.register_store("toy", PutOnlyStore)
        assert type(Location("toy://a/b").store) is ToyStore


def test_an_unknown_codec_is_named_with_those_that_there_are() -> None:
    for call in (lambda: codec_named("zz"), lambda: convert_dataset("a", "b", way=StorageFormat("zz"))):
        with pytest.raises(ConfigError, match=r"codec: unknown \(found zz, need one of raw, zstd\)"):
            call()


def test_an_unknown_scheme_is_an_error_that_names_the_uri() -> None:
    with pytest.raises(ConfigError, match=r"^nobody://b/k: .*nobody"):
        binidx.open_object("nobody://b/k")


def test_a_pickled_reader_brings_the_registrations(tmp_path: Path) -> None:
    with registered_store("toy", ToyStore), registered_codec(".zz", TOY):
        Location("toy://a/b").store.put("toy://a/b", [memoryview(b"123")])
        pickles = pickle.dumps(Registrations()), pickle.dumps(RemoteObject(Location.of("toy://a/b")))
    for data in pickles:
        assert "toy" not in STORES.names()
        found = pickle.loads(data)
        try:
            assert (STORES["toy"], CODECS[".zz"]) == (ToyStore, TOY)
        finally:
            unregister(STORES, "toy")
            unregister(CODECS, ".zz")
    assert isinstance(found, RemoteObject)


def test_each_registered_codec_costs_a_request_but_no_round_trip(s3: Bucket, tmp_path: Path) -> None:
    with binidx.IndexedDatasetBuilder(tmp_path / "en.bin", np.uint16) as builder:
        builder.add_document([1, 2, 3], [3])
        builder.finalize(tmp_path / "en.idx")
    plain, encoded = s3.fresh(), s3.fresh()
    convert_dataset(tmp_path / "en", f"{plain}/en")
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():

        def requests(prefix: str) -> int:
            before = proxy.counts()
            assert binidx.IndexedDataset(prefix)[0].tolist() == [1, 2, 3]
            return (proxy.counts() - before).requests

        requests(f"{plain}/en")  # the first one connects
        alone = requests(f"{plain}/en")
        with registered_codec(".zz", TOY):
            assert requests(f"{plain}/en") == alone + 1
            convert_dataset(tmp_path / "en", f"{encoded}/en", way=StorageFormat("zz"))
            assert binidx.IndexedDataset(f"{encoded}/en")[0].tolist() == [1, 2, 3]
        assert not binidx.IndexedDataset.exists(f"{encoded}/en")


def python(code: str, *path: Path) -> str:
    """Run code in a Python that finds these folders first; return its output."""
    start = f"import sys; sys.path[:0] = {[*map(str, path)]}\nimport binidx\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def pretend_installed(folder: Path, name: str, points: str) -> Path:
    """Write the metadata of an installed package with entry points into a folder."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    return folder


FIND = "from binidx.storage.stores.registry import STORES\nfrom binidx.errors import ConfigError\n"


def test_two_packages_with_one_name_are_an_error_that_names_both(tmp_path: Path) -> None:
    for name in ("one", "two"):
        pretend_installed(tmp_path, name, f"[binidx.stores]\nmyfs = {name}:Store\n")
    found = python(f"{FIND}try:\n    STORES['myfs']\nexcept ConfigError as error:\n    print(error)", tmp_path)
    assert found == (
        "store 'myfs': published twice (found package one (one:Store) and package two (two:Store), need one); "
        "uninstall one"
    )


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    pretend_installed(tmp_path, "one", "[binidx.stores]\nmyfs = absent_module:Store\n")
    found = python(f"{FIND}try:\n    STORES['myfs']\nexcept ConfigError as error:\n    print(error)", tmp_path)
    assert found.startswith("absent_module:Store: cannot be imported (No module named 'absent_module'); repair or")


def test_a_codec_that_cannot_be_imported_hurts_only_objects_of_its_suffix(tmp_path: Path) -> None:
    pretend_installed(tmp_path, "one", "[binidx.codecs]\n.zz = absent_module:CODEC\n")
    found = python(
        "import fsspec, numpy as np\n"
        "def opened(prefix):\n"
        "    try:\n"
        "        binidx.IndexedDataset(prefix)\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__)\n"
        f"for base in ('memory://a', {str(tmp_path)!r}):\n"
        "    opened(f'{base}/en')\n"
        "    binidx.IndexedDatasetBuilder(f'{base}/en.bin', np.uint16).finalize(f'{base}/en.idx')\n"
        "    filesystem, path = fsspec.url_to_fs(f'{base}/en.bin')\n"
        "    filesystem.mv(path, f'{path}.zz')\n"
        "    opened(f'{base}/en')\n",
        tmp_path,
    )
    assert found.split() == ["ObjectNotFoundError", "ConfigError"] * 2


def test_a_package_does_not_replace_a_built_in_store(tmp_path: Path) -> None:
    pretend_installed(tmp_path, "one", "[binidx.stores]\ns3 = absent_module:Store\n")
    code = f"import logging; logging.basicConfig(stream=sys.stdout)\n{FIND}STORES.names(); print(STORES['s3'])"
    warning, found = python(code, tmp_path).splitlines()
    assert warning.endswith("package one (absent_module:Store): store 's3' is built in, and not replaced")
    assert found == "<class 'binidx.storage.stores.s3.S3Store'>"


def test_installed_packages_are_looked_up_for_unknown_names_only(tmp_path: Path) -> None:
    with binidx.IndexedDatasetBuilder(tmp_path / "en.bin", np.uint16) as builder:
        builder.add_document([1, 2, 3], [3])
        builder.finalize(tmp_path / "en.idx")
    write_package(tmp_path / "toys")
    pretend_installed(tmp_path / "toys", "toys", "[binidx.stores]\ntoys3 = toys3:ToyStore\n")
    found = python(
        "from binidx.storage.location import Location
from binidx.storage.stores.registry import STORES\n"
        "from binidx.storage.open import CODECS\n"
        "looked_up = lambda: ['installed' in vars(each) for each in (STORES, CODECS)]\n"
        f"binidx.IndexedDataset({str(tmp_path / 'en')!r}); open_store('s3://b/k'); open_store('memory://b/k')\n"
        "print(looked_up(), 'toys3' in sys.modules)\n"
        "print(type(open_store('toys3://b/k')).__name__, looked_up(), 'toyzlib' in sys.modules)",
        tmp_path / "toys",
    )
    assert found.splitlines() == ["[False, False] False", "ToyStore [True, False] False"]
