"""Writes tests/golden/plans: read plans, a pinned file and a history. `python tests/golden/make_plans.py`.

    plans/s3/            the objects of the bucket `golden-plans`: corpora, runs, their read plans, and a pinned file
    plans/local/         files of the runs of a history, over the corpora of `make_state.py`
    plans/expected.json  the commit that wrote all this, and the names, samples and rows that it got

The rules of `make_state.py` hold: run it again only to add a kind, with the code of the commit in expected.json. All
plans are in the bucket, as those of local files have whole paths.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden import make_state as golden

import binidx
from binidx.run.history import RunHistory
from binidx.run.stored.read_planning import prepare_read_plan

PLANS = Path(__file__).parent / "plans"
BUCKET = "golden-plans"
STORE = f"s3://{BUCKET}"

MASKS: dict[str, Any] = {
    "reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True, "create_attention_mask": False,
    "context_parallel_size": 2, "data_parallel_size": 4, "allow_ambiguous_pad_tokens": True,
    "megatron_samples": "0.16.1",
}  # fmt: skip
"""Options that move no token, all with other values than the usual ones."""

BLEND: dict[str, Any] = {"blend": ([f"{STORE}/en", f"{STORE}/de"], [0.7, 0.3])}
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "blend": BLEND,
    "masks": {**MASKS, **BLEND},
    "documents": {"inter_document_masking": True},
    "best_fit": {"order": {"kind": "best_fit"}},
    "view": {"order": binidx.View(f"{STORE}/drop.txt")},
    "rebuilt": {"order": binidx.View(f"{STORE}/drop.txt", how="rebuild")},
}
"""Runs of one source, or of a blend, whose every split has a read plan."""


def config(**options: Any) -> Any:
    """A GPT config without small indices, of one source in the bucket."""
    usual = {"blend": ([f"{STORE}/en"], None), "split": "8,2,0", "path_to_cache": f"{STORE}/cache"}
    settings = {**golden.SETTINGS, **golden.GPT, **usual, "cache_small_indices": False}
    return binidx.GPTDatasetConfig(**{**settings, **options})


def run_of(**options: Any) -> binidx.Run:
    return binidx.Run(config(**options), [90, 10, 0], 2, 2, global_batch_size=8, directory=None)


def planned(options: Mapping[str, Any]) -> dict[str, Any]:
    """Name of split -> dataset, of a start that asks for the read plan."""
    wanted = replace(config(**options), read_plan=True)
    datasets = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [90, 10, 0], lambda: True, wanted).build()
    return {split.name: each for split, each in zip(binidx.Split, datasets, strict=True) if each is not None}


def describe(dataset: Any) -> dict[str, Any]:
    """What a trainer sees of a planned dataset: its class, its samples, and the states of its loaders."""
    samples = golden.digest(dataset[idx] for idx in range(len(dataset)))
    return {"class": type(dataset).__name__, "samples": samples, **golden.loader_states(dataset)}


def write_plans(local: Path) -> dict[str, Any]:
    """Runs in the bucket with their read plans and a pinned file; return what a start finds."""
    fs = golden.bucket()
    for name in ("en", "de"):
        for end in ("bin", "idx"):
            fs.pipe_file(f"{BUCKET}/{name}.{end}", (local / f"corpus/{name}.{end}").read_bytes())
    fs.pipe_file(f"{BUCKET}/drop.txt", b"3\n7\n19\n")
    for name, options in OPTIONS.items():
        run = run_of(**options)
        run.save(f"{STORE}/{name}.json")
        for dataset, size in zip(run.build(), run.sizes, strict=True):
            if dataset is not None:
                prepare_read_plan(dataset, size)
    golden.command("prepare", "read-plan", f"{STORE}/blend.json", "--to", f"{STORE}/plan")
    golden.command("prepare", "index", f"{STORE}/blend.json")  # the pinned file
    return {
        name: {split: describe(each) for split, each in planned(options).items()} for name, options in OPTIONS.items()
    }


HISTORY = ("first", "second", "third")


def write_history() -> None:
    """A run, its resume with other weights on more ranks, and a fork of that in stages."""
    local: dict[str, Any] = {"path_to_cache": "cache", "blend": (["corpus/en", "corpus/de"], [0.7, 0.3])}
    first = replace(run_of(**local), sizes=[160, 10, 0])
    first.save("first.json")
    other = config(**{**local, "blend": (["corpus/en", "corpus/de"], [0.2, 0.8])})
    second = replace(
        first, config=other, previous="first.json", first_step=5, data_parallel_size=4, iterations_to_skip=(7, 8)
    )
    second.save("second.json")
    sizes = {"micro_batch_size": 2, "data_parallel_size": 2, "global_batch_size": 8}
    third = binidx.Run(
        config(**{**local, "blend": (["corpus/en"], None)}), [0, 10, 0], **sizes, stages=golden.STAGES,
        previous="second.json", first_step=9, directory=None,
    )  # fmt: skip
    third.save("third.json")


def rows_of_history(name: str) -> list[list[Any]]:
    """Step, rank, slot, source and number of each sample of the first 15 steps of a history."""
    history = RunHistory.of(binidx.Run.load(f"{name}.json"))
    rows: list[list[Any]] = []
    for order, steps in history.orders(range(history.first_step, 15)):
        reads = order.readings(steps)
        names = [order.sources[source].name for source in order.sources_of(reads.sample).tolist()]
        columns = (reads.step.tolist(), reads.rank.tolist(), reads.slot.tolist(), names, reads.sample.tolist())
        rows += [list(row) for row in zip(*columns, strict=True)]
    return rows


SAMPLES_OF_MAIN = ("fim", "bert", "bert, blend", "chats", "chats, shuffled", "varlen chats")


def samples_of_main() -> dict[str, Any]:
    """What `make_state.py` records of the kinds that differ between Megatron's releases, with the samples of "main"."""
    kept, golden.EARLIER = golden.EARLIER, {"megatron_samples": "main"}
    try:
        return {
            name: {split: golden.describe(each) for split, each in golden.DATASETS[name]().items()}
            for name in SAMPLES_OF_MAIN
        }
    finally:
        golden.EARLIER = kept


