"""Datasets made of datasets know what theirs agree on, in a manifest of their own counts."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from demo.corpus import EOD
from helpers.preprocess_jobs import job_of, run, texts, tokenizer_path, write_lines

import binidx
from binidx import describe_tokenizer
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.cut import cut_dataset
from binidx.corpus.merge import merge_datasets, merge_virtually
from binidx.corpus.shuffle import shuffle_datasets
from binidx.corpus.verify import verify_dataset
from binidx.jobs.parts import Workers
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.tools import main

RABBIT = "a white rabbit with pink eyes"


def tokenized(folder: Path, name: str, **options: Any) -> str:
    lines = [*texts(40, seed=len(name)), f"quietly {RABBIT}"]
    run(job_of([write_lines(folder / f"{name}.jsonl", [{"text": text} for text in lines])], folder / name, **options))
    return f"{folder}/{name}_text_document"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two datasets of one recipe, the second compressed and with its tokenizer at another place."""
    folder = tmp_path_factory.mktemp("sources")
    copied = shutil.copy(tokenizer_path(), folder / "copied.json")
    second = describe_tokenizer(str(copied), eod=EOD)
    return [tokenized(folder, "en"), tokenized(folder, "code", tokenizer=second, min_tokens=1)]


def manifest(prefix: Any) -> Any:
    return json.loads(bytes(read_whole(open_object(Location.of(f"{prefix}.manifest.json")))))


def merged(sources: list[str], target: str) -> None:
    merge_datasets(sources, target)


def shuffled(sources: list[str], target: str) -> None:
    shuffle_datasets(sources, target, seed=1)


def shuffled_in_parts(sources: list[str], target: str) -> None:
    shuffle_datasets(sources, target, seed=1, workers=Workers(count=1))


def head(sources: list[str], target: str) -> None:
    merge_virtually(sources, f"{target}-list")
    cut_dataset(f"{target}-list", [target], num_documents=82)


def sample(sources: list[str], target: str) -> None:
    merge_virtually(sources, f"{target}-list")
    cut_dataset(f"{target}-list", [target], [1.0], seed=1)


def converted(sources: list[str], target: str) -> None:
    merge_virtually(sources, f"{target}-list")
    convert_dataset(f"{target}-list", target)


def compressed(sources: list[str], target: str) -> None:
    merge_virtually(sources, f"{target}-list")
    convert_dataset(f"{target}-list", target, way=StorageFormat(codec="zstd"))


WAYS: list[Callable[[list[str], str], None]] = [
    merged, shuffled, shuffled_in_parts, head, sample, converted, compressed,
]  # fmt: skip


@pytest.mark.parametrize("make", WAYS)
def test_what_the_sources_agree_on_travels_and_no_count_of_theirs(
    make: Callable[[list[str], str], None], sources: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "binidx"):
        make(sources, f"{tmp_path}/all")
    first, new = manifest(sources[0]), manifest(tmp_path / "all")
    assert new["job"]["tokenizer"] == first["job"]["tokenizer"]
    assert new["job"]["tokenizer"]["eod"] == 0
    left = {"inputs", "output", "format", "part_bytes", "codec", "lineage", "min_tokens"}
    assert new["job"] == {name: value for name, value in first["job"].items() if name not in left}
    of_sources = [manifest(source)["dataset"] for source in sources]
    counts = {name: sum(each[name] for each in of_sources) for name in ("documents", "sequences", "tokens")}
    assert new == {"binidx_manifest": 1, "version": binidx.__version__, "job": new["job"], "dataset": counts}
    assert verify_dataset(f"{tmp_path}/all").manifest
    assert ".manifest.json: lacks min_tokens, as the manifests of the sources differ in" in caplog.text


