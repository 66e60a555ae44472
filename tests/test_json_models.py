"""Every kind of persisted JSON file: what was written comes back, and what is wrong is named by its path."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import binidx
from binidx import describe_tokenizer
from binidx.corpus.copies.convert_owner import OWNER_FILE, BegunObject, ConvertOwner, OwnerFields
from binidx.dataset.pinned_run import PINNED_FILE, PinnedPair, PinnedRun
from binidx.errors import BinidxError, ConfigError, FormatError
from binidx.format.prefix_listing import TABLE
from binidx.format.sidecars.dataset_manifest import MANIFEST_FILE as DATASET_FILE
from binidx.format.sidecars.dataset_manifest import RowCounts, read_manifest
from binidx.format.virtual import PARTS_FILE, VirtualPart, format_parts, read_parts
from binidx.index.cache.lease import LEASE_FILE, LeaseRecord
from binidx.index.cache.manifest import INDEX_MANIFEST_FILE, Manifest, StoredArray
from binidx.index.cache.order_record import KNOWN_FILE, Known, format_known, parse_known
from binidx.json_models import MAX_BYTES, MAX_DEPTH, JsonFile
from binidx.order.stored.baked_order import BAKED_FILE, Baked
from binidx.order.stored.planned_order import PLAN_FILE, PlannedFile, PlannedSource, ReadPlan
from binidx.packed.packed_run import PACKED_FILE, load_packed_run
from binidx.prepare.preprocess.job_files import JOB_FILE, RECORD_FILE, JobFile, Record, TokenCounts
from binidx.prepare.text.slices import Extent
from binidx.run.run_file import RUN_FILE, SavedTokenizer, format_run, parse_run
from binidx.storage.cache.block_files import META_FILE, CachedContent, read_meta
from binidx.storage.location import Location
from binidx.storage.open import read_document
from binidx.storage.steps import run
from binidx.tokenizers.describe import CONFIG
from binidx.tokenizers.spec import TOKENIZER_FILE, VOCAB_FILE

IDENTITY = {"size": 8, "etag": '"e"'}
CONFIGURED = binidx.GPTDatasetConfig(
    1, 24, (["a", "b"], [7, 0.5]), split="8,1,1", tokenizer=SavedTokenizer({"class": "t"}, eod=0),
    reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=True,
)  # fmt: skip
STAGES = [binidx.Stage((["a", "b"], [0.5, 0.5]), 20, 30)]
RUN = format_run(
    binidx.Run(CONFIGURED, [0, 4, 0], 2, rampup_batch_size=(2, 2, 100), global_batch_size=8, stages=STAGES)
)
MANIFEST = Manifest(
    library="0.1", fingerprint={"seed": 7}, content={}, data={"idx": IDENTITY},
    arrays={"a": StoredArray("<i4", (10, 2), 208, "ab")},
)  # fmt: skip
PLAN = ReadPlan(
    "f", 0, 8, 4, 24, True, True, {"class": "GPTDataset"}, False,
    [PlannedSource("en", "uint16", [PlannedFile("en.bin", IDENTITY, None, 8, 8)])],
)  # fmt: skip
PINNED = PinnedRun("0.1", 3, {"s3://b/en": PinnedPair(".bin", IDENTITY, IDENTITY, None)}, {"a-train": {"b": "c"}})
RECORD = Record("p", "hf", 3, [RowCounts(2, 2)], [Extent(0, 9, 9)], {"text": TokenCounts(2, 9, "ab")}, 0, 1.5, 1.0)
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b", ["a", "b"]], "dropout": None},
    "added_tokens": [{"id": 2, "content": "<s>", "special": True}], "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel"},
    "post_processor": {"type": "Sequence", "processors": [{
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [2]}},
    }]},
}  # fmt: skip
SETS = [{"name": "web", "files": "files.txt", "weight": 1}, {"name": "code", "files": ["a", "b"]}]

OWNER = OwnerFields(owner="o", objects={"bin": BegunObject("t")})
KINDS: dict[str, tuple[JsonFile[Any], bytes]] = {
    "run": (RUN_FILE, RUN),
    "packed": (PACKED_FILE, json.dumps(
        {"fork": "umd", "block_size": 9, "n_chunks": 2, "seed": 3, "sets": SETS}).encode()),
    "owner of a target": (OWNER_FILE, json.dumps(asdict(OWNER)).encode()),
    "index manifest": (INDEX_MANIFEST_FILE, json.dumps(asdict(MANIFEST)).encode()),
    "orders": (KNOWN_FILE, format_known([Known("a", {"num_epochs": 1, "separate_final_epoch": False}, 9)])),
    "dataset manifest": (DATASET_FILE, json.dumps(
        {**DATASET_FILE.tags, "plan": "p", "job": {"tokenizer": {"uri": "u", "digest": "d"}, "on_error": "skip"},
         "dataset": {"documents": 1, "sequences": 1, "tokens": 2}, "machines": {}}).encode()),
    "parts": (PARTS_FILE, format_parts("uint16", [VirtualPart("a\udcff", 1, 2, IDENTITY, IDENTITY)])),
    "baked": (BAKED_FILE, BAKED_FILE.encode(Baked("f", 0, 8, 4, 24, True, False), indent=1)),
    "read plan": (PLAN_FILE, PLAN_FILE.encode(PLAN, indent=1)),
    "pinned": (PINNED_FILE, json.dumps({**PINNED_FILE.tags, **asdict(PINNED)}).encode()),
    "bundle": (TABLE, json.dumps([["s3://b/p", 0, 8, "ab", IDENTITY]]).encode()),
    "job": (JOB_FILE, json.dumps({**JOB_FILE.tags, **asdict(JobFile("p", ["a"], {"keys": ["text"]}))}).encode()),
    "record": (RECORD_FILE, RECORD_FILE.encode(RECORD)),
    "claim": (LEASE_FILE, LEASE_FILE.encode(LeaseRecord("h", error="x"))),
    "cached object": (META_FILE, CachedContent("s3://b/a", 9, IDENTITY).text()),
    "tokenizer.json": (TOKENIZER_FILE, json.dumps(TOKENIZER).encode()),
    "vocab.json": (VOCAB_FILE, json.dumps({"a": 0, "b": 1}).encode()),
    "tokenizer_config.json": (CONFIG, json.dumps({"eos_token": {"content": "</s>"}, "more": 1}).encode()),
}  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS)


WRITTEN = {
    "BAKED_FILE", "IDENTITY_FILE", "INDEX_MANIFEST_FILE", "JOB_FILE", "KNOWN_FILE", "LEASE_FILE", "MANIFEST_FILE",
    "META_FILE", "ORIGIN_FILE", "OWNER_FILE", "PARTS_FILE", "PINNED_FILE", "PLAN_FILE", "RUN_FILE",
    "jobs RECORD_FILE", "preprocess RECORD_FILE",
}  # fmt: skip
"""Kinds that are written; docs/contributing/decisions/one-of-each.md lists them, with their readers."""


def test_all_kinds_that_are_written_are_written_by_json_file() -> None:
    root = Path(binidx.__file__).parent
    texts = {path: path.read_text() for path in root.rglob("*.py") if path.name != "json_models.py"}
    found = {
        f"{path.parent.name} {name}" if name == "RECORD_FILE" else name
        for path, text in texts.items()
        for name in re.findall(r"\b([A-Z_]+_FILE)\.encode\(", text)
    }
    described = re.findall(r"def json_file\(self\).*?return (\w+)", "".join(texts.values()), re.S)
    assert found | {*described} == WRITTEN


@each_kind
def test_what_was_written_is_read(kind: str) -> None:
    file, data = KINDS[kind]
    assert file.decode(data, "x") == file.decode(memoryview(data), "x")


def test_what_was_read_is_what_was_written() -> None:
    for kind, written in {
        "record": RECORD,
        "index manifest": MANIFEST,
        "claim": LeaseRecord("h", error="x"),
    }.items():
        file, data = KINDS[kind]
        assert file.decode(data, "x") == written
    assert OWNER_FILE.decode(KINDS["owner of a target"][1], "x") == OWNER
    assert format_run(binidx.run.run_file.parse_run(RUN)) == RUN  # an integer weight stays one


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda data: b"", "x: no JSON: Expecting value"),
    "truncated": (lambda data: data.rstrip()[:-1], "x: no JSON: "),
    "another root": (lambda data: b'"text"', r"x: \$: expected (object|array) \(found 'text'\)"),
    "no text": (lambda data: b"\xff" + data, "x: no JSON: "),
    "two files": (lambda data: data + data, "x: no JSON: Extra data"),
    "NaN": (lambda data: b'{"a": [NaN]}', "x: no JSON: NaN is no number of JSON"),
    "infinite": (lambda data: b'{"a": -Infinity}', "x: no JSON: -Infinity is no number of JSON"),
    "a number too long": (lambda data: b'{"a": ' + b"9" * 5000 + b"}", "x: no JSON: "),
    "arrays without end": (lambda data: b"[" * 100_000, rf"x: nested too deep \(more than {MAX_DEPTH} levels\)"),
    "deep arrays": (lambda data: b"[" * 100_000 + b"]" * 100_000, "x: nested too deep"),
    "deep objects": (lambda data: b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "x: nested too deep"),
    "one level too many": (lambda data: nested(data, MAX_DEPTH), "x: nested too deep"),
}


def nested(data: bytes, depth: int) -> bytes:
    """With so many arrays in its last field, or element."""
    whole = json.loads(data)
    inside: Any = []
    for _ in range(depth - 1):
        inside = [inside]
    if isinstance(whole, list):
        return json.dumps([*whole, inside]).encode()
    return json.dumps({**whole, "deep": inside}).encode()


@each_kind
@pytest.mark.parametrize("way", HOSTILE)
def test_hostile_bytes_are_one_error(kind: str, way: str) -> None:
    file, data = KINDS[kind]
    spoil, message = HOSTILE[way]
    with pytest.raises(file.error, match=f"^{message}") as caught:
        file.decode(spoil(data), "x")
    assert len(str(caught.value)) < 400
    assert file.hint in str(caught.value)


WRONG: list[tuple[str, str, Any, str]] = [
    ("run", "config.blend.0.1", 5, r"x: \$.config.blend[0][1]: expected str (found 5)"),
    ("run", "config.blend.1.0", "7", "x: $.config.blend[1][0]: expected float (found '7')"),
    ("run", "config.blend", ["a"], "x: $.config.blend: expected array of length 2 (found ['a'])"),
    ("run", "config.random_seed", ..., "x: $.config: missing required field random_seed"),
    ("run", "config.storage_options", {}, "x: $.config: unknown field storage_options; it has random_seed, "),
    ("run", "config.tokenizer.eod", "0", "x: $.config.tokenizer.eod: expected int | null (found '0')"),
    ("run", "config.tokenizer.more", 0, "x: $.config.tokenizer: unknown field more; it has unique_identifiers, "),
    ("run", "stages.0.num_samples", 0, "x: $.stages[0]: stage: num_samples is 0, need 1 to 30"),
    ("run", "stages.0.more", 0, "x: $.stages[0]: unknown field more; it has blend, num_samples, planned_samples"),
    ("run", "micro_batch_sise", 2, "x: $: unknown field micro_batch_sise; it has config, sizes, micro_batch_size, "),
    ("run", "global_batch_sise", 8, "same_data, library; did you mean global_batch_size?"),
    ("run", "config.sequense_length", 8, "steps; did you mean sequence_length?"),
    ("run", "config.new_kind_of_order", 8, "x: $.config: unknown field new_kind_of_order; it has random_seed, "),
    ("run", "sizes.1", True, "x: $.sizes[1]: expected int | null (found True)"),
    ("packed", "fork", "mine", "x: $: fork: found 'mine', needs one of lit-gpt, "),
    ("packed", "sets", [], "x: $: sets: found none, needs at least one"),
    ("packed", "sets.1.files", 5, "x: $.sets[1].files: expected str | array (found 5)"),
    ("packed", "sets.1.name", ..., "x: $.sets[1]: missing required field name"),
    ("packed", "sets.0.weight", "1", "x: $.sets[0].weight: expected float (found '1')"),
    ("packed", "sets.0.weight", -1, "x: $: sets: found weights below 0, or none above it"),
    ("packed", "sets.0.more", 1, "x: $.sets[0]: unknown field more; it has name, files, weight"),
    ("packed", "block_size", 0, "x: $.block_size: expected int >= 1 (found 0)"),
    ("owner of a target", "objects.bin.token", 1, "x: $.objects[...].token: expected str (found int)"),
    ("run", "\ud800", 1, "x: $: 'utf-8' codec can't encode character "),
    ("record", "part", 2**64, "x: no JSON: 18446744073709551616 does not fit 64 bits"),
    ("packed", "seed", -1, "x: $.seed: expected int >= 0 (found -1)"),
    ("packed", "sets", [{"name": "a", "files": [], "weight": 1e308}] * 2, "none above it, or infinite ones"),
    ("index manifest", "arrays.a.shape", [], "x: $.arrays[...]: shape: found () of <i4, need sizes that "),
    ("index manifest", "arrays.a.shape", [-1, 2], "shape: found (-1, 2) of <i4, need sizes that "),
    ("index manifest", "arrays.a.shape", [2**63], "shape: found (9223372036854775808,) of <i4, need sizes that "),
    ("index manifest", "arrays.a.dtype", "<x4", "x: $.arrays[...]: data type '<x4' not understood"),
    ("index manifest", "arrays.a.shape", [1, "2"], "x: $.arrays[...].shape[1]: expected int (found str)"),
    ("index manifest", "order", [], "x: $.order: expected object | null (found [])"),
    ("index manifest", "content", ..., "x: $: missing required field content"),
    ("orders", "indices", 1, "x: $.indices: expected array (found 1)"),
    ("orders", "indices.0.most", "9", "x: $.indices[0].most: expected int (found '9')"),
    ("orders", "indices.0.order", {}, "x: $.indices[0]: order: found nothing, need the fields of an order"),
    ("dataset manifest", "binidx_manifest", 2, "x: $.binidx_manifest: expected 1 (found 2)"),
    ("dataset manifest", "binidx_manifest", True, "x: $.binidx_manifest: expected 1 (found True)"),
    ("dataset manifest", "dataset.tokens", "2", "x: $.dataset.tokens: expected int (found '2')"),
    ("dataset manifest", "job.tokenizer.uri", 2, "x: $.job.tokenizer.uri: expected str (found 2)"),
    ("dataset manifest", "machines.a", 2, "x: $.machines[...]: expected object (found int)"),
    ("parts", "version", 2, "x: $.version: expected 1 (found 2); needed binidx-parts 1, as binidx merge --virtual"),
    ("parts", "dtype", "float128", "x: $: dtype: float128, needed one of uint8, "),
    ("parts", "parts", [], "x: $: parts: found none, needs at least one; "),
    ("parts", "parts.0.tokens", -1, "x: $.parts[0].tokens: expected int >= 0 (found -1); "),
    ("parts", "parts.0.idx", {}, "idx or bin has no size, needed it to identify the file; "),
    ("baked", "binidx", "raw",
     "x: $.binidx: expected 'baked' (found 'raw'); needs a file written by binidx prepare bake"),
    ("baked", "samples_per_part", 0, "x: $.samples_per_part: expected int >= 1 (found 0); "),
    ("baked", "blended", 1, "x: $.blended: expected bool (found 1); "),
    ("read plan", "samples_per_part", 0, "x: $.samples_per_part: expected int >= 1 (found 0); "),
    ("read plan", "sources", [{"prefix": "a", "dtype": "text", "files": []}], "x: $.sources[0]: dtype: found 'text', "),
    ("bundle", "0", ["s3://b/p", 0], "x: $[0]: expected array of length 5 (found ['s3://b/p', 0])"),
    ("bundle", "0.1", -1, "x: $[0][1]: expected int >= 0 (found -1)"),
    ("job", "inputs", "a", "x: $.inputs: expected array (found 'a')"),
    ("job", "binidx_job", ..., "x: $.binidx_job: expected 1 (found None)"),
    ("record", "binidx_part", 1, "x: $.binidx_part: expected 2 (found 1); finish with the binidx that began, or "),
    ("record", "slices.0.dropped", {"a": "b"}, "x: $.slices[0].dropped[...]: expected int (found str); "),
    ("record", "extents.0.more", 1, "x: $.extents[0]: unknown field more; it has first, count, end; "),
    ("record", "datasets.text.digest", ..., "x: $.datasets[...]: missing required field digest; "),
    ("record", "seconds", None, "x: $.seconds: expected float (found None); "),
    ("claim", "holder", 1, "x: $.holder: expected str (found 1)"),
    ("cached object", "format", 2, "x: $.format: expected 1 (found 2)"),
    ("cached object", "size", -1, "x: $.size: expected int >= 0 (found -1)"),
    ("cached object", "chunk_bytes", 0, "x: $.chunk_bytes: expected int >= 1 (found 0)"),
    ("tokenizer.json", "model", ..., "x: $: missing required field model; give a tokenizer.json; a vocab.json needs"),
    ("tokenizer.json", "model.vocab", {}, "x: $.model: vocab: found no entry; "),
    ("tokenizer.json", "model.vocab.a", "0", "x: $.model.vocab[...]: expected int (found str); "),
    ("tokenizer.json", "model.vocab", [["a"]], "x: $.model.vocab[0]: expected array of length 2 (found ['a']); "),
    ("tokenizer.json", "model.merges.0", 5, "x: $.model.merges[0]: expected str | array (found 5); "),
    ("tokenizer.json", "model.continuing_subword_prefix", "##", "merges: found 'b', needs continuing_subword"),
    ("tokenizer.json", "added_tokens.0.content", ..., "x: $.added_tokens[0]: missing required field content; "),
    ("tokenizer.json", "post_processor.processors.0.special_tokens", {},
     "x: $.post_processor.processors[0]: single: found '<s>', needs one of special_tokens; "),
    ("tokenizer.json", "post_processor", {"type": "BertProcessing", "cls": ["a", 1]},
     "x: $.post_processor: BertProcessing: missing required field sep; "),
    ("tokenizer.json", "model.vocab.a", 2**32, "x: $.model.vocab[...]: expected int <= 16777215; "),
    ("tokenizer.json", "model.vocab.a", -1, "x: $.model.vocab[...]: expected int >= 0; "),
    ("tokenizer.json", "added_tokens.0.id", 2**31, "x: $.added_tokens[0].id: expected int <= 16777215 (found "),
    ("tokenizer.json", "added_tokens.0.lstrip", 1, "x: $.added_tokens[0].lstrip: expected bool (found 1); "),
    ("vocab.json", "a", 1.5, "x: $[...]: expected int (found float); give a vocab.json"),
    ("tokenizer_config.json", "eos_token", 5, "x: $.eos_token: expected str | object | null (found 5)"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "value", "message"), WRONG, ids=[f"{each[0]} {each[1]}" for each in WRONG])
def test_a_wrong_field_is_named_by_its_path(kind: str, path: str, value: Any, message: str) -> None:
    file, data = KINDS[kind]
    whole = inside = copy.deepcopy(json.loads(data))
    *way, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    for name in way:
        inside = inside[name]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    with pytest.raises(file.error) as caught:
        file.decode(json.dumps(whole).encode(), "x")
    assert message.replace("\\", "") in str(caught.value)


TOLERATED: list[tuple[str, str, str]] = [
    ("run", "newer", "x: $: unknown field newer is ignored; a newer version of binidx may have written it"),
    ("run", "config.num_dataset_builder_thread", "is ignored; did you mean num_dataset_builder_threads?"),
    ("index manifest", "newer", "x: $: unknown field newer is ignored; a newer version of binidx may have written it"),
    ("index manifest", "arrays.a.newer", "x: $.arrays.a: unknown field newer is ignored; a newer version"),
    ("parts", "parts.0.newer", "x: $.parts[0]: unknown field newer is ignored; a newer version"),
    ("baked", "newer", "x: $: unknown field newer is ignored; a newer version"),
    (
        "read plan",
        "sources.0.files.0.newer",
        "x: $.sources[0].files[0]: unknown field newer is ignored; a",
    ),
    ("claim", "newer", "x: $: unknown field newer is ignored; a newer version"),
]


@pytest.mark.parametrize(("kind", "path", "message"), TOLERATED, ids=[f"{each[0]} {each[1]}" for each in TOLERATED])
def test_a_field_of_a_newer_version_is_ignored_with_one_warning(
    kind: str, path: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, data = KINDS[kind]
    whole = inside = json.loads(data)
    *way, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    for name in way:
        inside = inside[name]
    inside[last] = {"new": 1}
    for _ in range(2):
        assert file.decode(json.dumps(whole).encode(), "x") == file.decode(data, "x")
    [warning] = caplog.messages
    assert message in warning


@pytest.mark.parametrize("left_out", ["library", "data", "order", "arrays.a.identity"])
def test_a_manifest_that_lacks_a_field_with_a_default_is_read(left_out: str) -> None:
    whole = inside = json.loads(KINDS["index manifest"][1])
    *way, last = left_out.split(".")
    for name in way:
        inside = inside[name]
    del inside[last]
    assert INDEX_MANIFEST_FILE.decode(json.dumps(whole).encode(), "x").arrays == MANIFEST.arrays


def test_fields_of_a_newer_version_stay_in_a_file_that_is_written_again() -> None:
    more = {"note": {"by": ["a newer version"]}}
    run = parse_run(json.dumps({**json.loads(RUN), **more}).encode())
    assert json.loads(format_run(replace(run, consumed_samples=8))) == {
        **json.loads(RUN),
        **more,
        "consumed_samples": 8,
    }
    record = json.loads(KINDS["orders"][1])
    record = json.dumps({**record, **more, "indices": [{**record["indices"][0], **more}]}).encode()
    written = json.loads(format_known([*parse_known(record), Known("b", {**parse_known(record)[0].order}, 3)], record))
    assert written.items() >= more.items()
    assert [more.items() <= index.items() for index in written["indices"]] == [True, False]


def test_a_number_beyond_64_bits_is_refused_in_our_files_and_ignored_in_those_of_others() -> None:
    with pytest.raises(FormatError, match="x: no JSON: 1e999 does not fit 64 bits"):
        RECORD_FILE.decode(b'{"seconds": 1e999}', "x")
    assert CONFIG.decode(b'{"model_max_length": 1000000000000000019884624838656}', "x").eos_token is None


def test_threads_that_use_a_model_for_the_first_time_at_once_get_its_values() -> None:
    """Alone in a process: msgspec without the lock ends it by SIGSEGV, in one of some ten rounds."""
    program = """if True:
        import sys
        from concurrent.futures import ThreadPoolExecutor
        from dataclasses import make_dataclass
        from binidx.json_models import JsonFile
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as threads:
            for _ in range(300):
                inner = make_dataclass("Inner", [(f"f{number}", int) for number in range(20)])
                file = JsonFile(make_dataclass("Model", [("a", inner), ("b", list[inner])]))
                values = {f"f{number}": number for number in range(20)}
                found = threads.map(lambda _: file.convert({"a": values, "b": [values]}, "x").b[0].f7, range(8))
                assert [*found] == [7] * 8
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def huge(path: Path) -> str:
    path.touch()
    os.truncate(path, 10 * 10**9)
    return str(path)


