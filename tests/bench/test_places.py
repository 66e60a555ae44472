"""A sample tells where it is from, to readers that know nothing of how the corpus was written."""

from __future__ import annotations

import numpy as np
import pytest

from bench.corpus import PLACES, tokens_at
from bench.readers.stopwatch import places_of

NUM_TOKENS = 1 << 20
SAMPLE = 4096


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_samples_tell_which_thousandth_they_begin_in(dtype: type) -> None:
    tokens = tokens_at(0, NUM_TOKENS, NUM_TOKENS, np.random.default_rng(0), dtype)
    starts = np.arange(0, NUM_TOKENS - SAMPLE, SAMPLE)
    found = np.array(places_of(np.stack([tokens[start : start + SAMPLE] for start in starts])))
    # The first telling token is among the first fifty or so, seldom in the next thousandth.
    assert set(found - starts * PLACES // NUM_TOKENS) <= {0, 1}
    assert tokens.min() > 0


def test_what_is_not_of_the_corpus_is_noticed() -> None:
    with pytest.raises(ValueError, match="no tokens of the corpus"):
        places_of(np.zeros((2, SAMPLE), np.int64))
