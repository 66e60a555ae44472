"""A byte-level BPE tokenizer, trained by the demo, with the attributes that a GPT dataset needs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import md5
from pathlib import Path
from typing import Any

VOCAB_SIZE = 4096
EOD = "<eod>"
PAD = "<pad>"


def train_bpe(documents: Iterable[str], path: Path, *, vocab_size: int = VOCAB_SIZE) -> DemoTokenizer:
    """Learn merges from the documents and write a tokenizer.json to `path`.

    Bytes are the alphabet, so every text can be encoded and there is no unknown token.

    Source: Sennrich et al. 2016, over bytes as in GPT-2; computed by Hugging Face tokenizers.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.save(str(path))
    return DemoTokenizer(path)


class DemoTokenizer:
    """A tokenizer.json with Megatron Core's interface, for GPTDatasetConfig(tokenizer=...), and encode/decode.

    Source: ours; the attribute names are those megatron.core.datasets.megatron_dataset and gpt_dataset use.
    """

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer

        text = Path(path).read_text("utf-8")
        self.path = str(path)
        self.bpe = Tokenizer.from_str(text)
        self.bpe.encode_special_tokens = True  # a text that says <eod> means five characters
        self.vocab_size = self.bpe.get_vocab_size()
        vocabulary = self.bpe.get_vocab()
        self.eod = vocabulary[EOD]
        self.pad = vocabulary[PAD]
        self.special_tokens_dict = {"eod_token": self.eod, "pad_token": self.pad}
        # Part of every index cache's name. The digest stands for the merges: a tokenizer trained anew under the same
        # path is another tokenizer.
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict(
            {
                "class": f"{type(self).__module__}.{type(self).__qualname__}",
                "tokenizer_path": Path(path).name,
                "md5": md5(text.encode(), usedforsecurity=False).hexdigest(),
            }
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of one text, without EOD."""
        ids: list[int] = self.bpe.encode(text).ids
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = self.bpe.decode(list(tokens))
        return text
