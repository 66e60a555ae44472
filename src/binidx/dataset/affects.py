"""Words that say what an option of a config affects. Each field has its own, where it is defined:

    sequence_length: int = field(metadata=affects("order", "samples"))
    tokenizer: Any = field(default=None, metadata=affects("samples", chats="order"))

    place       where things are: data, stores, caches
    start       how, and how fast, a process starts and reads
    order       which tokens make which sample
    samples     what is made of the tokens: masks, positions, pads
    nothing     what is given is only checked

A word after a name holds besides in that split or kind of dataset alone: `valid`, lists of validation sets (`lists`),
`chats`, `masked` sentences, fill in the middle (`fim`), `padded` documents (`VarlenGPTDataset`).

From the words follow the fields that ranks compare, the fields in the names of read plans, the misspelt fields that a
run's file may have, and the table "What each option affects" of the site. A field without words, as in the config of a
user, counts as one that affects the order and the samples.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, Literal

Word = Literal["place", "start", "order", "samples", "nothing"]


def affects(*words: Word, saved: bool = True, **scoped: Word) -> Mapping[str, Any]:
    """Return the metadata of a field of a config.

    Args:
        words: those for every kind of dataset and every split.
        saved: whether the file of a run has the field.
        scoped: a further word for one split or kind.
    """
    return {"words": words, "scoped": scoped, "saved": saved}


def words_of(option: Field[Any], *scopes: str) -> set[Word]:
    """Return the words of a field: those for all splits and kinds, and those for some of them, by default for each."""
    scoped: Mapping[str, Word] = option.metadata["scoped"]
    return {*option.metadata["words"], *(word for scope, word in scoped.items() if scope in (scopes or scoped))}


def described_fields(kind: type) -> dict[str, Field[Any]]:
    """Return the fields with words by name, from the class that gave the words where a subclass has the field again."""
    bases = [base for base in reversed(kind.__mro__) if is_dataclass(base)]
    return {option.name: option for base in bases for option in fields(base) if "words" in option.metadata}
