"""Documents of text and images, written as Megatron's tool writes them; and Megatron's made-up ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from helpers.gpt_data import TOKENIZER, assert_same_sample
from helpers.oracle import megatron

import binidx
from binidx.dataset.assemble.text_and_images import image_bytes
from binidx.dataset.megatron.multimodal import build_serving_order
from binidx.errors import ConfigError, FormatError, IndexBuildError

S = 16
CONFIG: dict[str, Any] = {
    "random_seed": 1234, "sequence_length": S, "tokenizer": TOKENIZER, "image_h": 2, "image_w": 3,
    "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
}  # fmt: skip
Items = list[tuple[int, list[int] | bytes]]
"""Mode and tokens, or mode and image file."""


def packed(image: bytes) -> list[int]:
    """As `preprocess_mmdata.py` stores a file among int32 tokens."""
    padding = -len(image) % 4
    return [padding, *np.frombuffer(image + bytes(padding), np.int32).tolist()]


def random_items(rng: np.random.Generator) -> Items:
    """Text and images in turn, sometimes more text than fits, sometimes none."""
    items: Items = []
    for _ in range(rng.integers(1, 4)):
        if rng.random() < 0.8:
            items.append((0, rng.integers(1, 900, rng.integers(0, 14)).tolist()))
        if rng.random() < 0.7:
            items.append((int(rng.integers(1, 3)), rng.bytes(rng.integers(0, 30))))
    return items


def write(prefix: Path, documents: list[Items]) -> str:
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.int32, multimodal=True) as builder:
        for items in documents:
            stored = [packed(item) if isinstance(item, bytes) else item for _, item in items]
            tokens = [token for item in stored for token in item]
            builder.add_document(tokens, list(map(len, stored)), [mode for mode, _ in items])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def documents() -> list[Items]:
    rng = np.random.default_rng(0)
    return [[] if each % 10 == 7 else random_items(rng) for each in range(60)]


@pytest.fixture(scope="module")
def prefix(documents: list[Items], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("data") / "web", documents)


def build(prefixes: list[str], sizes: Any = (None, None, None), weights: Any = None, **changes: Any) -> list[Any]:
    options = {"split": "8,1,1", **CONFIG, **changes}
    config = binidx.megatron.MultimodalDatasetConfig(blend=(prefixes, weights), **options)
    return binidx.BlendedMegatronDatasetBuilder(
        binidx.megatron.MultimodalDataset, list(sizes), lambda: True, config
    ).build()


def test_a_sample_is_the_text_and_the_images_of_one_document(prefix: str, documents: list[Items]) -> None:
    dataset = build([prefix], split="1,0,0")[0]
    served = []
    for idx, sample in zip(range(len(dataset)), dataset.__getitems__(range(len(dataset))), strict=True):
        served.append(int(dataset.document_index[idx]))
        items = documents[served[-1]]
        text = [token for mode, item in items if mode == 0 for token in item]
        fed, labels = text[:S], text[1 : S + 1]
        assert sample["tokens"].tolist() == fed + [0] * (S - len(fed))
        assert sample["labels"].tolist() == labels + [0] * (S - len(labels))
        assert sample["loss_mask"].tolist() == [1.0] * len(labels) + [0.0] * (S - len(labels))
        assert sample["position_ids"].tolist() == [*range(S)]
        assert [image_bytes(image) for image in sample["images"]] == [item for mode, item in items if mode]
        assert sample["image_modes"].tolist() == [mode for mode, _ in items if mode]
        before = np.cumsum([len(item) if mode == 0 else 0 for mode, item in items]).tolist()
        assert sample["image_positions"].tolist() == [b for b, (mode, _) in zip(before, items, strict=True) if mode]
    assert sorted(served) == [each for each, items in enumerate(documents) if items]
    assert served != sorted(served)


def test_text_that_is_cut_off_is_not_read(prefix: str) -> None:
    dataset = build([prefix], split="1,0,0")[0]
    modes = dataset.dataset.sequence_modes
    for idx in range(len(dataset)):
        spans = dataset.spans(idx)
        assert sum(count for sequence, _, count in spans if modes[sequence] == 0) <= S + 1


@pytest.mark.parametrize(
    "options",
    [
        {"add_extra_token_to_sequence": False},
        {"create_attention_mask": True, "reset_attention_mask": True},
        {"create_attention_mask": True},
        {"inter_document_masking": True},
        {"eod_mask_loss": True, "reset_position_ids": True},
    ],
    ids=str,
)
def test_the_text_is_a_gpt_sample_of_it(prefix: str, tmp_path: Path, documents: list[Items], options: Any) -> None:
    dataset = build([prefix], split="1,0,0", **options)[0]
    texts = [[t for mode, item in items if mode == 0 for t in item] for items in documents]
    for idx in range(12):
        text = texts[dataset.document_index[idx]][: S + 1]
        if len(text) < 2:
            continue
        with binidx.IndexedDatasetBuilder(f"{tmp_path}/{idx}.bin", np.int32) as builder:
            builder.add_document(text, [len(text)])
            builder.finalize(f"{tmp_path}/{idx}.idx")
        gpt = {name: value for name, value in CONFIG.items() if not name.startswith("image")}
        config = binidx.GPTDatasetConfig(
            blend=([f"{tmp_path}/{idx}"], None), split="0,1,0",
            drop_last_partial_validation_sequence=False, **{**gpt, **options},
        )  # fmt: skip
        plain = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [None] * 3, lambda: True, config).build()[1]
        assert plain is not None
        sample = {name: value for name, value in dataset[idx].items() if not name.startswith("image")}
        assert_same_sample(sample, plain[0])


def test_each_epoch_serves_every_document_once_and_in_an_order_of_its_own() -> None:
    documents = np.arange(5, 25, dtype=np.int32)
    order = build_serving_order(documents, 50, 3)
    assert len(order) == 50
    epochs = order[:20].tolist(), order[20:40].tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == documents.tolist()
    assert epochs[0] != epochs[1]
    assert len(set(order[40:].tolist())) == 10
    assert (build_serving_order(documents, 30, 3) == order[:30]).all()
    assert not (build_serving_order(documents, 50, 4) == order).all()


def test_splits_divide_documents(prefix: str) -> None:
    served = [set(dataset.document_index.tolist()) for dataset in build([prefix])]
    assert [max(each) < first for each, first in zip(served, (48, 54, 60), strict=True)] == [True] * 3
    assert not served[0] & served[1] | served[1] & served[2]


def as_pixels(sample: dict[str, Any]) -> dict[str, Any]:
    """An image of the model's shape out of the first item: its bytes, repeated."""
    content = image_bytes(sample["images"][0]) if sample["images"] else b""
    pixels = np.resize(np.frombuffer(content or b"\0", np.uint8), (3, 2, 3)).astype(np.float32)
    return {"tokens": sample["tokens"], "image": torch.from_numpy(pixels), "num_images": len(sample["images"])}


