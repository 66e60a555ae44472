"""binidx convert: byte for byte to any place; what stands at the target stays unless told; what a person sees."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.conversion import MIB, AtEvent, build, memory, names_beside, pair, unfinished_uploads
from helpers.random_datasets import Document, build_ours

from binidx.corpus.block_digests import plan_samples
from binidx.corpus.convert import convert_dataset
from binidx.errors import ObjectExistsError, ObjectNotFoundError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.tools import main


def test_local_to_bucket_to_local_is_byte_for_byte(s3: Bucket, tmp_path: Path, capsys) -> None:
    source = build(tmp_path / "en", 6_000_000)
    with Path(f"{source}.bin").open("ab") as file:
        file.write(b"bytes that no sequence covers")
    middle, back = f"{s3.fresh()}/en", str(tmp_path / "deep" / "er" / "back")
    assert main(["convert", source, "--to", middle]) == 0
    assert main(["convert", middle, "--to", back]) == 0
    assert pair(source) == pair(middle) == pair(back)
    assert names_beside(middle) == names_beside(source)
    assert names_beside(back) == ["back.bin", "back.idx"]
    assert unfinished_uploads(middle) == []
    assert "6,000,000 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("num_tokens", [0, 1, 5 * MIB // 2])
def test_the_edges_of_a_part(s3: Bucket, tmp_path: Path, num_tokens: int) -> None:
    source = build(tmp_path / "en", num_tokens)
    for target in (f"{s3.fresh()}/en", str(tmp_path / "copy"), memory()):
        done = convert_dataset(source, target, part_bytes=5 * MIB)
        assert done.parts_sent == 2
        assert pair(target) == pair(source)


def test_a_target_that_is_the_dataset_already_is_left_alone(tmp_path: Path, capsys) -> None:
    source, target = build(tmp_path / "en", 600), str(tmp_path / "copy")
    for verify in ("checksum", "size"):
        assert main(["convert", source, "--to", target, "--verify", verify]) == 0
    said = capsys.readouterr().out
    assert "copy: index and size are this dataset's, and so are all samples of its tokens; left alone" in said
    assert "the rest was not compared; --verify checksum does" in said
    for verify, verified in (("checksum", "checksum"), ("size", "sample")):
        assert main(["convert", source, "--to", target, "--json", "--verify", verify]) == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["copied"], done["verified"]) == (False, verified)
    assert main(["convert", source, "--to", source, "--overwrite"]) == 0
    assert pair(source) == pair(target)


def test_another_dataset_at_the_target_stays_unless_told(tmp_path: Path, capsys) -> None:
    source = build(tmp_path / "en", 600)
    for target in (str(tmp_path / "other"), memory()):
        build_ours(target, [Document([1], [1], [])], np.uint16)
        before = pair(target)
        assert main(["convert", source, "--to", target]) == 2
        assert "holds .bin, .idx, needed a free name; --overwrite replaces it" in capsys.readouterr().err
        assert pair(target) == before
        assert main(["convert", source, "--to", target, "--overwrite"]) == 0
        assert pair(target) == pair(source)


@pytest.mark.parametrize("num_tokens", [600, 6_000_000])
def test_other_tokens_under_an_equal_index_are_another_dataset_by_size_alone_too(tmp_path, num_tokens, capsys) -> None:
    source, target = build(tmp_path / "en", num_tokens), str(tmp_path / "other")
    lengths = IndexedDataset(source).sequence_lengths
    build_ours(target, [Document(np.zeros(n, np.uint16), [n], [1]) for n in lengths], np.uint16, multimodal=True)
    before = pair(target)
    assert [len(each) for each in before] == [len(each) for each in pair(source)]
    assert main(["convert", source, "--to", target, "--verify", "size"]) == 2
    assert "holds .bin, .idx, needed a free name; --overwrite replaces it" in capsys.readouterr().err
    assert pair(target) == before
    assert main(["convert", source, "--to", target, "--verify", "size", "--overwrite"]) == 0
    assert pair(target) == pair(source)


def test_a_last_token_that_differs_is_seen_by_size_alone_too(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 6_000_000), tmp_path / "copy"
    convert_dataset(source, target)
    with Path(f"{target}.bin").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([pair(source)[0][-1] ^ 1]))
    with pytest.raises(ObjectExistsError, match=r"copy: holds \.bin, \.idx"):
        convert_dataset(source, target, verify="size")


@pytest.mark.parametrize("size", [0, 1, 64 * 65536, 64 * 65536 + 1, 10**12])
def test_samples_reach_from_the_first_byte_to_the_last(size: int) -> None:
    samples = plan_samples(size)
    assert samples[0][0] == 0
    assert samples[-1][1] == size
    assert sum(stop - start for start, stop in samples) == min(size, 64 * 65536)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(samples))


def test_paths_are_welcome(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 600)
    done = convert_dataset(Path(source), tmp_path / "copy")
    assert (done.source, done.target) == (source, f"{tmp_path}/copy")
    assert pair(tmp_path / "copy") == pair(source)


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_a_lone_half_at_the_target_is_somebodys(tmp_path: Path, end: str, capsys) -> None:
    source = build(tmp_path / "en", 600)
    (tmp_path / f"out.{end}").write_bytes(b"precious")
    assert main(["convert", source, "--to", str(tmp_path / "out")]) == 2
    assert f"out: holds .{end}, needed" in capsys.readouterr().err
    assert (tmp_path / f"out.{end}").read_bytes() == b"precious"


def test_on_overwrite_the_old_index_goes_before_the_new_tokens_come(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 600), memory()
    build_ours(target, [Document([1], [1], [])], np.uint16)
    seen = {}
    watch = AtEvent(f"verify {target}.bin", lambda: seen.update(names=names_beside(target)))
    convert_dataset(source, target, overwrite=True, watch=watch)
    assert seen["names"] == ["en-parts", "en.bin", "en.convert.json"]


def test_a_source_that_is_no_dataset_is_refused_before_anything_is_written(tmp_path: Path, capsys) -> None:
    source = build(tmp_path / "en", 600)
    os.truncate(f"{source}.bin", 1199)
    assert main(["convert", source, "--to", str(tmp_path / "out")]) == 1
    assert "en.bin: 1199 bytes, its .idx needs 1200" in capsys.readouterr().err
    Path(f"{source}.idx").write_bytes(b"nonsense")
    assert main(["convert", source, "--to", str(tmp_path / "out")]) == 1
    assert list(tmp_path.glob("out*")) == []


def test_several_datasets_go_into_a_folder_each_by_its_name(s3: Bucket, tmp_path: Path, capsys) -> None:
    sources = [build(tmp_path / name / name, 600) for name in ("en", "code")]
    to = f"{s3.fresh()}/all/"
    assert main(["convert", *sources, "--to", to]) == 0
    assert [pair(f"{to}{name}") for name in ("en", "code")] == [*map(pair, sources)]
    said = capsys.readouterr().out
    assert f"{sources[0]} -> {to}en\n" in said
    assert f"{sources[1]} -> {to}code\n" in said
    assert main(["convert", *sources, "--to", to, "--json"]) == 0
    assert [each["target"] for each in json.loads(capsys.readouterr().out)["datasets"]] == [f"{to}en", f"{to}code"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--to", "out"], "nowhere.bin: no such file"),
        (["en", "en", "--to", "out"], "--to: found out for 2 datasets, needs a folder, such as FOLDER/"),
        (["en", "en", "--to", "out/"], "--to: found out/ for 2 datasets, needs datasets of different names"),
        (["en"], "the following arguments are required: --to"),
        (["en", "out"], "unrecognized arguments: out; did you mean --to out?"),
        (["en", "--to", "out", "--verify", "hope"], "invalid choice: 'hope'"),
        (["en", "--to", "out", "--target-options", "[1]"], "found a JSON list, needed an object"),
        (["en", "--to", "out", "--target-options", "{"], "no JSON"),
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
    assert main(["convert", source, "--to", target, "--target-options", text]) == 0
    assert main(["convert", target, "--to", str(tmp_path / "back"), "--source-options", text]) == 0
    assert pair(str(tmp_path / "back")) == pair(source)


def test_the_example_of_the_help_runs(s3: Bucket, tmp_path: Path, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    example = capsys.readouterr().out.rstrip().splitlines()[-1].split()
    (tmp_path / "data").mkdir()
    for name in ("en", "code"):
        build(tmp_path / "data" / name, 600)
    s3.server.make_bucket("bucket")
    monkeypatch.chdir(tmp_path)
    assert example[0] == "binidx"
    assert main(example[1:]) == 0
    assert [pair(f"s3://bucket/{name}") == pair(f"data/{name}") for name in ("en", "code")] == [True, True]


def test_a_terminal_sees_a_bar_and_a_pipe_does_not(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 600)
    command = [sys.executable, "-m", "binidx", "convert", source, "--to"]
    quiet = subprocess.run([*command, str(tmp_path / "a")], check=True, capture_output=True)
    assert quiet.stderr == b""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    loud = subprocess.Popen([*command, str(tmp_path / "b")], stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    assert loud.wait() == 0
    seen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert re.search(r"copy b\.bin: .*/1\.17k.*B/s", seen)
    assert re.search(r"verify b\.idx: .*B/s", seen)


def test_a_missing_bucket_is_named(s3: Bucket, tmp_path: Path) -> None:
    with pytest.raises((ObjectNotFoundError, OSError), match="s3://no-such-bucket-here"):
        convert_dataset(build(tmp_path / "en", 600), "s3://no-such-bucket-here/en")
