"""Installs with some extras alone; there every command must work, or name the missing extra in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
import venv
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

COMMANDS: list[tuple[str, str]] = [
    ("--help", ""),
    ("--version", ""),
    ("inspect {plain}", ""),
    ("inspect {known} --text 2 --tokenizer {tokenizer}", "tokenizers"),
    ("verify {known} --vocab-size 256", ""),
    ("verify {known} --lineage", "parquet"),
    ("diff {plain} {plain}", ""),
    ("convert {known} --to {out}/convert --compress 3", ""),
    ("merge {plain} {plain} --to {out}/merge", ""),
    ("merge {plain} {known} --to {out}/merged", "parquet"),
    ("merge {plain} {known} --to {out}/merge-no --no-lineage", ""),
    ("cut head {known} --to {out}/head -n 3", "parquet"),
    ("cut head {known} --to {out}/head-no -n 3 --no-lineage", ""),
    ("cut split {known} --to {out}/a {out}/b --fractions 0.5 0.5 --seed 1", "parquet"),
    ("shuffle {known} --to {out}/shuffled --seed 1", "parquet"),
    ("shuffle {known} --to {out}/shuffled-no --seed 1 --no-lineage", ""),
    ("shuffle --lines {text} --to {out}/shuffled.jsonl.zst --seed 1", ""),
    ("export litpkds {plain} --to {out}/packed --eod 0 --chunk-size 4096", ""),
    ("plan {run}", ""),
    ("doctor {run}", ""),
    ("prepare index {run}", ""),
    ("trace {run} --steps 1", ""),
    ("trace {run} --steps 1 --tokenizer {tokenizer}", "tokenizers"),
    ("where {run} --document 3 --source {known}", ""),
    ("where {run} --document id=id-1-", "parquet"),
    ("account {run}", ""),
    ("order {run} --to {out}/order", "parquet"),
    ("explore {run} --html {out}/report.html", "explore"),
    ("account {run} --figure epochs --to {out}/epochs.svg", "plot"),
    ("prepare bake {run} --to {out}/baked", ""),
    ("prepare read-plan {run} --to {out}/plan", ""),
    ("cache list --help", ""),
    ("estimate {text} --tokenizer {tokenizer}", "tokenizers"),
    ("estimate {table} --tokenizer {tokenizer}", "tokenizers parquet"),
    ("preprocess {text} --to {out}/made --tokenizer {tokenizer} --workers 1", "tokenizers parquet"),
    ("preprocess {text} --to {out}/made-no --tokenizer {tokenizer} --workers 1 --no-lineage", "tokenizers"),
    ("preprocess {text} --to {out}/made-ray --tokenizer {tokenizer} --engine ray --no-lineage", "ray tokenizers"),
    ("inspect s3://bucket/en", "s3"),
    ("inspect gs://bucket/en", "gcs"),
    ("inspect abfs://bucket/en", "azure"),
    ("inspect oss://bucket/en", "oss"),
    ("inspect hf://datasets/org/corpus/en", "hub"),
]
"""A command, and the extras without which it names one of them."""

NAMED = re.compile(r"'binidx\[(\w+)\]'")

UNTRIED = {"s3", "gcs", "azure", "oss", "hub", "ray"}
"""Extras whose commands need a server or much time: that these name them is all that is tried."""


def write_data(folder: Path) -> dict[str, str]:
    """Write the data of the commands in an environment that has everything; return what stands in their braces."""
    import pyarrow as pa
    import pyarrow.parquet as parquet
    from helpers.gpt_data import TOKENIZER
    from helpers.lineage_data import build_with_lineage
    from helpers.random_datasets import Document, build_ours
    from tokenizers import Tokenizer, models

    import binidx

    documents = [Document(np.arange(1, 30, dtype=np.uint8), [29], []) for _ in range(40)]
    plain, known = build_ours(folder / "plain", documents, np.uint8), build_with_lineage(folder / "en", 60, 1, np.uint8)
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=16, blend=([plain, known], [0.7, 0.3]), split="1,0,0", tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=f"{folder}/cache",
    )  # fmt: skip
    binidx.Run(config, [64, 0, 0], 2, 2, global_batch_size=8).save(f"{folder}/run.json")
    words = {f"w{number}": number for number in range(256)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(f"{folder}/tokenizer.json")
    rows = [{"text": f"w{number}"} for number in range(20)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pa.Table.from_pylist(rows), folder / "text.parquet")
    files = {"run": "run.json", "tokenizer": "tokenizer.json", "text": "text.jsonl", "table": "text.parquet"}
    return {"plain": plain, "known": known, **{name: f"{folder}/{file}" for name, file in files.items()}}


def expand(extras: Iterable[str]) -> set[str]:
    """Return some extras and those that they name."""
    found = set(extras)
    for need in (Requirement(text) for extra in extras for text in EXTRAS[extra]):
        found |= expand(need.extras) if need.name == "binidx" else set()
    return found


def requirements(extras: Iterable[str]) -> list[str]:
    """Return the requirements of the project with some extras."""
    texts = [*PROJECT["dependencies"], *(text for extra in expand(extras) for text in EXTRAS[extra])]
    return [text for text in texts if Requirement(text).name != "binidx"]


def closure(texts: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed distributions that some requirements bring, by name."""
    left, seen, found = [Requirement(text) for text in texts], set[tuple[str, frozenset[str]]](), {}
    while left:
        need = left.pop()
        key = canonicalize_name(need.name), frozenset(need.extras)
        if key not in seen:
            seen.add(key)
            found[key[0]] = distribution(need.name)
            for child in map(Requirement, found[key[0]].requires or ()):
                extras = need.extras or {""}
                if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                    left.append(child)
    return found


