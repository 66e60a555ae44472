"""Classes as users of Megatron Core have written them, over any library of its modules' names."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from binidx.compat.megatron import serve

NAMES = (
    "blended_dataset",
    "blended_megatron_dataset_builder",
    "blended_megatron_dataset_config",
    "gpt_dataset",
    "helpers",
    "indexed_dataset",
    "megatron_dataset",
    "object_storage_utils",
    "utils",
)


def library(*, stand_ins: bool) -> SimpleNamespace:
    """The modules of `megatron.core.datasets`, as they are or as after `install`, and users' classes over them."""
    lib = SimpleNamespace(**{name: load(name, stand_ins) for name in NAMES})
    lib.users = define(lib)
    return lib


def load(name: str, stand_in: bool) -> Any:
    """A module of Megatron's; or its stand-in, with the names that it lacks."""
    own = importlib.import_module(f"megatron.core.datasets.{name}")
    if not stand_in or name not in serve.CORE:
        return own
    ours = importlib.import_module(f"binidx.compat.megatron.{name}")
    return SimpleNamespace(**{**vars(own), **vars(ours)})


def define(lib: SimpleNamespace) -> SimpleNamespace:
    GPTDataset, GPTDatasetConfig = lib.gpt_dataset.GPTDataset, lib.gpt_dataset.GPTDatasetConfig  # noqa: N806
    IndexedDataset = lib.indexed_dataset.IndexedDataset  # noqa: N806

    class ArrayDataset(lib.megatron_dataset.MegatronDataset):
        """Its own low-level dataset, an array; only what Megatron's base class asks for."""

        def __init__(self, dataset, dataset_path, indices, num_samples, index_split, config):
            super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
            if self.num_samples is None:
                self.num_samples = len(self.indices)
            self.sample_index = numpy.random.RandomState(1).choice(self.indices, size=self.num_samples)

        @staticmethod
        def numel_low_level_dataset(low_level_dataset):
            return len(low_level_dataset)

        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            return numpy.load(dataset_path)

        def __len__(self):
            return len(self.sample_index)

        def __getitem__(self, idx):
            return {"text": self.dataset[self.sample_index[idx]]}

    class Marked(GPTDataset):
        """More in a sample, by super()."""

        def __getitem__(self, idx):
            sample = super().__getitem__(idx)
            sample["tokens"] = sample["tokens"] + 1
            return {**sample, "number": torch.tensor(-1 if idx is None else idx)}

    class Queried(GPTDataset):
        """Another text of each sample."""

        def _query_document_sample_shuffle_indices(self, idx):
            text, document_ids = super()._query_document_sample_shuffle_indices(idx)
            return numpy.where(text == 5, self._pad_token_id, text[::-1]), document_ids

    class Copied(GPTDataset):
        """A __getitem__ made after Megatron's, with its cached masks."""

        def __getitem__(self, idx):
            text, document_ids = self._query_document_sample_shuffle_indices(idx)
            text = torch.from_numpy(text).long()
            tokens, labels = text[:-1].contiguous(), text[1:].contiguous()
            if not self.masks_and_position_ids_are_cacheable or not self.masks_and_position_ids_are_cached:
                attention_mask, loss_mask, position_ids = lib.gpt_dataset._get_ltor_masks_and_position_ids(
                    tokens,
                    self.config.tokenizer.eod,
                    self.config.reset_position_ids,
                    self.config.reset_attention_mask,
                    self.config.eod_mask_loss,
                    self.config.create_attention_mask,
                )
                if self.masks_and_position_ids_are_cacheable:
                    self.cached_attention_mask = attention_mask
                    self.cached_loss_mask = loss_mask
                    self.cached_position_ids = position_ids
                    self.masks_and_position_ids_are_cached = True
            else:
                attention_mask, position_ids = self.cached_attention_mask, self.cached_position_ids
                loss_mask = self.cached_loss_mask.clone()
            loss_mask[labels == self._pad_token_id] = 0.0
            return {
                "tokens": tokens,
                "labels": labels,
                "attention_mask": attention_mask,
                "loss_mask": loss_mask,
                "position_ids": position_ids,
                "document_ids": torch.from_numpy(document_ids),
            }

    class Backwards(GPTDataset):
        """The indices of the base class, the order turned round."""

        def _build_document_sample_shuffle_indices(self):
            document_index, sample_index, shuffle_index = super()._build_document_sample_shuffle_indices()
            return document_index, sample_index, numpy.ascontiguousarray(shuffle_index[::-1])

    class Built(GPTDataset):
        """Indices of its own, out of Megatron's helpers."""

        def _build_document_sample_shuffle_indices(self):
            tokens_per_epoch = self._get_num_tokens_per_epoch()
            num_epochs = self._get_num_epochs(tokens_per_epoch)
            rng = numpy.random.RandomState(self.config.random_seed + 1)
            document_index = lib.gpt_dataset._build_document_index(self.indices, num_epochs, rng, num_epochs > 1)
            sample_index = lib.helpers.build_sample_idx(
                self.dataset.sequence_lengths,
                document_index,
                self.config.sequence_length,
                num_epochs,
                tokens_per_epoch,
                True,
                self.config.add_extra_token_to_sequence,
            )
            num_samples = sample_index.shape[0] - 1
            shuffle_index = lib.gpt_dataset._build_shuffle_index(num_samples // 2, num_samples, rng)
            return document_index, sample_index, shuffle_index

    class Squares:
        """A low-level dataset of no file."""

        sequence_lengths = numpy.arange(3, 60, dtype=numpy.int32)

        def __len__(self):
            return len(self.sequence_lengths)

        def __getitem__(self, idx):
            return numpy.arange(self.sequence_lengths[idx], dtype=numpy.int64) ** 2 * 10**6 + idx

        def get(self, idx, offset=0, length=None):
            stop = None if length is None else offset + length
            return self[idx][offset:stop]

    class OfSquares(GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            return Squares()

        @staticmethod
        def numel_low_level_dataset(low_level_dataset):
            return len(low_level_dataset)

    class Shifted(IndexedDataset):
        """Other tokens than the file's."""

        def get(self, idx, offset=0, length=None):
            return super().get(idx, offset, length) + 1

    class OfShifted(GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            return Shifted(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    class FromStore(GPTDataset):
        """Opens a prefix as Megatron's own do, one in a store with what it needs for that."""

        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            if lib.object_storage_utils.is_object_storage_path(dataset_path):
                assert config.object_storage_cache_path is not None
                return IndexedDataset(
                    dataset_path,
                    multimodal=False,
                    mmap=config.mmap_bin_files,
                    object_storage_config=lib.object_storage_utils.ObjectStorageConfig(
                        path_to_idx_cache=config.object_storage_cache_path
                    ),
                )
            return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    @dataclass
    class DialConfig(GPTDatasetConfig):
        """A config of its own, whose field is part of the caches' names."""

        dial: int = 3

        def __post_init__(self):
            super().__post_init__()
            assert self.dial > 0

    class Dialled(GPTDataset):
        @staticmethod
        def _key_config_attributes():
            return [*GPTDataset._key_config_attributes(), "dial"]

        def __len__(self):
            return super().__len__() // self.config.dial

    class Mirrored(lib.blended_dataset.BlendedDataset):
        def _build_indices(self):
            dataset_index, dataset_sample_index = super()._build_indices()
            return dataset_index[::-1], dataset_sample_index[::-1]

    return SimpleNamespace(**{name: value for name, value in locals().items() if isinstance(value, type)})


class Tokenizer:
    vocab_size, eod, pad = 1000, 0, 999

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict([("class", "users.Tokenizer")])
