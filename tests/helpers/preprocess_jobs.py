"""What the tests of preprocess share: text, tokenizers, jobs run in threads, and Megatron's tool re-enacted."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from demo.corpus import EOD, train_bpe

from binidx import describe_tokenizer
from binidx.jobs.parts import Workers, make_parts
from binidx.prepare.preprocess.job import Job, Part
from binidx.prepare.preprocess.job_files import JobFiles, Record
from binidx.prepare.preprocess.preprocess import Report, preprocess
from binidx.prepare.preprocess.tokenize_part import make_part
from binidx.storage.open import open_object, read_whole

WORDS = ["the", "sea", "wrote", "tokens", "été", "naïve", "雨", "🙂", "in", "1234", "def f(x):", "\n", "quietly", "  "]
"""Bytes of one to four, spaces, digits, newlines."""


@functools.cache
def tokenizer_path() -> str:
    """A tokenizer.json of 600 entries, trained once in a process."""
    folder = tempfile.mkdtemp()
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 50)) for _ in range(100)]
    train_bpe(texts, Path(folder) / "tokenizer.json", vocab_size=600)
    return f"{folder}/tokenizer.json"


def with_bos(folder: Path) -> str:
    """The same tokenizer, which puts a BOS before each text."""
    told = json.loads(Path(tokenizer_path()).read_text())
    told["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<pad>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<pad>": {"id": "<pad>", "ids": [1], "tokens": ["<pad>"]}},
    }
    path = folder / "with_bos.json"
    path.write_text(json.dumps(told))
    return str(path)


def texts(count: int, seed: int = 0, words: int = 30) -> list[str]:
    """Documents of 0 to `words` words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(0, words + 1))) for _ in range(count)]


def write_lines(path: Path, rows: Iterable[Any]) -> str:
    """A jsonl of objects; text and bytes are lines as they are."""
    with path.open("wb") as file:
        for row in rows:
            line = row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode()
            file.write(line + b"\n")
    return str(path)


def corpus(folder: Path, count: int = 200, files: int = 2, seed: int = 0) -> list[str]:
    """Files of documents with a text and an id."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_lines(
            folder / f"{number}.jsonl",
            ({"text": text, "id": f"{number}-{place}"} for place, text in enumerate(texts(count, seed + number))),
        )
        for number in range(files)
    ]


def job_of(inputs: Sequence[str], output: Any, **options: Any) -> Job:
    """A job with small parts and an EOD."""
    tokenizer = options.pop("tokenizer", None) or describe_tokenizer(tokenizer_path(), eod=EOD)
    return Job(tuple(inputs), str(output), tokenizer, **{"append_eod": True, "part_bytes": 5000, **options})


def run(job: Job, **options: Any) -> Report:
    """In threads of this process: a process takes a second or more to begin."""
    with ThreadPoolExecutor(2) as threads:
        return preprocess(job, executor=threads, workers=2, **options)


def make_recorded(job: Job, part: Part) -> Record:
    """The record of a part, which is made if it has none."""
    return make_parts(functools.partial(make_part, job), [part], Workers(count=1), JobFiles(job))[part.name]


def files_of(prefix: Any, suffix: str = ".bin") -> tuple[bytes, bytes]:
    """The two files of a dataset, wherever it lies."""
    ends = suffix, ".idx"
    return tuple(bytes(read_whole(open_object(f"{prefix}{end}", cache=False, codec="raw"))) for end in ends)


def theirs(
    inputs: Sequence[str],
    prefix: Any,
    key: str = "text",
    *,
    eod: int | None = 0,
    path: str | None = None,
    fast: bool = False,
) -> tuple[bytes, bytes]:
    """What Megatron's preprocess_data.py makes of these files: its Encoder, retold; its builder, as it is.

    Args:
        fast: as preprocess_data_fast.py, which puts an EOD behind every document, one of no tokens too.

    Source: Megatron-LM, tools/preprocess_data.py: Encoder.encode, Partition.process_json_file, get_args.
    """
    from helpers.oracle import megatron  # 3 s of CPU time, which most users of this module do not need
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path or tokenizer_path())
    dtype = megatron.indexed.DType.optimal_dtype(tokenizer.get_vocab_size())
    builder = megatron.indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for line in (line for name in inputs for line in Path(name).read_text("utf-8").split("\n") if line):
        value = json.loads(line)[key]
        document, lengths = [], []
        for sentence in value if isinstance(value, list) else [value]:
            ids = tokenizer.encode(sentence).ids
            if ids:
                document.extend(ids)
                lengths.append(len(ids))
        if document and eod is not None:
            document.append(eod)
            lengths[-1] += 1
        elif fast:
            document, lengths = [eod], [1]
        builder.add_document(document, lengths)
    builder.finalize(f"{prefix}.idx")
    return files_of(prefix)
