"""A run that resumes from a copy of its data, against the tokens that its loaders served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.copied_runs import (
    account_served,
    copy_corpus,
    count_served,
    open_history,
    run_over,
    save_history,
    write_corpus,
)
from helpers.explored import read_html
from helpers.explored import served as served_pages

import binidx
from binidx import RunOrder
from binidx.errors import ConfigError
from binidx.explore.explored import Explored
from binidx.run.display.timeline import build_timeline
from binidx.run.history import RunHistory
from binidx.run.provenance.accounts import account, compare_documents
from binidx.run.provenance.data_card import build_card, format_card, format_public_summary
from binidx.run.provenance.exposures import count_exposures
from binidx.tools import main

NOT_COMPARED = "same lengths, tokens not compared"
STOP = 25
COLUMNS = ("times_started", "samples", "samples_trained", "tokens", "first_step", "last_step")


def check_exposures(history: RunHistory, served: list[Any], names: dict[str, int]) -> None:
    """Compare the exposures of all documents of each name with those of its corpus that were served."""
    found = count_exposures(history, {name: range(30) for name in names}, STOP)
    for name, corpus in names.items():
        columns = [getattr(found[name], column).tolist() for column in COLUMNS]
        assert [*zip(*columns, strict=True)] == [count_served(served, corpus, document) for document in range(30)]


def check_account(history: RunHistory, served: list[Any], names: dict[str, int]) -> Any:
    """Compare the account of a history with what was served; return it."""
    found, expected = account(history, STOP), account_served(served)
    counts = ("samples_read", "tokens_read", "samples_trained", "tokens_trained")
    rows = [(names[each.source], *(getattr(each, name) for name in counts)) for each in found]
    assert rows == [(names[each.source], *expected[names[each.source]]) for each in found]
    assert sorted(names[each.source] for each in found) == sorted(expected)
    for each in found:
        assert each.epochs_read == pytest.approx(each.tokens_read / each.tokens)
    return found


@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.2, 0.8]])
@pytest.mark.parametrize("proof", ["checksums", "same_data", "manifest"])
def test_a_run_that_resumes_from_a_copy_keeps_its_reads(
    proof: str,
    weights: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    corpora = [
        write_corpus(tmp_path / "a" / name, n, checksums=proof == "checksums") for n, name in ((1, "en"), (2, "code"))
    ]
    if proof == "manifest":
        for prefix in corpora:
            job = {"binidx_manifest": 1, "plan": f"plan of {prefix}", "job": {}}
            Path(f"{prefix}.manifest.json").write_text(json.dumps(job))
    copies = [copy_corpus(prefix, tmp_path / "b") for prefix in corpora]
    alias = dict(zip(copies, corpora, strict=True)) if proof == "same_data" else {}
    again = {} if weights[0] == 0.7 else {"consumed_samples": 0, "earlier_samples": 40}
    runs = (
        run_over((corpora, [0.7, 0.3])),
        run_over((copies, weights), 10, same_data=alias, iterations_to_skip=[12], **again),
    )
    file, served = save_history(tmp_path, *runs, stop=STOP)
    history = open_history(file)
    assert {each.corpus for each in served if each.step >= 10} == {1, 2}
    check_exposures(
        history, served, {**dict(zip(corpora, (1, 2), strict=True)), **dict(zip(copies, (1, 2), strict=True))}
    )
    assert len(check_account(history, served, dict(zip(corpora, (1, 2), strict=True)))) == 2
    assert [*history.sources] == corpora
    assert build_timeline(history, range(STOP)).counts.sum(axis=0).tolist() == [
        account_served(served)[n][0] for n in (1, 2)
    ]
    card = build_card(history, STOP, {copies[0]: {"license": "MIT"}})
    assert [each["license"] for each in card["sources"]] == ["MIT", None]
    # The commands: by the name of either run.
    expected = sorted(each.step for each in served if each.tokens_of(1, 7))
    (tmp_path / "list").write_text(f"{copies[0]}\t7\n{corpora[0]}\t7\n")
    capsys.readouterr()
    for chosen in (["--source", corpora[0], "--document", "7"], ["--source", copies[0], "--document", "7"],
                   ["--documents", str(tmp_path / "list")]):  # fmt: skip
        assert main(["where", file, *chosen, "--json", "--steps", f":{STOP}"]) == 0
        reads = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        # A label is no input, and `where` finds it, too.
        inputs = [row for row in reads if any(doc["doc"] == 7 and doc["dst"] < 16 for doc in row["docs"])]
        assert sorted(row["step"] for row in inputs) == expected
    assert NOT_COMPARED not in caplog.text
    with served_pages(Explored.open(file)) as pages:
        rows = read_html(pages.page("source/0/document/7/reads")).rows[1:]
        assert {step for row in rows if (step := int(row[0])) < STOP} == {row["step"] for row in reads}
        assert NOT_COMPARED not in pages.page("")
    both = compare_documents(
        history.order_of(history.runs[0]), range(10), history.order_of(history.runs[1]), range(10, STOP)
    )
    assert [each.source for each in both] == corpora


def test_copies_without_digests_stay_apart_and_each_answer_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus, other = write_corpus(tmp_path / "a" / "en", 1), write_corpus(tmp_path / "a" / "code", 2)
    copy = copy_corpus(corpus, tmp_path / "b")
    runs = run_over(([corpus, other], [0.6, 0.4])), run_over(([copy, other], [0.6, 0.4]), 10)
    file, served = save_history(tmp_path, *runs, stop=STOP)
    early, late = ([each for each in served if (each.step < 10) is is_early] for is_early in (True, False))
    found = count_exposures(open_history(file), {corpus: range(30), copy: range(30), other: range(30)}, STOP)
    for name, own, number in ((corpus, early, 1), (copy, late, 1), (other, served, 2)):
        assert found[name].samples.tolist() == [count_served(own, number, document)[1] for document in range(30)]
    (tmp_path / "list").write_text(f"{corpus}\t7\n")
    commands = (
        ["where", file, "--documents", f"{tmp_path}/list"],
        ["where", "--count", file, "--documents", f"{tmp_path}/list"],
        ["account", file], ["account", "--card", file], ["trace", file, "--steps", "9:11"],
    )  # fmt: skip
    for command in commands:
        caplog.clear()
        assert main(command) == 0
        lines = [line for line in caplog.messages if NOT_COMPARED in line]
        assert len(lines) == 1
        assert f"{copy} and {corpus}: " in lines[0]
        assert "binidx convert --checksums" in lines[0]
        assert f'"same_data": {json.dumps({copy: corpus})}' in lines[0]
    caplog.clear()
    assert main(["trace", file, "--steps", "3"]) == 0  # of one run alone
    assert NOT_COMPARED not in caplog.text
    card = build_card(open_history(file), STOP)
    assert NOT_COMPARED in format_card(card)
    assert NOT_COMPARED in format_public_summary(card)
    with served_pages(Explored.open(file)) as pages:
        for page in ("", "source/0/document/7", "step/12", "compare"):
            assert NOT_COMPARED in pages.page(page)
    with served_pages(Explored.open(f"{tmp_path}/run0.json", compare=file)) as pages:
        assert pages.page("compare")
        assert NOT_COMPARED in caplog.text


@pytest.mark.parametrize("options", [{"checksums": True}, {"end": ".bin.zst"}])
def test_other_tokens_of_the_same_lengths_are_not_joined(options: Any, tmp_path: Path) -> None:
    one = write_corpus(tmp_path / "a" / "en", 1, **options)
    other = write_corpus(tmp_path / "b" / "en", 2, seed=1, **options)
    assert Path(f"{one}.idx").read_bytes() == Path(f"{other}.idx").read_bytes()
    runs = run_over(([one], [1.0])), run_over(([other], [1.0]), 10)
    file, served = save_history(tmp_path, *runs, stop=STOP)
    history = open_history(file)
    check_exposures(history, served, {one: 1, other: 2})
    assert len(check_account(history, served, {one: 1, other: 2})) == 2
    # Checksums prove that the tokens differ; the sizes of frames prove nothing.
    assert len(history.joined.notes) == ("end" in options)
    if "checksums" in options:
        replace(binidx.Run.load(file), same_data={other: one}).save(file)
        with pytest.raises(ConfigError, match=f"same_data: {other} and {one} have other tokens"):
            account(open_history(file), STOP)


@pytest.mark.parametrize(("number", "dtype"), [(2, np.int32), (1, np.int64)])
def test_an_alias_of_other_lengths_or_another_dtype_is_refused_by_name(number: int, dtype: Any, tmp_path: Path) -> None:
    one, other = write_corpus(tmp_path / "a" / "en", 1), write_corpus(tmp_path / "b" / "en", number, dtype=dtype)
    runs = run_over(([one], [1.0])), run_over(([other], [1.0]), 10, same_data={other: one})
    file, _ = save_history(tmp_path, *runs, stop=STOP)
    with pytest.raises(ConfigError, match=f"same_data: {other} and {one} have other lengths.* take the entry out"):
        open_history(file).sources  # noqa: B018


def test_an_alias_names_sources_of_this_run_and_of_an_earlier_one(tmp_path: Path) -> None:
    one, other = write_corpus(tmp_path / "a" / "en", 1), write_corpus(tmp_path / "b" / "en", 1)
    with pytest.raises(ConfigError, match="same_data: found nowhere, needs prefixes of this run"):
        run_over(([one], [1.0]), same_data={"nowhere": one})
    runs = run_over(([one], [1.0])), run_over(([other], [1.0]), 10, same_data={other: "nowhere"})
    file, _ = save_history(tmp_path, *runs, stop=STOP)
    with pytest.raises(ConfigError, match="same_data: found nowhere, needs a source of an earlier run"):
        open_history(file).sources  # noqa: B018


def test_an_alias_is_no_part_of_an_order_and_a_file_without_it_stays_as_it_was(tmp_path: Path) -> None:
    one = write_corpus(tmp_path / "en", 1)
    plain, alias = run_over(([one], [1.0])), run_over(([one], [1.0]), same_data={one: "s3://old/en"})
    for name, run in (("plain", plain), ("alias", alias)):
        run.save(f"{tmp_path}/{name}.json")
        assert binidx.Run.load(f"{tmp_path}/{name}.json").same_data == run.same_data
    written = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "alias")]
    assert "same_data" not in written[0]
    assert written[1].pop("same_data") == {one: "s3://old/en"}
    assert written[0] == written[1]
    assert RunOrder.open(plain).fingerprint == RunOrder.open(alias).fingerprint


def test_relative_prefixes_of_two_folders_are_joined_by_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "a" / "en", 1, checksums=True)
    copy_corpus(f"{tmp_path}/a/en", tmp_path / "b")
    runs = [
        run_over((["en"], [1.0]), first, directory=f"{tmp_path}/{folder}") for first, folder in ((0, "a"), (10, "b"))
    ]
    file, served = save_history(tmp_path, *runs, stop=STOP)
    check_exposures(open_history(file), served, {"en": 1, f"{tmp_path}/b/en": 1})
    Path(f"{tmp_path}/b/en.bin.xxh3").unlink()
    with pytest.raises(ConfigError, match="names two datasets"):
        open_history(file).sources  # noqa: B018


def test_a_prefix_listed_twice_stays_two_members_also_beside_its_copy(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a" / "en", 1, checksums=True)
    copy = copy_corpus(corpus, tmp_path / "b")
    runs = run_over(([corpus, corpus], [0.75, 0.25])), run_over(([copy, copy], [0.75, 0.25]), 10)
    file, served = save_history(tmp_path, *runs, stop=STOP)
    history = open_history(file)
    check_exposures(history, served, {corpus: 1, copy: 1})
    rows = account(history, STOP)
    assert [each.source for each in rows] == [corpus, corpus]
    assert sum(each.samples_read for each in rows) == len(served)
    assert rows[0].samples_read == pytest.approx(3 * rows[1].samples_read, abs=4)


def test_a_source_that_no_run_has_is_an_error(tmp_path: Path) -> None:
    corpus, later = write_corpus(tmp_path / "en", 1), write_corpus(tmp_path / "code", 2)
    file, _ = save_history(tmp_path, run_over(([corpus], [1.0])), run_over(([later], [1.0]), 10), stop=STOP)
    with pytest.raises(ConfigError, match=f"source: found s3://typo/en, needs a source of the run: {corpus}, {later}"):
        count_exposures(open_history(file), {"s3://typo/en": [7]}, STOP)
    with pytest.raises(ConfigError, match="source: found s3://typo/en"):
        count_exposures(RunOrder.open(binidx.Run.load(f"{tmp_path}/run0.json")), {"s3://typo/en": [7]}, 5)
    found = count_exposures(open_history(file), {later: [7]}, 5)  # before the run that has it
    assert found[later].samples.tolist() == [0]


def test_a_comparison_has_the_sources_of_either_run(tmp_path: Path) -> None:
    names = [write_corpus(tmp_path / name, number) for number, name in enumerate("abc")]
    first, second = (RunOrder.open(run_over((own, [0.5, 0.5]))) for own in (names[:2], names[1:]))
    steps = range(10)
    there, back = compare_documents(first, steps, second, steps), compare_documents(second, steps, first, steps)
    assert [each.source for each in there] == names
    assert [each.source for each in back] == [*names[1:], names[0]]
    turned = {each.source: each for each in back}
    for each in there:
        other = turned[each.source]
        assert (each.first, each.second, each.both) == (other.second, other.first, other.both)
        assert each.only_first.tolist() == other.only_second.tolist()
        assert len(each.only_first) == each.first - each.both
        assert (each.first > 0, each.second > 0) == (each.source in names[:2], each.source in names[1:])
