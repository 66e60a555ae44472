"""A sound dataset is said to be, with its counts; of an unsound one the first document that is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.conversion import build
from helpers.random_datasets import DTYPES, Document, build_ours, random_documents
from servers.latency_proxy import latency_proxy

from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_virtually
from binidx.corpus.verify import verify_dataset
from binidx.errors import ConfigError, FormatError
from binidx.format import idx
from binidx.storage import open as opening


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_sound_is_counted(tmp_path: Path, dtype: type) -> None:
    documents = random_documents(np.random.default_rng(1), dtype, 30)
    found = verify_dataset(build_ours(tmp_path / "en", documents, dtype))
    tokens = np.concatenate([each.tokens for each in documents])
    assert (found.num_documents, found.num_tokens) == (30, len(tokens))
    assert found.num_sequences == sum(len(each.lengths) for each in documents)
    assert found.empty_documents == sum(not each.lengths for each in documents)
    assert found.token_range == (tokens.min(), tokens.max())
    assert found.checked_by is None


@pytest.mark.parametrize("block", [2, 1 << 18])
def test_the_first_token_outside_the_vocabulary_is_named(tmp_path: Path, block: int, monkeypatch) -> None:
    monkeypatch.setattr(idx, "BLOCK_VALUES", block)
    monkeypatch.setattr(opening, "MAX_REQUEST", 2 * block)
    documents = [Document(np.full(n, n), [n], [0]) for n in (3, 0, 5, 7)]
    documents[2].tokens[1] = 90
    documents[3].tokens[6] = -1
    source = build_ours(tmp_path / "en", documents, np.int16)
    with pytest.raises(FormatError, match=r"en\.bin: token 90, needed 0 to 89; document 2, token 1 of it"):
        verify_dataset(source, vocab_size=90)
    with pytest.raises(FormatError, match=r"en\.bin: token -1, needed 0 to 90; document 3, token 6 of it"):
        verify_dataset(source, vocab_size=91)
    assert verify_dataset(source).token_range == (-1, 90)
    documents[3].tokens[6] = 0
    assert verify_dataset(build_ours(tmp_path / "en2", documents, np.int16), vocab_size=91).vocab_size == 91


def test_a_damage_is_named_by_its_document(s3: Bucket, tmp_path: Path) -> None:
    documents = [Document(np.full(30_000, n), [30_000], [0]) for n in range(10)]
    source = build_ours(tmp_path / "en", documents, np.uint16)
    convert_dataset(source, tmp_path / "packed", way=StorageFormat("zstd"))
    convert_dataset(source, source, way=StorageFormat(checksums=True))
    assert verify_dataset(source).checked_by == "checksums"
    assert verify_dataset(tmp_path / "packed").checked_by == "frames"
    data = bytearray(Path(f"{source}.bin").read_bytes())
    data[60_000 * 7 + 30_000] ^= 1
    Path(f"{source}.bin").write_bytes(data)
    with pytest.raises(FormatError, match=r"en\.bin.*; document 7, token \d+ of it"):
        verify_dataset(source)
    assert verify_dataset(source, quick=True).token_range is None


def test_the_rules_of_the_index_and_the_size_are_checked_quickly_too(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 100)
    Path(f"{source}.bin").write_bytes(bytes(199))
    for quick in (True, False):
        with pytest.raises(FormatError, match=r"en\.bin: 199 bytes, its \.idx needs 200"):
            verify_dataset(source, quick=quick)
    Path(f"{source}.bin").write_bytes(bytes(204))
    assert verify_dataset(source).trailing_bytes == 4
    data = bytearray(Path(f"{source}.idx").read_bytes())
    data[34 + 40 + 8] ^= 1
    Path(f"{source}.idx").write_bytes(data)
    with pytest.raises(FormatError, match="sequence 1 starts at byte"):
        verify_dataset(source, quick=True)


def test_quickly_nothing_of_the_tokens_is_read(s3: Bucket, tmp_path: Path) -> None:
    base = s3.fresh()
    convert_dataset(build(tmp_path / "en", 1_000_000), f"{base}/en", verify="size")
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():
        before = proxy.counts()
        assert verify_dataset(f"{base}/en", quick=True).num_tokens == 1_000_000
        assert (proxy.counts() - before).bytes < 20_000
        verify_dataset(f"{base}/en", vocab_size=65536)
        assert (proxy.counts() - before).bytes > 2_000_000


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 100)
    with pytest.raises(ConfigError, match="vocab_size, quick: found both"):
        verify_dataset(source, vocab_size=9, quick=True)
    with pytest.raises(ConfigError, match="records: found no workers, which write them; give workers, too"):
        verify_dataset(source, records=tmp_path / "records")
    with pytest.raises(ConfigError, match="verify: 'checksums', needed 'checksum' or 'size'"):
        convert_dataset(source, tmp_path / "copy", verify="checksums")
    with pytest.raises(ConfigError, match="a vocabulary needs integers"):
        verify_dataset(build_ours(tmp_path / "f", [], np.float32), vocab_size=9)


def with_foreign_idx(folder: Path, form: str) -> str:
    """A dataset whose `.idx` is that of a smaller corpus: plain, compressed, or a part of a virtual merge."""
    prefix, other = build(folder / "en", 10_000), build(folder / "other", 2_900)
    if form == "compressed":
        convert_dataset(prefix, prefix := f"{folder}/packed", way=StorageFormat("zstd"))
    Path(f"{prefix}.idx").write_bytes(Path(f"{other}.idx").read_bytes())
    if form == "part":
        merge_virtually([other, prefix], folder / "merged")
        return f"{folder}/merged"
    return prefix


@pytest.mark.parametrize("form", ["plain", "compressed", "part"])
def test_an_index_of_a_smaller_corpus_is_an_error(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = with_foreign_idx(tmp_path, form)
    caplog.clear()
    for quick in (True, False):
        needed = r"its .idx needs 5800 \(2900 tokens of uint16\) and at most 4096 of padding"
        with pytest.raises(FormatError, match=rf"\.bin(\.zst)?: 20000 bytes, {needed}"):
            verify_dataset(prefix, quick=quick)
    assert caplog.text == ""


@pytest.mark.parametrize("form", ["plain", "compressed", "part"])
def test_one_staged_block_of_padding_is_sound(form: str, tmp_path: Path) -> None:
    prefix, part = build(tmp_path / "en", 1_000), f"{tmp_path}/en"
    for spare, sound in ((4096, True), (4097, False)):
        with open(f"{part}.bin", "ab") as file:
            file.truncate(2_000 + spare)
        if form == "compressed":
            convert_dataset(part, prefix := f"{tmp_path}/packed{spare}", way=StorageFormat("zstd"))
        elif form == "part":
            merge_virtually([part], prefix := f"{tmp_path}/merged{spare}")
        if sound:
            assert verify_dataset(prefix).num_tokens == 1_000
        else:
            with pytest.raises(FormatError, match=r"6097 bytes, its \.idx needs 2000"):
                verify_dataset(prefix)


@pytest.mark.parametrize(
    ("field", "value"), [("documents", 11), ("sequences", 9), ("tokens", 999), ("dtype", "int16"), ("dtype", None)]
)
@pytest.mark.parametrize("virtual", [False, True], ids=["pair", "part"])
def test_a_manifest_that_contradicts_the_index_is_an_error(
    field: str, value: object, virtual: bool, tmp_path: Path
) -> None:
    """The sizes fit. Manifests of early versions have no dtype."""
    source = build(tmp_path / "en", 1_000)
    counts = {"documents": 10, "sequences": 10, "tokens": 1_000, "dtype": "uint16", field: value}
    text = json.dumps({"binidx_manifest": 1, "dataset": {k: v for k, v in counts.items() if v is not None}})
    Path(f"{source}.manifest.json").write_text(text)
    prefix = source
    if virtual:
        merge_virtually([source, build(tmp_path / "other", 500)], prefix := f"{tmp_path}/merged")
    if value is None:
        assert verify_dataset(prefix).manifest
        return
    with pytest.raises(FormatError, match=rf"en\.manifest\.json: {value} {field}, .*en\.idx has .*; one of the two"):
        verify_dataset(prefix, quick=True)
