"""Starts of a run whose objects `binidx prepare index` pinned: no lists, few HEADs, and an error where data moved."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER
from helpers.pages import read_page
from helpers.random_datasets import Document, build_ours
from servers.latency_proxy import latency_proxy
from servers.log import Logged

import binidx
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.dataset import pinned_run
from binidx.dataset.pinned_run import PINNED_FILE, PinnedFile, PinnedPair, PinnedRun
from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError
from binidx.format.prefix_listing import MIN_LISTED_PREFIXES
from binidx.storage.location import Location
from binidx.storage.open import open_if_exists
from binidx.storage.requests.remote_object import read_small
from binidx.storage.writing.publish import create_object, delete_object
from binidx.tools import main


def documents(n: int, length: int = 9) -> list[Document]:
    """Dataset `n`: 40 + n documents of tokens that are all n."""
    return [Document([n] * length, [length], []) for _ in range(40 + n)]


class PinnedStarts:
    """A run over `count` prefixes of one folder of a bucket, and starts of it, each on a node of its own."""

    def __init__(
        self, s3: Bucket, directory: Path, patch: pytest.MonkeyPatch, count: int = MIN_LISTED_PREFIXES
    ) -> None:
        self.endpoint, self.directory, self.patch, self.num_nodes = s3.server.endpoint, directory, patch, 0
        folder = s3.fresh()
        self.prefixes = [build_ours(f"{folder}/p{n}", documents(n), "uint16") for n in range(count)]
        config = binidx.GPTDatasetConfig(
            random_seed=7, sequence_length=8, blend=(self.prefixes, [1.0] * count), split="8,1,1", tokenizer=TOKENIZER,
            path_to_cache=f"{folder}/cache", reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        )  # fmt: skip
        self.run, self.path = binidx.Run(config, [300, 20, 20], 4), str(directory / "run.json")
        self.run.save(self.path)

    @property
    def file(self) -> Location:
        file = PinnedFile.of(self.run.config)
        assert file is not None
        return file.location

    def prepare(self, *arguments: str) -> None:
        assert main(["prepare", "index", self.path, *arguments]) == 0

    def start(self, rank: int = 0, node: int | None = None) -> list[Any]:
        """The tokens of all samples of train, read by a rank on a node; a new one, unless it is given."""
        self.num_nodes += 1
        self.patch.setenv("BINIDX_INDEX_DIR", str(self.directory / f"node{self.num_nodes if node is None else node}"))
        self.patch.setenv("RANK", str(rank))
        self.patch.setenv("WORLD_SIZE", "16")
        train: Any = binidx.Run.load(self.path).build()[0]
        return [sample["tokens"].tolist() for sample in train.__getitems__(range(len(train)))]

    def log(self, *starts: Callable[[], object]) -> list[Logged]:
        """The requests of some starts."""
        with latency_proxy(self.endpoint, delay_ms=1) as proxy, proxy.in_environment():
            for start in starts:
                start()
            return proxy.log()

    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(read_small(self.file) or b"")
        return values

    def replace_file(self, data: bytes) -> None:
        with create_object(self.file) as out:
            out.write(data)


@pytest.fixture
def starts(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedStarts:
    return PinnedStarts(s3, tmp_path, monkeypatch)


def kinds(log: Sequence[Logged]) -> Counter[str]:
    """Requests by kind: LIST, or the method and the end of the name."""
    return Counter(f"{each.method} {each.path.rpartition('.')[2]}" if "." in each.path else "LIST" for each in log)


def test_the_ranks_of_pinned_data_list_nothing_and_a_node_fetches_each_file_once(starts: PinnedStarts) -> None:
    unpinned = starts.start()
    before = kinds(starts.log(starts.start))
    assert before["LIST"] == 2
    starts.prepare()
    ranks: list[Any] = []
    log = kinds(starts.log(lambda: ranks.append(starts.start(rank=4, node=100))))
    assert not {kind for kind in log if kind == "LIST" or kind.endswith(("idx", "xxh3")) or kind == "HEAD bin"}, log
    assert (log["HEAD bundle"], log["GET bundle"]) == (1, 1)
    again = kinds(starts.log(*[lambda: ranks.append(starts.start(rank=5, node=100))] * 3))
    assert not {kind for kind in again if kind in ("LIST", "HEAD bin") or kind.endswith("idx")}, again
    assert again["GET bundle"] == 0
    assert all(rank == unpinned for rank in ranks)


def test_the_first_rank_of_all_lists_once_and_no_more(starts: PinnedStarts) -> None:
    starts.prepare()
    log = kinds(starts.log(lambda: starts.start(rank=0)))
    assert log["LIST"] == 1
    assert not {kind for kind in log if kind in ("HEAD bin", "HEAD idx")}, log


def test_few_prefixes_are_looked_up_once_by_one_rank(s3: Bucket, tmp_path: Path, monkeypatch: Any) -> None:
    starts = PinnedStarts(s3, tmp_path, monkeypatch, count=2)
    before = starts.start()
    starts.prepare()
    first, other = (kinds(starts.log(lambda rank=rank: starts.start(rank))) for rank in (0, 1))  # type: ignore[misc]
    assert (first["HEAD idx"], other["HEAD idx"]) == (2, 0)
    assert not {kind for kind in first + other if kind in ("LIST", "HEAD bin", "HEAD zst", "HEAD xxh3")}
    assert starts.start(rank=1) == before


def test_compressed_tokens_and_checksums_are_pinned_too(s3: Bucket, tmp_path: Path, monkeypatch: Any) -> None:
    starts = PinnedStarts(s3, tmp_path, monkeypatch)
    before = starts.start()
    for number, way in ((0, StorageFormat("zstd")), (1, StorageFormat("raw", checksums=True))):
        prefix = starts.prefixes[number]
        convert_dataset(prefix, f"{prefix}-new", way=way)
        starts.prefixes[number] = f"{prefix}-new"
    run = replace(starts.run, config=replace(starts.run.config, blend=(starts.prefixes, [1.0] * 8)))
    starts.run = run
    run.save(starts.path)
    starts.prepare()
    pairs = starts.values()["pairs"]
    assert pairs[starts.prefixes[0]]["tokens"] == ".bin.zst"
    assert pairs[starts.prefixes[1]]["sums"]["size"] > 32
    log = kinds(starts.log(lambda: starts.start(rank=1)))
    assert not {kind for kind in log if kind == "LIST" or kind in ("HEAD bin", "HEAD idx", "HEAD zst", "HEAD xxh3")}
    assert log["GET xxh3"] > 0
    assert starts.start(rank=1) == before


def test_a_restart_reads_the_same_samples_and_a_second_call_changes_nothing(starts: PinnedStarts) -> None:
    starts.prepare()
    first, file = starts.start(rank=1), read_small(starts.file)
    starts.prepare()
    assert read_small(starts.file) == file
    assert [starts.start(rank=rank, node=7) for rank in (0, 1)] == [first, first]


def move(starts: PinnedStarts, how: str) -> str:
    """Change data of prefix 3; the name of the object that moved."""
    prefix = starts.prefixes[3]
    if how == "deleted":
        delete_object(Location.of(f"{prefix}.idx"))
        delete_object(Location.of(f"{prefix}.bin"))
        return f"{prefix}.bin"
    other = build_ours(f"{prefix}-other", documents(4, length=11), "uint16")
    with create_object(Location.of(f"{prefix}.{how}")) as out:
        out.write(read_small(Location.of(f"{other}.{how}")) or b"")
    return f"{prefix}.{how}"


@pytest.mark.parametrize("how", ["bin", "idx", "deleted"])
def test_data_that_moved_is_an_error_of_the_first_rank_that_names_the_way_out(starts: PinnedStarts, how: str) -> None:
    starts.prepare()
    name = move(starts, how)
    with pytest.raises(ObjectChangedError) as raised:
        starts.start(rank=0)
    for part in (
        name,
        str(starts.file),
        "1 objects of the run moved" if how != "deleted" else "2 objects",
        "prepare index",
    ):
        assert part in str(raised.value)


@pytest.mark.parametrize("bundled", [True, False])
@pytest.mark.parametrize("how", ["bin", "idx", "deleted"])
def test_data_that_moved_is_an_error_of_other_ranks_when_they_read_it(
    starts: PinnedStarts, how: str, bundled: bool
) -> None:
    starts.prepare()
    name = move(starts, how)
    if how == "idx" and bundled:
        starts.start(rank=1)  # of the pinned .idx, which the bundle has: the first rank ends the run
        return
    if not bundled:
        delete_object(Location.of(starts.file.uri.replace("pinned.json", "idx.bundle")))
    with pytest.raises((ObjectChangedError, ObjectNotFoundError)) as raised:
        starts.start(rank=1)
    for part in (name.rpartition(".")[0], str(starts.file), "prepare index"):
        assert part in str(raised.value)


@pytest.mark.parametrize("how", ["bin", "idx"])
def test_prepare_index_takes_the_new_data_and_no_pin_takes_whatever_is_there(starts: PinnedStarts, how: str) -> None:
    starts.prepare()
    before = starts.start()
    for end in ("bin", "idx"):
        move(starts, end)
    starts.prepare()
    new = starts.start()
    assert new != before
    assert starts.start(rank=1) == new
    build_ours(starts.prefixes[3], documents(3), "uint16")
    with pytest.raises(ObjectChangedError):
        starts.start()
    starts.prepare("--no-pin")
    assert read_small(starts.file) is None
    assert starts.start() == before


def test_prepare_index_says_what_it_does_not_pin_where_no_etags_are_sent(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = PinnedStarts(s3, tmp_path, monkeypatch, count=2)
    starts.prepare()
    assert "not pinned" not in capsys.readouterr().out
    with latency_proxy(starts.endpoint, delay_ms=0, versionless=True) as proxy, proxy.in_environment():
        starts.prepare()
        found = capsys.readouterr().out
        starts.prepare("--json")
        values = json.loads(capsys.readouterr().out)
    assert f"\nnot pinned: no ETags of {starts.prefixes[0]} and 1 more; " in found
    assert "JuiceFS: gateway --keep-etag" in found
    assert (values["pinned"], values["not_pinned"]) == (None, starts.prefixes)
    starts.prepare("--json")
    values = json.loads(capsys.readouterr().out)
    assert (values["pinned"], values["not_pinned"]) == (starts.file.uri, [])


def test_a_damaged_copy_of_a_node_is_fetched_again_and_a_damaged_file_is_an_error(starts: PinnedStarts) -> None:
    starts.prepare()
    before = starts.start(rank=1, node=1)
    for path in (starts.directory / "node1").rglob("*"):
        if path.is_file() and b'"pinned"' in (data := path.read_bytes()):
            path.write_bytes(data.replace(b'"size"', b'"sise"', 1))
    assert starts.start(rank=1, node=1) == before
    whole = read_small(starts.file) or b""
    for damaged in (whole.replace(b'"size"', b'"sise"', 1), whole[:-9], b""):
        starts.replace_file(damaged)
        with pytest.raises(FormatError, match="binidx prepare index writes it again"):
            starts.start(rank=1)
    starts.prepare()
    assert starts.start() == before


def rewrite(starts: PinnedStarts, change: Callable[[dict[str, Any]], object]) -> None:
    """Write the pinned file as another version of the library might."""
    values = starts.values()
    change(values)
    del values["xxh3_64"]
    starts.replace_file(json.dumps({**values, "xxh3_64": pinned_run.checksum_fields(values)}).encode())


def test_fields_of_a_later_version_are_named_and_kept(starts: PinnedStarts, caplog: pytest.LogCaptureFixture) -> None:
    starts.prepare()
    rewrite(starts, lambda values: values.update(library="99.0", zones={"a": 1}))
    with caplog.at_level(logging.WARNING):
        starts.start(rank=1)
    assert "unknown fields zones, of a later version" in caplog.text
    rewrite(starts, lambda values: values.update(indices={}))  # so that it is written again
    starts.prepare()
    assert starts.values()["zones"] == {"a": 1}
    assert starts.values()["indices"]


def test_the_same_pins_of_another_version_are_not_written_again(starts: PinnedStarts) -> None:
    starts.prepare()
    rewrite(starts, lambda values: values.update(library="99.0"))
    file = read_small(starts.file)
    starts.prepare()
    assert read_small(starts.file) == file


@pytest.mark.parametrize(
    ("other", "message"),
    [({"algorithm": 2}, r"found algorithm 2 of binidx"), ({"version": 2}, r"\$\.version: expected 1 \(found 2\)")],
)
def test_a_file_of_another_version_is_an_error(starts: PinnedStarts, other: dict[str, Any], message: str) -> None:
    starts.prepare()
    rewrite(starts, lambda values: values.update(other))
    with pytest.raises(FormatError, match=message) as raised:
        starts.start(rank=1)
    assert "prepare index" in str(raised.value)


def test_an_index_with_other_arrays_is_an_error(starts: PinnedStarts) -> None:
    starts.prepare()
    name = next(name for name in starts.values()["indices"] if name.endswith("BlendedDataset-train"))

    def change(values: dict[str, Any]) -> None:
        values["indices"][name]["dataset_index"] = "0" * 16

    rewrite(starts, change)
    with pytest.raises(ObjectChangedError, match=rf"index {name}: changed \(found .*dataset_index.*prepare index"):
        starts.start(rank=1)


def test_digests_of_other_runs_over_the_same_objects_stay(starts: PinnedStarts) -> None:
    starts.prepare()
    names = {*starts.values()["indices"]}
    starts.prepare("--train-samples", "100", "--eval-iters", "1")
    assert names < {*starts.values()["indices"]}


def test_local_data_is_not_pinned(tmp_path: Path) -> None:
    prefix = build_ours(tmp_path / "en", documents(1), "uint16")
    config = binidx.GPTDatasetConfig(
        random_seed=7, sequence_length=8, blend=([prefix], None), split="1,0,0", path_to_cache=str(tmp_path / "cache"),
        tokenizer=TOKENIZER, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    binidx.Run(config, [30, 0, 0], 4).save(str(tmp_path / "run.json"))
    assert main(["prepare", "index", str(tmp_path / "run.json")]) == 0
    assert PinnedFile.of(config) is None
    assert not [*tmp_path.rglob("*pinned*")]


def test_an_identity_that_proves_nothing_is_no_pin() -> None:
    values = {"library": "", "algorithm": 3, "indices": {}, "pairs": {"s3://b/p": {
        "tokens": ".bin", "idx": {"size": 1, "etag": "a"}, "bin": {"size": 1, "etag": 'W/"a"'}, "sums": None,
    }}}  # fmt: skip
    with pytest.raises(FormatError, match="needs a size and an ETag or a generation"):
        PINNED_FILE.convert({**PINNED_FILE.tags, **values}, "x")


def test_the_page_of_formats_names_all_fields() -> None:
    [section] = re.findall(r"^### Pinned file$(.*?)^#", read_page("reference/formats"), re.M | re.S)
    named = {name.rpartition(".")[2] for name in re.findall(r"`([^`\s{}]+)`", section)}
    kinds = (PinnedRun, PinnedPair)
    assert {each.name for kind in kinds for each in fields(kind)} | {*PINNED_FILE.tags, "xxh3_64"} <= named


def test_a_run_with_a_blend_for_each_split_is_pinned_whole(starts: PinnedStarts) -> None:
    train, valid = (starts.prefixes[:5], None), (starts.prefixes[5:], None)
    config = replace(starts.run.config, blend=None, split=None, blend_per_split=[train, valid, None])
    starts.run = binidx.Run(config, [300, 20, 0], 4)
    starts.run.save(starts.path)
    before = starts.start(rank=1)
    starts.prepare()
    assert {*starts.values()["pairs"]} == {*starts.prefixes}
    log = kinds(starts.log(lambda: starts.start(rank=1)))
    assert not {kind for kind in log if kind in ("LIST", "HEAD bin", "HEAD idx")}, log
    assert starts.start(rank=1) == before
    name = move(starts, "idx")
    with pytest.raises(ObjectChangedError, match=name):
        starts.start()


def test_the_ranks_of_a_run_without_a_bundle_list_nothing(starts: PinnedStarts) -> None:
    starts.prepare()
    delete_object(Location.of(starts.file.uri.replace("pinned.json", "idx.bundle")))
    log = kinds(starts.log(lambda: starts.start(rank=1)))
    assert (log["LIST"], log["HEAD idx"], log["GET idx"]) == (0, 0, MIN_LISTED_PREFIXES)


def test_a_file_that_is_replaced_between_its_look_up_and_its_read_is_read_again(
    starts: PinnedStarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts.prepare()
    replaced = []

    def replace_and_open(location: Location, **how: Any) -> Any:
        reader = open_if_exists(location, **how)
        if len(replaced) < 2:
            replaced.append(rewrite(starts, lambda values: values.update(library=f"{len(replaced)}.0")))
        return reader

    monkeypatch.setattr(pinned_run, "open_if_exists", replace_and_open)
    starts.start(rank=1)
    assert len(replaced) == 2
