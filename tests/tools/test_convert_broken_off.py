"""convert when things go wrong: killed anywhere it goes on; what does not verify does not stand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from fsspec.implementations.memory import MemoryFileSystem
from helpers.conversion import MIB, AtEvent, build, dying, memory, names_beside, pair, unfinished_uploads
from helpers.random_datasets import Document, build_ours

from binidx.corpus import token_parts
from binidx.corpus.block_digests import CorruptCopyError
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.errors import FormatError, ObjectChangedError, ObjectExistsError, ObjectNotFoundError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage.codecs.segments import SEGMENT_BYTES
from binidx.storage.stores.driver_errors import PartsLostError
from binidx.tools import main

PART = SEGMENT_BYTES
TOKENS = PART // 2
"""uint16 tokens of a part."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_parts, "LEAST_BYTES", PART)


def left_beside(prefix: str) -> list[str]:
    """What a call leaves: the folder of the parts by its name."""
    return [name for name in names_beside(prefix) if not name.endswith(".partial")]


def test_killed_at_any_event_it_goes_on_and_is_never_half_a_dataset(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 5 * TOKENS - 77)
    # 5 parts and 1, each sent and read back, and 4 stages: 16 events. Killed at each, then run to the end.
    attempts = [[tmp_path / f"{event}", event, tmp_path / f"{event}", 0] for event in range(1, 17)]
    assert dying(source, PART, *chain(*attempts)) == "90" * 16
    for target, *_ in attempts:
        assert pair(target) == pair(source)
    assert len(list(tmp_path.iterdir())) == 2 * 17


def test_killed_again_and_again_it_comes_to_the_end(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 12 * TOKENS), str(tmp_path / "out" / "en")
    statuses = dying(source, PART, *chain(*([target, event] for event in range(1, 31))))
    assert statuses[0] == "9"
    assert statuses[-1] == "0"
    assert pair(target) == pair(source)
    assert names_beside(target) == ["en.bin", "en.idx"]


def test_killed_in_a_bucket_it_keeps_the_parts_that_are_there(s3: Bucket, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 16 * MIB), f"{s3.fresh()}/en"
    assert dying(source, 5 * MIB, target, 4) == "9"
    assert left_beside(target) == ["en-parts", "en.convert.json"]
    assert len(unfinished_uploads(target)) == 1
    done = convert_dataset(source, target, part_bytes=5 * MIB)
    # The third part was being reported when it died, so two have a record.
    assert (done.parts_kept, done.parts_sent) == (2, 6)
    assert pair(target) == pair(source)
    assert names_beside(target) == ["en.bin", "en.idx"]
    assert unfinished_uploads(target) == []


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_after_a_break_on_gcs_nothing_is_sent_twice(gs: str, tmp_path: Path, codec: str) -> None:
    source, target = build(tmp_path / "en", 5 * TOKENS - 77), f"{gs}/{uuid.uuid4().hex}/en"

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_dataset(source, target, way=StorageFormat(codec), watch=AtEvent("verify", stop))
    done = convert_dataset(source, target, way=StorageFormat(codec))
    assert done.parts_kept == (5 if codec == "raw" else 1)
    convert_dataset(target, tmp_path / "back", way=StorageFormat("raw"))
    assert pair(tmp_path / "back") == pair(source)
    assert names_beside(target) == ["en.bin.zst" if codec == "zstd" else "en.bin", "en.idx"]


