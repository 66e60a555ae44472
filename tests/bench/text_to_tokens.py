"""From jsonl to .bin/.idx, a CPU-second: binidx with each of its engines against Megatron's two tools, byte-compared.

    speed      CPU seconds for a file, after a tenth as much of other text in the same process: imports and start-up
               are no part of it, and the text is new to the tokenizer's cache of words. Medians. What a job does
               once is: to read a tokenizer.json, and to compare its first texts with the reference, 0.2 s
    memory     the most that one of the processes had resident
    writer     tokens a CPU-second of the process that waits for all others: Megatron's parent with a tokenizer that
               costs nothing, and our driver with the fastest. Megatron stops scaling where its workers fill that

Megatron's tools run themselves if BINIDX_BENCH_MEGATRON names a checkout of Megatron-LM, see megatron_tools.py: the
pool of preprocess_data.py, the same with --use-gigatoken, and preprocess_data_fast.py. Its package has no tools:
without a checkout the first and the last are re-enacted, see preprocessing.py.

The text is what lies on the machine: modules and notes of this Python and its packages, cut into documents of some
3 kB, no two alike; or BINIDX_BENCH_TEXT, a folder of .txt files. A byte-level BPE with the 50,257 entries of GPT-2 is
trained on a part of it. A few documents are left out that have characters newer than the Unicode of the reference:
gigatoken alone, and so Megatron's fast path, sees them otherwise.

The goals: 50 times the pool with gigatoken on new text, 1.2 times with Hugging Face; twice the fast path, at 300 MB.
"""

from __future__ import annotations

import filecmp
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from demo.corpus import train_bpe

from binidx.prepare.tokenizers.gigatoken_engine import find_new_code_points
from tests.bench.megatron_tools import find_checkout
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(
    cores=0,
    size="400 MB of jsonl, 12 MB with Hugging Face, documents of 3 kB",
    cached="text in the page cache, imports, words of a tenth as much other text",
    workers=1,
)
SLOW_BYTES = 12_000_000
FAST_BYTES = 400_000_000
TRAINING_BYTES = 12_000_000
DOCUMENT_CHARACTERS = 3000
VOCAB_SIZE = 50_257
ROUNDS = 3
TOOL, FAST_TOOL = "Megatron preprocess_data.py", "Megatron preprocess_data_fast.py"


class Used(NamedTuple):
    """What a run took."""

    start_cpu: float  # seconds: imports, the tokenizer, and a first text a tenth as long
    cpu: float  # seconds for the text, of all processes
    own_cpu: float  # seconds for the text, of the first process alone
    resident: int  # bytes, of the largest process
    tokens: int
    text_bytes: int  # of jsonl, that `cpu` was spent on

    @property
    def speed(self) -> float:
        """Megabytes of jsonl a CPU-second."""
        return self.text_bytes / self.cpu / 1e6


def rows(directory: Path) -> list[Row]:
    """Speed with two engines against each of Megatron's tools, memory, the writer's ceiling."""
    tokenizer, slow, fast = prepare(directory)
    tools = bool(find_checkout())
    if not tools:
        print("text_to_tokens: --use-gigatoken left out, the other tools re-enacted; name a checkout of Megatron-LM in "
              "BINIDX_BENCH_MEGATRON", file=sys.stderr)  # fmt: skip
    pool, hf = medians(directory, tokenizer, slow, "tool-pool" if tools else "pool", "ours-hf")
    ways = ("tool-fast", "tool-gigatoken") if tools else ("files",)
    *others, alone, giga = medians(directory, tokenizer, fast, *ways, "files-alone", "ours-gigatoken")
    null, driver = medians(directory, tokenizer, fast, "null", "driver", compare=False)
    return [
        *gigatoken_rows(giga, pool, others, alone),
        Row(
            "text to tokens, memory", driver.resident / 1e6, others[0].resident / 1e6, "MB", False,
            "goal: <= 300 MB, flat", FAST_TOOL, options=re_enacted(),
        ),
        hf_row(hf, pool),
        Row(
            "tokens through the process that all wait for", driver.tokens / max(driver.own_cpu, 0.01) / 1e6,
            null.tokens / null.own_cpu / 1e6, "Mtok/CPU-s", True,
            f"a worker gives it {rate_of_a_worker(pool) / 1e6:.2f}: full at {ceiling(null, pool):.0f} workers", TOOL,
            options="re-enacted, with a tokenizer that costs nothing",
        ),
    ]  # fmt: skip


def quick_rows(directory: Path) -> list[Row]:
    """Hugging Face alone."""
    tokenizer, slow, _ = prepare(directory, fast_bytes=SLOW_BYTES)
    pool, hf = medians(directory, tokenizer, slow, "tool-pool" if find_checkout() else "pool", "ours-hf")
    return [hf_row(hf, pool)]


def hf_row(ours: Used, theirs: Used) -> Row:
    work = "text to tokens, Hugging Face's engine"
    note = "the same bytes; goal 1.2x"
    return Row(work, ours.speed, theirs.speed, "MB/CPU-s", True, note, TOOL, options=re_enacted())


def re_enacted() -> str:
    """Return how Megatron's tools ran, for the options of a row: "" if they are those of a checkout."""
    return "" if find_checkout() else "re-enacted"


