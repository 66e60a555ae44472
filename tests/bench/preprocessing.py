"""One way from a jsonl to a .bin/.idx: python -m tests.bench.preprocessing WAY JSONL TOKENIZER PREFIX

    ours-ENGINE    binidx.prepare.preprocess with this engine, its parts made by a thread of this process
    driver         the same with gigatoken and a worker process, as the command has it
    pool           Megatron's tools/preprocess_data.py: lines to a Pool by imap in chunks of 32, in each worker
                   json.loads and the tokenizer, lists of ints back, and one process that makes arrays and writes
    null           the same with a tokenizer that costs nothing: what the one writing process can take
    files          Megatron's tools/preprocess_data_fast.py: gigatoken.encode_files into one awkward array; it is
                   flattened, and EOD put in by np.insert, for a million documents at a time; megatron-core's builder
    files-alone    the same with gigatoken kept to one thread, where it takes less CPU; by itself it takes all cores

The last four are re-enactments: megatron-core's package has the builder and not the tools, nor yet the builder's
add_documents. They call the same libraries the same way, without transformers' wrapper, which is in their favour. All
leave the same bytes.

A first text, JSONL's .first.jsonl, goes the same way before, with the same tokenizer object: what is imported, loaded
and compared once in a process is no part of the figures, nor is a cache of words that is quite empty. Prints the CPU
seconds of that start, of the text by this process and its children, of this process alone, the most that it or one of
its children had resident, in bytes, the tokens written, and the bytes of the text.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
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


def by_files(encode_files: Any, parallel: bool, source: str, prefix: str) -> None:
    import awkward
    import gigatoken

    found = encode_files(gigatoken.JsonlFileSource([source]), parallel=parallel)
    target = builder(prefix)
    for first in range(0, len(found), CHUNK_DOCUMENTS):
        chunk = found[first : first + CHUNK_DOCUMENTS]
        lengths = np.asarray(awkward.num(chunk, axis=1))
        ids = np.asarray(awkward.flatten(chunk), dtype=target.dtype)
        target.data_file.write(np.insert(ids, np.cumsum(lengths), Encoder.eod).tobytes(order="C"))
        before = len(target.sequence_lengths)
        target.sequence_lengths.extend((lengths + 1).tolist())
        target.document_indices.extend(range(before + 1, len(target.sequence_lengths) + 1))
    target.finalize(f"{prefix}.idx")


def by_ours(engine: str, executor: Executor | None, source: str, tokenizer: str, prefix: str) -> None:
    from binidx import describe_tokenizer
    from binidx.jobs.engines import configure_malloc
    from binidx.prepare.preprocess.job import Job
    from binidx.prepare.preprocess.preprocess import preprocess

    configure_malloc()  # as a worker does
    spec = describe_tokenizer(tokenizer, eod=Encoder.eod)
    job = Job((source,), prefix, spec, append_eod=True, lineage=False, engine=engine)
    preprocess(job, executor=executor, workers=1)
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}_text_document.*"):
        path.rename(prefix + path.suffix)


def maker(way: str, tokenizer: str) -> Callable[[str, str], None]:
    """What makes PREFIX of JSONL; called twice."""
    if way.startswith("ours-"):
        executor = ThreadPoolExecutor(1)
        return lambda source, prefix: by_ours(way.removeprefix("ours-"), executor, source, tokenizer, prefix)
    if way == "driver":
        return lambda source, prefix: by_ours("gigatoken", None, source, tokenizer, prefix)
    if way in ("files", "files-alone"):
        import gigatoken

        encode_files = gigatoken.Tokenizer(tokenizer).encode_files
        return lambda source, prefix: by_files(encode_files, way == "files", source, prefix)
    encoder = (NullEncoder if way == "null" else Encoder)(tokenizer)
    return lambda source, prefix: by_pool(encoder, source, prefix)


def main(way: str, source: str, tokenizer: str, prefix: str) -> None:
    make = maker(way, tokenizer)
    make(str(Path(source).with_suffix(".first.jsonl")), f"{prefix}.first")
    own_start, children_start = cpu_seconds()
    make(source, prefix)
    own, children = cpu_seconds()
    start = own_start + children_start
    most = max(own_resident(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024
    tokens = Path(f"{prefix}.bin").stat().st_size // 2
    print(json.dumps([start, own + children - start, own - own_start, most, tokens, Path(source).stat().st_size]))


def cpu_seconds() -> tuple[float, float]:
    """Of this process, and of its children that have ended."""
    own, children = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def own_resident() -> int:
    """KiB; the kernel's ru_maxrss would begin with what the process had that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
