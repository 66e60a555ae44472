"""A saved run over two sources with manifests and lineage, whose texts hold what researchers look for."""

from __future__ import annotations

import random
from pathlib import Path

from helpers.gpt_data import Tokenizer
from helpers.preprocess_jobs import WORDS, job_of, run, write_lines

import binidx

RABBIT = "a white rabbit with pink eyes ran close by her"
ITEM = "what did the little white rabbit with pink eyes say when it ran close by her in the afternoon"


def texts_of(name: str) -> list[str]:
    """Sixty texts; numbers 7 and 21 have the rabbit, and 30 of `code` an item of the evaluation."""
    rng = random.Random(name)
    texts = [" ".join(rng.choices(WORDS, k=rng.randrange(5, 60))) for _ in range(60)]
    for number in (7, 21):
        texts[number] += f" {RABBIT} {texts[number]}"
    if name == "code":
        texts[30] = f"{texts[30]} {ITEM} {texts[30]}"
    return texts


def build_research_run(folder: Path) -> None:
    """Write text, datasets, evals.jsonl and run.json, with relative paths, into a folder."""
    for name in ("en", "code"):
        rows = [{"text": text, "id": f"https://{name}.example.org/{n}"}
                for n, text in enumerate(texts_of(name))]  # fmt: skip
        source = write_lines(folder / f"{name}.jsonl", rows)
        run(job_of([source], folder / name, id_key="id"))
    write_lines(folder / "evals.jsonl", [
        {"id": "rabbit", "question": ITEM, "answer": "Oh dear"},
        {"id": "clean", "question": " ".join(f"word{n}" for n in range(20)), "answer": "none"},
        {"id": "short", "question": "What is this?", "answer": "it"},
    ])  # fmt: skip
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=64, blend=(["en_text_document", "code_text_document"], [0.7, 0.3]),
        split="1,0,0", tokenizer=Tokenizer(eod=0, pad=1), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, path_to_cache="cache",
    )  # fmt: skip
    binidx.Run(config, [400, 0, 0], 2, 2, global_batch_size=8, directory=str(folder)).save(f"{folder}/run.json")
