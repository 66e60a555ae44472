"""A WordPiece vocabulary, documents of sentences in it, and the masked datasets of both libraries over them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import binidx
from binidx.dataset.config import split_indices

NUM_TOKENS = 300
CLS, SEP, MASK, PAD, BOS, EOS = range(NUM_TOKENS, NUM_TOKENS + 6)
SENTINELS = list(range(NUM_TOKENS + 6, NUM_TOKENS + 306))


def vocabulary() -> dict[int, str]:
    """Ids in no order; every third piece carries a word on, and 0 and 1 stay free."""
    ids = np.random.default_rng(5).permutation(np.arange(2, NUM_TOKENS + 6)).tolist()
    return {each: f"##{each}" if each % 3 == 0 and each < NUM_TOKENS else f"w{each}" for each in ids}


@dataclass(frozen=True)
class WordPieces:
    """As much of a tokenizer as masked datasets look at."""

    pad: int = PAD
    additional_special_tokens_ids: list[int] = field(default_factory=lambda: list(SENTINELS))
    inv_vocab: dict[int, str] = field(default_factory=vocabulary, repr=False)
    cls: int = CLS
    sep: int = SEP
    mask: int = MASK
    bos: int = BOS
    eos: int = EOS
    eod: int = EOS

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict([("class", "wordpieces.WordPieces"), ("tokenizer_path", ["test"])])


TOKENIZER = WordPieces()

SORTED = WordPieces(inv_vocab=dict(sorted(vocabulary().items())))
"""The same ids in order: with them BERT of 0.16.1, the installed Megatron, draws as BERT of main does with any."""


def write_sentences(
    prefix: Path, num_documents: int, rng: np.random.Generator, longest: int = 30, specials: float = 0.02
) -> str:
    """Documents of 0 to 12 sentences, a share of `specials` among the pieces; some are empty, a few too long."""
    from helpers.oracle import megatron

    builder = megatron.indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(num_documents):
        lengths = rng.integers(rng.integers(2), longest, rng.integers(0, 13)).tolist()
        if lengths and rng.random() < 0.03:
            lengths[0] = 600
        tokens = rng.integers(2, NUM_TOKENS, sum(lengths))
        tokens[rng.random(len(tokens)) < specials] = rng.choice([CLS, SEP])
        builder.add_document(tokens, lengths)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    """Everything that masked configs share. The permutation is not in it: Megatron's cannot be repeated."""
    geometric = bool(rng.integers(3) == 0)
    return {
        "random_seed": int(rng.choice([0, 1, 1234, 2**31 - 2, rng.integers(2**31 - 1)])),
        "sequence_length": int(rng.choice([16, 64, 128, 300])),
        "split": str(rng.choice(["1,0,0", "8,1,1", "6,2,2", "0,1,0"])),
        "masking_probability": float(rng.choice([0.15, 0.05, 0.5, 0.9])),
        "short_sequence_probability": float(rng.choice([0.0, 0.1, 0.5])),
        "masking_max_ngram": int(rng.integers(1, 6)),
        "masking_do_full_word": bool(rng.integers(2)),
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": bool(rng.integers(2)) and not geometric,
        "masking_use_geometric_distribution": geometric,
        "tokenizer": TOKENIZER,
    }


OPTIONS: dict[str, Any] = {
    "random_seed": 1234, "sequence_length": 64, "split": "1,0,0", "masking_probability": 0.15,
    "short_sequence_probability": 0.1, "masking_max_ngram": 3, "masking_do_full_word": True,
    "masking_do_permutation": False, "masking_use_longer_ngrams": False, "masking_use_geometric_distribution": False,
    "tokenizer": TOKENIZER,
}  # fmt: skip

BERT = (binidx.megatron.BERTMaskedWordPieceDataset, binidx.megatron.BERTMaskedWordPieceDatasetConfig)
T5 = (binidx.megatron.T5MaskedWordPieceDataset, binidx.megatron.T5MaskedWordPieceDatasetConfig)
OWN = {BERT: {"classification_head": True}, T5: {"sequence_length_decoder": 128}}


def build(kind: Any, prefixes: list[str], sizes: Any = (200, 20, 20), weights: Any = None, **changes: Any) -> list[Any]:
    """All splits, by our builder; the samples are those of the installed Megatron."""
    cls, config = kind
    options = {"megatron_samples": "0.16.1", **OPTIONS, **OWN[kind], **changes}
    configured = config(blend=(prefixes, weights), **options)
    return binidx.BlendedMegatronDatasetBuilder(cls, list(sizes), lambda: True, configured).build()


def megatrons(kind: Any, prefix: str, which: binidx.Split, num_samples: int, cache: str, **options: Any) -> Any:
    """Megatron's dataset of one split; it builds its index, or finds one in `cache`. Needs a process group to build."""
    from helpers.oracle import megatron

    home = {BERT: megatron.bert, T5: megatron.t5}[kind]
    cls, config = (getattr(home, each.__name__) for each in kind)
    configured = config(blend=([prefix], None), path_to_cache=cache, **options)
    low_level = megatron.indexed.IndexedDataset(prefix)
    documents = split_indices(configured.split_matrix[which.value], len(low_level.document_indices) - 1)
    return cls(low_level, prefix, documents, num_samples, megatron.utils.Split(which.value), configured)


def assert_same_masked(ours: dict[str, Any], needed: dict[str, Any]) -> None:
    """Key by key, in dtype, shape and value."""
    assert sorted(ours) == sorted(needed)
    for key, value in needed.items():
        assert type(ours[key]) is type(value), key
        if isinstance(value, np.ndarray):
            assert (ours[key].dtype, ours[key].shape) == (value.dtype, value.shape), key
        assert np.array_equal(ours[key], value), key


@contextlib.contextmanager
def process_group(directory: Path) -> Iterator[None]:
    """One of one process, which Megatron's masked datasets ask for their rank."""
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def compare(
    kind: Any, directory: Path, seed: int, own: Callable[[np.random.Generator], dict[str, Any]], **version: Any
) -> int:
    """Indices, identities and samples of datasets of random options are Megatron's; how many samples were equal."""
    rng, compared = np.random.default_rng(seed), 0
    prefix = write_sentences(directory / "en", int(rng.choice([80, 150])), rng, int(rng.choice([4, 30, 80])))
    with process_group(directory):
        for case in range(25):
            options = {**random_options(rng), **own(rng)}
            splits = build(kind, [prefix], (num := int(rng.integers(1, 400)),) * 3, **options, **version)
            if version.get("megatron_samples") == "main":
                options["tokenizer"] = SORTED
            for which, ours in zip(binidx.Split, splits, strict=True):
                if ours is not None:
                    needed = megatrons(kind, prefix, which, num, str(directory / f"cache{case}"), **options)
                    compared += same_dataset(ours, needed, rng.integers(0, len(ours), 12).tolist())
    return compared


def same_dataset(ours: Any, needed: Any, idxs: list[int]) -> int:
    np.testing.assert_array_equal(ours.sample_index, needed.sample_index)
    assert ours.sample_index.dtype == needed.sample_index.dtype
    assert ours.unique_description_hash == needed.unique_description_hash
    assert ours.token_lookup == needed.token_lookup
    for idx, sample in zip(idxs, ours.__getitems__(idxs), strict=True):
        assert_same_masked(sample, needed[idx])
    return len(idxs)