def upload() -> None:
    """Put the stored objects into the bucket, each in one request: then ETags are those of their writer."""
    fs = golden.bucket()
    for path in golden.files_below(PLANS / "s3"):
        fs.pipe_file(f"{BUCKET}/{path.relative_to(PLANS / 's3')}", path.read_bytes())


def main() -> None:
    from servers.seaweed import s3_server

    shutil.rmtree(PLANS, ignore_errors=True)
    root = Path(tempfile.mkdtemp())
    os.environ["BINIDX_INDEX_DIR"] = str(root / "index-dir")
    head = ["git", "-C", str(PLANS.parent), "rev-parse", "HEAD"]
    commit = subprocess.run(head, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    (local := root / "local").mkdir()
    os.chdir(local)
    shutil.copytree(golden.STATE / "local" / "corpus", "corpus")
    golden.same_times(Path("corpus"))
    write_history()
    expected: dict[str, Any] = {"commit": commit, "histories": {name: rows_of_history(name) for name in HISTORY}}
    expected["samples of main"] = samples_of_main()
    (root / "server").mkdir()
    with s3_server(root / "server") as server, server.in_environment():
        server.make_bucket(BUCKET)
        expected["plans"] = write_plans(local)
        fs = golden.bucket()
        for key in fs.find(BUCKET):
            target = root / "s3" / key.partition("/")[2]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(fs.cat_file(key))
    (PLANS / "local").mkdir(parents=True)
    for name in HISTORY:
        shutil.copyfile(f"{name}.json", PLANS / "local" / f"{name}.json")
    shutil.copytree(root / "s3", PLANS / "s3")
    (PLANS / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    found = [*golden.files_below(PLANS)]
    print(sum(path.stat().st_size for path in found), "bytes", len(found), "files")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
