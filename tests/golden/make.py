"""Writes the golden files of this folder with Megatron Core itself: `python tests/golden/make.py`.

Made with megatron-core 0.16.1. One pair for each dtype, a multimodal one, one of empty sequences and documents; the
tokens are those of `EXPECTED`, so a test can say what must come back.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]

EXPECTED = {name: ([[[1, 2, 3], [4]], [[5, 100]], [[7]]], None) for name in DTYPES}
"""name -> (documents -> sequences -> tokens, mode of each sequence or None). uint16 unless the name is a dtype."""
EXPECTED["multimodal"] = ([[[1, 2], [9, 9, 9]], [[3]]], [0, 1, -2])
EXPECTED["empty"] = ([[], [[], [1, 2], []], [], [[]], []], None)
EXPECTED["limits"] = ([[[0, 65535]]], None)


def main() -> None:
    sys.path.insert(0, str(HERE.parent))
    from helpers.oracle import megatron

    for name, (documents, modes) in EXPECTED.items():
        dtype = np.dtype(name if name in DTYPES else "uint16").type
        builder = megatron.indexed.IndexedDatasetBuilder(str(HERE / f"{name}.bin"), dtype, modes is not None)
        left = list(modes or [])
        for document in documents:
            taken = [left.pop(0) for _ in document] if modes is not None else None
            builder.add_document(
                [token for sequence in document for token in sequence], list(map(len, document)), taken
            )
        builder.finalize(str(HERE / f"{name}.idx"))


if __name__ == "__main__":
    main()