@pytest.mark.parametrize("workers", [0, 2])
def test_blends_from_s3_are_the_local_ones_in_workers_too(prefix: str, workers: int, tmp_path: Path, s3: Any) -> None:
    base, rng = s3.fresh(), np.random.default_rng(1)
    other = write(tmp_path / "other", [[(0, [1, 2]), (1, rng.bytes(9))] for _ in range(20)])
    for name, path in (("web", prefix), ("other", other)):
        for end in ("bin", "idx"):
            with fsspec.open(f"{base}/{name}.{end}", "wb") as out:
                out.write(Path(f"{path}.{end}").read_bytes())
    options: dict[str, Any] = {"sizes": (32, 0, 0), "weights": [0.6, 0.4], "preprocess_func": as_pixels}
    here, there = (build(prefixes, **options)[0] for prefixes in ([prefix, other], [f"{base}/web", f"{base}/other"]))
    loader = binidx.build_pretraining_data_loader(there, 0, 8, num_workers=workers)
    assert loader is not None
    for step, batch in enumerate(loader):
        assert batch["image"].shape == (8, 3, 2, 3)
        needed = torch.utils.data.default_collate([here[idx] for idx in range(8 * step, 8 * step + 8)])
        for key in ("tokens", "image", "num_images", "dataset_id"):
            assert torch.equal(batch[key], needed[key]), key


def test_a_dataset_that_was_read_pickles(prefix: str) -> None:
    dataset = build([prefix])[0]
    before = dataset[3]["tokens"]
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[3]["tokens"], before)


def test_the_padding_sample_is_sample_0_without_loss(prefix: str) -> None:
    dataset = build([prefix])[0]
    assert dataset[None]["loss_mask"].sum() == 0
    assert torch.equal(dataset[None]["tokens"], dataset[0]["tokens"])


def test_samples_count_from_the_end_too_and_there_are_no_others(prefix: str) -> None:
    dataset = build([prefix])[0]
    assert torch.equal(dataset[-1]["tokens"], dataset[len(dataset) - 1]["tokens"])
    for idx in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=rf"sample {idx}, it has {len(dataset)}"):
            dataset[idx]


def test_samples_of_a_split_without_documents_are_an_error_that_names_it(prefix: str) -> None:
    with pytest.raises(IndexBuildError, match=r"web, test split: no document has a sequence, 5 samples"):
        build([prefix], (5, 0, 5), split="999,0,1")
    assert len(build([prefix], (5, 0, 0), split="999,0,1")[2]) == 0


def test_a_dataset_written_as_text_is_refused(tmp_path: Path) -> None:
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/text.bin", np.int32) as builder:
        builder.add_document([1, 2], [2])
        builder.finalize(f"{tmp_path}/text.idx")
    with pytest.raises(FormatError):
        build([f"{tmp_path}/text"])


@pytest.mark.parametrize("size", range(9))
def test_an_image_file_comes_back_byte_by_byte(size: int) -> None:
    image = bytes(range(size))
    assert image_bytes(np.array(packed(image), np.int32)) == image
    assert image_bytes(np.frombuffer(image, np.uint8)) == image


@pytest.mark.parametrize("item", [np.empty(0, np.int32), np.array([4, 1], np.int32), np.array([1], np.int32),
                                  np.array([-1, 5], np.int32), np.array([0, 5], np.int64)])  # fmt: skip
def test_an_item_that_is_no_image_file_is_an_error(item: np.ndarray) -> None:
    with pytest.raises(FormatError, match="image: int"):
        image_bytes(item)


def test_made_up_samples_are_megatrons() -> None:
    options = {**CONFIG, "create_attention_mask": False}
    ours = binidx.BlendedMegatronDatasetBuilder(
        binidx.megatron.MockMultimodalDataset,
        [20, 5, 5],
        lambda: True,
        binidx.megatron.MultimodalDatasetConfig(**options),
    ).build()
    needed = megatron.builder.BlendedMegatronDatasetBuilder(
        megatron.multimodal.MockMultimodalDataset,
        [20, 5, 5],
        lambda: True,
        megatron.multimodal.MultimodalDatasetConfig(**options),
    ).build()
    for found, expected in zip(ours, needed, strict=True):
        assert found is not None
        for idx, sample in zip(range(5), found.__getitems__(range(5)), strict=True):
            assert_same_sample(sample, expected[idx])


def test_the_size_of_images_must_be_given(prefix: str) -> None:
    with pytest.raises(ConfigError, match="image_w: must be given"):
        build([prefix], image_w=None)
