"""State that an earlier commit persisted is found, opened and resumed: nothing is built again, no name has changed.

`golden/make_state.py` says what the state is; `expected.json` names the commit that wrote it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from golden import make_state as golden
from helpers.public_names import PUBLIC

import binidx
from binidx.errors import ConfigError
from binidx.format.prefix_listing import IdxBundle
from binidx.storage.location import Location
from binidx.tools import main

EXPECTED = json.loads((golden.STATE / "expected.json").read_text())
STORE = f"s3://{golden.BUCKET}"
RUNS = ("run", "cyclic", "staged")

Files = dict[str, tuple[int, int, bytes]]


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the local state, as the working directory; its files have other inodes, and their recorded times."""
    found = shutil.copytree(golden.STATE / "local", tmp_path / "local")
    golden.same_times(found)
    monkeypatch.chdir(found)
    return found


@pytest.fixture(scope="module")
def store(s3: Bucket) -> Any:
    """The filesystem of a bucket with a copy of the stored state; each test changes its own part."""
    s3.server.make_bucket(golden.BUCKET)
    golden.upload(golden.STATE / "s3")
    return golden.bucket()


def files(directory: Path | str) -> Files:
    """Inode, time and bytes of every file below a directory: a file that is written again has another inode."""
    found = {str(path): (path.stat(), path.read_bytes()) for path in golden.files_below(Path(directory))}
    return {name: (about.st_ino, about.st_mtime_ns, data) for name, (about, data) in found.items()}


def contents(directory: Path | str) -> dict[str, bytes]:
    return {name: data for name, (_, _, data) in files(directory).items()}


def assert_loaders_resume(make: Callable[[], Any], expected: Any) -> None:
    for kind, recorded in expected["loader"].items():
        assert golden.resumed(make(), kind, recorded["state"]) == recorded["next"], kind


# Index caches and loader states


@pytest.mark.parametrize("name", golden.DATASETS)
def test_an_index_cache_is_found_and_serves_the_samples_of_its_writer(name: str, local: Path) -> None:
    before = files(golden.CACHE)
    built = golden.DATASETS[name]()
    assert {split: golden.describe(dataset) for split, dataset in built.items()} == EXPECTED["datasets"][name]
    assert files(golden.CACHE) == before


@pytest.mark.parametrize("name", golden.DATASETS)
def test_a_loader_resumes_from_the_state_of_an_earlier_one(name: str, local: Path) -> None:
    for split, dataset in golden.DATASETS[name]().items():
        assert_loaders_resume(lambda dataset=dataset: dataset, EXPECTED["datasets"][name][split])


CHANGED = ["fim", "bert", "bert, blend", "chats", "chats, shuffled", "varlen chats"]


@pytest.mark.parametrize("name", CHANGED)
def test_a_state_of_samples_of_0_16_1_is_refused_by_those_of_main_in_the_same_index(
    name: str, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "EARLIER", {})
    before = files(golden.CACHE)
    for split, dataset in golden.DATASETS[name]().items():
        expected = EXPECTED["datasets"][name][split]
        assert dataset.unique_description_hash == expected["unique_description_hash"]
        for kind, recorded in expected["loader"].items():
            with pytest.raises(ConfigError, match=r"; megatron_samples: 'main' here; .* need '0.16.1'\."):
                golden.new_loader(dataset, kind).load_state_dict(recorded["state"])
    assert files(golden.CACHE) == before


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", golden.OTHERS)
def test_a_loader_of_data_without_an_index_resumes_from_the_state_of_an_earlier_one(name: str, local: Path) -> None:
    assert golden.loader_states(golden.OTHERS[name]()) == EXPECTED["others"][name]
    assert_loaders_resume(golden.OTHERS[name], EXPECTED["others"][name])


def test_an_empty_cache_gets_files_of_the_same_names_and_content(local: Path) -> None:
    needed = contents(golden.CACHE)
    shutil.rmtree(golden.CACHE)
    for make in golden.DATASETS.values():
        make()
    for name in RUNS:
        binidx.Run.load(f"runs/{name}.json").build()
    found = contents(golden.CACHE)
    assert found.keys() == needed.keys()
    for name, data in needed.items():
        if name.endswith("-binidx.json"):
            assert what_a_manifest_compares(found[name]) == what_a_manifest_compares(data), name
        else:
            assert found[name] == data, name


def what_a_manifest_compares(data: bytes) -> dict[str, Any]:
    """All of a manifest but the identities of objects on this machine."""
    manifest = json.loads(data)
    arrays = {name: {**each, "identity": None} for name, each in manifest["arrays"].items()}
    return {"fields": [*manifest], **{name: manifest[name] for name in ("fingerprint", "content", "order")}, **arrays}


