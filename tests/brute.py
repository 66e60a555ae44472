"""Answers of the commands against a search, by brute force, in the tokens that loaders have served.

    python -m tests.brute exposures --passages 100000 --seed 1

Each token of a corpus has an id and a text of its own, so an id in a batch says which token of which document it is. A
run's batches are read by its loaders, rank by rank; a passage is sought with `bytes.find` in the texts of all
documents; and each sample is searched for the ids of the passage. Nothing of `binidx.order` and `binidx.run` is
imported: the answers are those that `binidx grep --queries --run` and `binidx where` print.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import binidx
from binidx.packed.packed_convert import indexed_to_packed
from binidx.tools import main as call

NGRAMS = (1, 2, 3, 9, 40, 250)
"""Words of the passages; a token has about one."""

PAD = 0
FORKS = ("lit-gpt", "lit-gpt-wrap", "tinyllama", "umd")


@dataclass
class Corpus:
    """Sources on a disk whose tokens all differ, and the texts of their documents.

    Attributes:
        documents: (prefix, number) -> its token ids.
        text: texts of all documents, a newline after each.
        owner: token id of each byte of that text; -1 of a newline.
    """

    folder: Path
    prefixes: list[str]
    documents: dict[tuple[str, int], range]
    text: bytes
    owner: np.ndarray
    document_of: list[tuple[str, int]]

    @classmethod
    def write(cls, folder: Path, num_sources: int, rng: random.Random, *, whole: bool) -> Corpus:
        """Write sources and a tokenizer; of several sequences a document, unless `whole`."""
        entries, text, owner, documents = ["<pad>"], list[bytes](), list[int](), dict[tuple[str, int], range]()
        document_of: list[tuple[str, int]] = [("", -1)]
        prefixes = [f"{folder}/source{number}" for number in range(num_sources)]
        for prefix in prefixes:
            with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.int32) as builder:
                for number in range(rng.randrange(20, 60)):
                    length = rng.choice([0, 1, rng.randrange(1, 30), rng.randrange(1, 300), rng.randrange(30, 600)])
                    length = rng.randrange(3000, 6000) if number == 7 else length
                    ids = range(len(entries), len(entries) + length)
                    cuts = [] if whole or rng.random() < 0.5 else [rng.randrange(length + 1) for _ in range(3)]
                    builder.add_document([*ids], np.diff([0, *sorted(cuts), length]).tolist())
                    documents[prefix, number] = ids
                    document_of += [(prefix, number)] * length
                    for token in ids:
                        letters = f"{token:x}."
                        at = rng.randrange(len(letters) + 3)  # most tokens hold the end of a word and the begin of one
                        entries.append(letters if at > len(letters) else f"{letters[:at]} {letters[at:]}")
                        text.append(entries[-1].encode())
                        owner += [token] * len(entries[-1])
                    text.append(b"\n")
                    owner.append(-1)
                builder.finalize(f"{prefix}.idx")
        parts = {"model": {"type": "BPE", "merges": [], "vocab": {
            entry.replace(" ", "Ġ"): number for number, entry in enumerate(entries)}}}  # fmt: skip
        (folder / "tokenizer.json").write_text(json.dumps({**parts, "decoder": {"type": "ByteLevel"}}))
        return cls(folder, prefixes, documents, b"".join(text), np.array(owner), document_of)

    def matches(self, passage: bytes) -> Iterator[tuple[tuple[str, int], set[int]]]:
        """Yield the document of each match of a passage, and the ids of the tokens that hold a byte of it."""
        at = self.text.find(passage)
        while at >= 0:
            ids = {*self.owner[at : at + len(passage)].tolist()}
            yield self.document_of[min(ids)], ids
            at = self.text.find(passage, at + 1)

    def passages(self, count: int, num_words: int, rng: random.Random) -> list[bytes]:
        """Return passages of some words that stand in a document; fewer if there are no such documents."""
        words = [[found.span() for found in re.finditer(rb"\S+", text)] for text in self.text.split(b"\n")]
        texts = self.text.split(b"\n")
        long = [number for number, own in enumerate(words) if len(own) >= num_words]
        found = []
        for number in rng.choices(long, weights=[len(words[each]) for each in long], k=count) if long else ():
            first = rng.randrange(len(words[number]) - num_words + 1)
            found.append(texts[number][words[number][first][0] : words[number][first + num_words - 1][1]])
        return found


@dataclass
class Served:
    """Samples that loaders have served: step of each, whether it was trained, and where each token id was an input."""

    steps: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    of_token: dict[int, list[int]] = field(default_factory=dict)

    def add(self, step: int, trained: bool, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.of_token.setdefault(token, []).append(len(self.steps))
        self.steps.append(step)
        self.trained.append(trained)

    def add_loader(self, batches: Iterator[Any], first: int, stop: int, each: int, untrained: Sequence[int]) -> None:
        """Add the micro-batches of a rank from step `first` to before `stop`, `each` of them a step."""
        for number, batch in enumerate(islice(batches, (stop - first) * each)):
            step = first + number // each
            for tokens in batch.tolist():
                self.add(step, step not in untrained, tokens)

    def before(self, stop: int) -> Served:
        """Return the samples of the steps before one."""
        kept = {token: [read for read in reads if self.steps[read] < stop] for token, reads in self.of_token.items()}
        return Served(self.steps, self.trained, kept)

    def reads(self, ids: set[int]) -> tuple[set[int], set[int]]:
        """Return the samples that have all of these ids as inputs, and those that have one."""
        own = [set(self.of_token.get(token, ())) for token in ids]
        return set[int].intersection(*own), set[int].union(*own)

    def row(self, whole: set[int], touched: set[int]) -> dict[str, Any]:
        """Return the columns that the commands print."""
        row: dict[str, Any] = {"samples_trained": sum(self.trained[read] for read in touched)}
        for name, reads in (("", touched), ("_whole", whole), ("_part", touched - whole)):
            steps = [self.steps[read] for read in reads]
            row |= {f"samples{name}": len(reads)}
            row |= {f"first_step{name}": min(steps, default=None), f"last_step{name}": max(steps, default=None)}
        return row


KINDS = {
    "one source": {},
    "blend": {"sources": 3},
    "skip": {"sources": 2, "view": {"how": "skip"}},
    "keep": {"sources": 2, "view": {"how": "skip", "keep": True}},
    "skip in each source": {"sources": 2, "view": {"how": "skip", "over": "source"}},
    "rebuild": {"sources": 2, "view": {"how": "rebuild"}},
    "best_fit": {"sources": 2, "order": "best_fit"},
    "first_fit": {"order": "first_fit"},
    "cyclic": {"sources": 2, "cyclic": True},
    "iterations to skip": {"sources": 2, "untrained": True},
    "resumed": {"sources": 2, "resumed": True},
    "packed files": {"sources": 2, "packed": True},
}
"""Name of a kind of runs -> what is special in it."""


def build_run(corpus: Corpus, kind: dict[str, Any], rng: random.Random) -> tuple[str, Served, int | None]:
    """Write the file of a run, and return it, what its loaders serve, and the end of its steps if it has none."""
    folder, served = corpus.folder, Served()
    length, micro, accumulation = rng.choice([5, 16, 64, 512]), rng.randrange(1, 4), rng.randrange(1, 3)
    order = kind.get("order")
    if view := kind.get("view"):
        share, length = (0.9 if view.get("keep") else 0.05), rng.choice([5, 16])
        listed = [f"{prefix}\t{number}\n" for prefix, number in corpus.documents if rng.random() < share]
        (folder / "list.txt").write_text("".join(listed))
        order = binidx.View(f"{folder}/list.txt", **view)
    split = "1,0,0" if view else rng.choice(["1,0,0", "80,20,0"])  # a view may leave no sample to a small split
    weights = [rng.random() + 0.2 for _ in corpus.prefixes]
    config = binidx.GPTDatasetConfig(
        random_seed=rng.randrange(1000), sequence_length=length, order=order, tokenizer=binidx.SpecialTokens(pad=PAD),
        blend=(corpus.prefixes, weights if len(weights) > 1 else None), split=split,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        add_extra_token_to_sequence=rng.random() < 0.8, path_to_cache=f"{folder}/cache",
        mid_level_dataset_surplus=4.0 if "over" in (view or {}) else 0.005,
    )  # fmt: skip
    tokens = len(corpus.document_of)
    sizes = [int(tokens / length * rng.choice([0.4, 1.0, 2.5])) + 40, 0, 0]
    dataset = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, config).build()[0]
    type_of = "cyclic" if kind.get("cyclic") else "single"
    first = consumed = 0
    previous, files = None, ["first.json", "run.json"] if kind.get("resumed") else ["run.json"]
    for file in files:
        ranks = rng.randrange(1, 4)
        size = micro * accumulation * ranks
        left = (len(dataset) - consumed) // size
        steps = first + (rng.randrange(1, max(left // 2, 2)) if file == "first.json" else left)
        steps += rng.randrange(left + 1) if type_of == "cyclic" else 0
        untrained = sorted(rng.sample(range(steps), min(steps, 3))) if kind.get("untrained") else []
        binidx.Run(
            config, sizes, micro, ranks, type_of, global_batch_size=size, first_step=first, consumed_samples=consumed,
            previous=previous, iterations_to_skip=[step + 1 for step in untrained],
        ).save(f"{folder}/{file}")  # fmt: skip
        for rank in range(ranks):
            batches = serve(dataset, consumed, micro, rank, ranks, type_of)
            served.add_loader(batches, first, steps, accumulation, untrained)
        first, consumed, previous = steps, consumed + (steps - first) * size, f"{folder}/{file}"
    return f"{folder}/run.json", served, first if type_of == "cyclic" else None


HISTORIES: dict[str, Sequence[str]] = {
    "a view into a view": ("plain", "view", "view"),
    "a view, a copy of the data and other weights": ("plain", "view", "copy"),
    "a rebuild": ("plain", "rebuild", "plain"),
    "a plan, then a bake": ("plain", "plan", "bake"),
    "packed files, a plan, then a bake": ("packed", "plan", "bake"),
}
"""Name of a kind of histories -> its runs: of another order or data each, or of packed files, a plan or a bake."""


def build_history(corpus: Corpus, kinds: Sequence[str], rng: random.Random) -> tuple[str, Served, int | None]:
    """As `build_run`, of several runs, each of which resumes the one before it."""
    folder, served, length, listed = corpus.folder, Served(), rng.choice([5, 16, 64]), set[tuple[str, int]]()
    first = consumed = earlier = 0
    previous, prefixes = None, corpus.prefixes
    for number, kind in enumerate(kinds):
        order, same_data = None, {}
        if kind == "packed":
            previous, served, _ = build_packed_run(corpus, rng, "packed.json", first_half=True)
            first, earlier = max(served.steps) + 1, len(served.steps)
            continue
        if kind in ("view", "rebuild"):
            listed |= {place for place in corpus.documents if rng.random() < 0.04}
            (folder / f"list{number}.txt").write_text("".join(f"{name}\t{each}\n" for name, each in sorted(listed)))
            order = binidx.View(f"{folder}/list{number}.txt", how="rebuild" if kind == "rebuild" else "skip")
        if kind == "copy":
            prefixes = [f"{prefix}-copy" for prefix in corpus.prefixes]
            for prefix, suffix in itertools.product(corpus.prefixes, (".bin", ".idx")):
                shutil.copy(prefix + suffix, f"{prefix}-copy{suffix}")
            same_data = dict(zip(prefixes, corpus.prefixes, strict=True))
        config = binidx.GPTDatasetConfig(
            random_seed=7, sequence_length=length, order=order, tokenizer=binidx.SpecialTokens(pad=PAD),
            blend=(prefixes, [rng.random() + 0.2 for _ in prefixes]), split="1,0,0", path_to_cache=f"{folder}/cache",
            reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        )  # fmt: skip
        sizes = [2 * len(corpus.document_of) // length + 200, 0, 0]
        dataset: Any = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, config).build()[0]
        micro, ranks, accumulation = rng.randrange(1, 3), rng.randrange(1, 4), rng.randrange(1, 3)
        size = micro * ranks * accumulation
        left, file = (len(dataset) - consumed) // size, f"{folder}/run{number}.json"
        steps = first + (rng.randrange(1, max(left // 3, 2)) if number + 1 < len(kinds) else left)
        untrained = sorted(rng.sample(range(first, steps), min(steps - first, 2)))
        binidx.Run(
            config, sizes, micro, ranks, global_batch_size=size, first_step=first, consumed_samples=consumed,
            previous=previous, iterations_to_skip=[step + 1 for step in untrained], same_data=same_data,
            earlier_samples=earlier,
        ).save(file)  # fmt: skip
        if kind in ("plan", "bake"):
            answer("prepare", "read-plan" if kind == "plan" else "bake", file, "--to", f"{folder}/{kind}")
            dataset = {"plan": binidx.PlannedDataset, "bake": binidx.BakedDataset}[kind](f"{folder}/{kind}", config)
        for rank in range(ranks):
            batches = serve(dataset, consumed, micro, rank, ranks, "single")
            served.add_loader(batches, first, steps, accumulation, untrained)
        first, consumed, previous = steps, consumed + (steps - first) * size, file
    return file, served, None


def serve(dataset: Any, consumed: int, micro: int, rank: int, ranks: int, kind: Any) -> Iterator[Any]:
    """Yield the tokens of the micro-batches of a rank: again and again if the sampler starts over."""
    options = {"data_parallel_rank": rank, "data_parallel_size": ranks, "dataloader_type": kind}
    while True:
        count = 0
        for batch in binidx.build_pretraining_data_loader(dataset, consumed, micro, **options):
            yield batch["tokens"]
            count += 1
        if kind == "single" or not count:
            return
        consumed += count * micro * ranks


def build_packed_run(
    corpus: Corpus, rng: random.Random, file: str = "run.json", *, first_half: bool = False
) -> tuple[str, Served, int | None]:
    """As `build_run`, of a run over packed files; the loaders serve all its steps, or those before some step."""
    folder, served, sets = corpus.folder, Served(), []
    block, micro, accumulation, ranks = rng.choice([5, 17, 65]), rng.randrange(1, 4), rng.randrange(1, 3), 2
    for number, prefix in enumerate(corpus.prefixes):
        chunk = block * rng.randrange(3, 9) + rng.randrange(block)
        options = {"add_separator": rng.random() < 0.5}
        files = indexed_to_packed(
            binidx.IndexedDataset(prefix), f"{folder}/packed", f"set{number}", chunk, 0, **options
        )
        sets.append({"name": f"set{number}", "files": files, "weight": rng.random() + 0.1})
    described = {
        "fork": rng.choice(FORKS), "block_size": block, "n_chunks": 1, "seed": rng.randrange(99),
        "sets": sets, "num_ranks": ranks, "num_workers": rng.randrange(2), "micro_batch_size": micro,
        "accumulation": accumulation,
    }  # fmt: skip
    Path(f"{folder}/{file}").write_text(json.dumps(described))
    order = binidx.packed.load_packed_run(f"{folder}/{file}")
    count = order.num_steps()
    steps = rng.randrange(5, 60) if count is None else count
    steps = rng.randrange(steps // 2, steps) + 1 if first_half else steps
    for rank in range(ranks):
        dataset = binidx.packed.PackedDataset(order.run_of(rank), order.files, steps * micro * accumulation)
        batches = (batch[:, :-1] for batch in DataLoader(dataset, batch_size=micro))
        served.add_loader(batches, 0, steps, accumulation, ())
    return f"{folder}/{file}", served, steps if count is None else None


def output(*arguments: str) -> str:
    """Return the text that a command prints."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = call([*arguments])
    assert code == 0, f"{arguments}: {error.getvalue()}{out.getvalue()}"
    return out.getvalue()