def test_an_index_in_several_pieces_leaves_none_of_them_on_gcs(gs: str, tmp_path: Path) -> None:
    documents = [Document(np.arange(3), [1, 1, 1], [0, 0, 0])] * (PART // 24)
    source, target = build_ours(tmp_path / "en", documents, np.uint16), f"{gs}/{uuid.uuid4().hex}/en"
    assert os.path.getsize(f"{source}.idx") > PART
    convert_dataset(source, target)
    assert pair(target) == pair(source)
    assert names_beside(target) == ["en.bin", "en.idx"]


def test_killed_after_publishing_it_sends_nothing_twice(s3: Bucket, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 8 * MIB), f"{s3.fresh()}/en"
    # copy, 4 parts, verify, 1 part read back: the upload is complete
    assert dying(source, 5 * MIB, target, 7) == "9"
    assert left_beside(target) == ["en-parts", "en.bin", "en.convert.json"]
    done = convert_dataset(source, target, part_bytes=5 * MIB)
    assert (done.parts_kept, done.parts_sent) == (4, 1)
    assert pair(target) == pair(source)


SMALL_PARTS = """
import sys
from functools import partial
from binidx.corpus import convert, token_parts
from binidx.tools.convert import main
token_parts.LEAST_BYTES = 1 << 16
convert.convert_dataset = partial(convert.convert_dataset, part_bytes=1 << 16)
sys.exit(main(sys.argv[1:]))
"""


def test_a_real_kill_9_of_the_command(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 300 * TOKENS), str(tmp_path / "out" / "en")
    command = [sys.executable, "-c", SMALL_PARTS, "--json", source, "--to", target]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        while len(list(Path(f"{target}-parts").glob("*.json"))) < 1 + 3:
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
    assert running.returncode == -signal.SIGKILL
    assert not Path(f"{target}.bin").exists()
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert done["parts_kept"] >= 3
    assert done["parts_kept"] + done["parts_sent"] == 300 + 1
    assert pair(target) == pair(source)
    assert names_beside(target) == ["en.bin", "en.idx"]


def interrupted(source: str, target: str) -> None:
    """A run that stops after some parts."""

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_dataset(source, target, part_bytes=PART, watch=AtEvent("verify", stop))


def test_ctrl_c_loses_the_parts_in_flight_only(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 12 * TOKENS), str(tmp_path / "out")

    def stop() -> None:
        if len(watch.events) <= 3:
            watch.act = stop
        else:
            raise KeyboardInterrupt

    watch = AtEvent("part", stop)
    with pytest.raises(KeyboardInterrupt):
        convert_dataset(source, target, part_bytes=PART, watch=watch)
    # A thread still at work could write into whatever file gets the number of the one that was closed.
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("binidx-copy")]
    assert convert_dataset(source, target, part_bytes=PART).parts_kept == 2


def test_a_partial_file_damaged_between_runs_is_mended(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 12 * TOKENS), str(tmp_path / "out")
    interrupted(source, target)
    [partial] = tmp_path.glob("out.bin.*.partial")
    damaged = bytearray(partial.read_bytes())
    damaged[2 * PART + 500] ^= 1
    partial.write_bytes(damaged)
    done = convert_dataset(source, target, part_bytes=PART)
    assert (done.parts_kept, done.parts_sent) == (11, 2)
    assert pair(target) == pair(source)


@pytest.mark.parametrize("name", [".convert.json", "-parts/job.json"])
def test_a_damaged_file_of_the_work_means_beginning_again(name: str, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 12 * TOKENS), str(tmp_path / "out")
    for text in ("", "[]", "{", '{"source": 1}', '{"objects": {"bin": {"token": 1}}}'):
        interrupted(source, target)
        Path(f"{target}{name}").write_text(text)
        if name == "-parts/job.json" and ":" in text:  # of a job that is not known
            with pytest.raises(ObjectExistsError, match="parts of another job"):
                convert_dataset(source, target, part_bytes=PART)
            Path(f"{target}{name}").write_text("")
        assert convert_dataset(source, target, part_bytes=PART).parts_kept == 0
        assert pair(target) == pair(source)
        assert names_beside(target) == ["out.bin", "out.idx"]
        for path in tmp_path.glob("out*"):
            path.unlink()


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 12 * TOKENS), str(tmp_path / "out")
    interrupted(source, target)
    record = next(path for path in Path(f"{target}-parts").glob("*.json") if path.name != "job.json")
    record.write_text("{")
    with pytest.raises(FormatError, match=rf"{record}: no JSON: .*; delete it and give the same command again"):
        convert_dataset(source, target, part_bytes=PART)
    record.unlink()
    assert convert_dataset(source, target, part_bytes=PART).parts_kept == 11
    assert pair(target) == pair(source)


