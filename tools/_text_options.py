"""Options of `preprocess` and `estimate`: the tokenizer, by Megatron's names and ours, and the filters of rows."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from binidx.errors import ConfigError, redacted

from ._options import Names, add_json, chosen

if TYPE_CHECKING:
    from binidx.prepare.text.batch import Filters
    from binidx.tokenizers.spec import TokenizerSpec


MEGATRON_TYPES = {
    "HuggingFaceTokenizer": "json",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "GPT2BPETokenizer": "json",
    "BertWordPieceCase": "wordpiece",
    "BertWordPieceLowerCase": "wordpiece",
}
"""Megatron's tokenizer type -> `TokenizerSpec.kind` in binidx."""


def add_text(group: Any, keys: str) -> None:
    """Add the options of the inputs' format, fields and store; `keys` is the help of the fields."""
    kinds = "of all inputs (by their names): jsonl, csv, parquet, ...; txt: a document a line, txt-file: one a file"
    formats = Names("binidx.prepare.text.read", "FORMATS")
    group.add_argument("--format", type=formats, metavar="FORMAT", help=kinds)
    group.add_argument("--json-keys", dest="keys", nargs="+", default=["text"], metavar="KEY", help=f"{keys} (text)")
    add_json(group, "--source-options", "fsspec's options for the text")


def add_tokenizer(group: Any) -> None:
    """Add the options that `parse_tokenizer` reads, and the option of the engine."""
    files = "tokenizer.json, its folder, .model, vocab.txt"
    group.add_argument("--tokenizer", "--tokenizer-model", metavar="URI", help=files)
    kinds = f"Megatron's name; checked against the file: {', '.join(MEGATRON_TYPES)}"
    group.add_argument("--tokenizer-type", choices=MEGATRON_TYPES, metavar="TYPE", help=kinds)
    group.add_argument("--vocab-file", metavar="URI", help="vocab.txt of BertWordPiece tokenizers; vocab.json")
    group.add_argument("--merge-file", dest="merges", metavar="URI", help="merges.txt beside a GPT-2 vocab.json")
    group.add_argument("--eod", metavar="TOKEN", help="the EOD token, if the tokenizer does not name it")
    specials = "a special token in text: its id, plain text, an error"
    group.add_argument("--specials", choices=["parse", "text", "error"], default="parse", help=specials)
    group.add_argument("--tokenizer-hf-no-include-special-tokens", action="store_true", help="no BOS, EOS around texts")
    engines = Names("binidx.prepare.tokenizers.engine_choice", "ENGINES", "auto")
    group.add_argument("--tokenizer-engine", type=engines, default="auto", metavar="NAME", help="the fastest exact one")


def parse_tokenizer(arguments: argparse.Namespace) -> TokenizerSpec:
    """Return the tokenizer that the options name."""
    from binidx.tokenizers.describe import describe_tokenizer

    uri = arguments.tokenizer or arguments.vocab_file
    if uri is None:
        raise ConfigError("tokenizer: found none, need a tokenizer.json or the file of another tokenizer")
    if arguments.tokenizer and arguments.vocab_file:
        raise ConfigError("tokenizer, vocab_file: found both, need one of them")
    spec = describe_tokenizer(
        uri,
        eod=int(arguments.eod) if (arguments.eod or "").isdecimal() else arguments.eod,
        post_processor=not arguments.tokenizer_hf_no_include_special_tokens,
        lowercase=arguments.tokenizer_type == "BertWordPieceLowerCase",
        storage_options=arguments.source_options,
        **chosen(arguments, "specials", "merges"),
    )
    if MEGATRON_TYPES.get(arguments.tokenizer_type, spec.kind) != spec.kind:
        raise ConfigError(f"{redacted(uri)}: is of kind {spec.kind}, --tokenizer-type says {arguments.tokenizer_type}")
    if spec.eod is None and arguments.append_eod:
        ends = [(text, number) for text, number in spec.special_tokens if text in END_TOKENS]
        if len(ends) == 1:
            print(f"EOD: {ends[0][0]} ({ends[0][1]}), as no --eod is given", file=sys.stderr)
            spec = replace(spec, eod=ends[0][1])
    return spec


END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<eod>", "<|eod|>")
"""Special tokens that end a document wherever they exist: of GPT, Llama, DeepSeek, T5 and Gemma, and Megatron."""


def add_filters(group: Any, drop: str) -> None:
    """Add the options that `parse_filters` reads; `drop` is their help, with {} for the documents out of bounds.

    Args:
        group: parser or group of options.
        drop: help of the bounds, with {} for the documents out of bounds.
    """
    group.add_argument("--keep", action="append", default=[], metavar="FIELD=VALUE", help="only rows with this value")
    group.add_argument("--min-characters", type=int, default=0, metavar="N", help=drop.format("shorter documents"))
    group.add_argument("--max-characters", type=int, metavar="N", help=drop.format("longer ones"))


def parse_filters(arguments: argparse.Namespace) -> Filters:
    """Return the filters that the options describe."""
    from binidx.prepare.text.batch import Filters, parse_keep

    return Filters(arguments.min_characters, arguments.max_characters, parse_keep(arguments.keep))