def link_environment(folder: Path, extras: Iterable[str]) -> Path:
    """Make a virtual environment with binidx and some extras alone, of links to what is installed; return its Python.

    It takes a tenth of a second, where pip would take minutes and a network.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "binidx").symlink_to(ROOT / "src" / "binidx")
    metadata = next(file.parent for file in distribution("binidx").files or () if file.name == "METADATA")
    (site / metadata).symlink_to(str(distribution("binidx").locate_file(metadata)))
    for each in closure(requirements(extras)).values():
        roots = set[PurePath]()
        for file in each.files or ():
            if ".." not in file.parts and roots.isdisjoint([file, *file.parents]):
                root = _root(each, file)
                roots.add(root)
                (site / root).parent.mkdir(parents=True, exist_ok=True)
                if not (site / root).is_symlink():
                    (site / root).symlink_to(str(each.locate_file(root)))
    return folder / "bin" / "python"


def _root(owner: Distribution, file: PurePath) -> PurePath:
    """Return the outermost package that a file is in; the file, if it is in none; a namespace has several owners."""
    for parent in [*reversed(file.parents)][1:]:
        if parent.suffix == ".dist-info" or Path(str(owner.locate_file(parent)), "__init__.py").exists():
            return parent
    return file


CHILD = """
import contextlib, io, json, sys
from binidx.tools import main

found = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            status = repr(error)
    found.append((status, err.getvalue()))
json.dump(found, sys.stdout)
"""


def run_in(python: Path, folder: Path, *arguments: str, stdin: str = "") -> str:
    """Run a Python in a folder, with no path but its own; return its stdout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BINIDX"))}
    done = subprocess.run(
        [python, *arguments], input=stdin, capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_commands(
    python: Path, extras: Iterable[str], data: dict[str, str], folder: Path
) -> dict[str, tuple[str, ...]]:
    """Run all commands in one process of an environment, and compare each with what its extras let it do.

    Returns:
        By command, the extras that its error names; none if it works.
    """
    available = expand(extras)
    calls = [text.format(**data, out=folder / "out").split() for text, _ in COMMANDS]
    tried = [
        (call, set(needs.split()) - available, text)
        for call, (text, needs) in zip(calls, COMMANDS, strict=True)
        if not UNTRIED.intersection(needs.split()) or UNTRIED.intersection(needs.split()) - available
    ]
    (folder / "out").mkdir(parents=True)
    found: Sequence[Any] = json.loads(
        run_in(python, folder, "-c", CHILD, stdin=json.dumps([call for call, *_ in tried]))
    )
    wrong = [
        f"binidx {' '.join(call)}: {status}\n{err}"
        for (call, missing, _), (status, err) in zip(tried, found, strict=True)
        if (status, "Traceback" in err) != ((2 if missing else 0), False)
        or (missing and not (err.count("\n") == 1 and any(f"'binidx[{extra}]'" in err for extra in missing)))
    ]
    assert not wrong, "\n".join(wrong)
    said = [err for status, err in found if status == 0 and "origins of documents are left out" in err]
    assert len(said) == ("parquet" not in available)
    return {
        text: tuple(NAMED.findall(err)) if status else ()
        for (*_, text), (status, err) in zip(tried, found, strict=True)
    }


API = """
import sys, binidx, numpy as np

plain, run, out = sys.argv[1:]
with binidx.IndexedDatasetBuilder(f"{out}/api.bin", np.uint16) as builder:
    builder.add_document([1, 2, 3], [3])
    builder.finalize(f"{out}/api.idx")
assert binidx.IndexedDataset(f"{out}/api")[0].tolist() == [1, 2, 3]
assert len(binidx.IndexedDataset(plain)) == 40
train = binidx.Run.load(run).build()[0]
assert train.read_tokens([0, 1]).shape == (2, 17)
assert binidx.find_topology() == (0, 1)
assert next(iter(binidx.megatron.MegatronPretrainingSampler(64, 0, 2, 0, 1))) == [0, 1]
try:
    sample = train[0]
    loader = binidx.build_pretraining_data_loader(train, 0, 2)
    assert next(iter(loader))["tokens"].tolist()[0] == sample["tokens"].tolist()
    print("torch")
except binidx.errors.MissingDriverError as error:
    print(error)
for needs_torch in (
    lambda: binidx.build_pretraining_data_loader,
    lambda: binidx.megatron.RandomSeedDataset(train, 1),
    lambda: __import__("binidx.compat.megatron").compat.megatron.install(),
):
    try:
        needs_torch()
        print("torch")
    except binidx.errors.MissingDriverError as error:
        print(error)
"""


def check_api(python: Path, extras: Iterable[str], data: dict[str, str], folder: Path) -> None:
    """Read, write and build without torch; samples, the loader and Megatron's stand-in name it."""
    said = run_in(python, folder, "-c", API, data["plain"], data["run"], str(folder)).splitlines()
    needed = "torch" if "torch" in extras else "pip install 'binidx[torch]'"
    assert len(said) == 4
    assert all(needed in line for line in said)
