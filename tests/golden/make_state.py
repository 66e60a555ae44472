"""Writes tests/golden/state, one of everything that binidx persists: `python tests/golden/make_state.py`.

    state/local/          files on a disk; every URI in them is relative to this directory
    state/s3/             the objects of the bucket `golden-state`
    state/disk-cache/     a disk cache of some of these objects
    state/expected.json   the commit that wrote all this, and the names, states and samples that it got

Run it again only to add a kind of state, with the code of the commit in expected.json: what users have on their disks
was written by that code. `tests/test_golden_state.py` opens and resumes all of it with today's code.

The state holds no path of this machine. ETags of S3 are digests of the content, so they are the same on every server.
Local identities are size and time: all local files get the time `MTIME`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import xxhash

import binidx

try:
    from binidx import megatron as kinds
except ImportError:  # the commit in expected.json
    kinds: Any = binidx  # type: ignore[no-redef]

STATE = Path(__file__).parent / "state"
BUCKET = "golden-state"
MTIME = 1_700_000_000
CACHE = "cache"


@dataclass(frozen=True)
class Tokenizer:
    """The members of a tokenizer that datasets use: of GPT, of masked samples, of chats."""

    vocab_size: int = 1000
    eod: int = 0
    pad: int = 999
    eos: int = 998
    bos: int = 997
    cls: int = 996
    sep: int = 995
    mask: int = 994

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict([("class", "golden.Tokenizer"), ("tokenizer_path", ["golden"])])

    @property
    def inv_vocab(self) -> dict[int, str]:
        return {each: f"##{each}" if each % 3 == 0 else f"w{each}" for each in range(1, 1000)}

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        return [*range(900, 994)]

    def tokenize(self, text: str) -> list[int]:
        return [10 + ord(letter) for letter in text]

    def tokenize_conversation(self, conversation: Any, return_target: bool, add_generation_prompt: bool) -> Any:
        tokens = [token for turn in conversation for token in self.tokenize(turn["content"])]
        return np.array(tokens), np.array(tokens)


class HuggingFaceTokenizer:
    """The members of a Hugging Face tokenizer that `ChatTokenizer` uses."""

    name_or_path = "golden/chat"
    chat_template = "{% generation %}{% endgeneration %}"
    eos_token_id, pad_token_id = 0, 999

    def __len__(self) -> int:
        return 1000


SETTINGS: dict[str, Any] = {
    "random_seed": 1234, "sequence_length": 16, "tokenizer": Tokenizer(), "path_to_cache": CACHE,
    "cache_small_indices": True, "num_dataset_builder_threads": 1,
}  # fmt: skip
GPT: dict[str, Any] = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
MASKED: dict[str, Any] = {
    "masking_probability": 0.15, "short_sequence_probability": 0.1, "masking_max_ngram": 3,
    "masking_do_full_word": True, "masking_do_permutation": False, "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
}  # fmt: skip


EARLIER: dict[str, Any] = {"megatron_samples": "0.16.1"}
"""What that state needs of today's code, for kinds whose samples have changed; the commit had no such option."""


def config(kind: Any, prefixes: list[str], weights: list[float] | None = None, **options: Any) -> Any:
    return kind(**{**SETTINGS, "blend": (prefixes, weights), "split": "1,0,0", **options})


def built(kind: Any, wanted: Any, sizes: Any = (90, 10, 0)) -> dict[str, Any]:
    """Name of split -> dataset, of those that have one."""
    datasets = binidx.BlendedMegatronDatasetBuilder(kind, list(sizes), lambda: True, wanted).build()
    return {split.name: each for split, each in zip(binidx.Split, datasets, strict=True) if each is not None}


def gpt_config(prefixes: list[str], weights: list[float] | None = None, **options: Any) -> Any:
    return config(binidx.GPTDatasetConfig, prefixes, weights, **{**GPT, **options})


