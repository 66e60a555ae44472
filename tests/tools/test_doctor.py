"""binidx doctor: what is installed, and what a URI is."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from helpers.conversion import build

from binidx.errors import ObjectNotFoundError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.tools import doctor, main

ROOT = Path(__file__).parents[2]


def checks(capsys: pytest.CaptureFixture[str], status: int, *uris: str) -> dict[str, Any]:
    assert main(["doctor", *uris, "--json"]) == status
    return {each["what"]: each for each in json.loads(capsys.readouterr().out)["checks"]}


def test_every_extra_that_a_user_may_lack_has_a_row() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bundles = {"demo", "examples", "preprocess", "test"}
    assert {extra for extra, _ in doctor.PACKAGES.values()} == project["optional-dependencies"].keys() - bundles


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor.PACKAGES, "no-such-package", ("s3", "s3://"))
    assert main(["doctor"]) == 0
    assert "missing  no-such-package" in (out := capsys.readouterr().out)
    assert "s3://: pip install 'binidx[s3]'" in out


def test_a_uri_is_a_dataset_an_object_a_folder_or_nothing(
    s3: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (f"{tmp_path}/data", s3.fresh()):
        prefix = build(f"{place}/en", 100)
        found = checks(capsys, 0, prefix, f"{prefix}.bin", place)
        assert found[prefix]["detail"].startswith("a dataset, in ")
        assert found[f"{prefix}.bin"]["detail"].startswith("a dataset, in ")
        assert found[place]["detail"].startswith("a folder")
        assert f"did you mean {prefix}?" in checks(capsys, 1, f"{prefix[:-1]}")[prefix[:-1]]["detail"]
    with pytest.raises(ObjectNotFoundError, match=r"^s3://no-such-bucket: no such bucket; correct [a-z ]*$"):
        IndexedDataset("s3://no-such-bucket/en")
    refused = json.dumps({**s3.server.storage_options, "secret": "wrong"})
    assert "denied" in checks(capsys, 1, prefix, "--storage-options", refused)[prefix]["detail"]
