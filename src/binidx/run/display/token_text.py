"""Text of stored tokens, cut where tokens end, by a tokenizer that a user or the manifest of the data names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from binidx.errors import BinidxError
from binidx.prepare.tokenizers.describe import describe_tokenizer
from binidx.prepare.tokenizers.engine_choice import open_decoder
from binidx.prepare.tokenizers.spec import TokenizerSpec
from binidx.search.document_search import find_tokenizer
from binidx.storage.location import Location

INCOMPLETE = "�"
"""A character of which some bytes are missing."""


class TokenPiece(NamedTuple):
    """Consecutive ids that together make whole characters.

    Attributes:
        first: position of the first id.
        ids: the ids; several where one character has several tokens.
        text: their text; the name of a special token.
        is_special: whether it is a special token, or one without text.
    """

    first: int
    ids: list[int]
    text: str
    is_special: bool


class TokenText:
    """Text of the tokens of one source.

    Args:
        decode: returns the text of ids; None: ids are shown as numbers.
        names: special tokens by id.
        eod: id that ends a document; None if none is known.
        reason: why there is no `decode`.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str] | None = None,
        names: dict[int, str] | None = None,
        eod: int | None = None,
        reason: str = "",
    ) -> None:
        self.decode, self.names, self.eod, self.reason = decode, names or {}, eod, reason

    @classmethod
    def open(cls, prefix: Location, tokenizer: str | None = None) -> TokenText:
        """Return the text of a dataset's tokens, without `decode` if its tokenizer is not known or cannot be read.

        Args:
            prefix: of the dataset.
            tokenizer: any that `describe_tokenizer` takes, whose errors are raised; None: that of the manifest.
        """
        if tokenizer is not None:
            return cls._of(describe_tokenizer(tokenizer, storage_options=prefix.options), prefix)
        try:
            return cls._of(find_tokenizer([prefix]), prefix)
        except BinidxError as error:
            return cls(reason=str(error))

    @classmethod
    def _of(cls, spec: TokenizerSpec, prefix: Location) -> TokenText:
        names = {} if spec.eod is None else {spec.eod: "[EOD]"}
        names |= {number: name for name, number in spec.special_tokens}
        return cls(open_decoder(spec, prefix.options), names, spec.eod)

    def pieces(self, ids: Sequence[int]) -> Iterator[TokenPiece]:
        """Yield the pieces of a text, in order; together they have all ids.

        A piece ends where its text is whole: decoding one id at a time would lose characters of several tokens, and the
        blanks that a tokenizer puts between words. Costs 20 us a token.
        """
        start = context = 0
        for stop in range(1, len(ids) + 1):
            own = list(ids[start:stop])
            if self.decode is None or (len(own) == 1 and own[0] in self.names):
                yield TokenPiece(start, own, self.names.get(own[0], str(own[0])), self.decode is not None)
                start = context = stop
                continue
            text = self.decode(list(ids[context:stop]))[len(self.decode(list(ids[context:start]))) :]
            if (text and not text.endswith(INCOMPLETE)) or stop == len(ids) or ids[stop] in self.names:
                yield TokenPiece(start, own, text or " ".join(map(str, own)), not text)
                context, start = (start, stop) if text else (stop, stop)
