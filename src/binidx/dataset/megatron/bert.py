"""Megatron's constructor of BERT samples: `assemble.sentences`."""

from __future__ import annotations

from typing import ClassVar

from numpy.random import RandomState

from binidx.dataset.assemble.sentences import BERT_SPECIALS, BERTAssemble, BERTMaskedWordPieceDatasetConfig
from binidx.dataset.megatron.masked_sentences import MaskedWordPieceDataset
from binidx.dataset.megatron_releases import Rule, follows
from binidx.dataset.token_dataset import Assemble
from binidx.order.sequences import SentenceOrder


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """BERT samples: `[cls] A [sep] B [sep]`, padded to S tokens.

    A sample is a dict of int64 arrays of shape (S,), and two ints:

        text            tokens; 0 at pads
        types           0 in A, 1 in B, the pad id at pads
        labels          original tokens where masked, else -1
        padding_mask    1, and the pad id at pads
        loss_mask       1 where masked
        is_random       1 if A and B were swapped
        truncated       1 if sentences were cut to fit

    Of the masked tokens 80 % become `mask`, 10 % any token, and 10 % stay. `megatron_samples="0.16"` or "0.17" draws
    that token from the ids in the order of `inv_vocab`: other samples in each process if the tokenizer has no order.

    Args:
        indexed_dataset: the `.bin`/`.idx` pair, a sequence per sentence.
        dataset_path: its prefix, as given by the user; part of the identity.
        indexed_indices: documents of the split, shape (num_in_split,) int32.
        num_samples: minimum number of samples; None is one epoch.
        index_split: the split.
        config: `BERTMaskedWordPieceDatasetConfig`.

    Raises:
        IndexBuildError: samples are requested of a split that has none.

    Example:
        >>> sizes = [1000, 10, 10]
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.megatron.BERTMaskedWordPieceDataset, sizes, lambda: True, config
        ... )
        >>> train, valid, test = builder.build()

    Source: Megatron Core, `BERTMaskedWordPieceDataset`; the differences are those of `MaskedWordPieceDataset`.
    """

    RECORDED_NAME: ClassVar[str] = "BERTMaskedWordPieceDataset"

    config: BERTMaskedWordPieceDatasetConfig
    config_class = BERTMaskedWordPieceDatasetConfig
    release_rules = frozenset({Rule.bert_sorted_ids})

    @property
    def token_lookup(self) -> list[int]:
        """All ids of the vocabulary, of which random tokens are drawn."""
        vocabulary = self.config.vocabulary
        return vocabulary.sorted_ids if follows(self.config, Rule.bert_sorted_ids) else vocabulary.ids

    def _open_order(self) -> SentenceOrder:
        return self._open_built_order(BERT_SPECIALS, 2 if self.config.classification_head else 1)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "classification_head"]

    def _make_assemble(self) -> Assemble:
        return BERTAssemble(self.config, self._pad_token_id, self._order, self._create_masked_lm_predictions)

    def _get_token_mask(self, numpy_random_state: RandomState) -> int | None:
        if numpy_random_state.random_sample() < 0.8:
            return int(self.config.tokenizer.mask)
        if numpy_random_state.random_sample() >= 0.5:
            return self.token_lookup[numpy_random_state.randint(0, len(self.token_lookup))]
        return None
