"""Normal form in which a search compares texts with `normalize`: the same one of queries and of stored texts.

    text        "Café\\u00a0(the\\n ﬁrst)"
    normal      "cafe\\u0301 the first "

Each character is folded by itself, so that tokens are folded once, and not each text anew:

- It is decomposed (Unicode NFKD), its case is folded, and the result is decomposed. Texts that are equal in NFKC get
  one form: "ﬁ" and "fi", "Ａ" and "a", "é" in one or in two code points. Several marks on one letter are compared in
  the order in which they stand. Accents stay; but a query that ends in "e" is found where "é" stands, as "cat" is
  found in "category".
- Blanks, controls and punctuation (categories Z, Cc and P, and the ASCII symbols $ + < = > ^ ` | ~) become a blank, and
  so does a byte that is no UTF-8. A run of them is one blank.
- Format characters (category Cf), as soft hyphens and zero-width ones, are left out.

Blanks at the ends of a query are left out.

Source: Unicode Standard Annex 15 and chapter 3.13, here by character; `string.punctuation` as lm-evaluation-harness.
"""

from __future__ import annotations

import string
import unicodedata
from functools import cache

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.native.token_search import FoldTable


def fold_character(character: str) -> str:
    """Return what a character becomes, before runs of blanks are one."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
    return "".join(" " if _is_separator(part) else part for part in folded if unicodedata.category(part) != "Cf")


def _is_separator(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] in "ZP" or category == "Cc" or character in string.punctuation


@cache
def fold_table() -> FoldTable:
    """Return the fold of each code point; those that are not assigned stay."""
    characters = (chr(code) for code in range(0x110000))
    assigned = [each for each in characters if unicodedata.category(each) not in ("Cn", "Co", "Cs")]
    folds = {ord(character): fold_character(character) for character in assigned}
    return FoldTable.of({code: fold.encode() for code, fold in folds.items() if fold != chr(code)})


def normalize_bytes(text: bytes) -> tuple[bytes, NDArray[np.int64]]:
    """Return the normal form of a text, and for each of its bytes the byte of the text where its character begins.

    Args:
        text: UTF-8, or bytes of any kind; a character that has not ended at its end is left out.

    Example:
        >>> normalize_bytes("Caf\\u00c9,  x".encode())[1].tolist()
        [0, 1, 2, 3, 3, 3, 5, 8]
    """
    return fold_table().fold(text)


def normalize_text(text: str) -> str:
    """Return the normal form of a text; a lone surrogate is a blank."""
    return normalize_bytes(text.encode(errors="surrogatepass"))[0].decode()


def normalize_query(text: str) -> str:
    """Return the normal form of a text to search for.

    Raises:
        ConfigError: nothing is left of it.
    """
    if normal := normalize_text(text).strip(" "):
        return normal
    raise ConfigError(f"normalize: nothing is left of the text {text[:60]!r}; give one with letters or digits")
