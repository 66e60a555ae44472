"""docs/reference/errors.md has every error class, and messages that are raised."""

from __future__ import annotations

import builtins
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.pages import python_blocks, read_page

import binidx
from binidx import errors
from binidx.storage.requests.cancellation import cancellable
from binidx.tools import main
from binidx.tools._command import CALL_ERRORS

PAGE = read_page("reference/errors")
ROW = r"^\| `(\w+)` \| `(\w+)` \| ?(\d?) \|"
CLASSES = {name: each for name, each in vars(errors).items() if name.endswith("Error")}


def test_every_class_is_in_the_table_with_its_builtin_and_exit_status_and_has_a_section() -> None:
    rows = {name: (builtin, status) for name, builtin, status in re.findall(ROW, PAGE, re.M)}
    assert rows.keys() == CLASSES.keys()
    for name, each in CLASSES.items():
        builtin = getattr(builtins, rows[name][0])
        status = "" if each is errors.BinidxError else "2" if issubclass(each, CALL_ERRORS) else "1"
        assert issubclass(each, builtin), name
        assert rows[name][1] == status, name
    assert sorted(re.findall(r"^### (\w+)$", PAGE, re.M)) == sorted(CLASSES)


def write_tokens(path: Path, sequences: int = 20, length: int = 50) -> None:
    builder = binidx.IndexedDatasetBuilder(f"{path}.bin", np.uint16)
    for _ in range(sequences):
        builder.add_document(np.arange(length), [length])
    builder.finalize(f"{path}.idx")


def shown(name: str) -> list[str]:
    """Messages of a section of the page."""
    section = PAGE.split(f"\n### {name}\n")[1].split("\n### ")[0]
    return [line for block in re.findall(r"```text\n(.*?)```", section, re.S) for line in block.splitlines()]


def matches(message: str, found: str) -> bool:
    """Whether a shown message is the found one; a … stands for any text, and so do the digits of times."""
    pattern = re.escape(message).replace("…", ".*")
    return re.fullmatch(re.sub(r"(?<= )\d+\\\.\d( s)?", r"[\\d.]+\1", pattern), found) is not None


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "en")
    write_tokens(tmp_path / "code", 4000)
    write_tokens(tmp_path / "empty", 5, 0)
    shutil.copy(tmp_path / "en.bin", tmp_path / "truncated.bin")
    return tmp_path


def raised(call: Callable[[], Any], data: Path) -> str:
    with pytest.raises(errors.BinidxError) as found:
        call()
    assert shown(type(found.value).__name__)
    return f"{type(found.value).__name__}: {found.value}".replace(str(data), "/data")


def test_messages_of_the_page_are_raised(data: Path) -> None:
    en = f"{data}/en"

    def cut_index() -> None:
        (data / "cut.idx").write_bytes((data / "en.idx").read_bytes()[:41])
        (data / "cut.bin").write_bytes(b"")
        binidx.IndexedDataset(f"{data}/cut")

    def cut_tokens() -> None:
        shutil.copy(data / "en.idx", data / "cut.idx")
        (data / "cut.bin").write_bytes((data / "en.bin").read_bytes()[:1000])
        binidx.IndexedDataset(f"{data}/cut")

    def other_file() -> None:
        (data / "x.idx").write_bytes(b"hello" * 20)
        (data / "x.bin").write_bytes(b"")
        binidx.IndexedDataset(f"{data}/x")

    def missing_key() -> None:
        shutil.copy(data / "en.idx", data / "news_text_document.idx")
        binidx.IndexedDataset(f"{data}/news")

    def blend() -> None:
        train = binidx.load_dataset(en, 16)
        binidx.megatron.BlendedDataset([train.wrapped] * 2, [0.5, 0.5], 10_000, train.config)

    def overwrite() -> None:
        reader = binidx.open_object(f"{data}/code.bin")
        os.utime(reader.uri, (1, 1))
        reader.read([(0, 10)])

    def cancelled() -> None:
        with cancellable() as scope:
            scope.cancel()
            scope.check()

    calls: list[Callable[[], Any]] = [
        lambda: binidx.load_dataset(en, 16, which="valid"),
        lambda: binidx.load_dataset(en, 16, storage_options={"binidx": {"cache_dri": "/x"}}),
        cut_index,
        cut_tokens,
        other_file,
        lambda: binidx.IndexedDatasetBuilder(f"{data}/t.bin", np.uint16).add_document(np.array([70_000]), [1]),
        lambda: binidx.load_dataset(f"{data}/empty", 16, num_samples=3),
        blend,
        overwrite,
        cancelled,
        lambda: binidx.load_dataset(f"{data}/none", 16),
        missing_key,
        lambda: binidx.open_object(f"{en}.bin").read([(0, 10**6)]),
    ]
    for call in calls:
        name, _, message = raised(call, data).partition(": ")
        assert any(matches(each, message) for each in shown(name)), message


def test_the_message_of_a_missing_driver_is_raised() -> None:
    code = "import sys, binidx; sys.modules['gcsfs'] = None; binidx.open_object('gs://corpus/en.bin')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    name, _, message = ended.stderr.splitlines()[-1].removeprefix("binidx.errors.").partition(": ")
    assert any(matches(each, message) for each in shown(name)), message


def test_messages_of_commands_are_printed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, name in (
        (["shuffle", f"{data}/en", "--to", f"{data}/s", "--seed", "1", "--memory", "1MB"], "ConfigError"),
        (["convert", f"{data}/en", "--to", f"{data}/code"], "ObjectExistsError"),
    ):
        assert main(arguments) == 2
        found = capsys.readouterr().err.strip().replace(str(data), "/data")
        assert any(matches(each, found) for each in shown(name)), found


def test_messages_of_stores_are_raised(s3: Bucket, tmp_path: Path) -> None:
    wrong = {**s3.server.storage_options, "secret": "wrong"}
    nowhere = {"endpoint_url": "http://127.0.0.1:1", "binidx": {"deadline_seconds": 60}}
    for bucket, options in ((s3.uri, wrong), ("s3://corpus", nowhere)):
        found = raised(partial(binidx.load_dataset, f"{bucket}/en", 16, storage_options=options), tmp_path)
        name, _, message = found.replace(s3.uri.removeprefix("s3://"), "corpus").partition(": ")
        assert any(matches(each, message) for each in shown(name)), message


def test_the_example_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = python_blocks(PAGE)
    exec(example.replace("/data", str(tmp_path)), {"binidx": binidx})
    assert capsys.readouterr().out == f"{tmp_path}/en.idx: no such file\n"
