"""The part of a tokenizer that a run's file keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from binidx.dataset.config import find_token
from binidx.errors import ConfigError


@dataclass(frozen=True)
class SavedTokenizer:
    """The part of a tokenizer that samples and the names of indices depend on.

    Attributes:
        unique_identifiers: identity of the tokenizer in the names of indices.
        eod, pad, eos: ids of special tokens; None if the tokenizer has none.
        special_tokens_dict: ids of its special tokens, by name.
    """

    unique_identifiers: Mapping[str, Any]
    eod: int | None = None
    pad: int | None = None
    eos: int | None = None
    special_tokens_dict: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Megatron hashes the text of an OrderedDict, so the order in the file is part of the identity.
        object.__setattr__(self, "unique_identifiers", OrderedDict(self.unique_identifiers))

    @classmethod
    def of(cls, tokenizer: Any) -> SavedTokenizer:
        """Return the saved part of a tokenizer, without the tokens that it does not have."""
        if not hasattr(tokenizer, "unique_identifiers"):
            raise ConfigError(f"{type(tokenizer).__name__}: has no unique_identifiers, a saved run needs them")
        values: dict[str, Any] = {option.name: find_token(tokenizer, option.name) for option in fields(cls)}
        return cls(**{name: value for name, value in values.items() if value is not None})
