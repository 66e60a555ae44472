"""What is cut is what a list of the documents, filtered, would give; the choice is the same everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.conversion import build, names_beside, pair
from helpers.random_datasets import Document, build_ours, random_documents

from binidx.corpus import cut
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.cut import cut_dataset
from binidx.corpus.random_numbers import uniform_hash
from binidx.errors import ConfigError, FormatError, ObjectExistsError
from binidx.format import idx


def built(prefix: Path, documents: list[Document], multimodal: bool) -> tuple[bytes, bytes]:
    return pair(build_ours(prefix, documents, np.uint16, multimodal))


@pytest.fixture(params=[2, 1 << 18])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "BLOCK_VALUES", request.param)
    if request.param == 2:
        monkeypatch.setattr(cut, "PART_BYTES", 4)
        monkeypatch.setattr(cut, "ROUND_BYTES", 6)


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_head_is_the_dataset_of_the_first_documents(tmp_path: Path, multimodal, packed, small) -> None:
    documents = random_documents(np.random.default_rng(1), np.uint16, 20)
    source = build_ours(tmp_path / "en", documents, np.uint16, multimodal)
    if packed:
        convert_dataset(source, tmp_path / "packed", way=StorageFormat("zstd"))
    for count in (0, 1, 7, 20, 21):
        done = cut_dataset(tmp_path / "packed" if packed else source, [tmp_path / f"head{count}"], num_documents=count)
        if packed:
            convert_dataset(tmp_path / f"head{count}", tmp_path / f"plain{count}", way=StorageFormat("raw"))
        expected = built(tmp_path / f"expected{count}", documents[:count], multimodal)
        found = pair(tmp_path / f"{'plain' if packed else 'head'}{count}")
        assert found[0] == expected[0]
        if count:  # without sequences nothing tells that there are modes
            assert found[1] == expected[1]
        assert done.shares[0].num_documents == min(count, 20)


@pytest.mark.parametrize("multimodal", [False, True])
def test_a_split_is_the_documents_by_their_hash(tmp_path: Path, multimodal: bool, small) -> None:
    documents = random_documents(np.random.default_rng(2), np.uint16, 60)
    source = build_ours(tmp_path / "en", documents, np.uint16, multimodal)
    targets = [tmp_path / name for name in ("a", "b", "c")]
    done = cut_dataset(source, targets, [0.5, 0.0, 0.3], seed=7)
    u = uniform_hash(7, 0, 60)
    wanted = [u < 0.5, np.zeros(60, bool), (u >= 0.5) & (u < 0.8)]
    for target, chosen, share in zip(targets, wanted, done.shares, strict=True):
        kept = [each for each, take in zip(documents, chosen, strict=True) if take]
        assert pair(target)[0] == built(Path(f"{target}-expected"), kept, multimodal)[0]
        if kept:
            assert pair(target)[1] == pair(f"{target}-expected")[1]
        assert (share.num_documents, share.num_tokens) == (len(kept), sum(len(each.tokens) for each in kept))


def test_a_smaller_sample_lies_in_a_larger_and_shares_of_one_leave_nobody_out(tmp_path: Path) -> None:
    documents = [Document(np.array([n], np.uint16), [1], [0]) for n in range(2000)]
    source = build_ours(tmp_path / "en", documents, np.uint16)
    kept = []
    for fraction in (0.01, 0.1, 1.0):
        cut_dataset(source, [tmp_path / "out"], [fraction], seed=3, overwrite=True)
        kept.append(set(np.frombuffer(pair(tmp_path / "out")[0], np.uint16).tolist()))
    assert kept[0] < kept[1] < kept[2]
    assert len(kept[2]) == 2000
    assert 140 < len(kept[1]) < 260
    cut_dataset(source, [tmp_path / "of-head"], [0.1], seed=3, num_documents=500)
    assert set(np.frombuffer(pair(tmp_path / "of-head")[0], np.uint16).tolist()) == {n for n in kept[1] if n < 500}
    done = cut_dataset(source, [tmp_path / f"s{n}" for n in range(10)], [0.1] * 10, seed=3)
    assert sum(each.num_documents for each in done.shares) == 2000


def test_the_hash_is_splitmix64() -> None:
    """Against the algorithm in plain integers, for a few seeds; and wherever it begins."""

    def one(seed: int, number: int) -> float:
        z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return ((z ^ (z >> 31)) >> 11) / 2**53

    for seed in (0, 1, -1, 2**64 - 1):
        for first in (0, 5, 2**40):
            assert uniform_hash(seed, first, 4).tolist() == [one(seed, first + n) for n in range(4)]


def test_from_a_bucket_and_in_it(s3: Bucket, tmp_path: Path) -> None:
    base, source = s3.fresh(), build(tmp_path / "en", 6_000_000)
    convert_dataset(source, f"{base}/en", verify="size")
    for folder in (base, str(tmp_path / "here")):
        cut_dataset(f"{base}/en", [f"{folder}/head"], num_documents=9)
        cut_dataset(f"{base}/en", [f"{folder}/sample"], [0.5], seed=1)
    cut_dataset(source, [tmp_path / "head"], num_documents=9)
    cut_dataset(source, [tmp_path / "sample"], [0.5], seed=1)
    for name in ("head", "sample"):
        assert pair(f"{base}/{name}") == pair(tmp_path / "here" / name) == pair(tmp_path / name)
        assert names_beside(f"{base}/{name}") == [f"{name}.bin", f"{name}.idx"]


def test_what_cannot_be_cut_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    source, a, b = build(tmp_path / "en", 100), tmp_path / "a", tmp_path / "b"
    calls = {
        "targets, fractions: found 2 and 1": lambda: cut_dataset(source, [a, b], [1.0], seed=1),
        "fractions: found 0.6, 0.6, need shares": lambda: cut_dataset(source, [a, b], [0.6, 0.6], seed=1),
        "targets: two are equal": lambda: cut_dataset(source, [a, a], [0.5, 0.5], seed=1),
        "num_documents: found -1, need 0": lambda: cut_dataset(source, [a], num_documents=-1),
        "is read and written": lambda: cut_dataset(source, [source], num_documents=1, overwrite=True),
    }
    for message, call in calls.items():
        with pytest.raises(ConfigError, match=message):
            call()
    build(a, 10)
    with pytest.raises(ObjectExistsError):
        cut_dataset(source, [b, a], [0.5, 0.5], seed=1)
    Path(f"{source}.bin").write_bytes(b"x")
    for call in (lambda: cut_dataset(source, [b], num_documents=1), lambda: cut_dataset(source, [b], [1.0], seed=1)):
        with pytest.raises(FormatError, match=r"en\.bin: 1 bytes, its .idx needs 200"):
            call()
    assert names_beside(f"{tmp_path}/b") == []