def gigatoken_rows(ours: Used, pool: Used, others: list[Used], alone: Used) -> list[Row]:
    """Against the tool that people start with, and each that has the same engine; the fastest of these is its best."""
    names = {FAST_TOOL: "preprocess_data_fast.py", f"{TOOL} --use-gigatoken": "--use-gigatoken"}
    fastest = max(other.speed for other in others)
    how = f", {re_enacted()}" if re_enacted() else ""
    start = f"the same bytes; start-up apart: {ours.start_cpu:.1f} and {others[0].start_cpu:.1f} CPU-s"
    return [
        row_of(ours, pool, TOOL, "default", f"one worker, Hugging Face's engine{how}"),
        *(
            row_of(ours, other, tool, "best" if other.speed == fastest else setting, f"{setting}{how}", start)
            for (tool, setting), other in zip(names.items(), others, strict=False)
        ),
        row_of(ours, alone, FAST_TOOL, "one thread", "a setting of the library that the tool does not have"),
    ]


def row_of(ours: Used, theirs: Used, tool: str, setting: str, options: str = "", note: str = "") -> Row:
    work = "text to tokens, gigatoken's engine"
    return Row(work, ours.speed, theirs.speed, "MB/CPU-s", True, note or "the same bytes", tool, setting, options)


def ceiling(null: Used, pool: Used) -> float:
    """Workers whose tokens fill the process that writes."""
    return (null.tokens / null.own_cpu) / rate_of_a_worker(pool)


def rate_of_a_worker(pool: Used) -> float:
    """Tokens a CPU-second of a process that tokenizes."""
    return pool.tokens / (pool.cpu - pool.own_cpu)


def medians(directory: Path, tokenizer: Path, source: Path, *ways: str, compare: bool = True) -> list[Used]:
    """What each way takes for a text, in turns."""
    runs: list[list[Used]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for way, found in zip(ways, runs, strict=True):
            found.append(used(directory, way, source, tokenizer))
        for way in ways[1:] if compare else ():
            for end in ("bin", "idx"):
                assert filecmp.cmp(directory / f"{ways[0]}.{end}", directory / f"{way}.{end}", shallow=False)
    return [Used(*(statistics.median(column) for column in zip(*found, strict=True))) for found in runs]


def used(directory: Path, way: str, source: Path, tokenizer: Path) -> Used:
    """One run, in a fresh process."""
    prefix = directory / way
    for old in directory.glob(f"{way}.*"):
        old.unlink()
    module = "tests.bench.megatron_tools" if way.startswith("tool-") else "tests.bench.preprocessing"
    command = [sys.executable, "-W", "ignore", "-m", module, way, *map(str, (source, tokenizer, prefix))]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]).stdout
    return Used(*json.loads(told.splitlines()[-1]))


def prepare(directory: Path, fast_bytes: int = FAST_BYTES) -> tuple[Path, Path, Path]:
    """A tokenizer, and jsonl files of two sizes with others a tenth as long beside them."""
    texts, enough = [], fast_bytes * 11 // 10 + TRAINING_BYTES
    for text in documents():
        texts.append(text)
        enough -= len(text)
        if enough < 0:
            break
    random.Random(0).shuffle(texts)
    tokenizer = directory / "tokenizer.json"
    train_bpe(texts[: len(texts) * TRAINING_BYTES // (fast_bytes + TRAINING_BYTES)], tokenizer, vocab_size=VOCAB_SIZE)
    return (
        tokenizer,
        write(directory / "slow.jsonl", texts, SLOW_BYTES),
        write(directory / "fast.jsonl", texts, fast_bytes),
    )


def write(path: Path, texts: list[str], num_bytes: int) -> Path:
    """So many bytes of lines, and in the file beside it other lines, a tenth as long."""
    lines = (json.dumps({"text": text}) + "\n" for text in reversed(texts))  # those it was trained on come last
    for target, size in ((path.with_suffix(".first.jsonl"), num_bytes // 10), (path, num_bytes)):
        with target.open("w") as file:
            while file.tell() < size and (line := next(lines, "")):
                file.write(line)
    return path


def documents() -> Iterator[str]:
    """Texts of the machine, each once."""
    folder, ends = os.environ.get("BINIDX_BENCH_TEXT"), {".txt"}
    if not folder:
        ends |= {".py", ".pyi", ".rst", ".md", ".html", ".h", ".hpp", ".js", ".json"}
    seen = set()
    for place in (
        [folder] if folder else [sysconfig.get_path("stdlib"), sysconfig.get_path("platlib"), "/usr/share/doc"]
    ):
        for path in sorted(Path(place).rglob("*")):
            if path.suffix not in ends or not path.is_file() or path.is_symlink():
                continue
            text = path.read_text(errors="ignore").encode(errors="ignore").decode()
            for start in range(0, len(text), DOCUMENT_CHARACTERS):
                document = text[start : start + DOCUMENT_CHARACTERS]
                if hash(document) not in seen and not is_unsettled(document):
                    seen.add(hash(document))
                    yield document


def is_unsettled(text: str) -> bool:
    """Whether it has characters that the engines see otherwise."""
    data = np.frombuffer(text.encode(), np.uint8)
    return len(find_new_code_points(data, np.array([0, len(data)], np.int64))) > 0
