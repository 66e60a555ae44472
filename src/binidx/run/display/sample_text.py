"""A sample as people read it: text cut where tokens end, bounds and origins of documents, tokens without loss."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from binidx.errors import BinidxError, MissingDriverError, redacted, redacted_text
from binidx.format.sidecars.lineage import origin_text
from binidx.loader.dataset_protocols import DatasetView
from binidx.order.reads import OrderReads
from binidx.run.display.sample_rows import known_origins
from binidx.run.run_order import check_traceable
from binidx.search.document_search import find_tokenizer
from binidx.storage.location import Location
from binidx.tokenizers.library import open_decoder

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


@dataclass(frozen=True)
class TokenText:
    """Text of the tokens of one source.

    Args:
        decode: returns the text of ids; None: ids are shown as numbers.
        names: special tokens by id.
        eod: id that ends a document; None if none is known.
        reason: why there is no `decode`.
    """

    decode: Callable[[list[int]], str] | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    eod: int | None = None
    reason: str = ""

    @classmethod
    def open(cls, prefix: Location, tokenizer: str | None = None) -> TokenText:
        """Return the text of a dataset's tokens, without `decode` if its tokenizer is not known or cannot be read.

        Args:
            prefix: of the dataset.
            tokenizer: any that `describe_tokenizer` takes, whose errors are raised; None: that of the manifest.
        """
        try:
            spec = find_tokenizer([prefix], tokenizer)
            decode = open_decoder(spec, prefix.options)
        except BinidxError as error:
            if tokenizer is not None:
                raise
            return cls(reason=str(error))
        names = {} if spec.eod is None else {spec.eod: "[EOD]"}
        return cls(decode, names | {number: name for name, number in spec.special_tokens}, spec.eod)

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


@dataclass(frozen=True)
class ShownDocument:
    """Piece of a document in a sample: the line above it, and its tokens.

    Attributes:
        title: document, tokens and origin.
        first: position of its first token in the sample.
        pieces: its text.
    """

    title: str
    first: int
    pieces: Sequence[TokenPiece]


@dataclass(frozen=True)
class ShownSample:
    """A sample as text: `str` for a terminal, HTML in a notebook. Made by `show_sample`.

    Attributes:
        title: the sample and its source.
        documents: pieces of documents, in order.
        without_loss: positions in the sample of tokens that are no label with a loss; its first token is none.
        note: why ids are shown in the place of text; "" if they are not.
    """

    title: str
    documents: Sequence[ShownDocument]
    without_loss: frozenset[int]
    note: str = ""

    def __str__(self) -> str:
        lines = [self.title, *filter(None, [self.note])]
        for document in self.documents:
            texts = [f" {piece.text} " if self._is_number(piece) else piece.text for piece in document.pieces]
            lines += [f"── {document.title}", "".join(texts)]
        places = sorted(self.without_loss - {0})
        breaks = [0, *(at for at in range(1, len(places)) if places[at] > places[at - 1] + 1), len(places)]
        spans = [f"{places[first]} to {places[stop - 1] + 1}" for first, stop in pairwise(breaks) if stop > first]
        return "\n".join([*lines, *([f"no loss on tokens {', '.join(spans)} of the sample"] if spans else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = [f"<b>{html.escape(self.title)}</b>", *([f"<p>{html.escape(self.note)}</p>"] if self.note else [])]
        for document in self.documents:
            lines += [f"<p>{html.escape(document.title)}</p>", '<pre style="white-space: pre-wrap">']
            lines += [self._span(document.first + piece.first, piece) for piece in document.pieces]
            lines += ["</pre>"]
        return "".join(lines)

    def _span(self, position: int, piece: TokenPiece) -> str:
        lost = not self.without_loss.isdisjoint(range(position, position + len(piece.ids)))
        style = ' style="opacity: 0.45; text-decoration: underline dotted"' if lost else ""
        title = f"token {position}: {' '.join(map(str, piece.ids))}{', no loss' if lost else ''}"
        text = html.escape(piece.text)
        return f'<span title="{title}"{style}>{f" {text} " if self._is_number(piece) else text}</span>'

    def _is_number(self, piece: TokenPiece) -> bool:
        return bool(self.note) or piece.is_special


def show_sample(dataset: Any, idx: int, tokenizer: str | None = None) -> ShownSample:
    """Return a sample as text with the bounds, origins and loss of its documents.

    Args:
        dataset: a GPT dataset, or a blend of them.
        idx: number of the sample; a negative one counts from the end.
        tokenizer: any that `describe_tokenizer` takes; None: that in the manifest beside the data.

    Returns:
        Text in a terminal, HTML in a notebook; tokens without loss are faint there.

    Raises:
        ConfigError: the dataset does not know its documents.
        IndexError: there is no such sample.

    Example:
        >>> print(binidx.show_sample(train, 7))  # doctest: +SKIP

    Source: ours.
    """
    dataset = DatasetView.unwrap(dataset)
    check_traceable(dataset, "show")
    if not isinstance(idx, SupportsIndex) or not -len(dataset) <= idx < len(dataset):
        raise IndexError(f"sample {idx!r}: out of range (there are {len(dataset)})")
    traced, number = OrderReads(dataset.order), range(len(dataset))[idx]
    reads, tokens = traced.trace(np.array([number])), traced.read_text(np.array([number]))[0].tolist()
    source = dataset.order.sources[int(reads.source[0])]
    prefix = Location(source.prefix, dataset.config.storage_options)
    text, origins = TokenText.open(prefix, tokenizer), known_origins(prefix, reads.document.tolist())
    documents = []
    rows = (reads.document, reads.start, reads.length, reads.target)
    for document, start, length, target in zip(*(column.tolist() for column in rows), strict=True):
        origin = f", from {redacted_text(origin_text(origins[document]))}" if document in origins else ""
        title = f"document {document:,}, tokens {start:,} to {start + length:,}{origin}"
        documents.append(ShownDocument(title, target, list(text.pieces(tokens[target : target + length]))))
    title = f"sample {number:,} of {len(dataset):,}, {redacted(source.name)}, epoch {int(reads.epoch[0])}"
    return ShownSample(title, documents, _without_loss(dataset, number), text.reason)


def _without_loss(dataset: Any, number: int) -> frozenset[int]:
    """Return the positions of tokens that are labels without loss; none if torch, which makes samples, is missing."""
    try:
        mask = dataset[number]["loss_mask"].tolist()
    except MissingDriverError:
        return frozenset()
    return frozenset(place + 1 for place, loss in enumerate(mask) if not loss)
