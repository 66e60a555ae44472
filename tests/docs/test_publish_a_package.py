"""The package of how-to/publish-a-package, built from the page: installed, or registered by a script, it works."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from helpers.installs import link_environment, run_in
from helpers.pages import python_blocks, read_page
from helpers.published import REGISTERED, check_published, write_package
from helpers.registering import registered_codec

from binidx.testing import MemoryObject, check_object_store, check_range_reader


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("toys") / "source")


@pytest.fixture
def modules(source: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules of the page, imported."""
    monkeypatch.syspath_prepend(source)
    assert len(python_blocks(read_page("how-to/publish-a-package"))) == 2
    return {name: importlib.import_module(name) for name in ("toys3", "toyzlib")}


def test_the_store_keeps_the_contract(modules: dict[str, Any], s3: Bucket) -> None:
    store, base = modules["toys3"].ToyStore("toys3://"), s3.fresh().replace("s3://", "toys3://")

    def make(name: str, data: bytes) -> tuple[Any, str]:
        store.put(f"{base}/{name}", [memoryview(data)])
        return store, f"{base}/{name}"

    check_object_store(make)


def test_the_reader_of_the_codec_keeps_the_contract(modules: dict[str, Any]) -> None:
    codec = modules["toyzlib"].ZLIB

    def make(data: bytes) -> Any:
        with codec.create(out := io.BytesIO(), None) as writer:
            writer.write(data)
        return codec.open(MemoryObject(out.getvalue()), b"")

    with registered_codec(".zz", codec):
        check_range_reader(make)


def test_what_is_installed_in_a_fresh_environment_trains_on_s3_with_spawned_workers(s3: Bucket, tmp_path: Path) -> None:
    python = link_environment(tmp_path / "venv", ["s3", "torch"])
    with pytest.raises(AssertionError, match=r"toys3://bucket/en: Protocol not known: toys3; needed a path or"):
        run_in(python, tmp_path, "-c", "import binidx; binidx.IndexedDataset('toys3://bucket/en')")
    done = check_published(python, tmp_path / "work", s3.fresh())
    assert "compared with their Adler-32" in done
    assert "bytes zz\n" in done


@pytest.mark.slow
def test_what_a_script_registers_its_spawned_workers_and_jobs_find(source: Path, s3: Bucket, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REGISTERED)
    base, path = s3.fresh().replace("s3://", "toys3://"), [str(Path(__file__).parents[2] / "src"), str(source)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, tmp_path / "script.py", base, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
