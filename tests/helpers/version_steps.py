"""Small jobs of one version of binidx, on a node and a bucket that versions share: a process of `mixed_versions.py`.

    PYTHONPATH=VERSION:tests python -m helpers.version_steps NODE BUCKET

Each line of stdin is a JSON list: the name of a step, the number of the turn (how many versions came before), and the
number of turns. A step runs in a fork, so it begins with nothing in memory. The answer is one JSON object a line:
`result`, or `error` in one line, or `killed`; and `opened`, the files of the node that the step opened for reading.

Only names that all versions have are imported; a step of later commands is given to versions that have them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import xxhash

import binidx

SOURCES = 8
"""As many prefixes as have a bundle of their .idx files."""
SAMPLES, STEPS = 96, 12
NOT_COMPARED = {"trained", "samples_trained", "tokens_trained", "cache_fill", "normalized", "seconds"}
IMPORTED = set[str]()


class Steps:
    """Steps of one turn. Methods whose names begin with `step_` are run by name."""

    def __init__(self, node: str, bucket: str, turn: int, turns: int) -> None:
        self.node, self.bucket, self.turn, self.turns = node, bucket, turn, turns
        self.prefixes = [f"{bucket}/corpus/{number}" for number in range(SOURCES)]
        self.run = f"{bucket}/runs/{turn}.json"
        self.fs = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)

    def config(self, **options: Any) -> Any:
        settings = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
        settings |= {"path_to_cache": f"{self.bucket}/cache"}
        return binidx.GPTDatasetConfig(
            random_seed=1234, sequence_length=16, blend=(self.prefixes, [1.0 + n for n in range(SOURCES)]),
            split="8,2,0", tokenizer=binidx.SpecialTokens(eod=0), cache_small_indices=True, **{**settings, **options},
        )  # fmt: skip

    def train(self, samples: int = SAMPLES, cache: str = "disk-cache", **options: Any) -> Any:
        """The train split, read through the disk cache of the node."""
        config = self.config(storage_options={"binidx": {"cache_dir": f"{self.node}/{cache}"}}, **options)
        sizes = [samples, 8, 0]
        return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, config).build()[0]

    def earlier(self, folder: str, suffix: str) -> list[str]:
        """URIs of what this turn and the earlier ones wrote, without the suffix."""
        names = [f"{self.bucket}/{folder}/{turn}" for turn in range(self.turn + 1)]
        return [name for name in names if self.fs.exists(name + suffix)]

    # A run

    def step_train(self) -> Any:
        return digest(islice(binidx.build_pretraining_data_loader(self.train(), 0, 2), 12))

    def step_train_on_new_node(self) -> Any:
        """Start with empty caches of the node: all comes from the bucket."""
        return digest(self.train(cache=f"tmp/node-{self.turn}")[idx] for idx in range(24))

    def step_train_longer(self) -> Any:
        """Build the indices of more samples than the turn before."""
        train = self.train((2 + self.turn) * SAMPLES, path_to_cache=f"{self.bucket}/longer")
        return digest(train[idx] for idx in range(24))

    def step_resume(self) -> Any:
        """Read on from the loader state of the turn before; the first turn begins."""
        loader = binidx.build_pretraining_data_loader(self.train(), 0, 2)
        if self.turn:
            loader.load_state_dict(json.loads(Path(f"{self.node}/state-{self.turn - 1}.json").read_text()))
        found = [loader.state_dict()["consumed_samples"], digest(islice(loader, 2))]
        Path(f"{self.node}/state-{self.turn}.json").write_text(json.dumps(loader.state_dict()))
        return found

    def step_run_files(self) -> Any:
        """Save a run, unless one that refused those of other turns did, and trace and search those of all turns."""
        if not self.fs.exists(self.run):
            binidx.Run(self.config(), [SAMPLES, 8, 0], 2, 2, global_batch_size=8).save(self.run)
        found = []
        for run in self.earlier("runs", ".json"):
            binidx.Run.load(run + ".json").save(f"{self.node}/tmp/again.json")
            trace = self.command("trace", run + ".json", "--step", "1", "--json")
            where = self.command("where", run + ".json", "--document", "23", "--source", self.prefixes[5], "--json")
            account = self.command("account", run + ".json", "--json")
            again = json.loads(Path(f"{self.node}/tmp/again.json").read_text())
            again.pop("library", None)  # the version that wrote it, or the one before it
            found.append([again, *map(facts, (trace, where, account))])
        assert all(each == found[0] for each in found), found
        return found[0]

    def step_plan(self) -> Any:
        [plan] = facts(self.command("plan", self.run, "--json"))
        return {name: plan[name] for name in ("samples", "steps", "tokens", "same_order_up_to", "sources")}

    def step_prepare_cache(self) -> Any:
        rows = json.loads(self.command("prepare-cache", self.run, "--json"))["indices"]
        return len(rows)

    def step_prepare_read_plan(self) -> Any:
        self.command("prepare-cache", self.run, "--read-plan")

    def step_train_by_plan(self) -> Any:
        train = self.train(read_plan=True)
        return [type(train).__name__, digest(train[idx] for idx in range(24))]

    def step_read_plan(self) -> Any:
        self.command("read-plan", self.run, "--to", f"{self.bucket}/plan")
        planned = binidx.PlannedDataset(f"{self.bucket}/plan", self.config())
        return digest(planned[idx] for idx in range(SAMPLES))

    def step_bake(self) -> Any:
        target = f"{self.bucket}/baked"
        self.command("bake", self.run, *([target] if is_first_cli() else ["--to", target]))
        baked = binidx.BakedDataset(target, self.config())
        return digest(baked[idx] for idx in range(SAMPLES))

    def step_bake_other(self) -> Any:
        """Bake other steps into the directory, which is refused."""
        target = f"{self.bucket}/baked"
        return self.refusal("bake", *([target] if is_first_cli() else ["--to", target]))

    def step_plan_other(self) -> Any:
        """Write the read plan of other steps into the directory, which is refused."""
        return self.refusal("read-plan", "--to", f"{self.bucket}/plan")

    def refusal(self, command: str, *target: str) -> bool:
        """Whether a command refuses to write a shorter run into a directory with another one.

        An early version also refuses a description with a field that came later.
        """
        run = f"{self.node}/tmp/shorter.json"
        config = self.config(path_to_cache=f"{self.bucket}/longer")
        binidx.Run(config, [SAMPLES // 2, 8, 0], 2, 2, global_batch_size=8).save(run)
        try:
            self.command(command, run, *target)
        except RefusedError as error:
            return "another run" in str(error) or "unknown field options; it has" in str(error)
        return False

    def step_order(self) -> Any:
        """Export the order of more steps than the turn before."""
        target, steps = f"{self.node}/order", f"0:{2 * self.turn + 2}"
        self.command("order", self.run, "--to", target, "--steps", steps, "--steps-per-file", "2")
        return [[path.name, table_digest(path)] for path in sorted(Path(target).glob("*.parquet"))]

    def step_warm(self) -> Any:
        """Fill the disk cache with the objects of a prefix, and list it."""
        self.command("cache", "warm", self.prefixes[0], "--dir", f"{self.node}/disk-cache")
        self.command("cache", "list", "--dir", f"{self.node}/disk-cache")

    # Datasets

    def step_sums(self) -> Any:
        """Copy a dataset with checksums, and verify the copies of all turns."""
        self.convert(self.prefixes[1], f"{self.bucket}/sums/{self.turn}", "--checksums")
        return [self.verified(prefix) for prefix in self.earlier("sums", ".bin.xxh3")]

    def step_compress(self) -> Any:
        self.convert(self.prefixes[1], f"{self.bucket}/zst/{self.turn}", "--compress")
        return [self.verified(prefix) for prefix in self.earlier("zst", ".bin.zst")]

    def step_merge(self) -> Any:
        """Merge two tokenized datasets, virtually too, and read those of all turns."""
        parts = [f"{self.bucket}/text/en_text_document"] * 2
        for folder, options in (("merged", []), ("virtual", ["--virtual"])):
            self.command("merge", *parts, "--to", f"{self.bucket}/{folder}/{self.turn}", *options)
        whole = [self.verified(prefix) for prefix in self.earlier("merged", ".idx")]
        return [whole, [content(prefix) for prefix in self.earlier("virtual", ".parts.json")]]

    # Work that is begun by one version and goes on with the next

    def step_preprocess_shard(self) -> Any:
        """Preprocess to the bucket as one of the shards of the job; the last turn finishes it, and others find it."""
        options = ["--part-bytes", "1000", "--workers", "1", "--shard", f"{self.turn}/{self.turns}"]
        self.command("preprocess", *self.text, "--to", f"{self.bucket}/shards/en", *options)
        done = self.turn == self.turns - 1
        return done and self.verified(f"{self.bucket}/shards/en_text_document")

    def step_tokens(self) -> Any:
        """Preprocess, or find the dataset of an earlier turn."""
        self.command("preprocess", *self.text, "--to", f"{self.bucket}/text/en", "--workers", "1")
        return self.verified(f"{self.bucket}/text/en_text_document", "--lineage")

    def step_preprocess_killed(self) -> Any:
        kill_when(lambda: len([*Path(f"{self.node}/text/{self.turn}-parts").glob("*.json")]) >= 3)
        self.preprocess(self.turn)

    def step_preprocess_on(self) -> Any:
        """Finish the job of the turn before; its finished parts stay."""
        kept = self.preprocess(self.turn - 1)
        prefix = f"{self.node}/text/{self.turn - 1}_text_document"
        return {"parts_kept": kept, "content": self.verified(prefix), "files": stored(prefix)}

    def step_convert_killed(self) -> Any:
        import inspect

        from binidx.corpus.convert import convert_dataset

        target = f"{self.node}/copied/{self.turn}"
        journal, records = Path(f"{target}.convert.json"), Path(f"{target}-parts")

        def has_copied() -> bool:
            """Whether there is a record, or a version with a journal has copied three parts."""
            return any(map(is_record, records.glob("*.json"))) or (
                journal.exists() and journal.read_text().count('": ["') >= 3
            )

        kill_when(has_copied)
        journaled = {"save_seconds": 0} if "save_seconds" in inspect.signature(convert_dataset).parameters else {}
        convert_dataset(self.prefixes[2], target, part_bytes=200, **journaled)

    def step_convert_on(self) -> Any:
        target = f"{self.node}/copied/{self.turn - 1}"
        self.convert(self.prefixes[2], target)
        return stored(target)

    def step_parts_killed(self) -> Any:
        kill_when(lambda: any(is_record(path) for path in Path(f"{self.node}/parts/{self.turn}-parts").glob("*.json")))
        self.convert(self.prefixes[3], f"{self.node}/parts/{self.turn}", "--workers", "1")

    def step_parts_on(self) -> Any:
        """Finish a copy in parts of the turn before; a version that has no such copies copies it anew."""
        target = f"{self.node}/parts/{self.turn - 1}"
        self.convert(self.prefixes[3], target, *([] if is_first_cli() else ["--workers", "1"]))
        return stored(target)

    def step_verify_killed(self) -> Any:
        self.kill_at_record("verify", *self.verify_command(self.turn))

    def step_verify_on(self) -> Any:
        return facts(self.command("verify", *self.verify_command(self.turn - 1)))

    def step_grep_killed(self) -> Any:
        self.kill_at_record("grep", *self.grep_command(self.turn))

    def step_grep_on(self) -> Any:
        return facts(self.command("grep", *self.grep_command(self.turn - 1)))

    # What steps share

    @property
    def text(self) -> list[str]:
        tokenizer = ["--tokenizer", f"{self.bucket}/source/vocab.txt", "--eod", "[SEP]"]
        return [f"{self.bucket}/source/*.jsonl", *tokenizer, "--append-eod", "--id-key", "id"]

    def preprocess(self, turn: int) -> int:
        """Run the job of a turn in threads of this process; return how many parts it did not have to make."""
        tokenizer = binidx.describe_tokenizer(f"{self.bucket}/source/vocab.txt", eod="[SEP]")
        job = binidx.Job(
            (f"{self.bucket}/source/*.jsonl",), f"{self.node}/text/{turn}", tokenizer, append_eod=True, id_key="id",
            part_bytes=500,
        )  # fmt: skip
        with ThreadPoolExecutor(1) as threads:
            done = binidx.preprocess(job, executor=threads, workers=1)
        return done.parts - done.parts_made

    def convert(self, source: str, target: str, *options: str) -> dict[str, Any]:
        to = [target] if is_first_cli() else ["--to", target]
        return json.loads(self.command("convert", source, *to, *options, "--json"))

    def verified(self, prefix: str, *options: str) -> Any:
        self.command("verify", prefix, *options)
        return content(prefix)

    def verify_command(self, turn: int) -> list[str]:
        return [self.prefixes[4], "--records", f"{self.node}/records/verify-{turn}", "--workers", "1", "--json"]

    def grep_command(self, turn: int) -> list[str]:
        records = ["--records", f"{self.node}/records/grep-{turn}", "--workers", "1"]
        return ["--tokens", "7", *self.prefixes[5:7], *records, "--json"]

    def kill_at_record(self, *arguments: str) -> None:
        folder = Path(arguments[arguments.index("--records") + 1])
        kill_when(lambda: any(map(is_record, folder.glob("*.json"))))
        self.command(*arguments)

    def command(self, *arguments: str) -> str:
        """Run a command of binidx in this process; return what it prints."""
        from binidx.tools import main

        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = main([*arguments])
        if status:
            raise RefusedError(f"{arguments[0]}: exit status {status}: {errors.getvalue().strip() or out.getvalue()}")
        return out.getvalue()


class RefusedError(Exception):
    """A command ended with another status than 0."""


def is_first_cli() -> bool:
    """Whether `convert` and `bake` take their target as an argument, and `convert` makes no parts."""
    import inspect

    from binidx.corpus.convert import convert_dataset

    return "workers" not in inspect.signature(convert_dataset).parameters


def is_record(path: Path) -> bool:
    return path.name != "job.json"


def digest(samples: Iterable[Any]) -> str:
    """Of the names, types and values of all arrays in some samples."""
    found = xxhash.xxh3_64()
    for sample in samples:
        for name, value in sorted(sample.items()):
            array = np.ascontiguousarray(value)
            found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def content(prefix: str) -> str:
    """Digest of all that a dataset holds."""
    dataset = binidx.IndexedDataset(prefix)
    found = xxhash.xxh3_64(np.asarray(dataset.document_indices).tobytes())
    for sequence in dataset[:]:
        found.update(f"{sequence.dtype} {len(sequence)}".encode() + sequence.tobytes())
    return found.hexdigest()


def stored(prefix: str) -> list[str]:
    """Digests of both files of a local dataset."""
    return [xxhash.xxh3_64_hexdigest(Path(f"{prefix}.{suffix}").read_bytes()) for suffix in ("bin", "idx")]


def table_digest(path: Path) -> str:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    return xxhash.xxh3_64_hexdigest(json.dumps([table.schema.names, table.to_pylist()]).encode())


def facts(output: str) -> list[Any]:
    """Values of JSON lines, without those that later versions added or that are measured."""

    def chosen(value: Any) -> Any:
        if isinstance(value, list):
            return [chosen(item) for item in value]
        return {k: chosen(v) for k, v in value.items() if k not in NOT_COMPARED} if isinstance(value, dict) else value

    return [chosen(json.loads(line)) for line in output.splitlines()]


def kill_when(done: Callable[[], bool]) -> None:
    """Kill this process by SIGKILL at the first file operation at which a state is reached."""
    busy = False

    def watch(event: str, arguments: Any) -> None:
        nonlocal busy
        if event in ("open", "os.rename", "os.link", "os.remove") and not busy:
            busy = True
            if done():
                os.kill(os.getpid(), signal.SIGKILL)
            busy = False

    sys.addaudithook(watch)


def run(name: str, turn: int, turns: int, node: str, bucket: str) -> dict[str, Any]:
    """Run a step in this process; return its answer."""
    opened = set[str]()

    def watch(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[0], str) and not (arguments[2] or 0) & (os.O_WRONLY | os.O_CREAT):
            opened.add(arguments[0])

    sys.addaudithook(watch)
    try:
        answer = {"result": getattr(Steps(node, bucket, turn, turns), f"step_{name}")()}
    except (binidx.errors.BinidxError, RefusedError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    return {**answer, "opened": [path for path in opened if path.startswith(node)], "modules": [*sys.modules]}


def fork(*step: Any) -> dict[str, Any]:
    """Run a step in a child process; return its answer."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            with open(writer, "w") as pipe:
                json.dump(run(*step), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answer = json.loads(text) if text else {"killed": status, "opened": [], "modules": []}
    for name in {*answer.pop("modules")} - IMPORTED:  # the next child has them at once: they take seconds of a step
        IMPORTED.add(name)
        with contextlib.suppress(ImportError):
            import_module(name)
    return answer


def main(node: str, bucket: str) -> None:
    print(json.dumps({"package": binidx.__file__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(fork(*json.loads(line), node, bucket)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