def test_files_that_a_killed_builder_left_are_removed(local: Path) -> None:
    left = Path(golden.CACHE, f"{'0' * 32}-GPTDataset-train-sample_index.npy.{'1' * 32}.tmp")
    left.touch()
    os.utime(left, (golden.MTIME, golden.MTIME))
    golden.gpt("corpus/en", random_seed=99)
    assert not left.exists()


def test_the_counts_of_a_long_stage_are_found(local: Path) -> None:
    before = files("stage-cache")
    assert [name.rpartition("-")[2] for name in before] == ["binidx.json", "counts.npy", "description.txt"]
    assert len(golden.staged_counts()) == 4
    after = files("stage-cache")
    assert {name: after[name] for name in before} == before
    assert [name for name in after if "-Stage-" in name] == [*before]


def test_indices_in_a_store_are_found(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "index", f"{STORE}/run.json", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["indices"]
    assert [row["how"] for row in rows] == ["found"] * (len(golden.SMALL) + 1)


def test_a_bundle_of_idx_files_is_found(store: Any) -> None:
    bundle = IdxBundle(Location.of(f"{STORE}/cache"), writable=False).read(golden.SMALL)
    assert bundle is not None
    for prefix in golden.SMALL:
        data = store.cat_file(f"{prefix}.idx")
        identity = {"size": len(data), "etag": store.info(f"{prefix}.idx")["ETag"]}
        assert bundle.find(prefix, identity) == data


@pytest.fixture
def renamed() -> Iterator[None]:
    """All public classes whose names are recorded have another name, in another module."""
    kinds = [kind for name, kind in PUBLIC.items() if name.endswith(("Dataset", "Tokenizer", "Stage"))]
    names = [(kind.__name__, kind.__module__) for kind in kinds]
    try:
        for kind in kinds:
            kind.__name__, kind.__module__ = "Renamed", "binidx.moved"
        yield
    finally:
        for kind, (name, module) in zip(kinds, names, strict=True):
            kind.__name__, kind.__module__ = name, module


def test_a_class_that_is_renamed_or_moved_keeps_its_names(local: Path, store: Any, renamed: None) -> None:
    before = files(golden.CACHE)
    for name, make in golden.DATASETS.items():
        found = {split: golden.describe(dataset) for split, dataset in make().items()}
        assert found == EXPECTED["datasets"][name], name
    assert {name: golden.loader_states(make()) for name, make in WITHOUT_IMAGES.items()} == {
        name: EXPECTED["others"][name] for name in WITHOUT_IMAGES
    }
    assert files(golden.CACHE) == before
    assert golden.identities() == EXPECTED["identities"]


WITHOUT_IMAGES = {name: make for name, make in golden.OTHERS.items() if name != "multimodal"}


# Runs, orders, baked runs


@pytest.mark.parametrize("name", RUNS)
def test_a_saved_run_is_loaded_and_saved_as_the_same_bytes_but_its_version(name: str, local: Path) -> None:
    binidx.Run.load(f"runs/{name}.json").save("again.json")
    written = json.loads(Path(f"runs/{name}.json").read_text()) | {"library": binidx.__version__}
    assert Path("again.json").read_text() == json.dumps(written, indent=1) + "\n"


@pytest.mark.parametrize("name", golden.ORDERS)
def test_an_export_of_an_order_that_broke_off_goes_on(name: str, local: Path) -> None:
    before = files(f"orders/{name}")
    golden.command("order", f"runs/{name}.json", "--to", f"orders/{name}", "--steps", "0:6", "--steps-per-file", "2")
    after = files(f"orders/{name}")
    last = f"orders/{name}/steps-000000004-000000006.parquet"
    assert after.keys() == {*before, last}
    assert {each: after[each] for each in before} == before
    assert golden.table_digest(Path(last)) == EXPECTED["orders"][name]


def test_a_baked_run_is_kept_as_it_is(local: Path) -> None:
    before = files("baked")
    golden.command("prepare", "bake", "runs/run.json", "--to", "baked", "--steps", "0:8")
    Path("baked/complete.json").unlink()  # of a later version
    assert files("baked") == before


def test_a_bake_that_broke_off_goes_on(local: Path) -> None:
    needed = contents("baked")
    for path in golden.files_below(Path("baked")):
        if path.name != "baked.json":
            path.unlink()
    golden.command("prepare", "bake", "runs/run.json", "--to", "baked", "--steps", "0:8")
    assert contents("baked") == {**needed, "baked/complete.json": needed["baked/baked.json"]}


def test_packed_files_are_written_as_the_same_bytes(local: Path) -> None:
    needed = contents("packed/en")
    shutil.rmtree("packed/en")
    options = ["--eod", "0", "--chunk-size", "66", "--name", "en"]
    golden.command("export", "litpkds", "corpus/en", "--to", "packed/en", *options)
    Path("packed/en/en.packed.json").unlink()  # of a later version
    assert contents("packed/en") == needed


# Datasets as they are stored


@pytest.mark.parametrize("name", ["zst", "sums"])
def test_a_stored_dataset_holds_the_same_tokens(name: str, local: Path, store: Any) -> None:
    needed = golden.content("corpus/en")
    assert golden.content(f"stored/{name}") == needed
    assert golden.content(f"{STORE}/stored/{name}") == needed
    golden.command("verify", f"stored/{name}")


def test_checksums_are_written_as_the_same_bytes(local: Path) -> None:
    golden.command("convert", "corpus/en", "--to", "again", "--checksums")
    assert Path("again.bin.xxh3").read_bytes() == Path("stored/sums.bin.xxh3").read_bytes()


def test_a_virtual_merge_opens_as_its_parts(local: Path, store: Any) -> None:
    golden.command("merge", "corpus/en", "corpus/de", "--to", "merged")
    assert golden.content("stored/virtual") == golden.content("merged")
    golden.command("merge", *golden.SMALL, "--to", "small")
    assert golden.content(f"{STORE}/virtual") == golden.content("small")


def test_a_virtual_merge_is_listed_as_the_same_bytes(local: Path, store: Any) -> None:
    golden.command("merge", *golden.SMALL, "--to", f"{STORE}/again", "--virtual")
    assert store.cat_file(f"{STORE}/again.parts.json") == store.cat_file(f"{STORE}/virtual.parts.json")


def test_a_disk_cache_serves_all_bytes_and_fetches_none(tmp_path: Path, store: Any) -> None:
    cache = shutil.copytree(golden.STATE / "disk-cache", tmp_path / "cache")
    before = files(cache)
    found, stats = golden.read_cached(cache)
    corpus = golden.STATE / "local/corpus/en.bin"
    assert found == [corpus.read_bytes()] * 2
    assert [each.misses for each in stats] == [0, 0]
    assert min(each.hits for each in stats) > 0
    after = files(cache)  # a block that is used gets a new time, by which blocks are evicted
    assert {name: (after[name][0], after[name][2]) for name in before} == {
        name: (inode, data) for name, (inode, _, data) in before.items()
    }


# Work that broke off


def test_a_convert_that_was_killed_begins_again_and_leaves_nothing_of_the_first(local: Path, store: Any) -> None:
    assert len(os.listdir("converted")) == 2
    golden.command("convert", f"{STORE}/corpus/en", "--to", "converted/en", "--json")
    assert sorted(os.listdir("converted")) == ["en.bin", "en.idx"]
    for end in ("bin", "idx"):
        assert Path(f"converted/en.{end}").read_bytes() == Path(f"corpus/en.{end}").read_bytes()


def preprocess(output: str) -> Any:
    with ThreadPoolExecutor(2) as threads:
        return binidx.preprocess(golden.job(output), executor=threads, workers=2)


def test_an_unfinished_preprocess_job_goes_on_with_its_parts(store: Any) -> None:
    there = [name for name in store.find(f"{STORE}/unfinished") if name.endswith(".idx")]
    done = preprocess("unfinished/en")
    assert done.finished
    assert done.parts_made == done.parts - len(there) == 2
    finished, resumed = (f"{STORE}/{folder}/en_text_document" for folder in ("finished", "unfinished"))
    for end in ("bin", "idx", "manifest.json", "lineage.parquet"):
        data = [store.cat_file(f"{prefix}.{end}") for prefix in (finished, resumed)]
        if end == "manifest.json":
            data = [{name: json.loads(each)[name] for name in COMPARED} for each in data]
        if end != "lineage.parquet":
            assert data[0] == data[1], end
    quarantines = [store.cat_file(f"{STORE}/{folder}/en.quarantine.jsonl") for folder in ("finished", "unfinished")]
    assert quarantines[0] == quarantines[1]


COMPARED = ("plan", "dataset", "counts", "sources")


def test_a_finished_preprocess_job_is_found(store: Any) -> None:
    before = {name: store.info(name)["LastModified"] for name in store.find(f"{STORE}/finished")}
    done = preprocess("finished/en")
    assert done.finished
    assert done.parts_made == 0
    assert {name: store.info(name)["LastModified"] for name in store.find(f"{STORE}/finished")} == before


def test_lineage_is_of_its_dataset(store: Any) -> None:
    golden.command("verify", f"{STORE}/finished/en_text_document", "--lineage")


# Names that depend on no file


def test_the_parts_of_a_job_over_local_text_have_the_same_names(store: Any) -> None:
    assert golden.plan_of_local_text() == EXPECTED["plan of local text"]


def test_tokenizers_have_the_same_names(store: Any) -> None:
    assert golden.identities() == EXPECTED["identities"]