JOURNAL = {
    "binidx_convert": 2, "owner": "o", "source": {"uri": "s3://elsewhere/en"},
    "objects": {"bin": {"size": 8, "part_bytes": 4, "token": "ab12", "sent": {"1": ["d", "e"]}, "done": None}},
}  # fmt: skip


def test_a_journal_of_an_earlier_version_and_its_partial_file_are_removed_and_the_copy_begins_again(
    tmp_path: Path,
) -> None:
    source, target = build(tmp_path / "en", 600), str(tmp_path / "out")
    Path(f"{target}.convert.json").write_text(json.dumps(JOURNAL))
    Path(f"{target}.bin.ab12.partial").write_bytes(bytes(8))
    Path(f"{target}.bin").write_bytes(b"published by that convert")
    watch = AtEvent("", None)
    assert convert_dataset(source, target, watch=watch).parts_kept == 0
    assert "beginning again" in watch.events[0]
    assert pair(target) == pair(source)
    assert names_beside(target) == ["out.bin", "out.idx"]
    Path(f"{target}.convert.json").write_text(json.dumps(JOURNAL))
    assert not convert_dataset(source, target).copied
    assert names_beside(target) == ["out.bin", "out.convert.json", "out.idx"]  # it may be that of a living convert


@pytest.mark.parametrize("event", ["part", "verify", "copy {target}.idx"])
def test_a_convert_of_an_earlier_version_that_begins_meanwhile_stops_this_one(tmp_path: Path, event: str) -> None:
    source, target = build(tmp_path / "en", 12 * TOKENS), memory()
    fs, path = fsspec.url_to_fs(f"{target}.convert.json")
    watch = AtEvent(event.format(target=target), lambda: fs.pipe_file(path, json.dumps(JOURNAL).encode()))
    with pytest.raises(ObjectChangedError, match=r"convert.json: written by another convert to this target"):
        convert_dataset(source, target, watch=watch)
    assert not IndexedDataset.exists(target)


def test_what_arrived_wrong_on_a_disk_never_gets_the_name(tmp_path: Path, capsys) -> None:
    source, target = build(tmp_path / "en", 12 * TOKENS), str(tmp_path / "out")
    old = build(tmp_path / "out", 5, seed=1)
    before = pair(old)

    def damage() -> None:
        [partial] = tmp_path.glob("out.bin.*.partial")
        with partial.open("r+b") as file:
            file.write(b"wrong")

    with pytest.raises(CorruptCopyError, match=r"out.bin: bytes 0 to 65536 arrived wrong; removed, run it again"):
        convert_dataset(source, target, overwrite=True, part_bytes=PART, watch=AtEvent("verify", damage))
    assert pair(old) == before  # the dataset that was to be replaced still stands
    assert names_beside(target) == ["out-parts", "out.bin", "out.convert.json", "out.idx"]
    convert_dataset(source, target, overwrite=True)
    assert pair(target) == pair(source)
    assert names_beside(target) == ["out.bin", "out.idx"]


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_what_arrived_wrong_in_a_bucket_is_removed(s3: Bucket, tmp_path: Path, end: str) -> None:
    source, target = build(tmp_path / "en", 6_000), f"{s3.fresh()}/en"

    def damage() -> None:
        fs, path = fsspec.url_to_fs(f"{target}.{end}")
        fs.pipe_file(path, b"x" * fs.info(path)["size"])

    with pytest.raises(CorruptCopyError, match=rf"en.{end}: bytes 0 to \d+ arrived wrong"):
        convert_dataset(source, target, watch=AtEvent(f"verify {target}.{end}", damage))
    assert not IndexedDataset.exists(target)
    assert left_beside(target) == ["en-parts", *(["en.bin"] if end == "idx" else []), "en.convert.json"]
    convert_dataset(source, target)
    assert pair(target) == pair(source)
    assert names_beside(target) == ["en.bin", "en.idx"]


