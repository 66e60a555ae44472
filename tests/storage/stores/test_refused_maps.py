"""Files that the kernel does not map, for a quota of their file system or of the process: they are read by ranges."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.refused_maps import NUMBER_OF_MMAP

from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage.stores.local import READ_AT_ONCE

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

READ_DATASETS = """
import hashlib, sys
from helpers.refused_maps import refuse_maps
from binidx.format.indexed_dataset import IndexedDataset
refuse_maps(int(sys.argv[1]))
for prefix in sys.argv[2:]:
    dataset = IndexedDataset(prefix)
    print(hashlib.md5(b"".join(map(bytes, dataset[0 : len(dataset)]))).hexdigest(), type(dataset.bin_reader).__name__)
"""

READ_SPARSE_FILE = """
import resource, sys
from pathlib import Path
from binidx.storage.open import open_object
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30),) * 2)
print(bytes(open_object(sys.argv[1]).read([(5, 8), ((4 << 30) - 4, 4 << 30)])[1]))
"""


def run(code: str, *arguments: object) -> tuple[list[str], list[str]]:
    """Return the lines that a process of its own prints, and its warnings."""
    ended = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines(), ended.stderr.splitlines()


@LINUX
@pytest.mark.skipif(platform.machine() not in NUMBER_OF_MMAP, reason="needs the number of mmap")
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOMEM], ids=["EPERM", "ENOMEM"])
def test_pairs_that_are_not_mapped_are_read_by_ranges_with_one_warning(tmp_path: Path, number: int) -> None:
    """Both files: the `.idx`, too, is larger than a file that is read at once."""
    prefixes = [tmp_path / name for name in ("en", "de", "fr")]
    for seed, prefix in enumerate(prefixes):
        with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
            for tokens in np.random.default_rng(seed).integers(0, 60_000, (2_000, 30)):
                builder.add_document(tokens.tolist(), [30])
            builder.finalize(f"{prefix}.idx")
        assert Path(f"{prefix}.idx").stat().st_size > READ_AT_ONCE
    mapped, _ = run(READ_DATASETS.replace("refuse_maps(i", "(i"), number, *prefixes)
    lines, warnings = run(READ_DATASETS, number, *prefixes)
    assert [line.split()[1] for line in mapped] == ["LocalFile"] * 3
    assert lines == [line.replace("LocalFile", "RemoteObject") for line in mapped]
    assert len(warnings) == 1
    assert warnings[0].startswith("mmap: ")
    for words in ("vm.max_map_count", "ulimit -v", "mmap=False", "read by ranges"):
        assert words in warnings[0]


@LINUX
def test_a_file_beyond_the_limit_of_address_space_is_read_by_ranges(tmp_path: Path) -> None:
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.seek((4 << 30) - 4)
        file.write(b"last")
    lines, warnings = run(READ_SPARSE_FILE, path)
    assert lines == ["b'last'"]
    assert warnings[0].startswith(f"mmap: {path}: Cannot allocate memory; not mapped: raise sysctl ")
