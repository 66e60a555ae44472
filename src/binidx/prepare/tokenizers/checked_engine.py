"""Comparison of an engine with the reference during the work.

The compared texts are a sample, a function of the numbers of the part and of the text in it, so a restart, another
engine or another number of workers compares the same ones. The first difference raises: a job that went on would leave
a dataset of unknown quality.

Cost: the reference is 50 to 100 times slower than the fastest engine, so a share of 0.01 % costs a job with it about
1 %.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.random_numbers import uniform_hash
from binidx.errors import MismatchError
from binidx.prepare.tokenizers.engine import Encoded, Engine

FIRST, FIRST_BYTES = 1000, 512 << 10
"""Texts that the first part of a job compares, and most bytes of them: some tenths of a second."""

FIRST_OF_WORKER = 200
"""Texts that each worker compares at its start, as it may have another version of a library."""

DIFFERENCE_TOKENS = 8


class CheckedEngine:
    """Engine that compares a sample of its texts with the reference.

    Args:
        share: share of the texts to compare, drawn by a hash of `seed` and the number of the text.
        first: number of texts at the start that are all compared, up to `FIRST_BYTES`.
        seed: of the sample.

    Attributes:
        longest_bytes: bytes of a longer text that are compared: the reference takes hundreds of bytes for each byte.
        compared: number of compared texts.
        seen: number of encoded texts.
    """

    longest_bytes = 1 << 20

    def __init__(self, engine: Engine, reference: Engine, *, share: float = 0.0, first: int = 0, seed: int = 0) -> None:
        self.engine, self.reference, self.name = engine, reference, engine.name
        self.share, self.first, self.seed = share, first, seed
        self.compared = self.seen = self._seen_bytes = 0

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        """Return the engine's ids.

        Raises:
            MismatchError: the reference gives other ids for a text, or the engine returned too many or too few texts.
        """
        ids, bounds = self.engine.encode(texts, offsets)
        if self.engine.name == self.reference.name:
            return ids, bounds
        if len(bounds) != len(offsets):
            raise MismatchError(f"{self.name}: {len(bounds) - 1} texts returned (need {len(offsets) - 1})")
        for text in self._sample(offsets):
            content, tokens = texts[offsets[text] : offsets[text + 1]], ids[bounds[text] : bounds[text + 1]]
            if len(content) > self.longest_bytes:
                end = self.longest_bytes
                while content[end] & 0xC0 == 0x80:  # inside a character
                    end -= 1
                content = content[:end]
                tokens, _ = self.engine.encode(content, np.array([0, len(content)], np.int64))
            self._compare(text, content, tokens)
        self.seen += len(offsets) - 1
        self._seen_bytes += int(offsets[-1] - offsets[0])
        return ids, bounds

    def _sample(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the texts to compare."""
        drawn = uniform_hash(self.seed, self.seen, len(offsets) - 1) < self.share
        first = slice(max(0, self.first - self.seen))
        drawn[first] |= (self._seen_bytes + offsets[:-1] - offsets[0] < FIRST_BYTES)[first]
        return np.flatnonzero(drawn)

    def _compare(self, text: int, content: NDArray[np.uint8], tokens: NDArray[np.uint32]) -> None:
        needed, _ = self.reference.encode(content, np.array([0, len(content)], np.int64))
        self.compared += 1
        if np.array_equal(tokens, needed):
            return
        shared = min(len(tokens), len(needed))
        at = int(np.argmin(np.append(tokens[:shared] == needed[:shared], False)))
        window = slice(max(0, at - DIFFERENCE_TOKENS), at + DIFFERENCE_TOKENS)
        raise MismatchError(
            f"text {self.seen + text}, {len(content)} bytes, beginning "
            f"{content[:40].tobytes().decode(errors='replace')!r}: {self.name} has {tokens[window].tolist()} and "
            f"{self.reference.name} {needed[window].tolist()} from token {window.start}, where {at} is the first that "
            f"differs ({len(tokens)} and {len(needed)} tokens); --tokenizer-engine {self.reference.name} is exact"
        )