class LossyFileSystem(MemoryFileSystem):
    """Keeps all but the last byte of a .bin."""

    protocol = "lossy"

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        return super().pipe_file(path, value[:-1] if path.endswith(".bin") else value, **options)


def test_a_store_that_loses_bytes_is_found_out_by_size_alone(tmp_path: Path, capsys) -> None:
    fsspec.register_implementation("lossy", LossyFileSystem, clobber=True)
    source, target = build(tmp_path / "en", 600), f"lossy://{uuid.uuid4().hex}/en"
    assert main(["convert", source, "--to", target, "--verify", "size"]) == 1
    error = capsys.readouterr().err
    assert error == f"binidx convert: {target}.bin: 1199 bytes arrived, needed 1200; removed, run it again\n"
    assert names_beside(target) == ["en-parts", "en.convert.json"]


@pytest.mark.parametrize("when", ["copy", "part", "verify"])
def test_a_source_that_changes_meanwhile_is_an_error(tmp_path: Path, when: str) -> None:
    source = build(tmp_path / "en", 6_000)
    for target in (str(tmp_path / "out"), memory()):

        def touch() -> None:
            with Path(f"{source}.bin").open("r+b") as file:
                file.write(time.time_ns().to_bytes(8, "little"))

        with pytest.raises(
            ObjectChangedError, match=r"(en\.idx|tokens of .*en): changed since it was opened \(.*\); run it again"
        ):
            convert_dataset(source, target, part_bytes=PART, watch=AtEvent(when, touch))
        assert not IndexedDataset.exists(target)
        watch = AtEvent("", None)
        convert_dataset(source, target, watch=watch)
        assert "of another source or form, or the source has changed; beginning again" in watch.events[0]
        assert pair(target) == pair(source)
        assert names_beside(target) == sorted(Path(target).name + end for end in (".bin", ".idx"))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_the_upload_of_a_source_that_is_gone_is_aborted(s3: Bucket, tmp_path: Path, codec: str) -> None:
    target = f"{s3.fresh()}/en"
    convert_dataset(build(tmp_path / "plain", 8 * MIB), tmp_path / "en", way=StorageFormat(codec))
    assert dying(str(tmp_path / "en"), 5 * MIB, target, 3) == "9"
    assert len(unfinished_uploads(target)) == 1
    other = build(tmp_path / "other", 600)
    convert_dataset(other, target)
    assert unfinished_uploads(target) == []
    assert pair(target) == pair(other)


@pytest.mark.parametrize("same", [True, False])
def test_a_second_convert_in_a_store_overtakes_the_first_which_says_so(tmp_path: Path, same: bool) -> None:
    first, target = build(tmp_path / "en", 6_000), memory()
    second = first if same else build(tmp_path / "other", 7_000, seed=1)
    watch = AtEvent("part", lambda: convert_dataset(second, target, part_bytes=PART))
    with pytest.raises(ObjectChangedError, match=r"convert.json: written by another convert to this target"):
        convert_dataset(first, target, part_bytes=PART, watch=watch)
    assert pair(target) == pair(second)
    assert names_beside(target) == ["en.bin", "en.idx"]


class OvertakenFileSystem(MemoryFileSystem):
    """Calls a function before the first object is removed."""

    protocol = "overtaken"
    before_removal: ClassVar[list[Callable[[], object]]] = []

    def rm_file(self, path: str) -> None:
        if self.before_removal:
            self.before_removal.pop()()
        super().rm_file(path)


def test_a_convert_that_goes_on_after_another_call_has_finished_leaves_its_index(tmp_path: Path) -> None:
    """Between its check of the owner and its publication, see `simulation.convert_world`."""
    fsspec.register_implementation("overtaken", OvertakenFileSystem, clobber=True)
    source, target = build(tmp_path / "en", 6_000), f"overtaken://{uuid.uuid4().hex}/en"
    OvertakenFileSystem.before_removal.append(lambda: convert_dataset(source, target))
    with pytest.raises(ObjectChangedError, match=r"convert.json: written by another convert to this target"):
        convert_dataset(source, target)
    assert pair(target) == pair(source)
    assert not convert_dataset(source, target).copied


