"""Batches that cross to a device as a block are those of the loader in memory, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.forked_ranks import ForkedRanks, forked_ranks
from helpers.gpt_data import TOKENIZER, write_with_megatron

import binidx
from binidx.errors import ConfigError
from binidx.loader.device_batches import DeviceBatches

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")),
]
FLAGS: list[list[str]] = [
    [],
    ["reset_position_ids", "eod_mask_loss"],
    ["create_attention_mask"],
    ["inter_document_masking"],
]


def write(folder: Path) -> str:
    rng = np.random.default_rng(3)
    return write_with_megatron(folder / "en", rng.integers(0, 40, 200).astype(np.int32), rng, np.uint16)


def load(folder: Path, flags: list[str]) -> Any:
    return binidx.load_dataset(write(folder), 24, num_samples=60, tokenizer=TOKENIZER, **dict.fromkeys(flags, True))


def assert_same_batch(found: Any, needed: Any, device: str) -> None:
    assert list(found) == list(needed)
    for name in needed:
        assert found[name].device.type == device
        assert found[name].dtype == needed[name].dtype
        assert found[name].shape == needed[name].shape
        assert found[name].cpu().numpy().tobytes() == needed[name].numpy().tobytes(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_on_a_device_are_those_in_memory(device: str, flags: list[str], workers: int, tmp_path: Path) -> None:
    train = load(tmp_path, flags)
    here = train.loader(4)
    there = train.loader(4, device=device, num_workers=workers, persistent_workers=False)
    count = 0
    for found, needed in zip(islice(there, 9), islice(here, 9), strict=True):
        assert_same_batch(found, needed, device)
        assert there.consumed_samples == here.consumed_samples
        count += 1
    assert count == 9
    assert_same_batch(there[3], here[3], device)


@pytest.mark.parametrize("device", DEVICES)
def test_any_iterable_of_batches_is_served_to_its_end(device: str) -> None:
    rng = np.random.default_rng(0)
    batches = [
        {"tokens": torch.from_numpy(rng.integers(0, 2**40, (2, length))), "parts": (torch.ones(length), "name")}
        for length in rng.integers(1, 200, 100)
    ]
    served = [*DeviceBatches(batches, device, ahead=5)]
    assert len(served) == len(batches)
    for found, needed in zip(served, batches, strict=True):
        assert found["tokens"].device.type == device
        assert found["tokens"].tolist() == needed["tokens"].tolist()
        assert found["parts"][1] == "name"


def test_the_first_batch_does_not_wait_for_others() -> None:
    taken: list[int] = []

    def batches() -> Iterator[Any]:
        for number in range(20):
            taken.append(number)
            yield {"x": torch.tensor([number])}

    served = DeviceBatches(batches(), "cpu", ahead=3)
    assert next(served)["x"].item() == 0
    assert taken == [0]
    assert [batch["x"].item() for batch in islice(served, 3)] == [1, 2, 3]
    assert taken == [0, 1, 2, 3, 4, 5, 6]


def test_what_is_no_name_of_a_device_is_an_error_of_the_call() -> None:
    for name in ("gpu", 1.5):
        with pytest.raises(ConfigError, match=f"device: found {name!r}, needs a name that torch.device takes"):
            DeviceBatches([], name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_cuda_that_is_not_there_is_an_error_of_the_call(tmp_path: Path) -> None:
    message = "device: found 'cuda', (this torch is built without CUDA|torch sees no GPU); leave device out"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, []).loader(batch_size=2, device="cuda")
    with pytest.raises(ConfigError, match=message):
        DeviceBatches([], "cuda")


def test_a_reader_needs_batches() -> None:
    with pytest.raises(ConfigError, match="batches: found None on the rank that reads"):
        DeviceBatches(None, "cpu")


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    with forked_ranks() as process:
        yield process


@pytest.mark.parametrize("flags", [[], ["inter_document_masking"]])
@pytest.mark.parametrize("most", [5, 99])
def test_one_rank_reads_and_the_others_receive(flags: list[str], most: int, ranks: ForkedRanks, tmp_path: Path) -> None:
    prefix = write(tmp_path)
    options: Any = {"num_samples": 60, **dict.fromkeys(flags, True)}
    variables = [{"RANK": str(rank), "WORLD_SIZE": "2", "STORE": f"{tmp_path}/store"} for rank in range(2)]
    ended = ranks.run("helpers.device_ranks", {"prefix": prefix, "options": options, "most": most}, variables)
    assert [rank["status"] for rank in ended] == [0, 0], [rank["log"] for rank in ended]
    first, second = (json.loads(rank["out"]) for rank in ended)
    assert first == second
    needed = binidx.load_dataset(prefix, 24, **options).loader(4)
    assert first["batches"] == [
        {name: value.tolist() for name, value in batch.items()} for batch in islice(needed, most)
    ]


def test_an_error_of_the_rank_that_reads_ends_the_others(ranks: ForkedRanks, tmp_path: Path) -> None:
    how = {"prefix": write(tmp_path), "options": {"num_samples": 60}, "most": 99, "fails_at": 13}
    variables = [{"RANK": str(rank), "WORLD_SIZE": "2", "STORE": f"{tmp_path}/store"} for rank in range(2)]
    ended = ranks.run("helpers.device_ranks", how, variables)
    assert [rank["status"] for rank in ended] == [0, 0], [rank["log"] for rank in ended]
    assert ended[0]["out"] == "StorageError: s3://corpus/en: no sample 13\n"
    assert ended[1]["out"].startswith(
        "PeerError: batches: their reader, rank 0: StorageError('s3://corpus/en: no sample 13')"
    )