def gpt(*prefixes: str, kind: Any = None, sizes: Any = (90, 10, 0), weights: Any = None, **options: Any) -> Any:
    return built(kind or binidx.GPTDataset, gpt_config([*prefixes], weights, **options), sizes)


def masked(kind: str, *prefixes: str, weights: Any = None, **options: Any) -> dict[str, Any]:
    wanted = config(getattr(kinds, f"{kind}Config"), [*prefixes], weights, sequence_length=64, **MASKED, **options)
    return built(getattr(kinds, kind), wanted)


def fim() -> dict[str, Any]:
    words = {name: name for name in ("prefix", "middle", "suffix", "pad", "eod")}
    wanted = config(
        kinds.GPTFIMDatasetConfig, ["corpus/en"], **GPT, fim_rate=0.0, fim_spm_rate=0.0, fim_extra_tokens=words,
        tokenizer=FIMTokenizer(), **EARLIER,
    )  # fmt: skip
    return built(kinds.GPTFIMDataset, wanted)


class FIMTokenizer(Tokenizer):
    def tokens_to_ids(self, tokens: Any) -> Any:
        return 5 if isinstance(tokens, str) else [5 for _ in tokens]

    def text_to_ids(self, text: str) -> list[int]:
        return [7]

    def ids_to_text(self, ids: Any) -> str:
        return "text"


def staged() -> dict[str, Any]:
    return {"train": binidx.StagedBlendedDataset(binidx.GPTDataset, STAGES, gpt_config(["corpus/en"]))}


STAGES = [
    binidx.Stage((["corpus/en", "corpus/de"], [0.7, 0.3]), 60, planned_samples=100),
    binidx.Stage((["corpus/de", "corpus/en"], [0.5, 0.5]), 40),
]


def length_staged() -> dict[str, Any]:
    windows = gpt("corpus/en", "corpus/de", weights=[0.6, 0.4])["train"]
    return {"train": binidx.LengthStagedDataset(windows, [binidx.LengthStage(4, 80), binidx.LengthStage(16, 40)])}


def chats(kind: str, **options: Any) -> dict[str, Any]:
    wanted = config(kinds.SFTDatasetConfig, ["corpus/chat.jsonl.zst"], **GPT, **EARLIER, **options)
    return built(getattr(kinds, kind), wanted, (50, 5, 0))


DATASETS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "gpt": lambda: gpt("corpus/en", split="8,2,0"),
    "gpt, one epoch": lambda: gpt("corpus/en", sizes=(None, None, None), split="8,2,0"),
    "gpt, compressed": lambda: gpt("stored/zst"),
    "gpt, virtual merge": lambda: gpt("stored/virtual"),
    "gpt, documents": lambda: gpt("corpus/en", inter_document_masking=True, random_seed=5),
    "blend": lambda: gpt("corpus/en", "corpus/de", weights=[0.7, 0.3], split="8,2,0"),
    "blend of all": lambda: gpt("corpus/en", "corpus/de", sizes=(None, None, None)),
    "blend in stages": staged,
    "lengths in stages": length_staged,
    "best fit": lambda: gpt("corpus/en", kind=kinds.BestFitGPTDataset),
    "varlen gpt": lambda: gpt("corpus/en", kind=kinds.VarlenGPTDataset, inter_document_masking=True),
    "fim": fim,
    "bert": lambda: masked(
        "BERTMaskedWordPieceDataset", "corpus/sentences", classification_head=True, split="8,2,0", **EARLIER
    ),
    "bert, blend": lambda: masked(
        "BERTMaskedWordPieceDataset",
        "corpus/sentences",
        "corpus/en",
        weights=[0.5, 0.5],
        classification_head=False,
        **EARLIER,
    ),
    "t5": lambda: masked("T5MaskedWordPieceDataset", "corpus/sentences", sequence_length_decoder=128),
    "chats": lambda: chats("SFTDataset"),
    "chats, shuffled": lambda: chats("SFTDataset", shuffle=True),
    "varlen chats": lambda: chats("VarlenDataset"),
}
"""Every kind with an index. Run in a directory that has `corpus` and `stored`, with URIs relative to it."""