def answer(*arguments: str) -> Any:
    """Return the value that a command prints with --json."""
    return json.loads(output(*arguments, "--json"))


def compare(what: str, row: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise AssertionError unless a row has the expected values."""
    found = {name: row[name] for name in expected}
    assert found == expected, f"{what}: found {found}, need {expected}"


def check_exposures(folder: Path, name: str, num_passages: int, seed: int) -> Counter[str]:
    """Compare all answers about a random run; return how many passages were read whole, in part and not at all."""
    rng, kind, counts = random.Random(f"{name} {seed}"), KINDS.get(name, {"sources": 2}), Counter[str]()
    whole_documents = "order" in kind
    corpus = Corpus.write(folder, kind.get("sources", 1), rng, whole=whole_documents)
    if name in HISTORIES:
        run, served, end = build_history(corpus, HISTORIES[name], rng)
    else:
        run, served, end = build_packed_run(corpus, rng) if kind.get("packed") else build_run(corpus, kind, rng)
    last = max(served.steps) + 1
    stop = last if rng.random() < 0.5 else rng.randrange(last + 1)
    before = [] if stop == last and end is None else ["--steps", f":{stop}"]
    tokenizer, served = ["--tokenizer", f"{folder}/tokenizer.json"], served.before(stop)
    for num_words in NGRAMS:
        passages = corpus.passages(-(-num_passages // len(NGRAMS)), num_words, rng)
        items = "".join(json.dumps({"text": passage.decode()}) + "\n" for passage in passages)
        (folder / "items.jsonl").write_text(items)
        asked = ["--queries", f"{folder}/items.jsonl", "--ngram", str(num_words), "--run", run, *tokenizer, *before]
        rows = answer("grep", *asked)["items"] if passages else []
        for passage, row in zip(passages, rows, strict=True):
            matches = [*corpus.matches(passage)]
            reads = [served.reads(ids) for _, ids in matches]
            whole, touched = (set[int]().union(*own) for own in zip(*reads, strict=True))
            documents = {
                prefix: sorted({number for (own, number), _ in matches if own == prefix})
                for prefix in sorted({own for (own, _), _ in matches})
            }
            compare(f"{name} {seed}: {passage!r}", row, {"documents": documents, **served.row(whole, touched)})
            counts["whole" if whole else "part" if touched else "not read"] += 1
        for passage in passages[:2]:
            (folder / "passage.txt").write_bytes(passage)
            rows = answer("where", "--count", run, "--text", f"{folder}/passage.txt", *tokenizer, *before)["matches"]
            matches = sorted((place, sorted(ids)) for place, ids in corpus.matches(passage))
            rows = sorted(rows, key=lambda row: (row["source"], row["document"], row["first_token"]))
            for row, (place, ids) in zip(rows, matches, strict=True):
                first = ids[0] - corpus.documents[place].start
                expected = {"source": place[0], "document": place[1], "first_token": first}
                expected |= {"stop_token": first + len(ids), **served.row(*served.reads({*ids}))}
                compare(f"{name} {seed}: {passage!r}", row, expected)
    (folder / "all.txt").write_text("".join(f"{prefix}\t{number}\n" for prefix, number in corpus.documents))
    for row in answer("where", "--count", run, "--documents", f"{folder}/all.txt", *before)["documents"]:
        ids = corpus.documents[row["source"], row["document"]]
        reads = [served.of_token.get(token, ()) for token in ids]
        expected = served.row(*(served.reads({*ids}) if ids else (set(), set())))
        expected |= {"times_started": len(reads[0]) if ids else 0, "tokens": sum(map(len, reads))}
        compare(f"{name} {seed}: document", row, expected)
    check_where(corpus, served, [run, "--documents", f"{folder}/all.txt", *before])
    if not kind.get("packed"):  # of which sets of files are accounted
        check_account(corpus, served, [run, *before], stop)
    return counts


def check_where(corpus: Corpus, served: Served, asked: Sequence[str]) -> None:
    """Compare the rows of `where`, and its counts, with the samples of which a token of a document was an input."""
    found = Counter[tuple[str, int, int]]()
    for line in output("where", *asked, "--json").splitlines():
        row = json.loads(line)
        prefix = row.get("dataset", row["source"]).removesuffix("-copy")
        for document in {doc["doc"] for doc in row["docs"] if doc["len"] and "only_label" not in doc}:
            found[prefix, document, row["step"]] += 1
    expected = Counter[tuple[str, int, int]]()
    for (prefix, document), ids in corpus.documents.items():
        for read in set[int]().union(*(served.of_token.get(token, ()) for token in ids)):
            expected[prefix, document, served.steps[read]] += 1
    assert found == expected, f"{asked}: {found - expected} are too many, {expected - found} are missing"
    for row in answer("where", *asked, "--count")["documents"]:
        ids = corpus.documents[row["source"], row["document"]]
        reads = [served.of_token.get(token, ()) for token in ids]
        counted = {"samples": len(set[int]().union(*reads)), "tokens": sum(map(len, reads))}
        compare(f"{asked}: --count", row, counted)


def check_account(corpus: Corpus, served: Served, asked: Sequence[str], stop: int) -> None:
    """Compare the account of each source with the samples and the tokens that were served of it.

    A block of packed files may have no token of a document, so it names no source: those are compared in all.
    """
    rows, blank = answer("account", *asked), set(np.flatnonzero(np.array(served.steps) < stop).tolist())
    blank -= {read for token, reads in served.of_token.items() if token != PAD for read in reads}
    for row in rows:
        reads = [
            read for (prefix, _), ids in corpus.documents.items() if prefix == row["source"]
            for token in ids for read in served.of_token.get(token, ())
        ]  # fmt: skip
        trained = [read for read in reads if served.trained[read]]
        row["blank"] = row["samples_read"] - len({*reads})
        expected = {"tokens_read": len(reads), "tokens_trained": len(trained)}
        expected |= {"blank": max(row["samples_trained"] - len({*trained}), 0)}
        compare(f"{asked}: account", row, expected)
    assert sum(row["blank"] for row in rows) == len(blank), f"{asked}: {len(blank)} samples have no token"


def exposures(num_passages: int, seed: int) -> int:
    """Compare the exposures of passages over runs of all kinds; print a line for each kind."""
    total, began, each = Counter[str](), time.monotonic(), 4200
    for name in (*KINDS, *HISTORIES):
        counts, runs = Counter[str](), 0
        while counts.total() < num_passages / len((*KINDS, *HISTORIES)):
            folder = Path(tempfile.mkdtemp(prefix="brute"))
            try:
                counts += check_exposures(folder, name, each, seed * 10_000 + runs)
            finally:
                shutil.rmtree(folder)
            runs += 1
        told = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
        print(f"{name:20} {runs:3} runs, {counts.total():7,} passages: {told}", flush=True)
        total += counts
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(total.items()))
    print(f"all {total.total():,} passages are as they were served: {told}; {time.monotonic() - began:.0f} s")
    return 0


CHECKS: dict[str, Callable[[int, int], int]] = {"exposures": exposures}


def main(arguments: Sequence[str]) -> int:
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser(prog="python -m tests.brute", description=__doc__.partition("\n")[0])
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--passages", type=int, default=100_000, metavar="N", help="passages to seek (100000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return CHECKS[options.check](options.passages, options.seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
