"""python -m helpers.bert_process PREFIX: prints digests of BERT samples, with ids in the order of a set of strings."""

from __future__ import annotations

import hashlib
import json
import sys

from helpers.masked_datasets import BERT, WordPieces, build, vocabulary


def main(prefix: str) -> None:
    pieces = vocabulary()
    ids = {number: pieces[int(number)] for number in {str(each) for each in pieces}}
    tokenizer = WordPieces(inv_vocab={int(number): piece for number, piece in ids.items()})
    found = {"order of ids": digest([*tokenizer.inv_vocab])}
    for version in ("main", "0.16.1"):
        options = {"masking_probability": 0.5, "tokenizer": tokenizer, "megatron_samples": version}
        dataset = build(BERT, [prefix], **options)[0]
        found[version] = digest([dataset[idx]["text"].tolist() for idx in range(20)])
    print(json.dumps(found))


def digest(values: list[int] | list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1])
