"""Pages show what the commands print."""

from __future__ import annotations

import contextlib
import csv
import http.client
import io
import json
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from helpers.explored import PageServer, number, read_html, served, write_run
from helpers.packed_runs import write_packed_run
from helpers.preprocess_jobs import tokenizer_path
from helpers.research_run import RABBIT, build_research_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import binidx
from binidx import RunOrder
from binidx.errors import FormatError
from binidx.explore.app import write_report
from binidx.explore.explored import Explored
from binidx.explore.loss_curve import LossCurve
from binidx.explore.token_counts import find_duplicates
from binidx.loader.losses import LossRecorder
from binidx.run.history import RunHistory
from binidx.run.run_file import Run
from binidx.storage.location import Location
from binidx.tools import main
from binidx.tools._runs import read_cells


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def pages(run: str) -> Iterator[PageServer]:
    with served(Explored.open(run, losses=[f"{Path(run).parent}/loss.csv"])) as server:
        yield server


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[Any]:
    """The JSON lines that a command prints."""
    capsys.readouterr()
    assert main(list(arguments)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_sources_of_a_run_are_those_of_account(
    run: str, pages: PageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (accounts,) = printed(capsys, "account", run, "--json")
    rows = [row for row in read_html(pages.page("")).rows if len(row) == 9][1:-1]
    for row, account in zip(rows, accounts, strict=True):
        names = ("documents", "tokens", "samples_in_run", "samples_read", "tokens_read")
        assert [number(cell) for cell in row[3:8]] == [account[name] for name in names]
        assert row[8] == f"{account['epochs_read']:.3f}"
        assert account["source"].endswith(row[0])


def test_a_step_has_the_samples_that_trace_prints(
    run: str, pages: PageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (0, 7, 20):
        rows = printed(capsys, "trace", run, "--steps", str(step), "--json")
        assert [json.loads(line) for line in pages.page(f"step/{step}.json").splitlines()] == rows
        reader = read_html(pages.page(f"step/{step}"))
        shown = " ".join("".join(reader.texts).split())
        links = [attributes.get("href") or "" for tag, attributes in reader.tags if tag == "a"]
        documents = [re.search(r"source/(\d+)/document/(\d+)", link) for link in links]
        sources = {prefix: place for place, prefix in enumerate(RunOrder.open(Run.load(run)).prefixes)}
        expected = [(sources[row["source"]], doc["doc"]) for row in rows for doc in row["docs"][:12]]
        assert [(int(found[1]), int(found[2])) for found in documents if found] == expected
        for row in rows:
            assert f"rank {row['rank']} slot {row['slot']}" in shown
            assert f"sample {row['sample']:,}, epoch {row['epoch']}" in shown
        pieces = list(csv.DictReader(io.StringIO(pages.page(f"step/{step}.csv"))))
        assert [int(piece["doc"]) for piece in pieces] == [doc["doc"] for row in rows for doc in row["docs"]]


def test_a_rank_and_the_parquet_file_of_a_step(run: str, pages: PageServer) -> None:
    order = RunOrder.open(Run.load(run))
    _, headers, _ = pages.get(f"/{pages.digest}/step/7.json?rank=1")
    assert headers["content-disposition"] == 'attachment; filename="step-7-rank-1.json"'
    rows = [json.loads(line) for line in pages.page("step/7.json?rank=1").splitlines()]
    assert {row["rank"] for row in rows} == {1}
    assert [row["sample"] for row in rows] == order.reading.readings(range(7, 8), 1).sample.tolist()
    assert pages.get(f"/{pages.digest}/step/7?rank=2")[0] == 404


def test_the_text_of_a_sample_is_its_tokens(run: str, pages: PageServer, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = f"{Path(run).parent}/tokenizer.json"
    for row in printed(capsys, "trace", run, "--steps", "9", "--tokenizer", tokenizer, "--json")[:4]:
        reader = read_html(pages.page(f"step/9/{row['rank']}/{row['slot']}"))
        titles = [attributes["title"] for tag, attributes in reader.tags if tag == "span" and "title" in attributes]
        tokens = [int(title.rpartition(": ")[2]) for title in titles if title and title.startswith("token ")]
        expected = RunOrder.open(Run.load(run)).read([row["sample"]])[0].tolist()  # type: ignore[arg-type]
        assert tokens == expected
        assert all(doc["origin"]["source"] in "".join(reader.texts) for doc in row["docs"])


def test_the_reads_of_a_document_are_those_of_where(
    run: str, pages: PageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, prefix in enumerate(RunOrder.open(Run.load(run)).prefixes):
        rows = printed(capsys, "where", run, "--source", prefix, "--document", "5", "--json")
        reader = read_html(pages.page(f"source/{source}/document/5/reads"))
        shown = [[number(cell) for cell in row[:5]] for row in reader.rows[1:]]
        assert shown == [[row[name] for name in ("step", "rank", "slot", "sample", "epoch")] for row in rows]
        assert pages.page(f"source/{source}/document/5")


def test_lengths_are_those_of_inspect(run: str, pages: PageServer, capsys: pytest.CaptureFixture[str]) -> None:
    for source, prefix in enumerate(RunOrder.open(Run.load(run)).prefixes):
        (report,) = printed(capsys, "inspect", prefix, "--json")
        rows = read_html(pages.page(f"source/{source}/lengths")).rows
        assert sum(number(row[1]) for row in rows[1:]) == report["num_sequences"]
        names, values = [name.removesuffix(" %") for name in rows[-1][3::2]], map(number, rows[-1][4::2])
        assert dict(zip(names, values, strict=True)) == report["sequence_lengths"]["percentiles"]
        facts = read_html(pages.page(f"source/{source}")).rows[-1]
        shown = dict(zip(facts[::2], facts[1::2], strict=False))
        assert number(shown["documents"]) == report["num_documents"]
        assert number(shown["tokens"]) == report["num_tokens"]


def test_documents_are_found_by_number_origin_and_id(run: str, pages: PageServer) -> None:
    def find(query: str) -> tuple[int, str]:
        status, headers, _ = pages.get(f"/{pages.digest}/find?{query}")
        return status, headers.get("location", "")

    assert find("step=7") == (303, "./step/7")
    assert find("document=5&source=1") == (303, "./source/1/document/5")
    assert find("document=5&source=all")[0] == 404
    assert find("document=1-a.jsonl:7&source=all") == (303, "./source/0/document/2")
    assert find("document=id=id-1-&source=0")[0] == 200
    assert find("document=id=none&source=all")[0] == 404


def test_steps_narrow_to_the_bins_of_a_click(pages: PageServer) -> None:
    text = pages.page("?steps=10:14")
    assert re.findall(r'href="\./(step/\d+)"><title', text)[:4] == [f"step/{step}" for step in range(10, 14)]
    assert "Steps 10 to 13" in text


def test_a_dataset_alone_has_its_documents_and_no_steps(run: str) -> None:
    prefix = RunOrder.open(Run.load(run)).prefixes[0]
    with served(Explored.open(prefix)) as server:
        assert "documents 0 to 24 of 400" in server.page("")
        assert "document 399" in server.page("source/0?from=375")
        assert server.get(f"/{server.digest}/step/1")[0] == 404
        assert server.page("source/0/document/3")
        assert "binidx inspect" in server.page("")


def test_a_page_of_another_run_is_not_found(pages: PageServer) -> None:
    status, _, text = pages.get("/0123456789abcdef/step/7")
    assert status == 404
    assert "another run" in text


def test_the_report_needs_no_other_file(run: str) -> None:
    report = write_report(Explored.open(run, losses=[f"{Path(run).parent}/loss.csv"]))
    reader = read_html(report)
    assert not [attributes for _, attributes in reader.tags if {"href", "src", "srcset"} & attributes.keys()]
    assert not [tag for tag, _ in reader.tags if tag in ("script", "link", "form", "iframe")]
    assert "url(" not in report
    assert "tokens read" in report


@pytest.mark.parametrize("options", [{"dataloader_type": "cyclic"}, {"consumed_samples": 24}], ids=str)
def test_cyclic_and_resumed_runs_have_pages(options: dict[str, Any], tmp_path: Path) -> None:
    with served(Explored.open(write_run(tmp_path, rampup_batch_size=None, **options))) as server:
        for path in ("", "step/3", "step/3/1/0", "source/1", "source/1/document/2/reads", "repeats", "timeline.csv"):
            assert server.page(path)


def test_losses_are_read_from_the_exports_of_trainers(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("tensorboardX")
    (tmp_path / "tfevents.broken").write_bytes(b"\x03" + bytes(11) + b"\xff" * 7)
    for name, text in {
        "tensorboard": "Wall time,Step,Value\n1.5,2,0.5\n1.4,1,0.7\n",
        "wandb": '"Step","run-7 - train/loss"\n"1","0.7"\n"2","0.5"\n"3",""\n',
    }.items():
        (tmp_path / name).write_text(text)
        curve = LossCurve.of_file(Location(f"{tmp_path}/{name}"))
        assert (curve.steps.tolist(), curve.losses.tolist()) == ([1, 2], [0.7, 0.5])
    for restart, steps in (({"filename_suffix": ".0"}, [1, 2, 3]), ({"filename_suffix": ".1"}, [3, 4])):
        with tensorboard.SummaryWriter(f"{tmp_path}/events", **restart) as writer:
            for step in steps:
                writer.add_scalar("eval loss", 9, step)
                writer.add_scalar("lm loss", step / 4 + len(steps), step)
                writer.add_text("lm loss vs samples", "text", step)
    history = RunHistory.of(Run.load(file := write_run(tmp_path)))
    for place in (f"{tmp_path}/events", *sorted(map(str, Path(f"{tmp_path}/events").iterdir()))):
        curve = LossCurve.read([Location(place)], history, file, first_number=1)
        expected = [3.25, 3.5, 2.75, 3.0] if place.endswith("events") else [3.25, 3.5, 3.75]
        expected = [2.75, 3.0] if place.endswith(".1") else expected
        assert curve.losses.tolist() == expected
        assert curve.steps.tolist() == ([2, 3] if place.endswith(".1") else [*range(len(expected))])
    with pytest.raises(FormatError, match="no event"):
        LossCurve.read([Location(f"{tmp_path}/tfevents.broken")], history, file)
    (tmp_path / "other").write_text("a,b\n1,2\n")
    with pytest.raises(FormatError, match="found columns"):
        LossCurve.of_file(Location(f"{tmp_path}/other"))


def test_documents_seen_before_are_those_that_where_finds_earlier(
    run: str, pages: PageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for row in read_html(pages.page("step/20/seen")).rows[1:]:
        name, document = row[0].split()
        shown[name, number(document)] = (number(row[1]), number(row[2]))
    rows = printed(capsys, "trace", run, "--steps", "20", "--json")
    expected = {}

    def inputs(row: dict[str, Any]) -> set[int]:
        return {doc["doc"] for doc in row["docs"] if doc["len"] and "only_label" not in doc}

    read = {(row["source"], document) for row in rows for document in inputs(row)}
    for prefix, document in sorted(read):
        searched = ["--source", prefix, "--document", str(document), "--steps", ":20", "--json"]
        if earlier := [row for row in printed(capsys, "where", run, *searched) if document in inputs(row)]:
            expected[Path(prefix).name, document] = (len(earlier), max(row["step"] for row in earlier))
    assert shown == expected
    assert len(shown) > 10


@pytest.mark.parametrize("other", [True, False])
def test_compared_parts_have_the_documents_that_trace_lists(other: bool, run: str) -> None:
    order = second = RunOrder.open(saved := Run.load(run))
    if other:
        replace(saved, config=replace(saved.config, random_seed=7)).save(f"{run[:-5]}-7.json")
        second = RunOrder.open(Run.load(f"{run[:-5]}-7.json"))

    def documents(order: RunOrder, steps: range) -> set[tuple[str, int]]:
        _, contents = order.trace(steps)
        pieces = zip(
            *(each.tolist() for each in (contents.piece_source, contents.document, contents.inputs)), strict=True
        )
        return {(order.prefixes[source], document) for source, document, inputs in pieces if inputs}

    one, two = documents(order, range(6)), documents(second, range(7, 9))
    with served(Explored.open(run, compare=f"{run[:-5]}-7.json" if other else None)) as server:
        rows = list(csv.DictReader(io.StringIO(server.page("compare.csv?first=0:6&second=7:9"))))
        for part, alone in (("first", one - two), ("second", two - one)):
            assert {(row["source"], int(row["document"])) for row in rows if row["only_in"] == part} == alone
        table = read_html(server.page("compare?first=0:6&second=7:9")).rows[1:]
        assert sum(number(row[3]) for row in table) == len(one & two)


def test_recorded_losses_rank_samples_as_spikes_does(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    order, folder = RunOrder.open(Run.load(run)), f"{Path(run).parent}/losses"
    reads, rng = order.reading.readings(range(40)), np.random.default_rng(3)
    losses = rng.random(len(reads.step)).astype(np.float32) + np.where(reads.step == 30, 9, 0)
    recorder = LossRecorder(folder)
    for position, loss in zip(reads.position.tolist(), losses.tolist(), strict=True):
        recorder.record(position, [loss])
    recorder.close()
    (found,) = printed(capsys, "spikes", run, "--losses", folder, "--most-samples", "99", "--json")
    (spike,) = found["spikes"]
    with served(Explored.open(run, losses=[folder])) as server:
        summaries = re.findall(r"<summary>(.*?)</summary>", server.page(f"step/{spike['step']}?by=loss"))
        shown = [re.search(r"sample ([\d,]+).*loss (\S+), \+(\S+) against", summary) for summary in summaries]
        texts = [(number(match[1]), match[2], match[3]) for match in shown if match]
        assert texts == [(row["sample"], f"{row['loss']:.4f}", f"{row['excess']:.4f}") for row in spike["samples"]]
        assert f"{spike['loss']:.4g}" in server.page(f"step/{spike['step']}")
        assert "loss" in server.page("")


def test_a_text_is_found_where_grep_finds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint16) as builder:
        for text in ("the_white_rabbit", "a_rabbit", "white", "a_white_rabbit,_a_white_rabbit"):
            builder.add_document([ids[character] for character in text], [len(text)])
        builder.finalize(f"{tmp_path}/en.idx")
    named = f"{tmp_path}/tokenizer.json"
    (found,) = printed(capsys, "grep", "e_rab", f"{tmp_path}/en", "--tokenizer", named, "--json")
    assert [(row["document"], row["matches"]) for row in found["documents"]] == [(0, 1), (3, 2)]
    with served(Explored.open(f"{tmp_path}/en", tokenizer=named)) as server:
        text = server.page("search?text=e_rab")
        assert re.findall(r"source/0/document/(\d+)", text) == ["0", "3"]
        assert [row[1:] for row in read_html(text).rows] == [["times"], ["1"], ["2"]]
        assert server.get(f"/{server.digest}/search?text=")[0] == 404
        assert "the_white_rabbit" in "".join(read_html(server.page("source/0/document/0")).texts)


def test_a_text_is_counted_by_the_samples_that_hold_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_research_run(tmp_path)
    run, named = f"{tmp_path}/run.json", ["--tokenizer", tokenizer_path()]
    (tmp_path / "passage.txt").write_text(RABBIT)
    (found,) = printed(capsys, "where", "--count", run, "--text", f"{tmp_path}/passage.txt", *named, "--json")
    with served(Explored.open(run, tokenizer=tokenizer_path())) as server:
        rows = read_html(server.page(f"search?text={RABBIT.replace(' ', '+')}")).rows
    assert [row[2:] for row in rows[1:]] == [read_cells(row) for row in found["matches"]]
    assert rows[0][2:] == ["samples with it whole", "in steps", "with a part", "in steps"]


def test_equal_documents_are_those_with_equal_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, texts = np.random.default_rng(3), list[list[int]]()
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint16) as builder:
        for _ in range(300):  # few texts, which are cut into sequences in several ways
            texts.append(rng.integers(0, 3, rng.integers(0, 5)).tolist())
            cut = int(rng.integers(0, len(texts[-1]) + 1))
            builder.add_document(texts[-1], [cut, len(texts[-1]) - cut])
        builder.finalize(f"{tmp_path}/en.idx")
    monkeypatch.setattr("binidx.explore.token_counts.COMPARED_TOKENS", 150)
    dataset, first, seen = binidx.IndexedDataset(f"{tmp_path}/en"), 0, list[int]()
    while first < 300:
        found = find_duplicates(dataset, first)
        assert sum(map(len, (texts[number] for number in found.documents))) <= 150
        expected = defaultdict[tuple[int, ...], list[int]](list)
        for place in found.documents:
            expected[tuple(texts[place])].append(place)
        equal = sorted(group for text, group in expected.items() if text and len(group) > 1)
        assert sorted(group.documents for group in found.groups) == equal
        seen += found.documents
        first = found.documents.stop
    assert seen == [*range(300)]
    with served(Explored.open(f"{tmp_path}/en")) as server:
        page = server.page(f"source/0/duplicates?from={seen[40]}")
        found = find_duplicates(dataset, seen[40])
        assert f"{found.num_copies} of {len(found.documents)} documents" in page
        assert f"from={found.documents.stop}" in page


@pytest.mark.parametrize("seed", range(3))
def test_a_run_over_packed_files_shows_what_the_commands_print(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, _ = write_packed_run(tmp_path, seed)
    with served(Explored.open(file)) as server:
        (accounts,) = printed(capsys, "account", file, "--steps", f":{server.explored.steps.stop}", "--json")
        rows = [row for row in read_html(server.page("")).rows if row[0] in [each["source"] for each in accounts]]
        names = ("files", "blocks", "tokens", "blocks_read", "tokens_read")
        assert [[number(cell) for cell in row[2:7]] for row in rows] == [
            [account[name] for name in names] for account in accounts
        ]
        for step in (0, 1):
            traced = printed(capsys, "trace", file, "--steps", str(step), "--json")
            summaries = re.findall(r'<summary><span class="place">(.*?)</summary>', server.page(f"step/{step}"))
            shown = [[int(n) for n in re.findall(r"rank (\d+) slot (\d+).* block (\d+), epoch (\d+)", text)[0]]
                     for text in summaries]  # fmt: skip
            assert shown == [[row[name] for name in ("rank", "slot", "block", "epoch")] for row in traced]
            row = traced[-1]
            titles = [tag["title"] for _, tag in read_html(
                server.page(f"step/{step}/{row['rank']}/{row['slot']}")).tags if "title" in tag]  # fmt: skip
            tokens = [int(title.rpartition(": ")[2]) for title in titles if title and title.startswith("token ")]
            assert tokens == [doc["doc"] * 1000 + doc["start"] + place
                              for doc in row["docs"] for place in range(doc["len"])]  # fmt: skip
        for source, prefix in enumerate(source.name for source in server.explored.sources):
            asked = ["--source", prefix, "--document", "2", "--steps", f":{server.explored.steps.stop}"]
            found = printed(capsys, "where", file, *asked, "--json")
            shown = [[number(cell) for cell in row[:5]] for row in
                     read_html(server.page(f"source/{source}/document/2/reads")).rows[1:]]  # fmt: skip
            names = ("step", "rank", "slot", "sample", "epoch")
            assert shown == [[row[name] for name in names] for row in found][:200]
            texts = read_html(server.page(f"source/{source}/document/2")).texts
            assert any(text.strip() == "2000" for text in texts)
            assert "2000 2001" in " ".join("".join(texts).split())  # ids, as no tokenizer is known
        assert [json.loads(line) for line in server.page("step/1.json").splitlines()] == traced
        for page in ("step/1/seen", "step/1.csv", "timeline.csv", "timeline.svg"):
            assert server.page(page)
        assert "packed files" in server.get(f"/{server.digest}/repeats")[2]
    assert "tokens read" in write_report(Explored.open(file))
    for origin in tmp_path.rglob("*.packed.json"):
        origin.unlink()
    with served(Explored.open(file)) as server:
        assert server.page("")
        assert "document" not in server.page("step/0").partition("<summary>")[2]
        assert "give --tokenizer" in server.page("step/0/0/0")


def test_a_resumed_run_shows_the_history_that_the_commands_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Run.load(write_run(tmp_path, rampup_batch_size=None))
    second = replace(
        first, previous=f"{tmp_path}/run.json", first_step=10, consumed_samples=80, iterations_to_skip=[12, 13]
    )
    second.save(run := f"{tmp_path}/run2.json")
    with served(Explored.open(run)) as server:
        (accounts,) = printed(capsys, "account", run, "--json")
        text = server.page("")
        rows = [row for row in read_html(text).rows if len(row) == 9][1:-1]
        assert [number(row[6]) for row in rows] == [account["samples_read"] for account in accounts]
        assert "the last of 2, from step 10" in text
        assert "1 skipped" in text
        timeline = list(csv.DictReader(io.StringIO(server.page("timeline.csv?steps=5:15"))))
        for row in timeline:
            traced = printed(capsys, "trace", run, "--steps", row["first_step"], "--json")
            assert int(row["samples"]) == sum(sample["source"] == row["source"] for sample in traced)
            assert int(row["skipped_steps"]) == (row["first_step"] in ("11", "12"))  # iterations 12 and 13
        assert [float(row["epochs_after"]) for row in csv.DictReader(io.StringIO(server.page("timeline.csv")))][
            -2:
        ] == [account["epochs_read"] for account in accounts]
        assert re.search(r'resume at\s+<a href="./step/10">', text)
        for step in (3, 12):
            rows = printed(capsys, "trace", run, "--steps", str(step), "--json")
            assert [json.loads(line) for line in server.page(f"step/{step}.json").splitlines()] == rows
        found = printed(capsys, "where", run, "--source", first.config.blend[0][0], "--document", "5", "--json")  # type: ignore[index]
        shown = read_html(server.page("source/0/document/5/reads")).rows[1:]
        assert [number(row[0]) for row in shown] == [row["step"] for row in found]
        assert server.page("step/15/seen")


@pytest.mark.parametrize("digits", [18, 19, 20, 40, 4300, 5000])
def test_numbers_of_any_length_are_not_found(digits: int, pages: PageServer) -> None:
    many = "9" * digits
    paths = [f"step/{many}", f"step/{many}/0/0", f"step/0/{many}/0", f"step/0/0/{many}", f"step/{many}/seen"]
    paths += [f"step/{many}.json", f"source/{many}", f"source/{many}/lengths", f"source/0/document/{many}"]
    paths += [f"source/0/document/{many}/reads", f"step/0?rank={many}", f"?steps=0:{many}", f"?steps={many}:"]
    paths += [f"find?document=en.jsonl:{many}", f"source/0?from={many}", f"find?document={many}&source={many}"]
    for path in paths:
        status, _, text = pages.get(f"/{pages.digest}/{path}")
        assert status in (400, 404), path
        assert "fault in binidx" not in text
    for path in (f"find?step={many}", f"find?document={many}&source=0"):  # redirects, to what is not there
        assert pages.get(f"/{pages.digest}/{path}")[0] in (303, 404), path


HANGING = """
import signal, sys, threading
from binidx.explore import app
from binidx.tools import main

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a suite under nohup ignores

def hang(explored, query):
    print("in flight", flush=True)
    threading.Event().wait()

app.PAGES["repeats"] = ("repeats.html", hang)
sys.exit(main(["explore", sys.argv[1], "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_with_a_request_in_flight(number: signal.Signals, run: str) -> None:
    command = [sys.executable, "-c", HANGING, run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = urlsplit(process.stdout.readline().strip())
        port, token = first.port, first.query.removeprefix("token=")
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            headers = {"cookie": f"binidx-{port}={token}"}
            connection.request("GET", "/", headers=headers)
            response = connection.getresponse()
            response.read()
            connection.request("GET", f"/{response.headers['location'].strip('./')}/repeats", headers=headers)
            assert process.stdout.readline() == "in flight\n"
            process.send_signal(number)
            assert process.wait() == 0
        assert process.stderr is not None
        assert process.stderr.read() == "Ctrl-C ends it\n"


def test_a_tokenizer_that_could_not_be_read_is_read_for_the_next_page(tmp_path: Path) -> None:
    explored, file = Explored.open(write_run(tmp_path)), tmp_path / "tokenizer.json"
    kept = file.rename(f"{file}.away")
    assert explored.text(0).decode is None
    kept.rename(file)
    assert explored.text(0).decode is not None
    assert explored.text(0) is explored.text(0)
