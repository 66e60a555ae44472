"""GPT samples: S + 1 consecutive tokens of the shuffled, concatenated sequences, as tensors.

mapped `.bin`    sample numbers ──────────────── one call of C ────────────────► rows of the batch
elsewhere        sample numbers ─► spans ─► byte ranges ─► stored tokens ─ C ─► rows of the batch
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.gpt_index import GPTIndices, RangedOrders
from binidx.dataset.megatron_dataset import Request, required
from binidx.dataset.torch_bridge import Sample, Samples, Tensor, as_tensor
from binidx.errors import ConfigError, IndexBuildError
from binidx.format.idx import DType
from binidx.format.indexed_dataset import IndexedDataset, Span, read_spans
from binidx.format.ranged_arrays import RangedArray
from binidx.index.cache.index_files import Arrays
from binidx.index.gpt_indices import ARRAYS
from binidx.native.gpt_samples import GPTRows, Orders, Recipe, Rows, Starts, TextRows

INT32_DTYPES = {DType.code_from_dtype(dtype) for dtype in (np.uint8, np.int8, np.int16, np.int32, np.uint16)}
LowLevel = TypeVar("LowLevel", bound=IndexedDataset)


class GPTDataset(GPTIndices):
    """Samples of `sequence_length` tokens and their labels, in Megatron Core's order.

        sample i  ─ shuffle_index ─►  rows j and j+1 of sample_index: where it starts and ends in document_index
                  ─ document_index ─►  spans of sequences  ─ .bin ─►  tokens

    A sample is a dict of tensors, each of shape (S,): `tokens`, `labels`, `position_ids` int64, `loss_mask` float32,
    and on request `attention_mask` bool (1, S, S), True where attention is forbidden. With `inter_document_masking`
    there are instead of the mask, both int32: `cu_seqlens` (S + 1,), the starts of documents and then S to the end, and
    `max_seqlen` (), tokens of the longest document; positions restart at each document. The tensors of a batch share
    one block of memory, which is freed with the last of them.

    Usually built by `BlendedMegatronDatasetBuilder`.

    Args:
        indexed_dataset: the stored sequences.
        dataset_path: their prefix, as the user wrote it: part of the identity.
        indexed_indices: the sequences of the split, shape (num_in_split,), int32.
        num_samples: the least number of samples; None is one epoch.
        index_split: the split.
        config: options of the run.

    Raises:
        ConfigError: the tokenizer has no `eod` and the config needs it.
        IndexBuildError: samples were requested of a split without tokens (Megatron loops for ever).

    Example:
        >>> config = binidx.GPTDatasetConfig(
        ...     random_seed=1234, sequence_length=4096, blend=(["s3://corpus/en"], None), split="1,0,0",
        ...     tokenizer=tokenizer)
        >>> builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [1000, 0, 0], lambda: True, config)
        >>> train, _, _ = builder.build()
        >>> train[0]["tokens"].shape
        torch.Size([4096])

    Source: Megatron Core, `GPTDataset`. Differences: counts stay integers (its count of a partial last sample goes
    through float32), a stale index cache is rebuilt instead of served, and each sample has its own loss mask (if
    Megatron serves a padded sample first, it reuses that mask for all others).
    """

    RECORDED_NAME: ClassVar[str] = "GPTDataset"

    takes_a_range = True
    """True if `indexed_indices` may be a range: see `split_range`."""

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self._set_index(self._load_or_build())

    def _set_index(self, arrays: Arrays) -> None:
        self.document_index, self.sample_index, self.shuffle_index = (arrays[name] for name in ARRAYS)

    def __getstate__(self) -> dict[str, Any]:
        # These two hold addresses of this process.
        return {name: value for name, value in vars(self).items() if name not in ("_orders", "recipe")}

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Return the number of elements that splits divide.

        Args:
            low_level_dataset: the stored sequences.

        Returns:
            The number of sequences: GPT splits by sequence, not by document.
        """
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> IndexedDataset:
        """Open the `.bin`/`.idx` pair of a prefix.

        Args:
            dataset_path: prefix, a path or any URI.
            config: `mmap_bin_files`, `storage_options` and `sequences_per_dataset` are used.

        Returns:
            The stored sequences.

        Raises:
            ConfigError: there is no prefix, or `sequences_per_dataset` lacks it or contradicts its header.
            ObjectNotFoundError: one of the two files is missing.
        """
        return open_low_level_dataset(IndexedDataset, dataset_path, config)

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    # Samples

    def spans(self, idx: int | None) -> list[Span]:
        """Return (sequence, first token, number of tokens) of each piece of a sample.

        Args:
            idx: position in serving order; None is the padding sample, which has the tokens of sample 0.

        Returns:
            The pieces in the order of the stream, one for each sequence that the sample touches.

        Raises:
            IndexError: there is no such sample.
        """
        return [(sequence, first, count) for sequence, first, count in self.orders.spans([idx or 0])[0].tolist()]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """Return the sample of the given tokens: padded to S, with labels, masks and positions.

        Args:
            idx: as for `spans`; the padding sample (None) has no loss.
            sequences: tokens of each span, 1-D, of the stored dtype or a wider one.

        Returns:
            The tensors of one sample, as the class describes them.
        """
        return assemble_gpt_sample(self, idx, sequences)

    def read_sample(self, idx: int | None) -> Sample:
        """Return one sample.

        Args:
            idx: as for `spans`.

        Returns:
            Its tensors, without a batch axis.
        """
        # Written without a batch axis: taking the sample out of a batch of one costs a quarter more.
        if self._is_customized():
            return super().read_sample(idx)
        rows = GPTRows(self.recipe, None)
        fill_rows(rows, [(self, [idx], [0])])
        return columns(self, rows)

    @classmethod
    def read_batch(cls, requests: Sequence[Request], num_rows: int) -> Sequence[Sample]:
        """Return a batch of samples; C writes its rows unless a subclass replaces `spans` or `assemble`.

        Args:
            requests: the samples of each dataset and their rows.
            num_rows: size of the batch; each row is in one request.

        Returns:
            The samples in the order of their rows, which share the memory of the batch.
        """
        if cls._is_customized() or not share_config(requests):
            return super().read_batch(requests, num_rows)
        first = requests[0][0]
        fill_rows(rows := GPTRows(first.recipe, num_rows), requests)
        shared = () if first.config.reset_attention_mask else ("attention_mask",)
        return Samples(num_rows, columns(first, rows), shared)

    @classmethod
    def _is_customized(cls) -> bool:
        return (cls.spans, cls.assemble) != (GPTDataset.spans, GPTDataset.assemble)

    def read_tokens(self, idxs: Sequence[int]) -> NDArray[np.int32]:
        """Return only the tokens of samples, a seventh of their bytes, for trainers that shift labels themselves.

        Args:
            idxs: positions in serving order, B of them.

        Returns:
            `text`, int32, shape (B, S + 1): `text[:, :-1]` are tokens, `text[:, 1:]` labels. A pad has the tokenizer's
            pad id, or -1 if it has none: exclude these labels from the loss, and replace these tokens by a valid one.
            Pads occur in a partial last validation sample, and in the last column without the extra token.

        Raises:
            ConfigError: the tokens are stored as float or int64, or a subclass makes its own samples.

        Example:
            >>> train.read_tokens([0, 1]).shape
            (2, 4097)

        Source: ours.
        """
        return self.read_tokens_of_batch([(self, idxs, range(len(idxs)))], len(idxs))

    @classmethod
    def read_tokens_of_batch(cls, requests: Sequence[Request], num_rows: int) -> NDArray[np.int32]:
        """Return only the tokens of a batch of several datasets of this class.

        Args:
            requests: the samples of each dataset and their rows.
            num_rows: size of the batch; each row is in one request.

        Returns:
            int32, shape (num_rows, S + 1): as of `read_tokens`.

        Raises:
            ConfigError: as for `read_tokens`.
        """
        if cls._is_customized() or not share_config(requests):
            raise ConfigError(f"{cls.__name__}: cannot serve tokens alone (needs one config and GPTDataset's samples)")
        for dataset, *_ in requests:
            if dataset.dataset.sequences.dtype_code not in INT32_DTYPES:
                raise ConfigError(
                    f"{dataset.dataset_path}: tokens do not fit int32 (found {dataset.dataset.index.dtype.__name__}); "
                    "read the samples, whose tokens are int64"
                )
        rows = TextRows(requests[0][0].recipe, num_rows)
        fill_rows(rows, requests)
        return rows.text

    @property
    def orders(self) -> Orders:
        """The index arrays and sequences in the form that C takes, made anew if an array was replaced.

        `RangedOrders` after `open_later`.
        """
        arrays = self.shuffle_index, self.sample_index, self.document_index
        bound = self.__dict__.get("_orders")
        if bound is None or any(map(operator.is_not, bound.arrays, arrays)):
            extra = self.config.add_extra_token_to_sequence
            if isinstance(self.shuffle_index, RangedArray):
                bound = RangedOrders(arrays, self.dataset, extra)
            else:
                bound = Orders(*arrays, self.dataset.sequences, add_extra_token=extra)
            self._orders = bound
        return cast(Orders, bound)

    @cached_property
    def recipe(self) -> Recipe:
        """Rules by which the C extension turns stored tokens into rows of a batch."""
        return gpt_recipe(self.config, self._pad_token_id)

    @cached_property
    def shared_attention_mask(self) -> Tensor:
        """Causal mask, shape (1, S, S), shared by all samples as in Megatron: it is too large to write anew."""
        return as_tensor(build_attention_mask(np.arange(self.config.sequence_length)))


