"""Run Megatron-LM's own unit tests of its datasets, unmodified, with Megatron's modules and then with ours.

    python tests/compat/run_megatron_tests.py PATH_OF_A_MEGATRON_LM_TREE [FILE.py ...]

Exit status 1 if a test that passes with Megatron's modules does not pass with ours and is not in `ALLOWED`, or if one
in `ALLOWED` passes. The tree is that of core_v0.16.1 or later (the archive of a tag, unpacked); the installed
megatron-core lends it its compiled helpers.

The tests assume a GPU, the container of Megatron's CI and a network. `pytest -p run_megatron_tests` provides a process
group of one rank over gloo instead, small tokenizer and text files where they read /opt/data, and the tree where they
read /opt/megatron-lm. Tests that need more fail for Megatron, too, and count for neither.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    "test_builder", "test_varlen_dataset", "test_gpt_dataset", "test_multimodal_dataset", "test_prepare_cache",
    "test_preprocess_data", "test_preprocess_data_fast", "test_preprocess_mmdata", "test_bin_reader",
)  # fmt: skip
ALLOWED = {
    "test_bin_reader.py::test_bin_reader": "reader classes: asserts the classes of Megatron's `_BinReader`s",
    "test_prepare_cache.py::test_prepare_cache_builds_and_hits_per_split_dataset_cache": "deferred indices: asserts "
    "that an index is None before the first sample",
}
"""Tests that fail here on purpose; docs/moving/megatron.md has the same list."""

LEFT_OUT = {
    "test_preprocess_data.py::test_preprocess_data_bert": "needs punkt models of NLTK as pickles, which NLTK no longer "
    "opens; Megatron's tool then starts its workers again for ever",
}
"""Tests that run for neither."""

TREE, OURS = "MEGATRON_TESTS_TREE", "MEGATRON_TESTS_OURS"
"""Environment variables: the tree; "1" with binidx in the place of Megatron's datasets."""


def main(arguments: list[str]) -> int:
    """Run the tests twice and compare the outcomes."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tree", type=Path, help="a tree of Megatron-LM")
    options.add_argument("files", nargs="*", help="files of its tests/unit_tests/data; by default those named above")
    given = options.parse_args(arguments)
    tree = given.tree.resolve()
    names = given.files or [f"{name}.py" for name in FILES]
    files = [path for name in names if (path := tree / "tests/unit_tests/data" / name).exists()]
    if not files:
        options.error(f"{tree}: no tree of Megatron-LM with one of {', '.join(names)}")
    lend_helpers(tree)
    with tempfile.TemporaryDirectory() as scratch:
        write_data(Path(scratch))
        theirs, ours = (run(tree, files, scratch, with_ours) for with_ours in (False, True))
    return compare(theirs, ours)


def compare(theirs: dict[str, str], ours: dict[str, str]) -> int:
    """Print the tests whose outcome is not the needed one, and the numbers; return the exit status."""
    passed = [name for name, outcome in theirs.items() if outcome == "passed"]
    different = [name for name in passed if ours.get(name) != "passed"]
    for name in different:
        print(f"{name}: {ours.get(name, 'not run')} ({ALLOWED.get(name, 'NOT ALLOWED')})")
    needless = [name for name in ALLOWED if ours.get(name) == "passed"]
    for name in needless:
        print(f"{name}: passes; remove it from the list of allowed differences")
    for name, outcome in theirs.items():
        if outcome == "failed":
            print(f"{name}: fails for Megatron on this machine")
    for name, reason in LEFT_OUT.items():
        print(f"{name}: left out, {reason}")
    print(f"output: {ROOT / 'build'}/megatron-tests-*.log")
    allowed = sum(name in ALLOWED for name in different)
    print(f"{len(theirs)} tests, {len(passed)} pass for Megatron, {len(passed) - len(different)} of them for binidx, "
          f"{allowed} differ as documented")  # fmt: skip
    return int(not passed or len(different) > allowed or bool(needless))


def run(tree: Path, files: list[Path], scratch: str, with_ours: bool) -> dict[str, str]:
    """Run the tests in a process of their own; return test -> outcome."""
    paths = [str(tree), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1",
        "BINIDX_INDEX_DIR": f"{scratch}/index", TREE: str(tree), "HF_HUB_OFFLINE": "1", OURS: str(int(with_ours)),
    }  # fmt: skip
    command = [
        "-m", "pytest", "-q", "--rootdir", str(tree), "--basetemp", f"{scratch}/pytest/of", "-o", "addopts=",
        "--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "run_megatron_tests", *map(str, files),
        *(f"--deselect=tests/unit_tests/data/{name}" for name in LEFT_OUT),
    ]  # fmt: skip
    log = ROOT / "build" / f"megatron-tests-{tree.name}-{'binidx' if with_ours else 'megatron'}.log"
    log.parent.mkdir(exist_ok=True)
    os.makedirs(f"{scratch}/pytest", exist_ok=True)
    with log.open("w") as out:
        subprocess.run([sys.executable, *command], cwd=scratch, env=environment, stdout=out, stderr=out, check=False)
    outcomes = Path(scratch) / "outcomes.json"
    if not outcomes.exists():
        sys.exit(f"{log}: pytest did not finish")
    found: dict[str, str] = json.loads(outcomes.read_text())
    outcomes.unlink()
    return found


def lend_helpers(tree: Path) -> None:
    """Give the tree the compiled helpers of the installed megatron-core, unless it has its own."""
    folder = tree / "megatron/core/datasets"
    for file in importlib.metadata.files("megatron-core") or ():
        if file.match("datasets/helpers_cpp*.so") and not (folder / file.name).exists():
            shutil.copy(file.locate(), folder)


def write_data(scratch: Path) -> None:
    """Write what the tests read of /opt/data: a byte-level BPE of few merges, in both forms, and documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

    folder = scratch / "opt/data/tokenizers/megatron"
    folder.mkdir(parents=True)
    merges = [("h", "e"), ("t", "he"), ("Ġ", "the"), ("1", "0"), ("Ġ", "1"), ("i", "n"), ("Ġ", "s")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "gpt2-vocab.json").write_text(json.dumps(vocabulary))
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    engine = Tokenizer(models.BPE(vocabulary, merges))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(tokenizer_object=engine, bos_token=end, eos_token=end, unk_token=end).save_pretrained(
        scratch / "opt/data/tokenizers/huggingface"
    )
    # Megatron opens "gpt2" by name: of the hub, or a folder where the tests run.
    files = [str(folder / "gpt2-vocab.json"), str(folder / "gpt2-merges.txt")]
    GPT2TokenizerFast(*files).save_pretrained(scratch / "gpt2")
    documents = scratch / "opt/data/datasets/dclm/dclm.jsonl"
    documents.parent.mkdir(parents=True)
    texts = (f"the {number} pens in the inn " * (number % 7 + 1) for number in range(1100))
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


