"""binidx convert: byte for byte to any place; killed anywhere it goes on; what does not verify does not stand."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
import uuid
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from binidx.tools import main
from conftest import Bucket
from fsspec.implementations.memory import MemoryFileSystem
from random_datasets import Document, build_ours

from binidx.errors import ObjectChangedError, ObjectNotFoundError
from binidx.format.convert import convert_dataset
from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage.backends import open_object
from binidx.storage.resumable import CopyState, CorruptCopyError, plan_copy
from binidx.storage.transfer import read_whole

HERE = Path(__file__).parent
MIB = 1 << 20


def build(prefix: Path, num_tokens: int, seed: int = 0) -> str:
    """A dataset of about 10 documents, uint16."""
    rng = np.random.default_rng(seed)
    lengths = np.diff(np.sort(rng.integers(0, num_tokens + 1, 9)), prepend=0, append=num_tokens).tolist()
    documents = [Document(rng.integers(0, 65536, length, dtype=np.uint16), [length], [1]) for length in lengths]
    return build_ours(prefix, documents, np.uint16, multimodal=True)


def pair(prefix: Any) -> tuple[bytes, bytes]:
    return tuple(bytes(read_whole(open_object(f"{prefix}.{end}", cache=False))) for end in ("bin", "idx"))


def names_beside(prefix: str) -> list[str]:
    """What lies under a prefix, journals and partial files included."""
    fs, path = fsspec.url_to_fs(prefix)
    fs.invalidate_cache()
    return sorted(name.rsplit("/", 1)[1] for name in fs.glob(f"{path}*"))


def unfinished_uploads(bucket: Bucket) -> list[Any]:
    fs, path = fsspec.url_to_fs(bucket.uri)
    return fs.call_s3("list_multipart_uploads", Bucket=path.split("/")[0]).get("Uploads", [])


def memory() -> str:
    return f"memory://{uuid.uuid4().hex}/en"


class AtEvent:
    """A Watch that does something at the first event whose text starts so; a part done is `part`."""

    def __init__(self, text: str, act) -> None:
        self.text, self.act, self.events = text, act, []

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        self.say(what)

    def advance(self, num_bytes: int) -> None:
        self.say("part")

    def say(self, message: str) -> None:
        self.events.append(message)
        if self.act is not None and message.startswith(self.text):
            act, self.act = self.act, None
            act()


def test_local_to_bucket_to_local_is_byte_for_byte(s3: Bucket, tmp_path: Path, capsys) -> None:
    source = build(tmp_path / "en", 6_000_000)
    with Path(f"{source}.bin").open("ab") as file:
        file.write(b"bytes that no sequence covers")
    middle, back = f"{s3.fresh()}/en", str(tmp_path / "deep" / "er" / "back")
    assert main(["convert", source, middle]) == 0
    assert main(["convert", middle, back]) == 0
    assert pair(source) == pair(middle) == pair(back)
    assert names_beside(middle) == names_beside(source)
    assert names_beside(back) == ["back.bin", "back.idx"]
    assert unfinished_uploads(s3) == []
    assert "6,000,000 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("num_tokens", [0, 1, 5 * MIB // 2])
def test_the_edges_of_a_part(s3: Bucket, tmp_path: Path, num_tokens: int) -> None:
    source = build(tmp_path / "en", num_tokens)
    for target in (f"{s3.fresh()}/en", str(tmp_path / "copy"), memory()):
        done = convert_dataset(source, target, part_bytes=5 * MIB)
        assert done.parts_sent == (2 if num_tokens else 1)
        assert pair(target) == pair(source)


def dying(source: str, part_bytes: int, *attempts: Any) -> str:
    """The exit status of each attempt: 9 died, 0 came to its end."""
    command = [sys.executable, HERE / "dying.py", source, part_bytes, *attempts]
    return subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout


def test_killed_at_any_event_it_goes_on_and_is_never_half_a_dataset(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 2_400)
    # 5 parts and 1, each sent and read back, and 4 stages: 16 events. Killed at each, then run to the end.
    attempts = [[tmp_path / f"{event}", event, tmp_path / f"{event}", 0] for event in range(1, 17)]
    assert dying(source, 1000, *chain(*attempts)) == "90" * 16
    for target, *_ in attempts:
        assert pair(target) == pair(source)
    assert len(list(tmp_path.iterdir())) == 2 * 17


def test_killed_again_and_again_it_comes_to_the_end(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 6_000), str(tmp_path / "out" / "en")
    statuses = dying(source, 1000, *chain(*([target, event] for event in range(1, 31))))
    assert statuses[0] == "9"
    assert statuses[-1] == "0"
    assert pair(target) == pair(source)
    assert names_beside(target) == ["en.bin", "en.idx"]


def test_killed_in_a_bucket_it_keeps_the_parts_that_are_there(s3: Bucket, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 16 * MIB), f"{s3.fresh()}/en"
    assert dying(source, 5 * MIB, target, 4) == "9"
    assert names_beside(target) == ["en.convert.json"]
    assert len(unfinished_uploads(s3)) == 1
    done = convert_dataset(source, target, part_bytes=5 * MIB)
    # The third part was being reported when it died, so two are in the journal.
    assert (done.parts_kept, done.parts_sent) == (2, 6)
    assert pair(target) == pair(source)
    assert names_beside(target) == ["en.bin", "en.idx"]
    assert unfinished_uploads(s3) == []


def test_killed_after_publishing_it_sends_nothing_twice(s3: Bucket, tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 8 * MIB), f"{s3.fresh()}/en"
    # copy, 4 parts, verify, 1 part read back: the upload is complete, the journal does not know that it verified
    assert dying(source, 5 * MIB, target, 7) == "9"
    assert names_beside(target) == ["en.bin", "en.convert.json"]
    done = convert_dataset(source, target, part_bytes=5 * MIB)
    assert (done.parts_kept, done.parts_sent) == (4, 1)
    assert pair(target) == pair(source)


def test_a_real_kill_9_of_the_command(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 500_000), str(tmp_path / "out" / "en")
    environment = {**os.environ, "BINIDX_CONVERT_PART_BYTES": "1000", "BINIDX_CONVERT_SAVE_SECONDS": "0"}
    command = [sys.executable, HERE.parent.parent / "tools" / "convert.py", "--json", source, target]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as running:
        journal = Path(f"{target}.convert.json")
        while not (journal.exists() and '"3": ' in journal.read_text()):
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
    assert running.returncode == -signal.SIGKILL
    assert not Path(f"{target}.bin").exists()
    del environment["BINIDX_CONVERT_SAVE_SECONDS"]
    done = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert done["parts_kept"] >= 3
    assert done["parts_kept"] + done["parts_sent"] == 1000 + 1
    assert pair(target) == pair(source)
    assert names_beside(target) == ["en.bin", "en.idx"]


def interrupted(source: str, target: str) -> None:
    """A run that stops after some parts."""

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_dataset(source, target, part_bytes=1000, save_seconds=0, watch=AtEvent("verify", stop))


def test_ctrl_c_loses_nothing_that_was_sent(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 6_000), str(tmp_path / "out")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_dataset(source, target, part_bytes=1000, save_seconds=1e9, watch=AtEvent("part", stop))
    assert convert_dataset(source, target).parts_kept == 1


def test_a_partial_file_damaged_between_runs_is_mended(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 6_000), str(tmp_path / "out")
    interrupted(source, target)
    [partial] = tmp_path.glob("out.bin.*.partial")
    damaged = bytearray(partial.read_bytes())
    damaged[2500] ^= 1
    partial.write_bytes(damaged)
    done = convert_dataset(source, target)
    assert (done.parts_kept, done.parts_sent) == (11, 2)
    assert pair(target) == pair(source)


def test_a_damaged_journal_means_beginning_again(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 6_000), str(tmp_path / "out")
    for text in ("", "[]", "{", '{"source": 1}'):
        interrupted(source, target)
        Path(f"{target}.convert.json").write_text(text)
        watch = AtEvent("", None)
        assert convert_dataset(source, target, part_bytes=1000, watch=watch).parts_kept == 0
        assert "beginning again" in watch.events[0]
        assert pair(target) == pair(source)
        for path in tmp_path.glob("out*"):
            path.unlink()


def test_what_arrived_wrong_on_a_disk_never_gets_the_name(tmp_path: Path, capsys) -> None:
    source, target = build(tmp_path / "en", 6_000), str(tmp_path / "out")
    old = build(tmp_path / "out", 5, seed=1)
    before = pair(old)

    def damage() -> None:
        [partial] = tmp_path.glob("out.bin.*.partial")
        with partial.open("r+b") as file:
            file.write(b"wrong")

    with pytest.raises(CorruptCopyError, match=r"out.bin: bytes 0 to 1000 arrived wrong; removed, run it again"):
        convert_dataset(source, target, overwrite=True, part_bytes=1000, watch=AtEvent("verify", damage))
    assert pair(old) == before  # the dataset that was to be replaced still stands
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
    assert names_beside(target) == ([] if end == "bin" else ["en.bin", "en.convert.json"])
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
    assert main(["convert", source, target, "--verify", "size"]) == 1
    error = capsys.readouterr().err
    assert error == f"binidx convert: {target}.bin: 1199 bytes arrived, needed 1200; removed, run it again\n"
    assert names_beside(target) == []


def test_a_target_that_is_the_dataset_already_is_left_alone(tmp_path: Path, capsys) -> None:
    source, target = build(tmp_path / "en", 600), str(tmp_path / "copy")
    for verify in ("checksum", "size"):
        assert main(["convert", source, target, "--verify", verify]) == 0
    assert "copy: holds this dataset already, compared by its index and sizes" in capsys.readouterr().out
    assert main(["convert", source, target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["copied"] is False
    assert main(["convert", source, source, "--overwrite"]) == 0
    assert pair(source) == pair(target)


def test_another_dataset_at_the_target_stays_unless_told(tmp_path: Path, capsys) -> None:
    source = build(tmp_path / "en", 600)
    for target in (str(tmp_path / "other"), memory()):
        build_ours(target, [Document([1], [1], [])], np.uint16)
        before = pair(target)
        assert main(["convert", source, target]) == 2
        assert "holds another dataset, needed a free name; --overwrite replaces it" in capsys.readouterr().err
        assert pair(target) == before
        assert main(["convert", source, target, "--overwrite"]) == 0
        assert pair(target) == pair(source)


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_a_lone_half_at_the_target_is_somebodys(tmp_path: Path, end: str, capsys) -> None:
    source = build(tmp_path / "en", 600)
    (tmp_path / f"out.{end}").write_bytes(b"precious")
    assert main(["convert", source, str(tmp_path / "out")]) == 2
    assert f"out: holds a .{end} without its other half" in capsys.readouterr().err
    assert (tmp_path / f"out.{end}").read_bytes() == b"precious"


def test_on_overwrite_the_old_index_goes_before_the_new_tokens_come(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 600), memory()
    build_ours(target, [Document([1], [1], [])], np.uint16)
    seen = {}
    watch = AtEvent(f"verify {target}.bin", lambda: seen.update(names=names_beside(target)))
    convert_dataset(source, target, overwrite=True, watch=watch)
    assert seen["names"] == ["en.bin", "en.convert.json"]


@pytest.mark.parametrize("when", ["copy", "part", "verify"])
def test_a_source_that_changes_meanwhile_is_an_error(tmp_path: Path, when: str) -> None:
    source = build(tmp_path / "en", 6_000)
    for target in (str(tmp_path / "out"), memory()):

        def touch() -> None:
            with Path(f"{source}.bin").open("r+b") as file:
                file.write(time.time_ns().to_bytes(8, "little"))

        with pytest.raises(ObjectChangedError, match="en: changed while it was copied; run it again"):
            convert_dataset(source, target, part_bytes=1000, watch=AtEvent(when, touch))
        assert not IndexedDataset.exists(target)
        watch = AtEvent("", None)
        convert_dataset(source, target, watch=watch)
        assert "of another source, or the source has changed; beginning again" in watch.events[0]
        assert pair(target) == pair(source)
        assert names_beside(target) == sorted(Path(target).name + end for end in (".bin", ".idx"))


def test_the_upload_of_a_source_that_is_gone_is_aborted(s3: Bucket, tmp_path: Path) -> None:
    target = f"{s3.fresh()}/en"
    assert dying(build(tmp_path / "en", 8 * MIB), 5 * MIB, target, 3) == "9"
    assert len(unfinished_uploads(s3)) == 1
    other = build(tmp_path / "other", 600)
    convert_dataset(other, target)
    assert unfinished_uploads(s3) == []
    assert pair(target) == pair(other)


@pytest.mark.parametrize("same", [True, False])
def test_a_second_convert_overtakes_the_first_which_says_so(tmp_path: Path, same: bool) -> None:
    first = build(tmp_path / "en", 6_000)
    second = first if same else build(tmp_path / "other", 7_000, seed=1)
    for target in (str(tmp_path / "out"), memory()):
        watch = AtEvent("part", lambda target=target: convert_dataset(second, target, part_bytes=1000))
        with pytest.raises(ObjectChangedError, match=r"convert.json: written by another convert to this target"):
            convert_dataset(first, target, part_bytes=1000, save_seconds=0, watch=watch)
        assert pair(target) == pair(second)


def test_a_source_that_is_no_dataset_is_refused_before_anything_is_written(tmp_path: Path, capsys) -> None:
    source = build(tmp_path / "en", 600)
    os.truncate(f"{source}.bin", 1199)
    assert main(["convert", source, str(tmp_path / "out")]) == 1
    assert "en.bin: 1199 bytes, its .idx needs 1200" in capsys.readouterr().err
    Path(f"{source}.idx").write_bytes(b"nonsense")
    assert main(["convert", source, str(tmp_path / "out")]) == 1
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out"], "nowhere.bin: no such object"),
        (["en", "folder/"], "folder/: a folder, needed a prefix such as folder/en"),
        (["en.idx", "out"], "argument source: found en.idx, needed the prefix of both files: en"),
        (["en"], "the following arguments are required: target"),
        (["en", "out", "--verify", "hope"], "invalid choice: 'hope'"),
        (["en", "out", "--target-options", "[1]"], "found [1], needed a JSON object"),
        (["en", "out", "--target-options", "{"], "no JSON"),
    ],
)
def test_a_wrong_call_is_exit_2_and_one_line(arguments, message, tmp_path: Path, monkeypatch, capsys) -> None:
    build(tmp_path / "en", 600)
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["convert", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.glob("out*")) == []


def test_options_reach_each_end(s3: Bucket, tmp_path: Path, monkeypatch) -> None:
    source, target = build(tmp_path / "en", 600), f"{s3.fresh()}/en"
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    text = json.dumps(options)
    assert main(["convert", source, target, "--target-options", text]) == 0
    assert main(["convert", target, str(tmp_path / "back"), "--source-options", text]) == 0
    assert pair(str(tmp_path / "back")) == pair(source)


def test_the_example_of_the_help_runs(s3: Bucket, tmp_path: Path, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    example = capsys.readouterr().out.rstrip().splitlines()[-1].split()
    (tmp_path / "data").mkdir()
    build(tmp_path / "data" / "en", 600)
    s3.server.make_bucket("bucket")
    monkeypatch.chdir(tmp_path)
    assert example[0] == "binidx"
    assert main(example[1:]) == 0
    assert pair("s3://bucket/en") == pair("data/en")


def test_a_terminal_sees_a_bar_and_a_pipe_does_not(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 600)
    command = [sys.executable, "-m", "binidx.tools.convert", source]
    quiet = subprocess.run([*command, str(tmp_path / "a")], check=True, capture_output=True)
    assert quiet.stderr == b""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    loud = subprocess.Popen([*command, str(tmp_path / "b")], stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    assert loud.wait() == 0
    seen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert re.search(r"copy .*b\.bin: 100%.*1\.17k/1\.17k.*B/s", seen)
    assert re.search(r"verify .*b\.idx: 100%", seen)


def test_huge_objects_get_larger_parts() -> None:
    assert plan_copy(80 * 10**9).part_bytes == 8 << 20
    for size in (84 * 10**9, 10**12, 5 * 2**40):
        plan = plan_copy(size)
        assert plan.part_bytes % MIB == 0
        assert -(-size // plan.part_bytes) <= 10_000


def test_a_state_survives_json() -> None:
    state = CopyState(25, 10, "t", {1: ("d", "e"), 3: ("f", "g")}, {"size": 25})
    assert CopyState.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert not state.complete
    for broken in ({}, {**state.to_json(), "sent": {"4": ["d", "e"]}}, {**state.to_json(), "part_bytes": 0}):
        with pytest.raises((KeyError, ValueError)):
            CopyState.from_json(broken)


def test_a_missing_bucket_is_named(s3: Bucket, tmp_path: Path) -> None:
    with pytest.raises((ObjectNotFoundError, OSError), match="s3://no-such-bucket-here"):
        convert_dataset(build(tmp_path / "en", 600), "s3://no-such-bucket-here/en")
