"""Attention masks. (Loss masks and positions come with the tokens: `native/gather.c`.)

Micro-batches of GPT samples, filled by C in one call a dataset; what is remote is read at the same time.

in a map         samples ───────────────────── read_samples.c ──────────────────────► rows
elsewhere        samples ─ locate.c ─► spans ─► ranges ─ storage ─► views ─ gather.c ─► rows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.torch_bridge import Sample, Samples, Tensor, as_tensor
from binidx.errors import ConfigError, IndexBuildError
from binidx.format.idx import DType
from binidx.format.indexed_dataset import read_pieces
from binidx.native.gather import GPTRows, Recipe, Rows, Starts, TextRows
from binidx.native.locate import Orders
from binidx.native.pieces import Pieces, scattered_pieces
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.stores.local import LocalFile

if TYPE_CHECKING:
    from binidx.dataset.gpt import GPTDataset


def build_attention_mask(positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True where attention is *forbidden*, shape (..., 1, S, S): the future, and all before the last position 0.

    Args:
        positions: of each token in its document, shape (..., S): 0, 1, 2, … or starting again after each EOD.

    Source: Megatron Core, `_get_ltor_masks_and_position_ids`.
    """
    document = np.cumsum(positions == 0, axis=-1)[..., None, :]
    forbidden = ~np.tri(positions.shape[-1], dtype=np.bool_)
    elsewhere: NDArray[np.bool_] = document[..., :, None] != document[..., None, :]
    return np.asarray(forbidden | elsewhere)


Request = tuple["GPTDataset", Sequence[int | None], Sequence[int]]


"""A dataset, samples of it (None is sample 0 without loss), and the rows of the batch that they go to."""


def gpt_recipe(config: GPTDatasetConfig, pad: int) -> Recipe:
    """What a config asks of C.

    Raises:
        ConfigError: the tokenizer has no EOD, and the config asks for what depends on it.
    """
    starts = starts_of(config)
    needs_eod = config.eod_mask_loss or starts is Starts.AFTER_EOD
    return Recipe(
        config.sequence_length,
        pad=pad,
        eod=_eod_of(config.tokenizer) if needs_eod else 0,
        mask_eod=bool(config.eod_mask_loss),
        starts=starts,
        add_extra_token=config.add_extra_token_to_sequence,
    )


def _eod_of(tokenizer: Any) -> int:
    eod: int | None = tokenizer.eod
    if eod is None:
        raise ConfigError(
            f"{type(tokenizer).__name__}: has no eod, which eod_mask_loss, reset_position_ids and reset_attention_mask "
            "need; describe_tokenizer takes it as eod="
        )
    return eod


def starts_of(config: GPTDatasetConfig) -> Starts:
    if config.inter_document_masking:
        return Starts.EACH_PIECE
    masked = config.create_attention_mask and config.reset_attention_mask
    return Starts.AFTER_EOD if config.reset_position_ids or masked else Starts.EACH_SAMPLE


def read_gpt_batch(requests: Sequence[Request], num_rows: int) -> Samples:
    """One batch out of datasets of one config."""
    like = requests[0][0]
    rows = GPTRows(like.recipe, num_rows)
    fill_rows(rows, requests)
    shared = () if like.config.reset_attention_mask else ("attention_mask",)
    return Samples(num_rows, dict(columns(like, rows)), shared)


def read_gpt_sample(dataset: GPTDataset, idx: int | None) -> Sample:
    """One sample, laid out as one: taking it out of a batch costs a quarter of all."""
    rows = GPTRows(dataset.recipe, None)
    fill_rows(rows, [(dataset, [idx], [0])])
    return dict(columns(dataset, rows))


