"""A dataset in one line is the one that the whole config builds."""

from __future__ import annotations

import ast
import inspect
import json
import random
import shutil
from collections import Counter
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers import trained_tokenizers
from helpers.gpt_data import assert_same_sample
from helpers.pages import python_blocks, read_page
from helpers.traceable_runs import write_source
from servers.http_objects import Server, http_objects

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.run.global_order import BatchSchedule, GlobalOrder
from binidx.storage.cache.maintenance import cached_contents
from binidx.tools import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    for name in ("en", "code"):
        write_source(folder / name, random.Random(name), False)
    return folder


def built_by(dataset: Any, **known: Any) -> Any:
    """The dataset that its code makes."""
    names: dict[str, Any] = {"binidx": binidx, **known}
    exec(dataset.as_code(), names)
    return names[dataset.split.name]


FORMS: dict[str, Any] = {
    "text": "{}/en",
    "path": Path("{}/en"),
    "list": ["{}/en", "{}/code"],
    "dict": {"{}/en": 0.7, "{}/code": 0.3},
    "pairs": [("{}/en", 0.7), (Path("{}/code"), 0.3)],
}


@pytest.mark.parametrize("options", [{}, {"num_samples": 200}, {"split": "6,3,1"}, {"random_seed": 7}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_one_line_gives_the_samples_of_the_code_it_stands_for(form: str, options: dict[str, Any], folder: Path) -> None:
    def placed(each: Any) -> Any:
        if isinstance(each, dict):
            return {placed(prefix): weight for prefix, weight in each.items()}
        if isinstance(each, str | Path):
            return type(each)(str(each).format(folder))
        return type(each)(map(placed, each)) if isinstance(each, list | tuple) else each

    for which in ("train", "valid") if "split" in options else ("train",):
        short = binidx.load_dataset(placed(FORMS[form]), sequence_length=16, which=which, **options)
        long = built_by(short)
        assert len(short) == len(long) > 0
        for number in range(len(long)):
            assert_same_sample(short[number], long[number])
        assert (short.read_tokens([0]) == long.read_tokens([0])).all()
        assert repr(short) == f"LoadedDataset of {long!r}"


def test_a_whole_epoch_of_a_weighted_blend_has_as_many_samples_as_its_tokens_fill(folder: Path) -> None:
    prefixes = [f"{folder}/en", f"{folder}/code"]
    tokens = sum(binidx.IndexedDataset(each).index.num_tokens for each in prefixes)
    assert len(binidx.load_dataset({prefixes[0]: 1, prefixes[1]: 3}, 16)) in (tokens // 16, tokens // 16 + 1)


def test_a_weighted_blend_without_a_number_of_samples_opens_each_file_once(folder: Path, web: Server) -> None:
    web.objects |= {f"/{name}": (folder / name).read_bytes() for name in ("en.bin", "en.idx", "code.bin", "code.idx")}
    blend = {f"{web.endpoint}/en": 0.7, f"{web.endpoint}/code": 0.3}
    counts = []
    for num_samples in (20, None, 20):  # the first fetches the .idx files into the directory of index files
        web.requests.clear()
        options = {"binidx": {"hedge": False}}  # a hedge of a slow machine is a request, too
        samples = binidx.load_dataset(blend, 16, num_samples=num_samples, storage_options=options)
        counts.append(Counter((method, path) for method, path, _ in web.requests))
        local = binidx.load_dataset({f"{folder}/en": 0.7, f"{folder}/code": 0.3}, 16, num_samples=num_samples)
        assert len(samples) == len(local)
        assert (samples.read_tokens([0]) == local.read_tokens([0])).all()
    assert counts[1] == counts[2] != {}


def test_its_loader_is_that_of_the_dataset_within_and_goes_on_from_its_state(folder: Path) -> None:
    dataset = binidx.load_dataset(folder / "en", 16, num_samples=40)
    loader = dataset.loader(batch_size=8)
    assert len(loader) == 5
    batches = [*loader]
    for batch, (first, stop) in zip(batches, pairwise(range(0, 41, 8)), strict=True):
        assert (batch["tokens"] == np.stack([dataset[number]["tokens"] for number in range(first, stop)])).all()
    given = binidx.build_pretraining_data_loader(dataset, 0, 8)  # type: ignore[arg-type]
    assert given is not None
    assert given.state_dict() == dataset.loader(8).state_dict()
    given.load_state_dict({**loader.state_dict(), "consumed_samples": 16})
    assert (next(iter(given))["tokens"] == batches[2]["tokens"]).all()
    assert (next(iter(dataset.loader(8, consumed_samples=16)))["tokens"] == batches[2]["tokens"]).all()


def test_the_tokens_of_a_tokenizer_are_found_by_its_name(folder: Path) -> None:
    trained_tokenizers.save("gpt2", folder)
    described = binidx.describe_tokenizer(f"{folder}/tokenizer.json", eod="<|endoftext|>")
    by_object = binidx.load_dataset(f"{folder}/en", 16, tokenizer=described, eod_mask_loss=True)
    assert built_by(by_object, tokenizer=described)[0]["tokens"].shape == (16,)
    by_ids = binidx.load_dataset(f"{folder}/en", 16, tokenizer=binidx.SpecialTokens(eod=0), eod_mask_loss=True)
    assert "tokenizer=binidx.SpecialTokens(eod=0, pad=None)," in by_ids.as_code()
    assert 0 in [mask for sample in by_ids for mask in sample["loss_mask"].tolist()]  # every document has a token 0
    by_name = binidx.load_dataset(f"{folder}/en", 16, tokenizer=folder / "tokenizer.json")
    assert f"tokenizer=binidx.describe_tokenizer('{folder}/tokenizer.json')," in by_name.as_code()
    assert_same_sample(by_name[3], built_by(by_name)[3])


@pytest.mark.parametrize(
    ("made", "given", "warned"),
    [
        ("aab", None, "2: made by the tokenizer b.json (bbbbbbbbbbbb), {0} by a.json (aaaaaaaaaaaa): ids of two mean"),
        (
            "a",
            "tokenizer.json",
            "made by the tokenizer a.json (aaaaaaaaaaaa), the given EOD by {folder}/tokenizer.json",
        ),
        ("aa", 70_000, "1: made with the EOD 5, the given tokenizer has 70000"),
        ("aa", 5, None),
        ("aa", None, None),
    ],
)
def test_a_tokenizer_that_did_not_make_the_tokens_is_warned_of(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, made: str, given: Any, warned: str | None
) -> None:
    prefixes = [f"{tmp_path}/{number}" for number in range(len(made))]
    for prefix, name in zip(prefixes, made, strict=True):
        [shutil.copy(f"{folder}/en{end}", prefix + end) for end in (".bin", ".idx")]
        tokenizer = {"uri": f"{name}.json", "digest": name * 64, "eod": 5}
        Path(f"{prefix}.manifest.json").write_text(json.dumps({"binidx_manifest": 1, "job": {"tokenizer": tokenizer}}))
    trained_tokenizers.save("gpt2", folder)
    if given is not None:
        given = f"{folder}/{given}" if isinstance(given, str) else binidx.SpecialTokens(eod=given)
    binidx.load_dataset(prefixes, 16, tokenizer=given)
    assert bool(caplog.messages) == (warned is not None)
    assert warned is None or warned.format(*prefixes, folder=folder) in "".join(caplog.messages)


def test_an_eod_that_an_option_needs_is_that_of_the_manifests(folder: Path, tmp_path: Path) -> None:
    for name, eod in (("en", 5), ("code", 5), ("other", 6), ("none", None)):
        write_source(tmp_path / name, random.Random(name), False)
        manifest = {"binidx_manifest": 1, "job": {"tokenizer": {"eod": eod}}}
        (tmp_path / f"{name}.manifest.json").write_text(json.dumps(manifest))
    blend = [tmp_path / "en", tmp_path / "code"]
    found = binidx.load_dataset(blend, 16, eod_mask_loss=True)
    assert found.config.tokenizer == binidx.SpecialTokens(eod=5)
    assert_same_sample(found[1], built_by(found)[1])
    assert binidx.load_dataset(blend, 16, reset_attention_mask=True).config.tokenizer.eod is None  # no mask is made
    for bad, problem in (
        (
            [*blend, tmp_path / "other"],
            rf"eod_mask_loss: needs an EOD \(found 6, {tmp_path}/en has 5: {tmp_path}/other",
        ),
        ([*blend, tmp_path / "none"], "found no manifest with one"),
        (f"{folder}/en", r"no manifest with one: .*; tokenizer=binidx.SpecialTokens\(eod=ID\) names it"),
    ):
        with pytest.raises(ConfigError, match=problem):
            binidx.load_dataset(bad, 16, eod_mask_loss=True)
    with pytest.raises(ConfigError, match="needs an EOD, SimpleNamespace has none"):
        binidx.load_dataset(blend, 16, eod_mask_loss=True, tokenizer=SimpleNamespace(eod=None, unique_identifiers={}))


def test_manifests_that_name_the_eod_are_read_once(folder: Path) -> None:
    made_by = {"eod": 5, "uri": "t", "digest": "0" * 64}
    manifest = json.dumps({"binidx_manifest": 1, "job": {"tokenizer": made_by}}).encode()
    objects = {f"/{name}.manifest.json": manifest for name in ("en", "code")}
    for name in ("en.bin", "en.idx", "code.bin", "code.idx"):
        objects[f"/{name}"] = (folder / name).read_bytes()
    counts = []
    for tokenizer in (binidx.SpecialTokens(eod=5), None):
        with http_objects(objects) as server:
            blend = [f"{server.endpoint}/{name}" for name in ("en", "code")]
            assert binidx.load_dataset(blend, 16, eod_mask_loss=True, tokenizer=tokenizer).config.tokenizer.eod == 5
            counts.append(Counter(path for _, path, _ in server.requests if path.endswith(".json")))
    assert counts[0] == counts[1]
    assert len(counts[0]) == 2


def cached(folder: Path) -> set[str]:
    return {each.content.uri for each in cached_contents(str(folder)) if each.content}


def test_directories_of_the_node_are_used_named_in_the_code_and_those_of_the_page(
    folder: Path, s3: Bucket, tmp_path: Path
) -> None:
    prefix = f"{s3.fresh()}/en"
    convert_dataset(f"{folder}/en", prefix)
    (block,) = python_blocks(read_page("reference/where-things-are-kept"))
    names: dict[str, Any] = {"prefix": prefix}
    exec(block.replace("/nvme", str(tmp_path)).replace("sequence_length=64", "sequence_length=16"), names)
    train = names["train"]
    assert_same_sample(train[3], binidx.load_dataset(folder / "en", 16)[3])
    assert {f"{prefix}.bin", f"{prefix}.idx"} <= cached(tmp_path / "cache")
    assert len(built_by(train)) == len(train)
    given = {"binidx": {"index_dir": "/nowhere"}}
    binidx.load_dataset(prefix, 16, storage_options=given, index_dir=tmp_path / "index")
    assert f"{prefix}.idx" in cached(tmp_path / "index")
    with pytest.raises(ConfigError, match="cache_dir, index_dir: found both, need one"):
        binidx.load_dataset(prefix, 16, cache_dir=tmp_path, index_dir=tmp_path)
    (tmp_path / "file").write_text("x")
    for name in ("cache_dir", "index_dir"):
        with pytest.raises(ConfigError, match=f"^{name}: found .*/file,.* needs a directory"):
            binidx.load_dataset(prefix, 16, **{name: tmp_path / "file"})[0]


def test_options_of_a_store_are_used_and_not_printed(folder: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = f"{s3.fresh()}/en"
    convert_dataset(f"{folder}/en", prefix)
    for name in s3.server.environment:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    options = s3.server.storage_options
    dataset = binidx.load_dataset(prefix, 16, storage_options=options)
    assert_same_sample(dataset[3], binidx.load_dataset(folder / "en", 16)[3])
    assert options["secret"] not in dataset.as_code() + repr(dataset)
    assert len(built_by(dataset, storage_options=options)) == len(dataset)
    assert "RemoteObject(s3://" in repr(dataset.wrapped.dataset.bin_reader)


def test_a_prefix_is_understood_as_it_is_typed(folder: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    wanted = binidx.load_dataset(folder / "en", 16)[3]
    for typed in ("~/en", f"{folder}/en/", f"{folder}/en.bin", "~/en.idx"):
        assert_same_sample(binidx.load_dataset(typed, 16)[3], wanted)
        assert len(binidx.IndexedDataset(typed)) == len(binidx.IndexedDataset(folder / "en"))
        assert main(["verify", typed]) == 0
    prefix = f"{s3.fresh()}/en"
    assert main(["convert", "~/en", "--to", f"{prefix}_text_document"]) == 0
    assert_same_sample(binidx.load_dataset(f"S3{prefix[2:]}_text_document.bin", 16)[3], wanted)
    for missing in (prefix, f"{prefix}_txt_document"):
        with pytest.raises(ObjectNotFoundError, match=rf"did you mean {prefix}_text_document\?"):
            binidx.load_dataset(missing, 16)


def test_mistakes_are_answered_with_the_right_form(folder: Path) -> None:
    for wrong, needed in (
        ({"which": "validation"}, "which: found 'validation', needs 'train', 'valid' or 'test'"),
        ({"which": "valid"}, "split: '1,0,0' has no valid; give one such as split='99,1,0'"),
        ({"seq_length": 16}, "unknown option seq_length; did you mean sequence_length"),
        ({"seed": 1}, "unknown option seed; did you mean random_seed"),
        ({"num_sample": 5}, "unknown option num_sample; did you mean num_samples"),
        ({"cachedir": "x"}, "unknown option cachedir; did you mean cache_dir"),
        ({"blend": "s3:/corpus/en"}, "^s3:/corpus/en: found :/ .*; did you mean s3://corpus/en"),
        ({"mmap": True}, "unknown option mmap; did you mean mmap_bin_files"),
        ({"batch_size": 8}, r"unknown option batch_size; give it to loader\(\)"),
        ({"num_samples": "5"}, "^num_samples: found '5', needs a whole number of at least 1"),
        ({"num_samples": 0}, "^num_samples: found 0, needs a whole number of at least 1"),
        ({"path_to_cache": 5}, "^path_to_cache: found 5, needs a path or URI"),
        ({"cache_dir": 5}, "^cache_dir: found 5, needs a path or URI"),
        ({"sequence_length": True}, "^sequence_length: found True, needs a whole number"),
        ({"eod_mask_loss": "no"}, "^eod_mask_loss: found 'no', needs True or False"),
        ({"order": 5}, "^order: found 5, needs a kind"),
        (
            {"sequence_length": 1 << 20},
            r"no sample \(found no document, or fewer tokens than sequence_length \+ 1 = 1,04",
        ),
        ({"tokenizer": 7}, r"^tokenizer: found 7, needs binidx.SpecialTokens\(eod=7\)"),
        ({"tokenizer": {"eod": 7}}, r"^tokenizer: found .*, needs binidx.SpecialTokens\(eod=ID\)"),
        ({"storage_options": "anon"}, "^storage_options: found str, needs a dict"),
        ({"blend": None}, "blend: found None; needs"),
        ({"blend": ""}, "blend: found no prefix in ''; needs"),
        ({"blend": "s3://"}, "blend: found no prefix in 's3://'; needs"),
    ):
        with pytest.raises(ConfigError, match=needed):
            binidx.load_dataset(**{"blend": f"{folder}/en", "sequence_length": 16, **wrong})
    dataset = binidx.load_dataset(f"{folder}/en", 16)
    for size in (0, "8"):
        with pytest.raises(ConfigError, match=f"^batch_size: found {size!r}, need"):
            dataset.loader(size)  # type: ignore[arg-type]
    for wrong in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
        with pytest.raises(ConfigError, match=rf"loader: found {wrong} \("):
            binidx.build_pretraining_data_loader(dataset, 0, 8, **{wrong: True})
    with pytest.raises(ConfigError, match=r"loader: unknown option rank; did you mean data_parallel_rank\?"):
        dataset.loader(8, rank=0)
    with pytest.raises(ConfigError, match="num_workers: found '2', needs a whole number"):
        dataset.loader(8, num_workers="2")
    for count in (-1, None):
        with pytest.raises(ConfigError, match=f"num_workers: found {count}, needs a whole number of at least 0"):
            dataset.loader(8, num_workers=count)
    with pytest.raises(IndexError, match=r"^sample 'a': out of range"):
        dataset.show("a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="location: found 3, needs a path or URI"):
        binidx.save_run(dataset, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="eod: found 'x', needs a whole number"):
        binidx.SpecialTokens(eod="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="global_batch_size: found 0, needs a whole number from 1"):
        dataset.as_run(global_batch_size=0)
    with pytest.raises(ConfigError, match=r"run: found 'run.json', needs a binidx.Run; binidx.Run.load opens its file"):
        binidx.RunOrder.open("run.json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"run: found 'run.json', needs a binidx.Run; binidx.Run.load opens its file"):
        binidx.RunOrder.of("run.json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"job: found 'en.jsonl', needs a binidx.Job"):
        binidx.preprocess("en.jsonl")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tokenizer: found 'x.json', needs binidx.describe_tokenizer of it"):
        binidx.Job(("a.jsonl",), "out", "x.json")  # type: ignore[arg-type]
    with pytest.raises(IndexError, match=r"sample 999999: out of range \(there are"):
        dataset.show(999_999)
    with pytest.raises(IndexError, match=r"sample 999999: out of range \(there are") as caught:
        dataset.read_tokens([999_999])
    assert len(caught.traceback) < 3, "frames of the library are shown"
    for dtype in ("uint17", None):
        with pytest.raises(FormatError, match=f"dtype: found {dtype!r}, needed one of uint8"):
            binidx.IndexedDatasetBuilder(f"{folder}/x.bin", dtype=dtype)


def test_a_repr_tells_what_a_thing_is(folder: Path) -> None:
    prefixes = {f"{folder}/en": 0.75, f"{folder}/code": 0.25}
    one, two = binidx.load_dataset(f"{folder}/en", 16, num_samples=1_000), binidx.load_dataset(prefixes, 16)
    assert repr(one) == f"LoadedDataset of GPTDataset({folder}/en, train, {len(one):,} samples x 16)"
    shares = f"{folder}/en 75.0%, {folder}/code 25.0%"
    assert repr(two) == f"LoadedDataset of BlendedDataset({shares}, train, {len(two):,} samples x 16)"
    many = binidx.megatron.BlendedDataset([one.wrapped] * 5, [1.0] * 5, 40, one.config)
    assert repr(many).startswith(f"BlendedDataset({', '.join([f'{folder}/en 20.0%'] * 3)}, 2 more, train, 40 samples x")
    place = f"{len(two) // 4:,} batches of 4, rank 0 of 1, 0 samples consumed"
    assert repr(two.loader(4)) == f"PretrainingLoader({two.wrapped!r}, {place})"
    own = binidx.build_pretraining_data_loader([*range(40)], 8, 4)
    assert repr(own) == "PretrainingLoader(list, 10 batches of 4, rank 0 of 1, 8 samples consumed)"
    stored = binidx.IndexedDataset(f"{folder}/en")
    counts = f"{len(stored):,} sequences, {stored.index.num_tokens:,} tokens, int32"
    assert repr(stored) == f"IndexedDataset({folder}/en, {counts})"
    assert repr(stored.bin_reader) == f"LocalFile({folder}/en.bin, {stored.index.num_bytes:,} bytes)"


def test_what_takes_a_dataset_takes_a_loaded_one(folder: Path) -> None:
    dataset = binidx.load_dataset(f"{folder}/en", 16)
    assert str(binidx.show_sample(dataset, 1)) == str(dataset.show(1)) == str(binidx.show_sample(dataset.wrapped, 1))
    reading = GlobalOrder(BatchSchedule(1, 1, 1), len(dataset))
    orders = [binidx.RunOrder.of_dataset(each, reading) for each in (dataset, dataset.wrapped)]
    assert orders[0].fingerprint == orders[1].fingerprint
    made = binidx.build_pretraining_data_loader(dataset, 0, 4)
    assert made is not None
    assert made.state_dict() == dataset.loader(4).state_dict()


def test_interactive_shells_and_type_checkers_see_every_option_of_load_dataset_with_its_type_and_default() -> None:
    shown, options = inspect.signature(binidx.load_dataset).parameters, fields(binidx.GPTDatasetConfig)
    assert {field.name for field in options if field.init} | {"which", "num_samples", "cache_dir", "index_dir"} == {
        *shown
    }
    named = ast.parse((Path(binidx.__file__).parent / "run/load_options.pyi").read_text()).body[-1]
    assert isinstance(named, ast.ClassDef)
    typed = [each for each in named.body if isinstance(each, ast.AnnAssign)]
    own = inspect.getfullargspec(inspect.unwrap(binidx.load_dataset))
    taken = {*own.args, *own.kwonlyargs}
    assert {ast.unparse(each.target): ast.unparse(each.annotation).replace('"', "'") for each in typed} == {
        field.name: field.type for field in options if field.init and field.name not in taken
    }
    for field in options:
        assert not field.init or field.name in taken or shown[field.name].default == field.default


def test_the_file_of_a_loader_is_the_run_that_it_reads(folder: Path, tmp_path: Path) -> None:
    prefixes, file = {f"{folder}/en": 0.75, f"{folder}/code": 0.25}, f"{tmp_path}/run.json"
    for blend in (f"{folder}/en", prefixes, [*prefixes]):
        for kind in ("single", "cyclic"):
            dataset = binidx.load_dataset(blend, 16)
            topology = {"data_parallel_rank": 1, "data_parallel_size": 2, "dataloader_type": kind}
            loader = dataset.loader(2, consumed_samples=8, **topology)
            binidx.save_run(loader, file)
            run = binidx.Run.load(file)
            assert run.build()[0].unique_description_hash == dataset.wrapped.unique_description_hash  # type: ignore[union-attr]
            assert run.samples_of_step(0, 1) == next(iter(loader.batch_sampler))
    built = binidx.load_dataset(prefixes, 16).wrapped
    binidx.save_run(built, file, micro_batch_size=4)
    assert binidx.Run.load(file).micro_batch_size == 4
    other = binidx.megatron.BlendedDataset(built.datasets, [0.5, 0.5], 40, built.config)
    with pytest.raises(ConfigError, match="has other weights, samples or prefixes than its config"):
        binidx.save_run(other, file)
    for source, way in (
        (dataset.as_run(), r"Run, .*; its save\(uri\) writes it"),
        ("en", r"str, .*; give binidx.load_d"),
    ):
        with pytest.raises(ConfigError, match=f"source: found a {way}"):
            binidx.save_run(source, "run.json")
    with pytest.raises(ConfigError, match=r"found \[.*\], a run reads the train split"):
        binidx.save_run([1, 2], file)
    own = type("OwnDataset", (binidx.GPTDataset,), {})
    [train, *_] = binidx.BlendedMegatronDatasetBuilder(own, [9, 0, 0], lambda: True, built.config).build()
    with pytest.raises(ConfigError, match=r"found .*, a run reads .* of GPTDataset itself, as its file names no class"):
        binidx.save_run(train, file)
