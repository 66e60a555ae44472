"""A run's file: what was saved is what is loaded, and its samples are those that the loader reads."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import trained_tokenizers
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron
from servers.http_objects import Server

import binidx
from binidx import RunOrder
from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.run.run_file import SavedTokenizer, format_run, parse_run


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(8)
    return [write_with_megatron(directory / name, np.full(40, 30, np.int32), rng) for name in ("en", "code")]


def make(prefixes: list[str], **changes: Any) -> binidx.Run:
    names = changes.keys() - binidx.Run.__dataclass_fields__.keys()
    config = binidx.GPTDatasetConfig(**{
        "random_seed": 1, "sequence_length": 24, "blend": (prefixes, [0.7, 0.3]), "split": "8,1,1",
        "tokenizer": TOKENIZER, "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": True,
        **{name: changes.pop(name) for name in names},
    })  # fmt: skip
    return binidx.Run(**{"config": config, "sizes": [50, 4, 0], "micro_batch_size": 2, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data_parallel_size": 4, "dataloader_type": "cyclic", "data_sharding": False, "consumed_samples": 8},
        {"blend_per_split": True, "path_to_cache": "memory://cache", "random_seed": np.int64(9)},
    ],
    ids=["plain", "cyclic", "per split"],
)
def test_a_saved_run_is_the_run(prefixes: list[str], changes: dict[str, Any]) -> None:
    if changes.get("blend_per_split"):
        blends = {"blend": None, "split": None, "blend_per_split": [(prefixes, None), None, (prefixes[::-1], None)]}
        changes = {**changes, **blends, "sizes": [None, 0, 7]}
    run = make(prefixes, **changes)
    run.save("memory://runs/run.json")
    loaded = binidx.Run.load("memory://runs/run.json")
    assert format_run(loaded) == format_run(run)
    for ours, needed in zip(loaded.build(), run.build(), strict=True):
        assert (ours is None) == (needed is None)
        if ours is not None and len(ours):
            # Megatron's name of the caches: equal only if nothing of the identity was lost.
            assert ours.unique_description_hash == needed.unique_description_hash
            assert_same_sample(ours[3], needed[3])


def test_samples_of_steps_are_what_loaders_read(prefixes: list[str]) -> None:
    for kind, sharding, size, consumed in product(["single", "cyclic"], [True, False], [1, 3], [0, 12]):
        topology = {"data_parallel_size": size, "dataloader_type": kind, "data_sharding": sharding}
        run = make(prefixes, **topology, consumed_samples=consumed)
        train = run.build()[0]
        ranks = []
        for rank in range(size):
            loader = binidx.build_pretraining_data_loader(train, consumed, 2, rank, **topology)
            assert loader is not None
            ranks.append([*islice(loader.batch_sampler, 5)])
        for step in range(5):
            assert [run.samples_of_step(step, rank) for rank in range(size)] == [batches[step] for batches in ranks]
            assert run.samples_of_step(step) == [*chain(*(batches[step] for batches in ranks))]
        assert [*run.samples_of_steps(range(1, 4), 0)] == ranks[0][1:4]


def test_a_single_run_ends_and_a_cyclic_one_goes_on(prefixes: list[str]) -> None:
    single, cyclic = (make(prefixes, dataloader_type=kind) for kind in ("single", "cyclic"))
    total = len(single.build()[0])
    assert len([*single.samples_of_steps(range(10**6))]) == total // 2
    assert single.samples_of_step(10**6) == []
    epochs = [*cyclic.samples_of_steps(range(total // 2 * 3))]
    assert [cyclic.samples_of_step(step) for step in range(len(epochs))] == epochs
    for epoch in range(3):
        served = chain(*epochs[total // 2 * epoch : total // 2 * (epoch + 1)])
        assert sorted(served) == list(range(total // 2 * 2))


def test_pinned_datasets_are_built_beside_those_that_are_not(prefixes: list[str]) -> None:
    run = make(prefixes)
    outcomes: list[Any] = []
    current = run.build(pinned=False, planned=False)
    assert (pinned := run.build(on_outcome=outcomes.append)) is not current
    assert outcomes
    assert run.build() is pinned
    assert run.build(pinned=False, planned=False) is run.build(pinned=False)


def test_a_run_pickles_without_what_it_built(prefixes: list[str]) -> None:
    run = make(prefixes)
    run.build()
    assert len(pickle.dumps(run)) < 4096
    assert pickle.loads(pickle.dumps(run)).samples_of_step(3) == run.samples_of_step(3)


def test_a_tokenizer_keeps_what_the_samples_depend_on() -> None:
    class Ambiguous:
        eod = pad = 3

        def __init__(self) -> None:
            self.unique_identifiers = OrderedDict([("z", 1), ("a", 2)])
            self.special_tokens_dict = OrderedDict([("eos_token", 3), ("pad_token", 3)])

        @property
        def eos(self) -> int:
            raise NotImplementedError("eos")

    saved = SavedTokenizer.of(Ambiguous())
    assert list(saved.unique_identifiers) == ["z", "a"]
    assert (saved.eod, saved.pad, saved.eos) == (3, 3, None)
    with pytest.raises(ConfigError, match="object: has no unique_identifiers"):
        SavedTokenizer.of(object())


def test_the_tokenizer_of_a_file_serves_as_the_tokenizer_of_a_run(prefixes: list[str], tmp_path: Path) -> None:
    def described() -> Any:
        return binidx.describe_tokenizer(trained_tokenizers.save("gpt2", tmp_path), eod=0)

    run = make(prefixes, tokenizer=described())
    run.save("memory://runs/described.json")
    loaded, again = binidx.Run.load("memory://runs/described.json"), make(prefixes, tokenizer=described())
    names = {each.build()[0].unique_description_hash for each in (run, loaded, again)}  # type: ignore[union-attr]
    assert len(names) == 1
    for number in range(8):
        assert_same_sample(loaded.build()[0][number], run.build()[0][number])  # type: ignore[index]


def broken(prefixes: list[str], **changes: Any) -> bytes:
    described = json.loads(format_run(make(prefixes)))
    for path, value in changes.items():
        *way, name = path.split("__")
        inside = described
        for each in way:
            inside = inside[each]
        inside.pop(name) if value is ... else inside.__setitem__(name, value)
    return json.dumps(described).encode()


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"micro_batch_sise": 1}, r"\$: unknown field micro_batch_sise; it has config, sizes"),
        ({"config__sequense_length": 1}, r"\$\.config: unknown field sequense_length; it has"),
        ({"config__tokenizer__pat": 1}, r"\$\.config\.tokenizer: unknown field pat; it has"),
        (
            {"config__tokenizer__unique_identifiers": ...},
            r"\$\.config\.tokenizer: missing required field unique_identifiers",
        ),
        ({"config__storage_options": {"key": "k"}}, r"\$\.config: unknown field storage_options"),
        ({"sizes": ...}, r"\$: missing required field sizes"),
        ({"config__tokenizer": ...}, "tokenizer: "),
        ({"config__random_seed": ...}, r"\$\.config: missing required field random_seed"),
        ({"config__blend": [["a"]]}, r"\$\.config\.blend: expected array of length 2 \(found \[\['a'\]\]\)"),
        ({"config__blend_per_split": [3]}, r"\$\.config\.blend_per_split\[0\]: expected array \| null \(found 3\)"),
        ({"config": 3}, r"\$\.config: expected object \(found 3\)"),
        ({"sizes": [1, 2]}, "sizes: found 2, needs 3"),
        ({"sizes": [None, 2, 3]}, "sizes: found None for train"),
        ({"micro_batch_size": 0}, "micro_batch_size: found 0, needs a whole number from 1"),
        ({"data_parallel_size": "4"}, r"\$\.data_parallel_size: expected int \(found '4'\)"),
        ({"consumed_samples": -1}, "consumed_samples: found -1, needs a whole number from 0"),
        ({"dataloader_type": "external"}, "dataloader_type: found 'external'"),
    ],
)
def test_a_file_that_is_no_run_says_what_is_wrong(prefixes: list[str], changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        parse_run(broken(prefixes, **changes))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json: no JSON"):
        binidx.Run.load(str(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"run\.json: \$: expected object \(found \[\]\)"):
        binidx.Run.load(str(path))
    with pytest.raises(ObjectNotFoundError):
        binidx.Run.load(str(tmp_path / "none.json"))


def test_a_run_of_a_web_page_chooses_neither_hosts_nor_files(web: Server, prefixes: list[str]) -> None:
    blend = {"blend_per_split": [([f"{web.endpoint}/en"], None), None, None], "blend": None, "split": None}
    for changes, named in (
        ({}, prefixes[0]),
        (blend | {"path_to_cache": "/tmp/cache"}, "/tmp/cache"),
        ({"blend": (["https://other/en"], None)}, "https://other/en"),
    ):
        web.objects["/run.json"] = format_run(make(prefixes, **changes))
        with pytest.raises(ConfigError, match=rf"names data elsewhere \(found {named}, needed {web.endpoint}"):
            binidx.Run.load(f"{web.endpoint}/run.json")
        allowed = {"binidx": {"parts_from": "file://,https://other"}}
        assert binidx.Run.load(f"{web.endpoint}/run.json", allowed).config.random_seed == 1
    web.objects["/run.json"] = format_run(make(prefixes, **blend))
    assert binidx.Run.load(f"{web.endpoint}/run.json").config.blend_per_split is not None


def test_a_staged_run_is_saved_read_and_traced(prefixes: list[str]) -> None:
    stages = [binidx.Stage((prefixes, [0.5, 0.5]), 20, 30), binidx.Stage((prefixes[:1], [1.0]), 10)]
    run = make(prefixes, sizes=[0, 4, 0], stages=stages, data_parallel_size=2)
    run.save("memory://runs/staged.json")
    loaded = binidx.Run.load("memory://runs/staged.json")
    assert format_run(loaded) == format_run(run)
    train, valid, _ = loaded.build()
    assert isinstance(train, binidx.StagedBlendedDataset)
    assert len(train) == 30
    assert isinstance(valid, binidx.megatron.BlendedDataset)
    assert [*loaded.samples_of_steps(range(2))] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    order = RunOrder.of(loaded)
    readings, contents = order.trace(range(6, 7))
    assert readings.sample.tolist() == [24, 25, 26, 27]
    assert {order.prefixes[source] for source in contents.source} == {prefixes[0]}


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"sizes": [5, 4, 0]}, "stages have sizes of their own; needs 0"),
        ({"sizes": []}, "sizes: "),
        ({"stages": [5]}, r"\$\.stages\[0\]: expected object \(found 5\)"),
        ({"stages": 7}, r"\$\.stages: expected array \| null \(found 7\)"),
    ],
)
def test_impossible_stages_of_a_file_are_refused(prefixes: list[str], changes: dict[str, Any], needed: str) -> None:
    run = make(prefixes, sizes=[0, 4, 0], stages=[binidx.Stage((prefixes, [0.5, 0.5]), 20)])
    text = json.dumps({**json.loads(format_run(run)), **changes})
    with pytest.raises(ConfigError, match=needed):
        parse_run(text.encode())
