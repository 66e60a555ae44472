"""The commands of docs/how-to/twenty-questions.md, run one after the other, and its code."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.explored import read_html, served
from helpers.pages import read_page, run_blocks
from helpers.preprocess_jobs import tokenizer_path
from helpers.research_run import RABBIT, build_research_run

import binidx
from binidx.explore.explored import Explored
from binidx.loader.losses import LossRecorder, read_losses
from binidx.tools import main

ABOUT = {"en_text_document": {"license": "CC-BY-4.0", "kind": "scraped", "cut_off": "2025-03"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    build_research_run(folder)
    shutil.copy(tokenizer_path(), folder / "tokenizer.json")
    (folder / "passage.txt").write_text(RABBIT)
    (folder / "about.json").write_text(json.dumps(ABOUT))
    recorder = LossRecorder(folder / "losses")
    recorder.record(0, np.where(np.arange(400) // 8 == 30, 9.0, 2.0) + 0.01 * np.random.default_rng(0).random(400))
    recorder.close()
    return folder


def test_every_question_is_answered_by_the_command_below_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    answers: dict[int, list[str]] = {}
    for number, block in re.findall(
        r"^(\d+)\. (.*?)(?=^\d+\. |^## )", read_page("how-to/twenty-questions"), re.M | re.S
    ):
        for line in re.findall(r"^ {8}(binidx .*)$", block, re.M):
            for part in line.split(" | "):
                assert main(shlex.split(part)[1:]) == (1 if "diff" in part else 0), part
                out = capsys.readouterr().out
                monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(out.encode())))
            answers.setdefault(int(number), []).append(out)
    assert [*answers] == [*range(1, 21)]
    assert {number for number, (out, *_) in answers.items() if not out} <= {10}
    assert answers[4] == answers[3]
    assert answers[6][0].splitlines() == [
        f"{name}_text_document\t{number}" for name, numbers in (("en", (7, 21)), ("code", (7, 21, 30)))
        for number in numbers
    ]  # fmt: skip
    assert answers[12] == answers[11][:1] == answers[11][1:]
    assert answers[16][0].startswith("step 30: loss 9.0")
    card, public = answers[20]
    assert "| CC-BY-4.0 | **[to be completed]** | scraped | 2025-03 |" in card
    assert "top domains of 1, with documents: en.example.org (60)" in card
    assert "| Text | Less than 1 billion tokens (" in public
    assert "; 25,600 read, repeats included) |" in public
    assert "- Latest date of data acquisition/collection for model training: 2025-03" in public
    headings = re.findall(r"^#+ ([\d.]+)", public, re.M)
    assert headings == [
        *("1.", "1.1.", "1.2.", "1.3.", "2.", "2.1.", "2.2.", "2.2.1.", "2.2.2.", "2.3.", "2.4.", "2.5.", "2.6."),
        *("3.", "3.1.", "3.2.", "3.3."),
    ]
    scraped = public.partition("### 2.3")[2].partition("###")[0]
    assert "- Purposes of the crawler(s): **[to be completed]**" in scraped
    assert "`en_text_document`: 60 documents" in scraped
    assert "most relevant of 1 domain names: en.example.org" in scraped
    assert "- Provider name and contact details: **[to be completed]**" in public
    assert "Sources without a kind: **[to be completed]**" in public


NUMBERS = {
    "account": ("documents", "tokens", "samples_in_run", "samples_read", "tokens_read"),
    "trace": ("rank", "slot", "sample", "doc"),
    "where": ("step", "rank", "slot", "sample"),
    "grep": ("document",),
    "spikes": ("sample", "loss"),
    "inspect": ("num_documents", "num_sequences", "num_tokens"),
}
"""Command -> names of its numbers that pages show."""

EXPECTED: dict[str, Callable[[Any], set[str]]] = {
    "2": lambda answer: set(),
    "3": lambda answer: {f"{documents:,}" for source in answer[0] for documents in source["seen"] if documents},
    "7": lambda answer: numbers_of(answer[:1], ("doc",)),
    "8": lambda answer: {f"{len(answer)}", f"{answer[-1]['step']}"},
    "9": lambda answer: {f"{answer[0]['spikes'][0]['loss']:.4g}"},
    "10": lambda answer: numbers_of(answer[0]["spikes"][0]["samples"], ("sample", "loss")),
    "14": lambda answer: {f"{row['origin']['row']}" for row in answer[0]["documents"] if row["document"] == 7},
    "18": lambda answer: numbers_of(answer, ("percentiles",)),
    "19": lambda answer: numbers_of(answer[0][1:], NUMBERS["account"][2:]),
    "20": lambda answer: set(),
}
"""Question -> numbers that its page must show, unless those are `NUMBERS`."""


def numbers_of(value: Any, names: tuple[str, ...]) -> set[str]:
    """The numbers with these names anywhere in a JSON value, as pages show them."""
    if isinstance(value, list):
        return set[str]().union(*(numbers_of(each, names) for each in value))
    if not isinstance(value, dict):
        return set()
    inner = [numbers_of(each, (*names, *(each if name in names and isinstance(each, dict) else ())))
             for name, each in value.items()]  # fmt: skip
    own = [value[name] for name in names if isinstance(value.get(name), int | float)]
    shown = {f"{number:,}" if isinstance(number, int) else f"{number:.4f}" for number in own}
    return shown.union(*inner)


def test_clicks_answer_as_the_commands_beside_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    table = re.findall(r"^\| (\d+) \| .*? \| (.*?) \| `binidx (.*?)` \|$", read_page("how-to/twenty-questions"), re.M)
    assert [int(number) for number, *_ in table] == [*range(1, 21)]
    with served(Explored.open("run.json", tokenizer="tokenizer.json", losses=["losses"])) as server:
        for number, address, command in table:
            assert main([*shlex.split(command), "--json"]) == 0
            answer = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            path = "" if address.startswith("(") else address.strip("`")
            status, headers, page = server.get(f"/{server.digest}/{path}")
            if status == 303:
                page = server.page(f"{headers['location'].removeprefix('./')}/reads")
            reader = read_html(page)
            found = set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", " ".join(reader.texts)))
            special, names = EXPECTED.get(number), NUMBERS[command.split()[0]]
            assert (special(answer) if special else numbers_of(answer, names)) <= found, number
            if number == "2":
                read = [(row["source"], int(row["samples"])) for row in csv.DictReader(io.StringIO(page))]
                counted = Counter(row["source"] for row in answer)
                assert {name: sum(count for each, count in read if each == name) for name, _ in read} == counted
            if number == "20":
                halves = [{(row["source"], doc["doc"]) for row in answer if (row["step"] < 25) == first
                           for doc in row["docs"] if doc["len"] and not doc.get("only_label")}
                              for first in (True, False)]  # fmt: skip
                columns = [sum(int(row[place]) for row in reader.rows[1:]) for place in range(1, 6)]
                one, two = halves
                assert columns == [len(each) for each in (one, two, one & two, one - two, two - one)]


def test_the_code_of_the_page_records_losses(folder: Path, tmp_path: Path) -> None:
    train = binidx.Run.load(f"{folder}/run.json").build()[0]
    names: dict[str, Any] = {"binidx": binidx, "train": train, "folder": str(tmp_path)}
    names |= {"loss_mask": torch.ones(2, 64), "token_losses": torch.full((2, 64), 7.0), "consumed_train_samples": 1000}
    names |= {"data_parallel_rank": 1, "data_parallel_size": 3}
    run_blocks("how-to/twenty-questions", {**names, "loss_of_each_token": lambda batch: batch["tokens"].double()})
    positions, losses = read_losses(tmp_path / "losses")
    assert positions[:4].tolist() == [0, 1, 2, 3]
    assert float(losses[0]) == pytest.approx(float(torch.as_tensor(train[0]["tokens"]).double().mean()))
    assert positions[losses == 7].tolist() == [1002, 1003, 1008, 1009]


def test_what_is_told_of_sources_must_be_of_sources(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    for about, found in (({"fr": {}}, "'fr'"), ({"en_text_document": {"licence": "x"}}, "'licence'")):
        Path("wrong.json").write_text(json.dumps(about))
        assert main(["account", "run.json", "--card", "--about", "@wrong.json"]) == 2
        assert f"--about: found {found}, needs a source of the run" in capsys.readouterr().err