LARGE: dict[str, tuple[str, Callable[[str], Any], type[BinidxError]]] = {
    "run": ("run.json", binidx.Run.load, ConfigError),
    "packed": ("packed.json", load_packed_run, ConfigError),
    "baked": ("baked.json", lambda uri: read_document(BAKED_FILE, Location.of(uri)), FormatError),
    "read plan": ("readplan.json", lambda uri: read_document(PLAN_FILE, Location.of(uri)), FormatError),
    "parts": ("x.parts.json", lambda uri: read_parts(Location.of(uri.removesuffix(".parts.json"))), FormatError),
    "dataset manifest": ("x.manifest.json", lambda uri: read_manifest(Location.of(uri)), FormatError),
    "tokenizer.json": ("tokenizer.json", describe_tokenizer, FormatError),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_file_of_ten_gigabytes_is_refused_unread(kind: str, tmp_path: Path) -> None:
    name, read, error = LARGE[kind]
    message = rf"{name}: too large \(found 10,000,000,000 bytes, need at most {MAX_BYTES:,}\)"
    with pytest.raises(error, match=message):
        read(huge(tmp_path / name))


def test_a_large_file_that_only_saves_work_is_none(tmp_path: Path) -> None:
    huge(tmp_path / "meta.json")
    assert read_meta(str(tmp_path)) is None
    huge(tmp_path / "en.convert.json")
    assert run(ConvertOwner(Location.of(f"{tmp_path}/en")).read_steps()) == OwnerFields()


def test_an_error_quotes_no_more_of_a_hostile_file_than_a_reader_takes_in() -> None:
    name = "x" * 100_000
    described = json.loads(RUN)
    for broken in (
        {**described, "config": {**described["config"], name: 1}},
        {**described, "config": {**described["config"], "tokenizer": {"unique_identifiers": {}, name: {}}}},
        {**described, "dataloader_type": name},
        {**described, "config": {**described["config"], **{f"{number}{name[:90]}": 1 for number in range(1000)}}},
    ):
        with pytest.raises(ConfigError) as raised:
            parse_run(json.dumps(broken).encode())
        assert len(str(raised.value)) < 3_000
        assert "x" * 30 in str(raised.value)


def test_no_message_is_longer_than_ten_thousand_characters() -> None:
    for quoted in ("x" * 100_000, "x y " * 25_000):
        message = str(FormatError(f"en.json: {quoted}; write it again"))
        assert len(message) < 10_100
        assert re.fullmatch(r"en\.json: x[xy ]+\[[\d,]{6} more characters\][xy ]+; write it again", message)
    path = f"s3://bucket/{'x' * 1024}"
    assert path in str(FormatError(f"{path}: truncated"))