PAUSED = """
import sys
from helpers.conversion import AtEvent
from binidx.corpus.convert import convert_dataset
def pause():
    print("paused", flush=True)
    sys.stdin.readline()
convert_dataset(*sys.argv[1:3], part_bytes=1 << 16, watch=AtEvent(sys.argv[3], pause))
"""


@pytest.mark.parametrize("event", ["part", "verify", "copy {target}.idx"])
@pytest.mark.parametrize("same", [True, False])
def test_a_second_convert_on_a_disk_is_refused_by_the_name_of_the_first_which_ends_well(
    tmp_path: Path, same: bool, event: str
) -> None:
    first, target = build(tmp_path / "en", 6_000), str(tmp_path / "new" / "out")
    second = first if same else build(tmp_path / "other", 7_000, seed=1)
    command = [sys.executable, "-c", PAUSED, first, target, event.format(target=target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "paused\n"
        with pytest.raises(ObjectExistsError, match=rf"^{target}: process {running.pid} of .* converts to it; wait"):
            convert_dataset(second, target, overwrite=True, part_bytes=PART)
        running.communicate("go on\n")
    assert running.returncode == 0
    assert pair(target) == pair(first)
    assert names_beside(target) == ["out.bin", "out.idx"]
    assert not convert_dataset(first, target).copied


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_a_convert_whose_parts_another_process_took_says_so_and_the_next_call_copies_them_again(
    tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    source = build(tmp_path / "en", 4 * MIB)
    target = str(tmp_path / "out") if where == "disk" else f"{request.getfixturevalue('s3').fresh()}/out"

    def take() -> None:
        for partial in tmp_path.glob("out.*.partial"):
            partial.unlink()
        if where == "s3":
            fs, path = fsspec.url_to_fs(target)
            [upload] = unfinished_uploads(target)
            names = {"Bucket": path.partition("/")[0], "Key": upload["Key"], "UploadId": upload["UploadId"]}
            fs.call_s3("abort_multipart_upload", **names)

    with pytest.raises((PartsLostError, ObjectNotFoundError)):
        convert_dataset(source, target, part_bytes=5 * MIB, watch=AtEvent("part", take))
    convert_dataset(source, target, part_bytes=5 * MIB)
    assert pair(target) == pair(source)
    assert names_beside(target) == ["out.bin", "out.idx"]
    if where == "s3":
        assert unfinished_uploads(target) == []


def test_a_convert_whose_source_is_gone_keeps_the_parts_that_it_has_written(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 4 * MIB), tmp_path / "out"
    aside = tmp_path / "aside.bin"

    def lose() -> None:
        if not aside.exists():
            os.replace(f"{source}.bin", aside)

    with pytest.raises(ObjectNotFoundError):
        convert_dataset(f"file://{source}", str(target), part_bytes=MIB, watch=AtEvent("part", lose))
    [partial] = tmp_path.glob("out.bin.*.partial")
    assert json.loads(Path(f"{target}.convert.json").read_text())["objects"]["bin"]["token"] in partial.name
    records = len(list(Path(f"{target}-parts").glob("*.json"))) - 1
    os.replace(aside, f"{source}.bin")
    assert convert_dataset(f"file://{source}", str(target), part_bytes=MIB).parts_kept == records > 0
    assert pair(str(target)) == pair(source)


def test_huge_objects_get_larger_blocks() -> None:
    assert token_parts.plan_blocks(80 * 10**9) == 8 << 20
    for size in (84 * 10**9, 10**12, 5 * 2**40):
        block_bytes = token_parts.plan_blocks(size)
        assert block_bytes % SEGMENT_BYTES == 0
        assert -(-size // block_bytes) <= 10_000
        assert all(start % block_bytes == 0 for start, _ in token_parts.plan_ranges(size, block_bytes))