@pytest.mark.parametrize("make", WAYS)
def test_text_is_found_in_what_was_made_without_a_named_tokenizer(
    make: Callable[[list[str], str], None], sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(sources, f"{tmp_path}/all")
    assert main(["grep", RABBIT, f"{tmp_path}/all"]) == 0
    found = capsys.readouterr().out.splitlines()
    assert len(found) == 2
    if make in (merged, head, converted):
        assert found == [f"{tmp_path}/all\t40", f"{tmp_path}/all\t81"]


def test_a_list_is_searched_by_the_manifests_of_its_parts(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merge_virtually(sources, f"{tmp_path}/list")
    assert main(["grep", RABBIT, f"{tmp_path}/list"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/list\t40\n{tmp_path}/list\t81\n"
    assert manifest(tmp_path / "list")["dataset"]["documents"] == 82
    assert verify_dataset(f"{tmp_path}/list").manifest
    merge_virtually(sources[:1], f"{tmp_path}/list", overwrite=True)
    assert manifest(tmp_path / "list")["dataset"]["documents"] == 41


@pytest.mark.parametrize("make", [merged, merge_virtually, head])
def test_training_takes_the_end_of_documents_from_what_was_made(
    make: Callable[..., object], sources: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(sources, f"{tmp_path}/all")
    with caplog.at_level(logging.INFO, "binidx"):
        binidx.load_dataset(f"{tmp_path}/all", sequence_length=16, eod_mask_loss=True)
    assert f"the EOD is 0, as the manifest of {tmp_path}/all has it" in caplog.text


def test_shares_of_a_split_have_their_own_counts(sources: list[str], tmp_path: Path) -> None:
    targets = [f"{tmp_path}/{name}" for name in ("train", "valid")]
    result = cut_dataset(sources[0], targets, [0.7, 0.3], seed=1)
    for target, share in zip(targets, result.shares, strict=True):
        counts = manifest(target)["dataset"]
        assert (counts["documents"], counts["sequences"], counts["tokens"]) == (
            share.num_documents, share.num_sequences, share.num_tokens,
        )  # fmt: skip
        assert verify_dataset(target).manifest


def test_two_ends_of_documents_do_not_travel_and_their_tokenizer_does(
    sources: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tokenized(tmp_path, "other", tokenizer=describe_tokenizer(tokenizer_path(), eod=1))
    merge_datasets([sources[0], other], tmp_path / "all")
    tokenizer = manifest(tmp_path / "all")["job"]["tokenizer"]
    assert "eod" not in tokenizer
    assert tokenizer["digest"] == manifest(other)["job"]["tokenizer"]["digest"]
    assert "all.manifest.json: lacks tokenizer.eod, as the manifests of the sources differ" in caplog.text
    assert main(["grep", RABBIT, f"{tmp_path}/all"]) == 0


def test_a_source_without_a_manifest_agrees_in_nothing(
    sources: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for end in (".bin", ".idx"):
        shutil.copy(sources[0] + end, tmp_path / f"bare{end}")
    merge_datasets([sources[0], tmp_path / "bare"], tmp_path / "all")
    assert not (tmp_path / "all.manifest.json").exists()
    assert "all.manifest.json: lacks append_eod, compared_share" in caplog.text
    caplog.clear()
    cut_dataset(tmp_path / "bare", [tmp_path / "head"], num_documents=3)
    assert not (tmp_path / "head.manifest.json").exists()
    assert not caplog.text
    assert main(["grep", RABBIT, f"{tmp_path}/all"]) == 2
    assert f"{tmp_path}/all has no manifest that names one" in capsys.readouterr().err


def test_tokenizers_without_a_digest_are_not_taken_for_one(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        for end in (".bin", ".idx"):
            shutil.copy(sources[0] + end, tmp_path / f"{name}{end}")
        job = {"append_eod": True, "tokenizer": {"uri": f"{name}.json"}}
        (tmp_path / f"{name}.manifest.json").write_text(json.dumps({"binidx_manifest": 1, "job": job}))
    merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert manifest(tmp_path / "all")["job"] == {"append_eod": True}
    cut_dataset(tmp_path / "a", [tmp_path / "head"], num_documents=3)
    assert main(["grep", RABBIT, f"{tmp_path}/head"]) == 2
    assert f"{tmp_path}/head has no manifest that names one" in capsys.readouterr().err


def test_a_manifest_that_a_killed_call_did_not_write_is_added(sources: list[str], tmp_path: Path) -> None:
    merge_datasets(sources, tmp_path / "all")
    path = tmp_path / "all.manifest.json"
    data = path.read_bytes()
    path.unlink()
    merge_datasets(sources, tmp_path / "all")
    assert path.read_bytes() == data
    merge_datasets([sources[0]], tmp_path / "all", overwrite=True)
    assert manifest(tmp_path / "all")["dataset"]["documents"] == 41


def test_a_store_keeps_it_too(s3: Bucket, sources: list[str]) -> None:
    target = f"{s3.fresh()}/all"
    merge_datasets(sources, target)
    assert manifest(target)["dataset"]["documents"] == 82
    cut_dataset(target, [f"{target}-head"], num_documents=5)
    assert manifest(f"{target}-head")["job"] == manifest(target)["job"]
    assert manifest(f"{target}-head")["dataset"]["documents"] == 5
