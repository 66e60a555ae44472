"""One way from a jsonl to a .bin/.idx: python -m tests.bench.preprocessing WAY JSONL TOKENIZER PREFIX

    ours-ENGINE    binidx.prepare.preprocess with this engine and one worker
    pool           Megatron's tools/preprocess_data.py: lines to a Pool by imap in chunks of 32, in each worker
                   json.loads and the tokenizer, lists of ints back, and one process that makes arrays and writes
    null           the same with a tokenizer that costs nothing: what the one writing process can take
    files          Megatron's tools/preprocess_data_fast.py: gigatoken.encode_files into one array, EOD put in by
                   np.insert for a million documents at a time, megatron-core's builder for the index

The last three are re-enactments: megatron-core's package has the builder and not the tools. They call the same
libraries the same way, without transformers' wrapper, which is in their favour; `files` on one thread, where it takes
the least CPU. All leave the same bytes. Prints the CPU seconds of this process alone, the most that it or one of its
children had resident, in bytes, and the tokens written.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

CHUNK_DOCUMENTS = 1_000_000
BYTES_OF_A_TOKEN = 4


class Encoder:
    """What a worker of the pool does with a line."""

    tokenizer: Any = None
    eod = 0

    def __init__(self, path: str) -> None:
        self.path = path

    def initializer(self) -> None:
        from tokenizers import Tokenizer

        Encoder.tokenizer = Tokenizer.from_file(self.path)

    def tokenize(self, text: str) -> list[int]:
        found: list[int] = Encoder.tokenizer.encode(text).ids
        return found

    def encode(self, line: str) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
        data = json.loads(line)
        ids = self.tokenize(data["text"])
        lengths = [len(ids)] if ids else []
        if ids:
            ids.append(Encoder.eod)
            lengths[-1] += 1
        return {"text": ids}, {"text": lengths}, len(line)


class NullEncoder(Encoder):
    """As many tokens as the text would have, taken from a list."""

    def initializer(self) -> None:
        Encoder.tokenizer = np.random.default_rng(0).integers(0, 50_000, 1 << 20).tolist()

    def tokenize(self, text: str) -> list[int]:
        found: list[int] = Encoder.tokenizer[: len(text) // BYTES_OF_A_TOKEN]
        return found


def builder(prefix: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        return IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)


def by_pool(encoder: Encoder, source: str, prefix: str) -> None:
    target = builder(prefix)
    with open(source, encoding="utf-8") as lines, multiprocessing.Pool(1, initializer=encoder.initializer) as pool:
        for ids, lengths, _ in pool.imap(encoder.encode, lines, 32):
            target.add_document(ids["text"], lengths["text"])
        pool.close()
        pool.join()
    target.finalize(f"{prefix}.idx")


def by_files(source: str, tokenizer: str, prefix: str) -> None:
    import gigatoken

    found = gigatoken.Tokenizer(tokenizer).encode_files(gigatoken.JsonlFileSource([source]), parallel=False).layout
    target = builder(prefix)
    ids, bounds = np.asarray(found.content.data), np.asarray(found.offsets.data)
    for first in range(0, len(bounds) - 1, CHUNK_DOCUMENTS):
        ends = bounds[first : first + CHUNK_DOCUMENTS + 1]
        chunk = np.insert(ids[ends[0] : ends[-1]], ends[1:] - ends[0], Encoder.eod).astype(target.dtype)
        target.data_file.write(chunk.tobytes())
        before = len(target.sequence_lengths)
        target.sequence_lengths.extend((np.diff(ends) + 1).tolist())
        target.document_indices.extend(range(before + 1, len(target.sequence_lengths) + 1))
    target.finalize(f"{prefix}.idx")


def by_ours(engine: str, source: str, tokenizer: str, prefix: str) -> None:
    from binidx.prepare.preprocess.job import Job
    from binidx.prepare.preprocess.run import preprocess
    from binidx.tokenize.describe import describe_tokenizer

    spec = describe_tokenizer(tokenizer, eod=Encoder.eod)
    job = Job((source,), prefix, spec, append_eod=True, lineage=False, engine=engine)
    preprocess(job, workers=1)
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}_text_document.*"):
        path.rename(prefix + path.suffix)


def main(way: str, source: str, tokenizer: str, prefix: str) -> None:
    if way.startswith("ours-"):
        by_ours(way.removeprefix("ours-"), source, tokenizer, prefix)
    elif way == "files":
        by_files(source, tokenizer, prefix)
    else:
        by_pool((NullEncoder if way == "null" else Encoder)(tokenizer), source, prefix)
    used, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    most = max(own_resident(), children.ru_maxrss) * 1024
    print(json.dumps([used.ru_utime + used.ru_stime, most, Path(f"{prefix}.bin").stat().st_size // 2]))


def own_resident() -> int:
    """KiB; the kernel's ru_maxrss would begin with what the process had that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
