"""The package of how-to/publish-a-package, and the order of how-to/choose-an-order: built as a wheel, and used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from helpers.installs import run_in
from helpers.pages import python_blocks, read_page

USE = """
import sys, warnings
import numpy as np
import binidx
from binidx.storage.open import CODECS
from binidx.storage.stores.registry import STORES
from binidx.tools import main


def first_batches(prefix, cache, **workers):
    dataset = binidx.load_dataset(prefix, 16, num_samples=40, path_to_cache=cache)
    loader = binidx.build_pretraining_data_loader(dataset, 0, 4, **workers)
    return [batch["tokens"].tolist() for batch in loader]


def use(base, folder):
    with binidx.IndexedDatasetBuilder(f"{folder}/en.bin", np.uint16) as builder:
        for number in range(400):
            builder.add_document(np.arange(number % 50 + 1), [number % 50 + 1])
        builder.finalize(f"{folder}/en.idx")
    assert main(["convert", f"{folder}/en", "--to", f"{base}/en", "--codec", "zz", "--compress", "9"]) == 0
    assert main(["convert", f"{base}/en", "--to", f"{folder}/zz", "--codec", "zz"]) == 0
    assert main(["convert", f"{base}/en", "--to", f"{folder}/plain", "--plain"]) == 0
    assert open(f"{folder}/en.bin", "rb").read() == open(f"{folder}/plain.bin", "rb").read()
    for prefix in (f"{base}/en", f"{folder}/zz"):
        assert main(["inspect", prefix]) == 0
        assert main(["verify", prefix]) == 0
    assert main(["merge", f"{base}/en", f"{base}/en", "--to", f"{base}/merged"]) == 0
    assert main(["merge", f"{base}/en", f"{base}/en", "--to", f"{base}/merged"]) == 0, "compared"
    with binidx.IndexedDatasetBuilder(f"{base}/built.bin.zz", np.uint16, compression_level=1) as builder:
        builder.add_document(np.arange(9), [9])
        builder.finalize(f"{base}/built.idx")
    assert binidx.IndexedDataset(f"{base}/built")[0].tolist() == [*range(9)]
    twice = binidx.IndexedDataset(f"{base}/merged")
    assert len(twice) == 800 and twice[799].tolist() == twice[399].tolist() == [*range(50)]
    dataset = binidx.load_dataset(f"{base}/en", 16, num_samples=40, path_to_cache=f"{base}/cache")
    binidx.Run(dataset.config, [40, 0, 0], 4, 1).save(f"{folder}/run.json")
    assert main(["plan", f"{folder}/run.json"]) == 0
    halved = binidx.load_dataset(f"{base}/en", 16, num_samples=40, order={"kind": "every_other", "first": 1})
    assert (halved.read_tokens([0, 1]) == dataset.read_tokens([1, 3])).all()
    binidx.Run(halved.config, [40, 0, 0], 4, 1).save(f"{folder}/half.json")
    assert '"every_other"' in open(f"{folder}/half.json").read()
    assert main(["trace", f"{folder}/half.json", "--steps", "0"]) == 0
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    found = first_batches(f"{base}/en", f"{base}/cache", **spawned)
    assert found == first_batches(f"{folder}/en", None)
    print(len(found), "batches")
"""
"""Definition of `use(base, folder)`, which does with the package all that users do."""

PUBLISHED = f"""{USE}
if __name__ == "__main__":
    use(*sys.argv[1:])
"""

REGISTERED = f"""{USE}
from binidx.jobs.engines import open_engine
from binidx.jobs.runner import run_tasks


def first_tokens(prefix):
    return binidx.IndexedDataset(prefix)[9].tolist()


if __name__ == "__main__":
    import toyorder, toys3, toyzlib
    binidx.register_order("every_other", toyorder.EveryOther)
    binidx.register_store("toys3", toys3.ToyStore)
    binidx.register_codec(".zz", toyzlib.ZLIB)
    base, folder = sys.argv[1:]
    use(base, folder)
    tasks = [f"{{base}}/en", f"{{folder}}/zz"]
    assert [found for _, found in run_tasks(first_tokens, tasks, open_engine("local", 1))] == [[*range(10)]] * 2
    assert "installed" not in vars(STORES) or not STORES.installed
"""


def write_package(folder: Path) -> Path:
    """Write the files of the page into a folder; return it."""
    page = read_page("how-to/publish-a-package")
    store, codec = python_blocks(page)
    project = re.search(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert project is not None
    [example] = [block for block in python_blocks(read_page("how-to/choose-an-order")) if "class EveryOther(" in block]
    order = "import binidx\n" + example[: example.index("\n\nusual =")] + "\n"
    published = project[1].replace('"toyzlib"]', '"toyzlib", "toyorder"]')
    published += '\n[project.entry-points."binidx.orders"]\nevery_other = "toyorder:EveryOther"\n'
    folder.mkdir(parents=True)
    files = {"toys3.py": store, "toyzlib.py": codec, "toyorder.py": order, "pyproject.toml": published}
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the package in a folder; return its wheel."""
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    return next(folder.glob("*.whl"))


def check_published(python: Path, folder: Path, base: str) -> str:
    """Install the package's wheel into an environment that has s3 and torch, and use it; return what that printed.

    Args:
        folder: an empty folder.
        base: URI of an empty folder, s3://.
    """
    wheel = build_wheel(write_package(folder / "source"), folder / "wheel")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (folder / "use.py").write_text(PUBLISHED)
    return run_in(python, folder, "use.py", base.replace("s3://", "toys3://"), str(folder))
