"""Code points that libraries read by different versions of Unicode.

gigatoken 0.10 knows the letters and marks of Unicode 17, tokenizers 0.23 those of 16, and its normal forms are older
still: it splits a word at U+16EA0, which gigatoken takes for a letter, and puts U+0897 elsewhere in NFC. Texts that
have one go through the reference instead (in ordinary text there are none).

Found by encoding every code point through both, alone, in words, doubled and among combining marks; blocks of scripts
that brought new compositions are in as a whole. tests/tokenize/test_unsettled.py does it again for those outside.

Cost: one pass for bytes that begin three or four, 0.05 ms a megabyte of English; a look at each, 1 to 2 ms, of Thai.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# First of each run and the one after its last.
# fmt: off
RUNS = np.array([
    (0x7FD, 0x7FE), (0x88F, 0x8A0), (0x8CA, 0x8D4), (0x9FE, 0x9FF), (0xC3C, 0xC3D), (0xC5C, 0xC5D), (0xCDC, 0xCDD),
    (0xD3B, 0xD3D), (0xEBA, 0xEBB), (0x1715, 0x1716), (0x1ABF, 0x1AEC), (0x1DF6, 0x1DFB), (0xA7CE, 0xA7D5),
    (0xA7F1, 0xA7F2), (0xA82C, 0xA82D), (0x105C0, 0x10600), (0x10940, 0x1095A), (0x10D24, 0x10D28),
    (0x10D69, 0x10D6E), (0x10EAB, 0x10EAD), (0x10EC5, 0x10EC8), (0x10EFA, 0x10F00), (0x10F46, 0x10F51),
    (0x10F82, 0x10F86), (0x11070, 0x11071), (0x1133B, 0x1133C), (0x11380, 0x11400), (0x1145E, 0x1145F),
    (0x11839, 0x1183B), (0x11930, 0x11960), (0x119E0, 0x119E1), (0x11A34, 0x11A35), (0x11A47, 0x11A48),
    (0x11A99, 0x11A9A), (0x11B60, 0x11B68), (0x11D42, 0x11D46), (0x11D97, 0x11D98), (0x11DB0, 0x11DEA),
    (0x11F41, 0x11F43), (0x16100, 0x16140), (0x16D40, 0x16D80), (0x16EA0, 0x16ED4), (0x16FF0, 0x16FF7),
    (0x187F8, 0x18800), (0x18D09, 0x18D1F), (0x18D80, 0x18DF3), (0x1E08F, 0x1E090), (0x1E130, 0x1E137),
    (0x1E2AE, 0x1E2AF), (0x1E2EC, 0x1E2F0), (0x1E4EC, 0x1E4F0), (0x1E5EE, 0x1E5F0), (0x1E6C0, 0x1E700),
    (0x2B73A, 0x2B740), (0x2CEA2, 0x2CEAE), (0x323B0, 0x3347A),
])
# fmt: on
FIRST_LEAD = 0xDF
"""The first byte of the lowest of them, in UTF-8."""


def begins_of(code_points: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first two bytes of each in UTF-8, as one number; of those from U+0080 on."""
    two = (0xC0 | code_points >> 6) << 8 | 0x80 | code_points & 0x3F
    three = (0xE0 | code_points >> 12) << 8 | 0x80 | code_points >> 6 & 0x3F
    four = (0xF0 | code_points >> 18) << 8 | 0x80 | code_points >> 12 & 0x3F
    return np.where(code_points < 0x800, two, np.where(code_points < 0x10000, three, four))


BEGINS = np.zeros(1 << 16, bool)
BEGINS[begins_of(np.concatenate([np.arange(first, stop) for first, stop in RUNS]))] = True


def unsettled_texts(texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The texts that have one, by number, rising."""
    first, stop = int(offsets[0]), int(offsets[-1])
    places = first + np.flatnonzero(texts[first : max(first, stop - 1)] >= FIRST_LEAD)
    places = places[BEGINS[texts[places].astype(np.int64) << 8 | texts[places + 1]]]
    found = code_points_at(texts, places)
    run = np.searchsorted(RUNS[:, 0], found, side="right") - 1
    places = places[(run >= 0) & (found < RUNS[run, 1])]
    return np.unique(np.searchsorted(offsets, places, side="right") - 1)


def code_points_at(texts: NDArray[np.uint8], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """What begins at each of these bytes, each the first of two or more."""
    lead = texts[places].astype(np.int64)
    extra = 1 + (lead >= 0xE0) + (lead >= 0xF0)
    value = lead & (0x3F >> extra)
    for place in (1, 2, 3):
        more = extra >= place
        value[more] = value[more] << 6 | (texts[places[more] + place] & 0x3F)
    return value
