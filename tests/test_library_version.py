"""Two versions of one program: their files differ in the field that names the version, and in nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from golden.make_state import files_below, write_dataset

BEGIN = """
import json, os, sys
from pathlib import Path
import binidx
from binidx.run.run_file import format_run
from binidx.tools import main

os.chdir(sys.argv[1])
options = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
config = binidx.GPTDatasetConfig(
    7, 16, ([sys.argv[2]] * 2, [0.3, 0.7]), split="8,2,0", tokenizer=binidx.SpecialTokens(eod=0),
    path_to_cache="cache", **options,
)
run = binidx.Run(config, [96, 8, 0], 2, 1, global_batch_size=4)
loader = binidx.build_pretraining_data_loader(run.build()[0], 0, 2, 0, 1)
"""
WRITE = """
next(iter(loader))
Path("state.json").write_text(json.dumps(loader.state_dict()))
run.save("run.json")
text = ["preprocess", str(Path(sys.argv[2]).parent / "en.jsonl"), "--tokenizer", sys.argv[2] + ".vocab.txt"]
for command in (["prepare", "bake", "run.json", "--to", "baked"], [*text, "--eod", "[SEP]", "--to", "text/en"]):
    assert main(command) == 0
"""
READ = """
assert format_run(binidx.Run.load("run.json")) == format_run(run)
state = json.loads(Path("state.json").read_text())
loader.load_state_dict(state)
print(json.dumps([binidx.__version__, state["library"], next(iter(loader))["tokens"].tolist()]))
"""
VERSIONS = ("0.2.0.dev7+g1a2b3c4d5", "0.3.0")
MACHINE = ("machines", "cpu_seconds")


def run_as(version: str, program: str, folder: Path) -> str:
    """Run a program as a version, in which `importlib.metadata` finds it installed; return its stdout."""
    about = folder.parent / version / f"binidx-{version}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True, exist_ok=True)
    about.write_text(f"Metadata-Version: 2.1\nName: binidx\nVersion: {version}\n")
    path = os.pathsep.join([str(about.parents[1]), *filter(None, sys.path)])
    command = [sys.executable, "-c", program, str(folder), str(folder.parent / "data" / "en")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder of each version, in which it wrote one of each kind of file, of the same data."""
    top = tmp_path_factory.mktemp("versions")
    write_dataset(str(top / "data" / "en"), 0, 60)
    (top / "data" / "en.jsonl").write_text('{"text": "the sea wrote"}\n' * 30)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "sea", "wrote"]
    (top / "data" / "en.vocab.txt").write_text("".join(word + "\n" for word in words))
    folders = [top / name for name in ("first", "second")]
    for version, folder in zip(VERSIONS, folders, strict=True):
        folder.mkdir()
        run_as(version, BEGIN + WRITE, folder)
    return folders


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_below(folder)}


def without_version(data: bytes, folder: Path) -> tuple[str, Any]:
    """The version in a JSON file, and what else it holds, without folder, machine and times."""
    fields = json.loads(data.replace(str(folder).encode(), b""))
    version = fields.pop("version" if "binidx_manifest" in fields else "library", "")
    for name in (*MACHINE, *(["xxh3_64"] if "arrays" in fields else [])):  # a checksum of the manifest's own bytes
        fields.pop(name, None)
    for array in fields.get("arrays", {}).values():
        del array["identity"]  # has the time
    return version, fields


def test_files_of_two_versions_differ_in_the_version_only(folders: list[Path]) -> None:
    first, second = map(contents, folders)
    assert first.keys() == second.keys()
    named = set()
    for name, data in first.items():
        if name.endswith(".json"):
            found = [without_version(each[name], folder) for each, folder in zip((first, second), folders, strict=True)]
            assert found[0][1] == found[1][1], name
            assert (found[0][0], found[1][0]) in (VERSIONS, ("", "")), name
            named |= {Path(name).name.rpartition("-")[2]} if found[0][0] else set()
        elif not name.endswith(".parquet"):
            assert data == second[name], name
    assert named == {"run.json", "state.json", "binidx.json", "en_text_document.manifest.json"}


def test_a_version_goes_on_with_the_files_of_another_one(folders: list[Path]) -> None:
    first = folders[0]
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files_below(first)}
    results = [json.loads(run_as(version, BEGIN + READ, first)) for version in VERSIONS]
    assert [result[:2] for result in results] == [[version, VERSIONS[0]] for version in VERSIONS]
    assert results[0][2] == results[1][2]
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files_below(first)} == before
