"""What one rank raises all raise, and what they read is one order of one data: real gloo groups, with kills."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed
from helpers.forked_ranks import ForkedRanks, forked_ranks
from helpers.ports import free_port
from helpers.train_process import build
from servers.latency_proxy import latency_proxy

import binidx
from binidx.dataset.rank_agreement import agree_on_outcome
from binidx.dataset.rank_comparison import Comparison, identify_arrays
from binidx.errors import PeerError
from binidx.index.cache.index_files import IndexFiles, hash_npy
from binidx.index.cache.manifest import format_manifest
from binidx.storage.effects import run
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object


def variables(size: int, place: dict[str, str] | None = None, num_nodes: int = 2) -> list[dict[str, str]]:
    """The variables of each rank, as a launcher sets them, on some nodes."""
    place = place or {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    about = {**place, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    directory = os.environ["BINIDX_INDEX_DIR"]
    return [
        {**about, "RANK": str(rank), "BINIDX_INDEX_DIR": f"{directory}/node{rank % num_nodes}"} for rank in range(size)
    ]


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedRanks]:
    """The process of which all ranks of this module are forks."""
    with forked_ranks() as process:
        yield process


Outcome = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def outcome(forked: ForkedRanks) -> Outcome:
    return partial(outcome_of, forked)


def outcome_of(
    forked: ForkedRanks,
    size: int,
    how: dict[str, Any],
    place: dict[str, str] | None = None,
    main: str = "helpers.rank_process",
) -> list[dict[str, Any]]:
    """What each rank printed, and its log as "log"; a rank that printed nothing was killed, or its log says why."""
    found = []
    for rank, each in enumerate(forked.run(main, how, variables(size, place))):
        printed = [line for line in each["out"].splitlines() if line.startswith("{")]
        silent = {"rank": rank, "error": "killed" if os.WIFSIGNALED(each["status"]) else each["log"]}
        found.append({**(json.loads(printed[-1]) if printed else silent), "log": each["log"]})
    return found


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("place", ["tcp", "file"])
def test_what_one_rank_raises_all_raise_within_seconds_with_its_traceback(
    culprit: int, place: str, tmp_path: Path, outcome: Outcome
) -> None:
    """Also where it is rank 0, with whose process the store of the group dies."""
    how = {"else": {"wait": 6000}, str(culprit): {"sleep": 1, "fail": "no tokens here"}}
    found = outcome(4, how, {"STORE": f"{tmp_path}/store"} if place == "file" else None)
    assert [each["error"] for each in found] == ["ValueError" if each == culprit else "PeerError" for each in range(4)]
    for each in found:
        assert "no tokens here" in each["text"]
        assert each["seconds"] < 1 + 200
        if each["rank"] != culprit:
            first_line = each["text"].partition("\n")[0]
            assert f"rank {culprit} (" in first_line
            assert "failed: ValueError: no tokens here" in first_line
            assert "Traceback (most recent call last)" in each["text"]
            assert 'raise ValueError(how["fail"])' in each["text"]


def test_an_error_is_known_to_those_that_were_done_already(outcome: Outcome) -> None:
    found = outcome(4, {"else": {}, "3": {"sleep": 2, "fail": "too late"}})
    assert [each["error"] for each in found] == ["PeerError"] * 3 + ["ValueError"]
    assert max(each["seconds"] for each in found) < 2 + 200


def test_a_rank_that_comes_after_another_one_failed_does_not_begin(tmp_path: Path, outcome: Outcome) -> None:
    how = {"else": {}, "1": {"fail": "no tokens here"}, "2": {"late": True, "sleep": 6000}}
    found = outcome(3, how, {"STORE": f"{tmp_path}/store"})
    assert [each["error"] for each in found] == ["PeerError", "ValueError", "PeerError"]
    assert "no tokens here" in found[2]["text"]
    assert found[2]["seconds"] < 200


def test_a_rank_that_comes_when_the_store_has_gone_is_told_so(outcome: Outcome) -> None:
    found = outcome(3, {"else": {}, "1": {"fail": "no tokens here"}, "2": {"late": True, "sleep": 6000}})
    assert found[2]["error"] == "PeerError"
    assert "the store of the process group does not answer" in found[2]["text"]


def test_all_go_on_together_when_all_are_done_as_often_as_they_come(outcome: Outcome) -> None:
    found = outcome(4, {"else": {}, "1": {"sleep": 1}, "again": True})
    assert [each["error"] for each in found] == [None] * 4
    assert len(found[1]["slept"]) == 2
    for each in found:
        assert all(np.greater(each["agreed"], found[1]["slept"])), "who is done waits for the one that sleeps, twice"
    assert max(each["seconds"] for each in found) < 2 + 200


def test_a_rank_that_is_killed_is_missed_by_all(outcome: Outcome) -> None:
    how = {"HEARTBEAT_TIMEOUT_SECONDS": 5, "POLL_SECONDS": 0.1}
    found = outcome(4, {**how, "else": {}, "2": {"sleep": 0.5, "kill": True}})
    assert [each["error"] for each in found] == ["PeerError", "PeerError", "killed", "PeerError"]
    for each in found:
        if each["rank"] != 2:
            assert "rank 2 (" in each["text"]
            assert "no heartbeat for" in each["text"]
            assert each["seconds"] < 0.5 + 2 + 200


def test_the_death_of_the_rank_that_has_the_store_is_seen_by_all(outcome: Outcome) -> None:
    how = {"POLL_SECONDS": 0.1}
    found = outcome(3, {**how, "else": {"wait": 6000}, "0": {"sleep": 0.5, "kill": True}})
    assert [each["error"] for each in found] == ["killed", "PeerError", "PeerError"]
    for each in found[1:]:
        assert "the store of the process group does not answer" in each["text"]
        assert each["seconds"] < 0.5 + 200


def test_a_rank_that_never_comes_is_not_waited_for(outcome: Outcome) -> None:
    found = outcome(3, {"ABSENT_SECONDS": 3, "else": {}, "2": {"absent": True}})
    assert [each["error"] for each in found] == [None] * 3
    for each in found[:2]:
        assert "1 of 3 ranks have not entered build()" in each["log"]


def test_ranks_at_work_are_waited_for_where_another_one_never_comes(outcome: Outcome) -> None:
    how = {"0": {"after": 1}, "1": {"sleep": 3, "fail": "too late"}, "2": {"absent": True}}
    found = outcome(3, {"ABSENT_SECONDS": 0.1, **how})
    assert [each["error"] for each in found] == ["PeerError", "ValueError", None]


def test_a_rank_that_waits_for_the_values_of_another_one_lets_its_heartbeats_through() -> None:
    """A `wait` of torch's store holds up all other requests of the process."""
    store, compared = torch.distributed.TCPStore("127.0.0.1", 0, 1, True), threading.Event()

    class Keys(torch.distributed.PrefixStore):
        def compare_set(self, *arguments: Any) -> Any:
            result = super().compare_set(*arguments)
            compared.set()
            return result

    keys = Keys("build", store)
    keys.set("order/first", "another-digest rank 0 (node, process 1)")
    comparison = Comparison("build() on rank 1 (node, process 2)", keys, "rank 1 (node, process 2)", 2)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(run, comparison.compare("order", [{"seed": 1}]))
        compared.wait()
        for number in range(20):
            keys.set("heartbeat/1", str(number))
            time.sleep(0.01)
        keys.set("order/fields", '[{"seed": 2}]')
        with pytest.raises(PeerError, match=r"\(seed: found 1, rank 0 \(node, process 1\) has 2\)"):
            future.result()


