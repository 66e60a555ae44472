"""hf:// against a server that answers as the Hub: files by redirects to another host, and listings."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers.trained_tokenizers import byte_level
from servers.http_objects import Server, http_objects

from binidx.errors import AccessError, ObjectChangedError, ObjectNotFoundError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import plan_slices
from binidx.storage.location import Location
from binidx.storage.open import open_stored

NAME = "datasets/org/corpus"
FILES = {f"en/part-{number}.jsonl": b'{"text": "document %d"}\n' % number * 200 for number in range(3)}
FILES["README.md"] = b"# corpus"


@dataclass
class Hub:
    """Server of the Hub, and the host to which it redirects."""

    api: Server
    files: Server

    @property
    def options(self) -> dict[str, str]:
        return {"endpoint": self.api.endpoint, "token": "hf_secret"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    tree = [{"type": "file", "oid": "0", "size": len(data), "path": path} for path, data in FILES.items()]
    folder = [{"type": "directory", "oid": "1", "size": 0, "path": "en"}]
    answers = {
        f"/api/{NAME}": {"id": "org/corpus", "sha": "abc"},
        f"/api/{NAME}/tree/main": [*folder, *tree],
        f"/api/{NAME}/tree/main/en": tree[:3],
    }
    with (
        http_objects({path: json.dumps(answer).encode() for path, answer in answers.items()}) as api,
        http_objects({f"/cdn/{path}": data for path, data in FILES.items()}) as files,
    ):
        api.targets = {f"/{NAME}/resolve/main/{path}": f"{files.endpoint}/cdn/{path}" for path in FILES}
        api.targets[f"/{NAME}/resolve/refs%2Fconvert%2Fparquet/x"] = f"{files.endpoint}/cdn/README.md"
        yield Hub(api, files)


def test_files_are_read_where_the_hub_redirects_and_the_token_stays_with_it(hub: Hub) -> None:
    reader = open_stored(Location(f"hf://{NAME}/en/part-1.jsonl", hub.options))
    assert bytes(reader.read([(10, 30)])[0]) == FILES["en/part-1.jsonl"][10:30]
    assert reader.uri == f"hf://{NAME}/en/part-1.jsonl"
    assert set(hub.api.authorizations) == {"Bearer hf_secret"}
    assert set(hub.files.authorizations) == {None}
    copy = pickle.loads(pickle.dumps(reader))
    assert bytes(copy.read([(0, 5)])[0]) == FILES["en/part-1.jsonl"][:5]
    revised = open_stored(Location(f"hf://{NAME}@refs/convert/parquet/x", hub.options))
    assert bytes(revised.read([(0, 8)])[0]) == b"# corpus"
    hub.files.objects["/cdn/en/part-1.jsonl"] = b"x" * reader.size
    with pytest.raises(ObjectChangedError, match=f"hf://{NAME}/en/part-1.jsonl"):
        reader.read([(0, 5)])


def test_folders_and_patterns_are_listed(hub: Hub) -> None:
    needed = [f"hf://{NAME}/en/part-{number}.jsonl" for number in range(3)]
    for name in (
        f"hf://{NAME}",
        f"hf://{NAME}/",
        f"hf://{NAME}/en",
        f"hf://{NAME}/en/*.jsonl",
        f"hf://{NAME}/**/*.jsonl",
    ):
        found = find_inputs(name, storage_options=hub.options)
        assert [file.uri for file in found] == needed
    (first, *_) = plan_slices(found, 1 << 40)
    ((batch,),) = read_slice(first, storage_options=hub.options)
    assert (batch.num_documents, batch.text(0)) == (200, "document 0")


def test_what_is_missing_or_refused_is_named(hub: Hub) -> None:
    with pytest.raises(ObjectNotFoundError, match=f"hf://{NAME}/fr"):
        find_inputs(f"hf://{NAME}/fr", storage_options=hub.options)
    hub.api.targets.clear()
    hub.api.behaviour = "forbidden"
    with pytest.raises(AccessError, match=f"hf://{NAME}/en/part-0.jsonl: access denied .*HF_TOKEN"):
        open_stored(Location(f"hf://{NAME}/en/part-0.jsonl", hub.options))


def test_preprocess_reads_the_hub_by_the_variables_of_its_users(hub: Hub, tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    environment = {**os.environ, "HF_ENDPOINT": hub.api.endpoint, "HF_TOKEN": "hf_secret", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "binidx", "preprocess", f"hf://{NAME}/en", "--to", str(tmp_path / "en")]
    made = subprocess.run(
        [*command, "--tokenizer", str(tmp_path / "tokenizer.json"), "--workers", "1"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "600 documents" in made.stdout
    dataset = IndexedDataset(str(tmp_path / "en_text_document"))
    assert len(dataset) == 600
    assert np.array_equal(dataset[0], dataset[199])
    assert "hf_secret" not in "".join(path.read_text(errors="replace") for path in tmp_path.glob("en*"))