def assemble_gpt_sample(dataset: GPTDataset, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
    """One sample of tokens that are here already, of the stored type or one that holds more."""
    dtype = np.result_type(dataset.dataset.index.dtype, *sequences)
    stored = [np.ascontiguousarray(sequence, dtype) for sequence in sequences]
    pieces = scattered_pieces([memoryview(sequence.view(np.uint8).data) for sequence in stored])
    rows, bounds = GPTRows(dataset.recipe, None), np.array([0, len(stored)], np.int64)
    rows.fill(pieces, bounds, [0], dtype_code=DType.code_from_dtype(dtype), item_bytes=dtype.itemsize)
    drop_losses(rows, [idx], [0])
    return dict(columns(dataset, rows))


def read_gpt_text(requests: Sequence[Request], num_rows: int) -> NDArray[np.int32]:
    """Tokens alone, (B, S + 1), of datasets of one config."""
    rows = TextRows(requests[0][0].recipe, num_rows)
    fill_rows(rows, requests)
    return rows.text


def fill_rows(rows: Rows, requests: Sequence[Request]) -> None:
    """Every request's samples in their rows; what is remote is read all at once."""
    remote = []
    for dataset, idxs, places in requests:
        served = numbers(idxs)
        if not fill_from_map(rows, dataset, served, places):
            remote.append((dataset, served, places))
    if remote:
        fill_from_reads(rows, remote)
    for _, idxs, places in requests:
        drop_losses(rows, idxs, places)


def fill_from_map(rows: Rows, dataset: GPTDataset, served: Sequence[int], places: Sequence[int]) -> bool:
    """One call of C; False, and nothing was filled, where the tokens are not mapped, or not all of them."""
    orders, reader = dataset.orders, dataset.dataset.bin_reader
    if not isinstance(reader, LocalFile | DiskCache) or not isinstance(orders, Orders):
        return False
    try:
        return reader.read_into(lambda about: rows.read(orders, about, served, places))
    except IndexBuildError:
        fill_from_reads(rows, [(dataset, served, places)])  # step by step, it says which sample or span is wrong
        raise


def fill_from_reads(rows: Rows, requests: Sequence[tuple[GPTDataset, Sequence[int], Sequence[int]]]) -> None:
    """The same in three steps, since the tokens have to be read between."""
    spans = [dataset.orders.spans(served) for dataset, served, _ in requests]
    pieces = read_pieces([(request[0].dataset, found) for request, (found, _) in zip(requests, spans, strict=True)])
    for (dataset, _, places), (_, bounds), tokens in zip(requests, spans, pieces, strict=True):
        fill_from_pieces(rows, dataset, tokens, bounds, places)


def fill_from_pieces(
    rows: Rows, dataset: GPTDataset, pieces: Pieces, bounds: NDArray[np.int64], places: Sequence[int]
) -> None:
    stored = dataset.dataset.sequences
    rows.fill(pieces, bounds, places, dtype_code=stored.dtype_code, item_bytes=stored.item_bytes)


def numbers(idxs: Sequence[int | None]) -> list[int]:
    """As C takes them; the padding sample is made of sample 0."""
    return [0 if idx is None else idx for idx in idxs]


def drop_losses(rows: Rows, idxs: Sequence[int | None], places: Sequence[int]) -> None:
    """The padding sample has none."""
    if isinstance(rows, GPTRows) and None in idxs:
        lost = [place for idx, place in zip(idxs, places, strict=True) if idx is None]
        rows.loss_mask.reshape(rows.num_rows, -1)[lost] = 0.0


def columns(like: GPTDataset, rows: GPTRows) -> Iterator[tuple[str, Tensor]]:
    """The outputs by name, in Megatron's order."""
    pieces = rows.recipe.starts is Starts.EACH_PIECE
    yield "tokens", as_tensor(rows.tokens)
    yield "labels", as_tensor(rows.labels)
    if like.config.create_attention_mask and not pieces:
        yield "attention_mask", attention_mask(like, rows)
    yield "loss_mask", as_tensor(rows.loss_mask)
    yield "position_ids", as_tensor(rows.positions)
    if pieces:
        yield "cu_seqlens", as_tensor(rows.cu_seqlens)
        yield "max_seqlen", as_tensor(rows.max_seqlen)


def attention_mask(like: GPTDataset, rows: GPTRows) -> Tensor:
    """That of all samples, or one for each, by their positions; these are then made what the config wants."""
    if not like.config.reset_attention_mask:
        return like.shared_attention_mask
    masks = build_attention_mask(rows.positions)
    if not like.config.reset_position_ids:
        rows.positions[:] = np.arange(rows.positions.shape[-1])
    return as_tensor(masks)