def test_without_a_process_group_it_is_a_plain_block() -> None:
    def work(*_: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        agree_on_outcome(work)
    assert agree_on_outcome(lambda checks, name: checks) == ()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An index of it is worth a cache: more than 2^15 sequences."""
    prefix = str(tmp_path_factory.mktemp("pair") / "pair")
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 4, 40_000)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        builder.add_document(rng.integers(0, 100, int(lengths.sum()), np.uint16), lengths.tolist())
        builder.finalize(f"{prefix}.idx")
    return prefix


def built(forked: ForkedRanks, pair: str, cache: str, tmp_path: Path, **how: Any) -> tuple[list[dict[str, Any]], int]:
    """What four ranks on two nodes came to, and how many of them built."""
    (tmp_path / "log").touch()
    asked = {"prefix": pair, "cache": cache, "samples": 20_000, "sequence_length": 8, "log": f"{tmp_path}/log", **how}
    found = [
        json.loads(each["out"].splitlines()[-1])
        for each in forked.run("helpers.build_process", asked, variables(4), ("s3fs",))
    ]
    return found, len((tmp_path / "log").read_text().splitlines())


def test_of_the_ranks_of_two_nodes_one_builds_and_the_other_node_fetches_it_once(
    pair: str, s3: Any, forked: ForkedRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINIDX_INDEX_BYTES", "100000000")  # however full the disk is
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():
        base = s3.fresh()
        for suffix in (".bin", ".idx"):
            with create_object(Location.of(f"{base}/pair{suffix}")) as out:
                out.write(Path(f"{pair}{suffix}").read_bytes())
        proxy.reset()
        found, builders = built(forked, f"{base}/pair", f"{base}/cache", tmp_path)
        log = proxy.log()
    assert len({str(each["digest"]) for each in found}) == 1
    assert builders == 1
    for name in ("document_index.npy", "sample_index.npy", "shuffle_index.npy", "binidx.json"):
        assert sum(each.method == "PUT" and each.path.endswith(name) for each in log) == 1
    for name in ("document_index.npy", "sample_index.npy", "shuffle_index.npy"):
        assert sum(each.method == "GET" and each.path.endswith(name) for each in log) == 1, "the builder's node has it"
    assert sum(each.method == "GET" and each.path.endswith("pair.idx") for each in log) == 2


def test_what_the_building_rank_raises_is_raised_by_all_that_wait_for_it(
    pair: str, forked: ForkedRanks, tmp_path: Path
) -> None:
    found, builders = built(forked, pair, f"{tmp_path}/cache", tmp_path, fail="no room for an index", slow=3)
    assert builders == 1
    assert sorted(each["error"] for each in found) == ["PeerError"] * 3 + ["ValueError"]
    for each in found:
        assert "no room for an index" in each["text"]
    assert max(each["ended"] for each in found) - min(each["ended"] for each in found) < 200


# One order, one data

BASE = {"prefixes": ["en", "code"], "weights": [0.7, 0.3], "seed": 1234, "size": 500, "sequence_length": 8}


def write_pair(prefix: Path, seed: int, num_documents: int = 300) -> None:
    """Documents of lengths that depend on their number alone, of tokens that depend on the seed, too."""
    lengths, rng = np.arange(num_documents) % 17 + 3, np.random.default_rng(seed)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for length in lengths:
            builder.add_document(rng.integers(1, 500, length), [int(length)])
        builder.finalize(f"{prefix}.idx")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a corpus of two sources, a copy, one of other lengths, and one of equal lengths and other tokens."""
    folder, found = tmp_path_factory.mktemp("corpora"), {}
    for name, seed, num_documents in [("ours", 1, 300), ("copy", 1, 300), ("longer", 1, 310), ("other", 2, 300)]:
        found[name] = folder / name
        found[name].mkdir()
        for source in BASE["prefixes"]:
            is_code = source == "code"
            write_pair(folder / name / source, seed + 10 * is_code, num_documents if is_code else 300)
    return found


def trained(outcome: Outcome, how: dict[str, Any], tmp_path: Path, size: int = 4) -> list[dict[str, Any]]:
    return outcome(size, how, {"STORE": str(tmp_path / "store")}, "helpers.train_process")


def assert_disagreement(text: str, rank: int, field: str, values: set[str]) -> None:
    """The message names the rank, the field and both values; either rank may have come first."""
    found = re.search(rf"{field}: found (\S+), rank \d \(\S+, process \d+\) has (\S+?)[;)]", text)
    assert found, text
    assert f"rank {rank} (" in text
    assert {*found.groups()} == values or not values


@pytest.mark.parametrize(
    ("different", "field", "values"),
    [
        ({"seed": 99}, r"train\.datasets\[0\]\.random_seed", {"99", "1234"}),
        ({"weights": [0.6, 0.4]}, r"train\.weights\[0\]", {"0.6", "0.7"}),
        ({"size": 501}, r"sizes\[0\]", {"501", "500"}),
        ({"cwd": "longer"}, r"train\.datasets\[1\]\.data\.num_sequences", {"310", "300"}),
        ({"cwd": "other"}, r"code\.bin\.version", set()),
    ],
)
def test_a_rank_that_would_read_something_else_ends_the_build_on_all(
    different: dict[str, Any],
    field: str,
    values: set[str],
    outcome: Outcome,
    corpora: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = {"cwd": str(corpora[different.get("cwd", "ours")])}
    found = trained(outcome, {"all": {**BASE, "cwd": str(corpora["ours"])}, "2": {**different, **folder}}, tmp_path)
    assert [each["error"] for each in found] == ["PeerError"] * 4, found
    for each in found:
        assert_disagreement(each["text"], 2, field, values)


@pytest.mark.parametrize(
    ("different", "field", "values"),
    [
        ({"tokenizer": {"eod": 1, "pad": 501}}, r"options\.tokenizer\.eod", {"1", "0"}),
        ({"tokenizer": {"eod": 0, "pad": 502}}, r"options\.tokenizer\.pad", {"502", "501"}),
        ({"options": {"eod_mask_loss": True}}, r"options\.eod_mask_loss", {"true", "false"}),
        ({"options": {"reset_position_ids": True}}, r"options\.reset_position_ids", {"true", "false"}),
        ({"options": {"reset_attention_mask": True}}, r"options\.reset_attention_mask", {"true", "false"}),
        ({"options": {"create_attention_mask": True}}, r"options\.create_attention_mask", {"true", "false"}),
        ({"options": {"inter_document_masking": True}}, r"options\.inter_document_masking", {"true", "false"}),
    ],
)
def test_a_rank_that_would_mask_in_another_way_ends_the_build_on_all(
    different: dict[str, Any],
    field: str,
    values: set[str],
    outcome: Outcome,
    corpora: dict[str, Path],
    tmp_path: Path,
) -> None:
    how = {"all": {**BASE, "tokenizer": {"eod": 0, "pad": 501}, "cwd": str(corpora["ours"])}, "1": different}
    found = trained(outcome, how, tmp_path, size=2)
    assert [each["error"] for each in found] == ["PeerError"] * 2, found
    for each in found:
        assert_disagreement(each["text"], 1, field, values)


def write_metadata(folder: Path, version: str) -> str:
    """What an installer leaves of this library."""
    (folder / "binidx.dist-info").mkdir(parents=True)
    (folder / "binidx.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: binidx\nVersion: {version}\n")
    return str(folder)


def test_a_rank_of_another_version_of_the_library_ends_the_build_on_all(
    outcome: Outcome, corpora: dict[str, Path], tmp_path: Path
) -> None:
    versions = [write_metadata(tmp_path / version, version) for version in ("7.0.0", "8.0.0")]
    how = {
        "all": {**BASE, "cwd": str(corpora["ours"])},
        **{str(rank): {"library": [versions[rank]]} for rank in (0, 1)},
    }
    found = trained(outcome, how, tmp_path, size=2)
    assert [each["error"] for each in found] == ["PeerError"] * 2, found
    assert_disagreement(found[0]["text"], 1, "library", {'"7.0.0"', '"8.0.0"'})


def cached(cache: Path) -> dict[str, Any]:
    return {"options": {"path_to_cache": str(cache), "cache_small_indices": True}}


def swap_two_samples(cache: Path, path: Path | None = None) -> None:
    """What a version with another order leaves: a valid index with the same options."""
    if path is None:
        (path,) = cache.glob("*GPTDataset-train-binidx.json")
    files = IndexFiles(Location.of(cache), path.name.removesuffix("-binidx.json"))
    manifest = files.read_manifest()
    assert manifest is not None
    order = np.load(f"{cache}/{files.name}-shuffle_index.npy")
    order[:2] = order[[1, 0]]
    np.save(f"{cache}/{files.name}-shuffle_index.npy", order)
    arrays = {**manifest.arrays, "shuffle_index": replace(manifest.arrays["shuffle_index"], xxh3_64=hash_npy(order))}
    files.write("binidx.json", format_manifest(replace(manifest, arrays=arrays)))


def test_a_rank_with_another_order_under_the_same_options_ends_the_build_on_all(
    outcome: Outcome, corpora: dict[str, Path], tmp_path: Path
) -> None:
    one = {**BASE, "prefixes": ["en"], "weights": None, "cwd": str(corpora["ours"])}
    how = {"all": one, "1": cached(tmp_path / "other")}
    assert [each["error"] for each in outcome_in(outcome, how, tmp_path / "first")] == [None, None]
    swap_two_samples(tmp_path / "other")
    found = outcome_in(outcome, how, tmp_path / "second")
    assert [each["error"] for each in found] == ["PeerError"] * 2, found
    for each in found:
        assert_disagreement(each["text"], 1, r"train\.shuffle_index", set())


def outcome_in(outcome: Outcome, how: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    return trained(outcome, how, folder, size=2)


def test_ranks_may_keep_their_indices_and_read_their_files_in_different_ways(
    outcome: Outcome, corpora: dict[str, Path], tmp_path: Path
) -> None:
    """In memory, built into a cache, loaded from it; mapped or not; objects of their own for the same tokenizer."""
    ways = {
        "1": cached(tmp_path / "one"),
        "2": {**cached(tmp_path / "one"), "after": [1]},
        "3": {"options": {"mmap_bin_files": False, "num_dataset_builder_threads": 2}},
    }
    how = {"all": {**LOADER, "tokenizer": {"eod": 0}, "cwd": str(corpora["ours"])}, **ways}
    found = trained(outcome, how, tmp_path)
    assert [each["error"] for each in found] == [None] * 4, found


def test_copies_in_other_places_are_one_corpus_and_a_rank_without_datasets_has_none(
    outcome: Outcome, corpora: dict[str, Path], tmp_path: Path
) -> None:
    ours, copy = ([str(corpora[name] / source) for source in BASE["prefixes"]] for name in ("ours", "copy"))
    how = {"all": {**BASE, "prefixes": ours}, "1": {"prefixes": copy}, "2": {"idle": True, "seed": 99}}
    found = trained(outcome, how, tmp_path)
    assert [(each["error"], each["read"]) for each in found] == [(None, [rank != 2]) for rank in range(4)]


LOADER = {**BASE, "alone": True, "loader": {"consumed_samples": 0, "micro_batch_size": 2}}
READY = {"consumed_samples": 16, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("together", "different", "field", "values"),
    [
        ({}, {"seed": 99}, r"dataset\.random_seed", {"99", "1234"}),
        ({}, {"loader": READY}, "consumed_samples", {"16", "0"}),
        ({"state": {}}, {"state": {"consumed_samples": 16}}, "consumed_samples", {"16", "0"}),
        ({}, {"loader": {"consumed_samples": 0, "micro_batch_size": 3}}, "samples_per_step", {"12", "8"}),
    ],
)
def test_a_rank_whose_loader_begins_elsewhere_is_refused_and_the_others_do_not_wait_for_it(
    together: dict[str, Any],
    different: dict[str, Any],
    field: str,
    values: set[str],
    outcome: Outcome,
    corpora: dict[str, Path],
    tmp_path: Path,
) -> None:
    how = {"all": {**LOADER, **together, "cwd": str(corpora["ours"])}, "2": {**different, "after": [0, 1, 3]}}
    found = trained(outcome, how, tmp_path)
    assert [each["error"] for each in found] == [None, None, "PeerError", None], found
    assert_disagreement(found[2]["text"], 2, field, values)


def test_the_ranks_of_one_replica_are_those_of_the_mesh(
    outcome: Outcome, corpora: dict[str, Path], tmp_path: Path
) -> None:
    found = trained(outcome, {"all": {**LOADER, "mesh": [2, 2], "info": True, "cwd": str(corpora["ours"])}}, tmp_path)
    read = [each["read"] for each in found]
    assert read[0] == read[1] != read[2] == read[3]
    logged = [each["log"] for each in found if "up to 2 ranks share each of 2 data-parallel ranks" in each["log"]]
    assert len(logged) == 1
    assert 'mesh["replicate", "shard"]._flatten("dp")' in logged[0]


def test_the_loader_of_one_line_gives_each_rank_samples_of_its_own(
    outcome: Outcome, corpora: dict[str, Path], tmp_path: Path
) -> None:
    how = {**BASE, "one_line": True, "info": True, "cwd": str(corpora["ours"])}
    found = trained(outcome, {"all": how}, tmp_path, 2)
    assert found[0]["read"] != found[1]["read"], found
    assert sum(each["log"].count("loader: data_parallel_size is 2, of 2 processes") for each in found) == 1
    # Ranks of a mesh may have to read the same samples.
    (tmp_path / "mesh").mkdir()
    for each in trained(outcome, {"all": {**how, "mesh": [1, 2]}}, tmp_path / "mesh", 2):
        assert "or every rank would read the same samples" in each["text"]


@pytest.mark.parametrize(
    ("all_do", "third_does", "message"),
    [
        (
            {}, {"data_parallel_rank": 1},
            r"on rank 2 .*_size 4 in .* 4 ranks: found 2 of data-parallel rank 1, rank 1 .* first, need at most 1;",
        ),
        ({"data_parallel_size": 2, "data_parallel_rank": 0}, {}, r"3 of data-parallel rank 0, .* need at most 2;"),
        ({"data_parallel_size": 7}, {}, r"size 7 in a group of 4 ranks: found fewer ranks than data-parallel ranks;"),
    ],
)  # fmt: skip
def test_a_data_parallel_rank_that_too_many_claim_is_refused_with_the_name_of_the_first(
    all_do: dict[str, Any],
    third_does: dict[str, Any],
    message: str,
    outcome: Outcome,
    corpora: dict[str, Path],
    tmp_path: Path,
) -> None:
    loader = {**LOADER["loader"], **all_do}
    how = {"all": {**LOADER, "cwd": str(corpora["ours"]), "loader": loader}}
    third = {"loader": {**loader, **third_does}, "after": [] if "data_parallel_size" in all_do else [0, 1, 3]}
    found = trained(outcome, {**how, "2": third}, tmp_path)
    texts = [each["text"] for each in found if each["error"]]
    assert any(re.search(message, text) for text in texts), found
    assert all('find_topology(mesh["replicate", "shard"]._flatten("dp"))' in text for text in texts)


def test_copies_in_other_places_with_other_tokens_are_refused(
    outcome: Outcome, corpora: dict[str, Path], tmp_path: Path
) -> None:
    ours, other = ([str(corpora[name] / source) for source in BASE["prefixes"]] for name in ("ours", "other"))
    found = trained(outcome, {"all": {**BASE, "prefixes": ours}, "1": {"prefixes": other}}, tmp_path)
    assert [each["error"] for each in found] == ["PeerError"] * 4, found
    for each in found:
        assert_disagreement(each["text"], 1, r"bin\[0\]\.version", set())


@pytest.mark.parametrize("is_first", [False, True])
def test_both_ranks_are_named_in_any_order_of_arrival(
    is_first: bool, outcome: Outcome, corpora: dict[str, Path], tmp_path: Path
) -> None:
    loader = {**LOADER["loader"], "micro_batch_size": 3}
    waiting = {str(rank): {"after": [1]} for rank in (0, 2, 3)} if is_first else {}
    one = {"loader": loader} if is_first else {"loader": loader, "after": [0, 2, 3]}
    found = trained(outcome, {"all": {**LOADER, "cwd": str(corpora["ours"])}, **waiting, "1": one}, tmp_path)
    assert [each["error"] is not None for each in found] == [(rank == 1) != is_first for rank in range(4)], found
    for each in found:
        assert not each["error"] or "rank 1 (" in each["text"]


def test_an_object_replaced_between_two_ranks_is_another_one(
    outcome: Outcome, s3: Any, corpora: dict[str, Path], tmp_path: Path
) -> None:
    ours, other, base = corpora["ours"] / "en", corpora["other"] / "en", f"{s3.fresh()}/en"
    how = {
        "all": {**LOADER, "prefixes": [base], "weights": None},
        "0": {"replace": [str(ours), base]},
        "1": {"replace": [str(other), base], "after": [0]},
    }
    found = trained(outcome, how, tmp_path, size=2)
    assert [each["error"] for each in found] == [None, "PeerError"], found
    assert_disagreement(found[1]["text"], 1, r"en\.bin\.version", set())


# Many nodes, and something altered on some ranks

SIZE = 16
ALTERED_BASE = {**BASE, "tokenizer": {"eod": 0, "pad": 501}, "loader": {"consumed_samples": 0, "micro_batch_size": 2}}
SWITCHES = (
    "eod_mask_loss", "reset_position_ids", "reset_attention_mask", "create_attention_mask", "inter_document_masking",
)  # fmt: skip


def random_alteration(rng: np.random.Generator, corpora: dict[str, Path], caches: dict[str, Path]) -> dict[str, Any]:
    """One to three ranks of 16, and something that they have, read or are in another way than the others."""

    def choose(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    ranks = sorted(rng.choice(SIZE, int(rng.integers(1, 4)), replace=False).tolist())
    number = int(rng.integers(2, 1000))
    share = float(rng.uniform(0.05, 0.6))
    corpus = corpora[choose("longer", "other")]
    changes: dict[str, Any] = choose(
        {"seed": number},
        {"size": 500 + number},
        {"sequence_length": 8 + number},
        {"weights": [share, 1 - share]},
        {"prefixes": ["code", "en"]},
        {"prefixes": ["en", "en"]},
        {"prefixes": ["en"], "weights": [1.0]},
        {"cwd": str(corpus)},
        {"prefixes": [str(corpus / name) for name in BASE["prefixes"]]},
        {"prefixes": [str(corpora["copy"] / name) for name in BASE["prefixes"]]},
        {"tokenizer": {"eod": 0, "pad": choose(501, 502, 503)}},
        {"tokenizer": {"eod": choose(0, 1, 2), "pad": 501}},
        {"options": {choose(*SWITCHES): True}},
        {"options": {"add_extra_token_to_sequence": False}},
        {"options": {"num_dataset_builder_threads": choose(2, 3), "mmap_bin_files": choose(True, False)}},
        {"options": {"path_to_cache": str(caches[choose("same", "swapped")]), "cache_small_indices": True}},
        {"loader": {"consumed_samples": 32 * choose(1, 2, 3)}},
        {"loader": {"micro_batch_size": choose(1, 3, 4)}},
        {"loader": {"dataloader_type": "cyclic"}},
        {"loader": {"data_parallel_size": choose(15, 17, 32), "data_parallel_rank": choose(0, 7, 14)}},
        {"loader": {"data_parallel_rank": choose(*range(SIZE))}},
    )
    parts: dict[str, Any] = choose(
        {}, {}, {}, {}, {}, {"library": f"2.{number}"}, {"algorithm": number}, {"swap": "dataset_index"},
        {"swap": "dataset_sample_index"},
    )  # fmt: skip
    return {"ranks": ranks, "first": bool(rng.integers(2)), **(parts or {"changes": changes})}


@pytest.fixture(scope="module")
def caches(corpora: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories with the indices of ALTERED_BASE: as they are, and one with another order of a source."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("same", "swapped")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(corpora["ours"])
        for folder in folders.values():
            build({**ALTERED_BASE, **cached(folder)})
    [manifest, *_] = sorted(folders["swapped"].glob("*GPTDataset-train-binidx.json"))
    swap_two_samples(folders["swapped"], manifest)
    return folders


def check_alterations(
    count: int, seed: int, forked: ForkedRanks, corpora: dict[str, Path], caches: dict[str, Path]
) -> None:
    """Each alteration is refused with a message that names its ranks, or changes no sample of any rank."""
    rng = np.random.default_rng(seed)
    starts: list[dict[str, Any]] = [{}, *(random_alteration(rng, corpora, caches) for _ in range(count))]
    how = {"all": {**ALTERED_BASE, "cwd": str(corpora["ours"])}, "starts": starts}
    ended = forked.run("helpers.altered_ranks", how, variables(SIZE, num_nodes=4))
    found = [[json.loads(line) for line in rank["out"].splitlines() if line.startswith("{")] for rank in ended]
    crashed = [rank["log"][-3000:] for rank in ended if rank["status"] and "gloo" not in rank["log"]]
    assert [len(rank) for rank in found] == [count + 1] * SIZE, crashed
    right = [rank[0]["read"] for rank in found]
    assert len({*right}) == SIZE
    refused = 0
    for number, altered in enumerate(starts[1:], 1):
        ranks = [rank[number] for rank in found]
        errors = [rank["text"] for rank in ranks if "error" in rank]
        if not errors:
            assert [rank["read"] for rank in ranks] == right, altered
            continue
        refused += 1
        for text in errors:
            numbers = {int(rank) for rank in re.findall(r"rank (\d+) \(node", text)}
            assert numbers & {*altered["ranks"]}, (altered, text)
    assert refused > count / 2


def test_alterations_of_ranks_of_four_nodes_are_refused_or_harmless(
    forked: ForkedRanks, corpora: dict[str, Path], caches: dict[str, Path]
) -> None:
    check_alterations(20, 1, forked, corpora, caches)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_alterations_of_ranks_are_refused_or_harmless(
    seed: int, forked: ForkedRanks, corpora: dict[str, Path], caches: dict[str, Path]
) -> None:
    check_alterations(25, seed, forked, corpora, caches)


@pytest.mark.parametrize("order", ["best_fit", "first_fit"])
def test_ranks_compare_the_index_of_a_packed_order_that_is_only_in_memory(order: str, tmp_path: Path) -> None:
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint16) as builder:
        for number in range(40):
            builder.add_document(np.arange(number % 9 + 1), [number % 9 + 1])
        builder.finalize(f"{tmp_path}/en.idx")
    dataset = binidx.load_dataset(f"{tmp_path}/en", 16, num_samples=30, order=order).wrapped
    assert not dataset.index_digests
    arrays = {name: hash_npy(getattr(dataset.order, name)) for name in ("pieces", "bounds", "shuffle_index")}
    assert identify_arrays(dataset) == arrays