def open_low_level_dataset(cls: type[LowLevel], dataset_path: str | None, config: GPTDatasetConfig) -> LowLevel:
    """Open a prefix as `cls` and compare it with `sequences_per_dataset` of the config."""
    prefix = required(dataset_path)
    opened = cls(prefix, mmap=config.mmap_bin_files, storage_options=config.storage_options)
    if config.sequences_per_dataset:
        needed = config.sequences_per_dataset.get(prefix)
        found = opened.index.sequence_count, opened.index.document_count
        if not isinstance(needed, Sequence) or tuple(needed) != found:
            raise ConfigError(
                f"sequences_per_dataset: wrong for {opened.path_prefix} (found {needed}, its .idx has {found}: "
                "sequences, document bounds); correct it"
            )
    return opened


def gpt_recipe(config: GPTDatasetConfig, pad: int) -> Recipe:
    """Return the rules by which the C extension turns stored tokens into rows of a batch.

    Raises:
        ConfigError: the tokenizer has no EOD, and an option of the config needs it.
    """
    masked = config.create_attention_mask and config.reset_attention_mask
    if config.inter_document_masking:
        starts = Starts.EACH_PIECE
    else:
        starts = Starts.AFTER_EOD if config.reset_position_ids or masked else Starts.EACH_SAMPLE
    eod = config.tokenizer.eod if config.eod_mask_loss or starts is Starts.AFTER_EOD else 0
    if eod is None:
        raise ConfigError(
            f"{type(config.tokenizer).__name__}: has no eod, which eod_mask_loss, reset_position_ids and "
            "reset_attention_mask need; describe_tokenizer takes it as eod="
        )
    return Recipe(
        config.sequence_length,
        pad=pad,
        eod=eod,
        mask_eod=bool(config.eod_mask_loss),
        starts=starts,
        add_extra_token=config.add_extra_token_to_sequence,
    )