def random_seed() -> Any:
    return kinds.RandomSeedDataset(gpt("corpus/en", split="8,2,0")["train"], 1234)


def multimodal() -> Any:
    wanted = config(kinds.MultimodalDatasetConfig, ["corpus/images"], **GPT, image_h=2, image_w=3)
    return built(kinds.MultimodalDataset, wanted)["train"]


def mock() -> Any:
    return built(kinds.MockGPTDataset, binidx.GPTDatasetConfig(**{**SETTINGS, "path_to_cache": None}, **GPT))["train"]


OTHERS: dict[str, Callable[[], Any]] = {
    "baked": lambda: binidx.BakedDataset("baked", gpt_config(["corpus/en", "corpus/de"], [0.7, 0.3])),
    "random seed": random_seed,
    "multimodal": multimodal,
    "mock": mock,
}
"""Kinds without an index of their own; run there, too."""


def describe(dataset: Any) -> dict[str, Any]:
    """What an index cache, a checkpoint and a trainer see of a dataset."""
    return {
        "num_samples": len(dataset),
        "unique_description_hash": dataset.unique_description_hash,
        "order_identity": json.loads(json.dumps(dataset.order_identity)),
        "samples": digest(dataset[idx] for idx in (0, 1, len(dataset) // 2, len(dataset) - 1)),
        **loader_states(dataset),
    }


def loader_states(dataset: Any) -> dict[str, Any]:
    return {"loader": {kind: loader_state(dataset, kind) for kind in ("single", "cyclic")}}


def new_loader(dataset: Any, kind: str) -> Any:
    return binidx.build_pretraining_data_loader(dataset, 0, 2, 0, 2, dataloader_type=kind)


def loader_state(dataset: Any, kind: str) -> dict[str, Any]:
    """The state of a loader after its first micro-batch, and a digest of the batch after it."""
    loader = new_loader(dataset, kind)
    digest(islice(loader, 1))
    # The commit that wrote the golden state had these two values alone.
    state = {name: loader.state_dict()[name] for name in ("consumed_samples", "fingerprint")}
    return {"state": state, "next": resumed(dataset, kind, loader.state_dict())}


def resumed(dataset: Any, kind: str, state: Mapping[str, Any]) -> str:
    """Digest of the next micro-batch after a state."""
    loader = new_loader(dataset, kind)
    loader.load_state_dict(state)
    return digest(islice(loader, 1))


def digest(samples: Iterable[Any]) -> str:
    """Of the names, types and values of all arrays in some samples."""
    found = xxhash.xxh3_64()
    for sample in samples:
        for name, value in sorted(sample.items()) if isinstance(sample, Mapping) else [("", sample)]:
            array = np.asarray(value)
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def content(prefix: str) -> str:
    """Digest of all that a dataset holds."""
    dataset = binidx.IndexedDataset(prefix)
    return digest([*dataset[:], dataset.document_indices])


def command(*arguments: str) -> None:
    """Run a command of binidx in this process."""
    from binidx.tools import main

    status = main([*map(str, arguments)])
    assert status == 0, arguments


def bucket() -> Any:
    """The filesystem of the server in the environment."""
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def upload(source: Path) -> None:
    """Put the files below a directory into the bucket, each in one request: then ETags are digests of the content."""
    fs = bucket()
    for path in files_below(source):
        fs.pipe_file(f"{BUCKET}/{path.relative_to(source)}", path.read_bytes())


def files_below(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def same_times(directory: Path) -> None:
    """Give all files the time that local identities were recorded with."""
    for path in files_below(directory):
        os.utime(path, (MTIME, MTIME))


def write_dataset(prefix: str, seed: int, count: int, sentences: int = 1) -> None:
    rng = np.random.default_rng(seed)
    os.makedirs(os.path.dirname(prefix), exist_ok=True)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for _ in range(count):
            lengths = rng.integers(1, 25, rng.integers(1, sentences + 1)).tolist()
            builder.add_document(rng.integers(1, 900, sum(lengths)), lengths)
        builder.finalize(f"{prefix}.idx")


def write_chats(path: str) -> None:
    """A chat file of more than 4 MiB, so that its lines have a cache, which compresses to little."""
    answers = [{"role": "assistant", "content": chr(97 + number % 20) * 90_000} for number in range(60)]
    rows = [{"messages": [{"role": "user", "content": "aaa"}, answer]} for answer in answers]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with binidx.IndexedDatasetBuilder("chat.bin", np.uint8) as builder:
        builder.add_document(np.frombuffer(text, np.uint8), [len(text)])
        builder.finalize("chat.idx")
    command("convert", "chat", "--to", "packed-chat", "--compress")
    os.replace("packed-chat.bin.zst", path)
    for left in ("chat.bin", "chat.idx", "packed-chat.idx"):
        os.unlink(left)


def write_corpora() -> None:
    """The data that all other local state is of."""
    write_dataset("corpus/en", 1, 40)
    write_dataset("corpus/de", 2, 30)
    write_dataset("corpus/sentences", 3, 30, sentences=6)
    write_chats("corpus/chat.jsonl.zst")
    with binidx.IndexedDatasetBuilder("corpus/images.bin", np.int32, multimodal=True) as builder:
        for number in range(1, 30):
            builder.add_document([number] * (number + 3), [number, 3], [0, 1])
        builder.finalize("corpus/images.idx")
    same_times(Path("corpus"))


def write_stored() -> None:
    """Datasets that are stored in other ways."""
    os.mkdir("stored")
    command("convert", "corpus/en", "--to", "stored/zst", "--compress")
    command("convert", "corpus/en", "--to", "stored/sums", "--checksums")
    same_times(Path("stored"))


def write_virtual() -> None:
    """A virtual merge of local datasets. The command writes whole paths; the format allows relative ones as well."""
    command("merge", "corpus/en", "corpus/de", "--to", "stored/virtual", "--virtual")
    parts = Path("stored/virtual.parts.json")
    parts.write_text(parts.read_text().replace(os.getcwd(), ".."))
    same_times(Path("stored"))


def staged_counts() -> Any:
    """A staged blend of which so many samples are planned that the counts of its first stage are cached."""
    stage = binidx.Stage((["corpus/long"], [1.0]), 4, planned_samples=4_200_000)
    wanted = gpt_config(["corpus/long"], path_to_cache="stage-cache", sequence_length=1)
    return binidx.StagedBlendedDataset(binidx.GPTDataset, [stage], wanted)


def write_staged_counts() -> None:
    """One document of many equal tokens, and of its caches only the counts: the others have 50 MB."""
    with binidx.IndexedDatasetBuilder("long.bin", np.uint8) as builder:
        builder.add_document(np.zeros(4_200_001, np.uint8), [4_200_001])
        builder.finalize("long.idx")
    command("convert", "long", "--to", "corpus/long", "--compress")
    for left in ("long.bin", "long.idx"):
        os.unlink(left)
    same_times(Path("corpus"))
    staged_counts()
    for path in files_below(Path("stage-cache")):
        if "-Stage-" not in path.name:
            path.unlink()


def write_runs() -> None:
    """Runs, their orders as parquet files of which the last is missing, and a baked run."""
    wanted = gpt_config(["corpus/en", "corpus/de"], [0.7, 0.3], split="8,2,0")
    sizes = {"micro_batch_size": 2, "data_parallel_size": 2, "global_batch_size": 8}
    os.mkdir("runs")
    binidx.Run(wanted, [90, 10, 0], **sizes).save("runs/run.json")
    binidx.Run(wanted, [90, 10, 0], **sizes, dataloader_type="cyclic", consumed_samples=16).save("runs/cyclic.json")
    binidx.Run(wanted, [0, 10, 0], **sizes, stages=STAGES).save("runs/staged.json")
    for name in ("en", "de"):
        command("pack", f"corpus/{name}", "--to", f"packed/{name}", "--sep", "0", "--chunk-size", "66", "--name", name)
    sets = [
        {"name": name, "files": sorted(map(str, Path("packed", name).glob("*.bin"))), "weight": weight}
        for name, weight in (("en", 0.7), ("de", 0.3))
    ]
    packed = {"fork": "umd", "block_size": 11, "n_chunks": 1, "seed": 7, "sets": sets, "num_ranks": 2}
    Path("runs/packed.json").write_text(json.dumps(packed))
    for name in ORDERS:
        command("order", f"runs/{name}.json", "--to", f"orders/{name}", "--steps", "0:6", "--steps-per-file", "2")
    command("prepare", "bake", "runs/run.json", "--to", "baked", "--steps", "0:8")


ORDERS = ("run", "cyclic", "staged", "packed")


def write_convert() -> None:
    """A convert from the bucket that was killed before its first record."""
    dying = Path(__file__).parents[1] / "helpers/convert_crash.py"
    arguments = [f"s3://{BUCKET}/corpus/en", str(CONVERT_PART_BYTES), "converted/en", "2"]
    told = subprocess.run([sys.executable, dying, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert told == "9", told
    assert json.loads(Path("converted/en.convert.json").read_text())["objects"]["bin"]["token"]


CONVERT_PART_BYTES = 200


def write_text() -> None:
    """Text, and a tokenizer for it."""
    words = ["the", "sea", "wrote", "tokens", "quietly"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    rng = np.random.default_rng(0)
    rows = [{"text": " ".join(rng.choice(words, rng.integers(0, 9))), "id": f"row-{n}"} for n in range(60)]
    lines = [json.dumps(row) for row in rows]
    lines.insert(50, "no document")
    fs = bucket()
    fs.pipe_file(f"{BUCKET}/text/0.jsonl", "".join(line + "\n" for line in lines[:30]).encode())
    fs.pipe_file(f"{BUCKET}/text/1.jsonl", "".join(line + "\n" for line in lines[30:]).encode())
    fs.pipe_file(f"{BUCKET}/text/vocab.txt", "".join(word + "\n" for word in vocabulary).encode())


def job(output: str) -> Any:
    """A preprocess job over the text of the bucket."""
    uri = f"s3://{BUCKET}/text"
    tokenizer = binidx.describe_tokenizer(f"{uri}/vocab.txt", eod="[SEP]")
    return binidx.Job(
        (f"{uri}/*.jsonl",), f"s3://{BUCKET}/{output}", tokenizer, append_eod=True, id_key="id",
        on_error="quarantine", part_bytes=1000,
    )  # fmt: skip


def write_preprocess() -> None:
    """A finished job, and the same unfinished."""
    uri = f"s3://{BUCKET}"
    options = [
        f"{uri}/text/*.jsonl", "--tokenizer", f"{uri}/text/vocab.txt", "--eod", "[SEP]", "--append-eod", "--id-key",
        "id", "--on-error", "quarantine", "--part-bytes", "1000", "--workers", "1",
    ]  # fmt: skip
    command("preprocess", *options, "--to", f"{uri}/finished/en")
    command("preprocess", *options, "--to", f"{uri}/unfinished/en", "--shard", "0/2")


SMALL = [f"s3://{BUCKET}/small/{number}" for number in range(8)]
"""As many prefixes as have a bundle of their .idx files."""


def write_bucket(local: Path) -> None:
    """The objects of the bucket, and the disk cache of two of them."""
    for number in range(len(SMALL)):
        write_dataset(f"small/{number}", 10 + number, 6)
    upload(local)
    shutil.rmtree("small")
    wanted = gpt_config(SMALL, [1.0] * len(SMALL), path_to_cache=f"s3://{BUCKET}/cache", split="1,0,0")
    run = binidx.Run(wanted, [40, 0, 0], 2)
    run.save(f"s3://{BUCKET}/run.json")
    run.build()
    command("merge", *SMALL, "--to", f"s3://{BUCKET}/virtual", "--virtual")
    write_text()
    write_preprocess()


def read_cached(cache: Path) -> tuple[list[bytes], Any]:
    """The bytes of two objects through a disk cache, and the counts of both readers."""
    uris = [f"s3://{BUCKET}/corpus/en.bin", f"s3://{BUCKET}/stored/zst.bin.zst"]
    options = {"binidx": {"cache_dir": str(cache)}}
    readers = [binidx.open_object(uri, storage_options=options) for uri in uris]
    found = [bytes(reader.read([(0, reader.size)])[0]) for reader in readers]
    return found, [reader.stats for reader in readers]


def plan_of_local_text() -> dict[str, Any]:
    """Names of the parts of a job over local files, whose identity is size and time."""
    from binidx.prepare.preprocess.job import plan_digest, plan_parts
    from binidx.prepare.text.slices import Input

    tokenizer = binidx.describe_tokenizer(f"s3://{BUCKET}/text/vocab.txt", eod="[SEP]")
    planned = binidx.Job(("/corpus/en.jsonl",), "/tokens/en", tokenizer, keys=("text", "title"), part_bytes=1000)
    parts = plan_parts(planned, [Input("/corpus/en.jsonl", "jsonl", {"size": 3500, "mtime": 1700000000.25})])
    return {"parts": [part.name for part in parts], "plan": plan_digest(planned, parts), "job": planned.to_json()}


def identities() -> dict[str, Any]:
    """Names of tokenizers in index caches and saved runs."""
    described = binidx.describe_tokenizer(f"s3://{BUCKET}/text/vocab.txt", eod="[SEP]")
    return {
        "chat tokenizer": kinds.ChatTokenizer(HuggingFaceTokenizer()).unique_identifiers,
        "tokenizer spec": described.unique_identifiers,
    }


def main() -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    from servers.seaweed import s3_server

    shutil.rmtree(STATE, ignore_errors=True)
    root = Path(tempfile.mkdtemp())
    os.environ["BINIDX_INDEX_DIR"] = str(root / "index-dir")
    head = ["git", "-C", str(STATE.parent), "rev-parse", "HEAD"]
    commit = subprocess.run(head, check=True, stdout=subprocess.PIPE, text=True)
    (local := root / "local").mkdir()
    os.chdir(local)
    write_corpora()
    write_stored()
    (root / "server").mkdir()
    with s3_server(root / "server") as server, server.in_environment():
        server.make_bucket(BUCKET)
        write_bucket(local)
        write_virtual()
        write_staged_counts()
        expected: dict[str, Any] = {"commit": commit.stdout.strip()}
        expected["datasets"] = {
            name: {split: describe(each) for split, each in make().items()} for name, make in DATASETS.items()
        }
        write_runs()
        expected["others"] = {name: loader_states(make()) for name, make in OTHERS.items()}
        write_convert()
        read_cached(root / "disk-cache")
        expected["plan of local text"], expected["identities"] = plan_of_local_text(), identities()
        fs = bucket()
        for key in fs.find(BUCKET):
            target = root / "s3" / key.partition("/")[2]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(fs.cat_file(key))
    for name in ORDERS:  # an export that broke off
        os.replace(f"orders/{name}/steps-000000004-000000006.parquet", root / f"{name}.parquet")
    expected["orders"] = {name: table_digest(root / f"{name}.parquet") for name in ORDERS}
    for name in ("local", "s3", "disk-cache"):
        shutil.copytree(root / name, STATE / name)
    (STATE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(sum(path.stat().st_size for path in files_below(STATE)), "bytes", len([*files_below(STATE)]), "files")
    shutil.rmtree(root)


def table_digest(path: Path) -> str:
    """Of the rows of a parquet file, whatever version of pyarrow wrote it."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    return xxhash.xxh3_64_hexdigest(json.dumps([str(table.schema.names), table.to_pylist()]).encode())


if __name__ == "__main__":
    main()
