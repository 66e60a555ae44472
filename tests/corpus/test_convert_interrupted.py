"""Converts that end at an event and go on: what stands there then is what an unbroken one leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.random_datasets import Document, build_ours

from binidx.corpus import token_parts
from binidx.corpus.block_digests import CorruptCopyError
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.copies.copy_job import CopyJob
from binidx.corpus.token_parts import PinnedDataset
from binidx.corpus.whole_dataset import WholeDataset
from binidx.errors import CancelledReadError, ObjectExistsError
from binidx.storage.codecs.segments import SEGMENT_BYTES
from binidx.storage.location import Location

TOKENS = np.random.default_rng(1).integers(0, 65536, 3 * SEGMENT_BYTES // 2 - 9, dtype=np.uint16)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_parts, "LEAST_BYTES", SEGMENT_BYTES)


class EndsAt:
    """Watcher that ends the call at one of its events."""

    def __init__(self, event: int) -> None:
        self.left = event

    def begin(self, *_: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise CancelledReadError("ended")

    advance = say = begin


def write(prefix: Path, lengths: list[int]) -> str:
    """Write the same tokens as documents of these lengths."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    cuts = np.split(TOKENS[: sum(lengths)], np.cumsum(lengths)[:-1])
    return build_ours(prefix, [Document(own, [len(own)], [0]) for own in cuts], np.uint16, multimodal=False)


def convert(source: str, target: Path, event: int = 10**9, **options: object) -> None:
    way = StorageFormat(checksums=bool(options.pop("checksums", False)), codec=options.pop("codec", None))  # type: ignore[arg-type]
    convert_dataset(source, str(target), way=way, watch=EndsAt(event), part_bytes=SEGMENT_BYTES, **options)  # type: ignore[arg-type]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def interrupt_everywhere(folder: Path, prepare: Callable[[Path], None], run: Callable[[Path, int], None]) -> int:
    """Compare an unbroken call with calls that end at each event and go on, by the files left; return their number."""
    prepare(folder / "whole")
    run(folder / "whole", 10**9)
    for event in range(1000):
        prepare(own := folder / f"{event}")
        try:
            run(own, event)
        except CancelledReadError:
            run(own, 10**9)
            assert files_of(own) == files_of(folder / "whole"), event
            assert not [*own.rglob("*-parts")]
        else:
            return event
    raise AssertionError


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_copy_over_equal_tokens_of_other_documents_leaves_none_of_the_old_files(
    codec: str | None, tmp_path: Path
) -> None:
    new = write(tmp_path / "source" / "en", [7, len(TOKENS) - 7])

    def prepare(folder: Path) -> None:
        write(folder / "en", [len(TOKENS) - 5, 5])
        (folder / "en.manifest.json").write_text("{}")
        convert(f"{folder}/en", folder / "en", checksums=True)

    def run(folder: Path, event: int) -> None:
        convert(new, folder / "en", event, overwrite=True, codec=codec)

    assert interrupt_everywhere(tmp_path, prepare, run) > 5
    assert "en.manifest.json" not in files_of(tmp_path / "whole")


def test_checksums_in_place_go_on(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        write(folder / "en", [7, len(TOKENS) - 7])

    def run(folder: Path, event: int) -> None:
        convert(f"{folder}/en", folder / "en", event, checksums=True)

    assert interrupt_everywhere(tmp_path, prepare, run) > 5


def begin(source: str, target: Path, event: int = 6, **options: object) -> None:
    with pytest.raises(CancelledReadError):
        convert(source, target, event, **options)


@pytest.mark.parametrize("damage", ["lost", "flipped"])
def test_a_part_of_checksums_that_is_lost_or_damaged_is_named_and_made_again(damage: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source" / "en", [len(TOKENS)])
    convert(source, tmp_path / "whole" / "en", checksums=True)
    target = tmp_path / "broken" / "en"
    begin(source, target, checksums=True)
    first = min(target.parent.glob("en-parts/*.xxh3"))
    if damage == "lost":
        first.unlink()
    else:
        first.write_bytes(bytes([first.read_bytes()[0] ^ 1]) + first.read_bytes()[1:])
    with pytest.raises(CorruptCopyError, match=f"{first}: lost or damaged, .*; give the same command again"):
        convert(source, target, checksums=True)
    convert(source, target, checksums=True)
    assert files_of(target.parent) == files_of(tmp_path / "whole")


def test_a_convert_that_finds_its_dataset_leaves_the_work_of_another(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", [len(TOKENS) - 5, 5]), write(tmp_path / "new", [len(TOKENS)])
    target = tmp_path / "to" / "en"
    convert(old, target)
    begin(new, target, overwrite=True)
    before = files_of(target.parent)
    convert(old, target)
    assert files_of(target.parent) == before
    assert {"en.convert.json", "en-parts/job.json"} <= before.keys()


def test_the_parts_of_another_job_are_not_removed(tmp_path: Path) -> None:
    source, target = write(tmp_path / "new", [len(TOKENS)]), tmp_path / "to" / "en"
    begin(source, target)
    for file in target.parent.glob("en-parts/*"):
        file.unlink()
    job = target.parent / "en-parts" / "job.json"
    job.write_text(json.dumps({"job": "shuffle", "form": "x"}))
    with pytest.raises(ObjectExistsError, match=r"parts of another job.*finish that job, or remove the folder"):
        convert(source, target)
    assert json.loads(job.read_text())["job"] == "shuffle"


def test_a_copy_goes_on_with_another_verification(tmp_path: Path) -> None:
    source, target = write(tmp_path / "new", [len(TOKENS)]), tmp_path / "to" / "en"
    begin(source, target)
    kept = {file.name for file in target.parent.glob("en-parts/*")}
    done = convert_dataset(source, str(target), verify="size", part_bytes=SEGMENT_BYTES)
    assert done.parts_kept == len(kept) - 1  # job.json
    assert done.parts_kept > 0


def test_identities_of_copies_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """Names of parts and records come from them: with another one, no work of an earlier version goes on."""
    pinned = PinnedDataset.of(WholeDataset(Location(write(tmp_path / "en", [9]))))
    target = Location(str(tmp_path / "to.bin"))
    job = CopyJob(pinned, target, target + "-parts", 18, "raw", checksum=True, form="slices", block_bytes=4, file="idx")
    assert {**job.identity, "source": ""} == {
        "job": "convert",
        "source": "",
        "stored": True,
        "codec": "raw",
        "level": None,
        "tokens": True,
        "sums": False,
        "form": "slices",
        "block_bytes": 4,
        "file": "idx",
    }
    pieces = CopyJob(pinned, target, target + "-parts", 18, "raw", checksum=True, form="pieces", block_bytes=4).identity
    assert pieces.keys() == {"job", "source", "stored", "codec", "level", "tokens", "sums", "checksum"}
    assert pieces["checksum"] is True