def assemble_gpt_sample(dataset: GPTDataset, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
    """Return the sample of the tokens in `sequences`, which have the stored dtype or a wider one."""
    dtype = np.result_type(dataset.dataset.index.dtype, *sequences)
    stored = [np.ascontiguousarray(sequence, dtype) for sequence in sequences]
    rows, bounds = GPTRows(dataset.recipe, None), np.array([0, len(stored)], np.int64)
    rows.fill(stored, bounds, [0], dtype_code=DType.code_from_dtype(dtype), item_bytes=dtype.itemsize)
    if idx is None:
        rows.loss_mask[:] = 0.0
    return columns(dataset, rows)


def share_config(requests: Sequence[Request]) -> bool:
    return len({id(dataset.config) for dataset, *_ in requests}) == 1


def fill_rows(rows: Rows, requests: Sequence[Request]) -> None:
    """Write the samples of every request to their rows; remote tokens are read in one vectored read."""
    unmapped = [request for request in requests if not fill_from_map(rows, *request)]
    if unmapped:
        fill_from_reads(rows, unmapped)
    for _, idxs, places in requests:
        if isinstance(rows, GPTRows) and None in idxs:
            padding = [place for idx, place in zip(idxs, places, strict=True) if idx is None]
            rows.loss_mask.reshape(rows.num_rows, -1)[padding] = 0.0


def fill_from_map(rows: Rows, dataset: GPTDataset, idxs: Sequence[int | None], places: Sequence[int]) -> bool:
    """Fill rows in one call of C; return False, with nothing written, if some tokens are not memory-mapped."""
    orders, reader = dataset.orders, dataset.dataset.mapped_reader
    if reader is None or not isinstance(orders, Orders):
        return False
    try:
        return reader.read_into(lambda about: rows.read(orders, about, [idx or 0 for idx in idxs], places))
    except IndexBuildError:
        fill_from_reads(rows, [(dataset, idxs, places)])  # step by step: its errors name the sample or span
        raise


def fill_from_reads(rows: Rows, requests: Sequence[Request]) -> None:
    """Fill rows from spans, whose tokens are read at once for all datasets."""
    found = [dataset.orders.spans([idx or 0 for idx in idxs]) for dataset, idxs, _ in requests]
    tokens = read_spans([(request[0].dataset, spans) for request, (spans, _) in zip(requests, found, strict=True)])
    for (dataset, _, places), (_, bounds), pieces in zip(requests, found, tokens, strict=True):
        stored = dataset.dataset.sequences
        rows.fill(pieces, bounds, places, dtype_code=stored.dtype_code, item_bytes=stored.item_bytes)


def columns(dataset: GPTDataset, rows: GPTRows) -> dict[str, Any]:
    """Return the tensors of filled rows by name, in Megatron's order."""
    config, has_bounds = dataset.config, rows.recipe.starts is Starts.EACH_PIECE
    named = {"tokens": as_tensor(rows.tokens), "labels": as_tensor(rows.labels)}
    if config.create_attention_mask and not has_bounds:
        named["attention_mask"] = dataset.shared_attention_mask
        if config.reset_attention_mask:
            named["attention_mask"] = as_tensor(build_attention_mask(rows.positions))
            if not config.reset_position_ids:
                rows.positions[:] = np.arange(rows.positions.shape[-1])
    named["loss_mask"], named["position_ids"] = as_tensor(rows.loss_mask), as_tensor(rows.positions)
    if has_bounds:
        named["cu_seqlens"], named["max_seqlen"] = as_tensor(rows.cu_seqlens), as_tensor(rows.max_seqlen)
    return named


def build_attention_mask(positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return masks of shape (..., 1, S, S), True where attention is *forbidden*: the future and other documents.

    Args:
        positions: position of each token in its document, shape (..., S): 0, 1, 2, …, from 0 again after each EOD.

    Source: Megatron Core, `_get_ltor_masks_and_position_ids`.
    """
    document = np.cumsum(positions == 0, axis=-1)[..., None, :]
    future = ~np.tri(positions.shape[-1], dtype=np.bool_)
    elsewhere: NDArray[np.bool_] = document[..., :, None] != document[..., None, :]
    return np.asarray(future | elsewhere)