# The plugin of both runs.

OUTCOMES: dict[str, str] = {}


def moved(argument: Any) -> Any:
    """Return a path of the CI's container as it is here."""
    if not isinstance(argument, str):
        return argument
    return argument.replace("/opt/data", os.getcwd() + "/opt/data").replace("/opt/megatron-lm", os.environ[TREE])


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Prepare the process before Megatron's conftest.py imports Megatron."""
    import packaging.version
    import requests
    import torch
    import typing_extensions

    if sys.version_info < (3, 12):  # which the trees after core_v0.19 need
        vars(typing)["override"] = typing_extensions.override
    if os.environ[OURS] == "1":
        import binidx.compat.megatron

        binidx.compat.megatron.install(cache_small_indices=True)  # test_prepare_cache looks for the files
    import megatron.core.datasets.utils
    import megatron.core.utils
    import megatron.training
    from tests.test_utils.python_scripts import download_unit_tests_dataset

    megatron.core.utils._te_version = packaging.version.Version("0")  # None, without Transformer Engine, is an error
    download_unit_tests_dataset.download_and_extract_asset = lambda **_: None
    with pytest.MonkeyPatch.context() as patch:  # the tool imports a name from torchvision that it does not use
        patch.setitem(sys.modules, "torchvision.transforms", types.SimpleNamespace(ToTensor=None))
        patch.setitem(sys.modules, "torchvision", types.SimpleNamespace())
        import tools.preprocess_mmdata  # noqa: F401
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    megatron.core.datasets.utils.compile_helpers = lambda: None  # `lend_helpers` has brought them
    parse, execute = argparse.ArgumentParser.parse_known_args, runpy.run_path

    def parse_moved(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        return parse(self, [*map(moved, sys.argv[1:] if args is None else args)], namespace)

    def get(url: str, **_: Any) -> Any:  # of the vocabulary and the merges of GPT-2
        answer = requests.Response()
        name = "gpt2-vocab.json" if "vocab" in url else "gpt2-merges.txt"
        answer._content = Path(moved(f"/opt/data/tokenizers/megatron/{name}")).read_bytes()
        return answer

    argparse.ArgumentParser.parse_known_args = parse_moved  # type: ignore[assignment, method-assign]
    runpy.run_path = lambda path, *rest, **named: execute(moved(path), *rest, **named)
    requests.get = get


def pytest_runtest_logreport(report: Any) -> None:
    name = report.nodeid.removeprefix("tests/unit_tests/data/")
    if report.when == "call" or report.outcome != "passed":
        OUTCOMES[name] = report.outcome


def pytest_sessionfinish() -> None:
    Path("outcomes.json").write_text(json.dumps(OUTCOMES))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
