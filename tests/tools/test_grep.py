"""binidx grep and binidx where, as a person calls them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.preprocess_jobs import tokenizer_path
from helpers.research_run import ITEM, RABBIT, build_research_run, texts_of
from helpers.trained_tokenizers import save
from tokenizers import Tokenizer

import binidx
from binidx import RunOrder
from binidx.tools import main
from binidx.tools._runs import write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("research")
    build_research_run(folder)
    (folder / "item.txt").write_text(f"{ITEM}\n")
    (folder / "drop.en.txt").write_text("7\n21\n")
    (folder / "none.txt").write_text("none\n")
    for name in ("wordpiece", "small"):
        (folder / name).mkdir()
    save("wordpiece", folder / "wordpiece")
    trained = json.loads(Path(tokenizer_path()).read_text())
    trained["model"]["vocab"] = {entry: number for entry, number in trained["model"]["vocab"].items() if number < 300}
    trained["model"]["merges"] = []
    (folder / "small" / "tokenizer.json").write_text(json.dumps(trained))
    return folder


@pytest.fixture
def binidx_out(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs a command in the folder and returns what it prints."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> str:
        assert main([*arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


EN, CODE = "en_text_document", "code_text_document"


def test_the_list_names_the_documents_with_a_text(binidx_out: Any) -> None:
    expected = [f"{name}\t{number}\n" for name in (EN, CODE) for number in (7, 21)]
    assert binidx_out("grep", RABBIT, EN, CODE) == "".join(expected)
    shown = json.loads(binidx_out("grep", "-e", RABBIT, "-e", "never there", EN, "--show", "--json"))
    first = shown["documents"][0]
    assert (first["document"], first["matches"], first["patterns"]) == (7, 1, [0])
    assert first["origin"]["row"] == 7
    assert RABBIT in first["text"]
    assert first["byte"] == texts_of("en")[7].encode().index(RABBIT.encode())
    assert shown["searched"]["documents"] == 60
    people = binidx_out("grep", RABBIT, EN, "--show").splitlines()
    assert people[0] == f"{EN}  document 7  1 place"
    assert people[1].startswith("    from ")
    assert people[1].endswith('id "https://en.example.org/7"')
    assert binidx_out("grep", "never there", EN) == ""


TYPED = "“A white\u00a0rabbit, with \uff30INK eyes”\n ran close-by her…"
"""The rabbit as a person types it."""


def test_a_typed_text_is_found_in_normal_form_alone(binidx_out: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grep", TYPED, EN]) == 0
    out, err = capsys.readouterr()
    assert (out, "compared byte for byte; --normalize folds" in err) == ("", True)
    assert main(["grep", "--normalize", TYPED, EN]) == 0
    out, err = capsys.readouterr()
    assert (out, "compared in normal form (NFKC, case folded, " in err) == (f"{EN}\t7\n{EN}\t21\n", True)
    shown = json.loads(binidx_out("grep", "--normalize", TYPED, EN, "--show", "--json"))
    assert shown["searched"]["normalized"]
    for document in shown["documents"]:
        assert document["byte"] == texts_of("en")[document["document"]].encode().index(RABBIT.encode())
        assert RABBIT in document["text"]
    bare = json.loads(binidx_out("grep", "--normalize", TYPED, EN, "--json"))["documents"]
    assert [row["byte"] for row in bare] == [row["byte"] for row in shown["documents"]]
    assert main(["grep", "--tokens", "17", EN]) == 0
    assert "compared" not in capsys.readouterr().err


def test_typed_items_and_passages_are_found_in_normal_form(binidx_out: Any) -> None:
    words = ITEM.split()
    Path("typed.jsonl").write_text(json.dumps({"id": "typed", "text": f"- {',  '.join(words).title()}!"}))
    call = ["grep", "--queries", "typed.jsonl", "--ngram", "8", "--run", "run.json", "--json"]
    assert json.loads(binidx_out(*call))["items"][0]["found"] == 0
    item = json.loads(binidx_out(*call, "--normalize"))["items"][0]
    assert (item["found"], item["ngrams"], item["documents"]) == (len(words) - 7, len(words) - 7, {CODE: [30]})
    Path("typed.txt").write_text(f"{'  '.join(words).upper()}?\n")
    call = ["where", "--count", "run.json", "--text", "typed.txt", "--json"]
    assert json.loads(binidx_out(*call)) == {"steps": 50, "normalized": False, "matches": []}
    found = json.loads(binidx_out(*call, "--normalize"))
    exact = json.loads(binidx_out("where", "--count", "run.json", "--text", "item.txt", "--json"))
    assert found == {**exact, "normalized": True}
    assert len(found["matches"]) == 1


def test_ids_are_found_without_a_tokenizer(binidx_out: Any) -> None:
    dataset = binidx.IndexedDataset(EN)
    ids = ",".join(map(str, dataset[21][5:30].tolist()))
    assert f"{EN}\t21\n" in binidx_out("grep", "--tokens", ids, EN)


def test_shards_find_together_what_one_call_finds(binidx_out: Any, folder: Path) -> None:
    place = ["--records", str(folder / "found")]
    assert binidx_out("grep", RABBIT, EN, "--shard", "1/2", *place) == ""
    whole = binidx_out("grep", RABBIT, EN)
    assert binidx_out("grep", RABBIT, EN, "--shard", "0/2", *place) == whole
    assert binidx_out("grep", RABBIT, EN, *place) == whole
    assert not (folder / "found").exists()
    assert binidx_out("grep", RABBIT, EN, "--engine", "local", "--workers", "2") == whole


def test_items_of_an_evaluation_get_documents_and_exposures(binidx_out: Any) -> None:
    call = ["grep", "--queries", "evals.jsonl", "--ngram", "8", "--run", "run.json"]
    items = {item["id"]: item for item in json.loads(binidx_out(*call, "--json"))["items"]}
    assert items["rabbit"]["documents"] == {CODE: [30]}
    assert items["rabbit"]["found"] == items["rabbit"]["ngrams"] == len(ITEM.split()) - 7
    assert [items["clean"][name] for name in ("found", "samples", "first_step")] == [0, 0, None]
    assert items["short"]["ngrams"] == 0
    words, served = ITEM.split(), decode_served(range(50))
    ngrams = [" ".join(words[at : at + 8]) for at in range(len(words) - 7)]
    whole = [step for step, text in served if any(ngram in text for ngram in ngrams)]
    assert len(whole) > 1
    row = {"samples_whole": len(whole), "first_step_whole": whole[0], "last_step_whole": whole[-1]}
    assert items["rabbit"] == items["rabbit"] | row
    run = binidx.Run.load("run.json")
    replace(run, first_step=20, consumed_samples=160, previous="run.json").save("resumed.json")
    resumed = json.loads(binidx_out(*call[:-1], "resumed.json", "--json"))["items"]
    assert resumed == [*items.values()]
    table = binidx_out(*call).splitlines()
    assert table[0].split() == ["item", "found", "of", "documents", *("whole", "in", "steps", "part", "in", "steps")]
    assert table[-1] == "1 of 3 items found, 1 with too few words"


def decode_served(steps: range) -> list[tuple[int, str]]:
    """The step and the text of the input tokens of each sample of some steps."""
    order, tokenizer = RunOrder.of(binidx.Run.load("run.json")), Tokenizer.from_file(tokenizer_path())
    reads = order.readings(steps)
    texts = [tokenizer.decode(tokens[:-1], skip_special_tokens=False) for tokens in order.read(reads.sample)]
    return [*zip(reads.step.tolist(), texts, strict=True)]


def test_a_passage_is_counted_by_the_samples_that_hold_it(binidx_out: Any) -> None:
    Path("passage.txt").write_text(RABBIT)
    call = ["where", "--count", "run.json", "--text", "passage.txt", "--steps", ":20"]
    rows = json.loads(binidx_out(*call, "--json"))["matches"]
    served = decode_served(range(20))
    found = [(step, text.count(RABBIT)) for step, text in served if RABBIT in text]
    assert 0 < len(found) < len(served)
    assert sum(row["samples_whole"] for row in rows) == sum(times for _, times in found)
    assert min(row["first_step_whole"] for row in rows if row["samples_whole"]) == found[0][0]
    assert max(row["last_step_whole"] for row in rows if row["samples_whole"]) == found[-1][0]
    *table, last = binidx_out(*call).splitlines()
    assert table[0].split() == ["source", "document", "tokens", *("whole", "in", "steps", "part", "in", "steps")]
    assert max(map(len, [*table, last])) <= 80
    assert last == "4 matches, steps before 20; 4 read whole, 0 only in part, 0 not read"
    assert binidx_out(*call[:-1], ":0").splitlines()[-1].endswith("0 read whole, 0 only in part, 4 not read")


def test_seen_means_samples_also_of_a_document_whose_first_token_was_not_read(binidx_out: Any) -> None:
    Path("one.txt").write_text(f"{CODE}\t21\n")
    call = ["where", "--count", "run.json", "--documents", "one.txt", "--steps", ":6"]
    (row,) = json.loads(binidx_out(*call, "--json"))["documents"]
    assert [row[name] for name in ("samples", "times_started", "first_step", "last_step")] == [3, 0, 0, 5]
    head, cells, last = binidx_out(*call).splitlines()
    assert head.split()[1:5] == ["document", "samples", "trained", "started"]
    assert cells.split()[1:5] == ["21", "3", "3", "0"]
    assert last == "1 document, steps before 6; 1 seen, in up to 3 samples each"


def test_a_list_goes_on_to_where_and_a_view(binidx_out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [EN, CODE]
    listed = binidx_out("grep", RABBIT, *prefixes, "--to", "drop.txt")
    assert Path("drop.txt").read_text() == listed
    assert main(["grep", RABBIT, *prefixes, "--to", "drop.txt/list"]) == 2

    def piped(*arguments: str) -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(listed.encode())))
        return str(binidx_out(*arguments))

    reads = [json.loads(line) for line in piped("where", "run.json", "--documents", "-", "--json").splitlines()]
    counted = json.loads(piped("where", "--count", "run.json", "--documents", "-", "--json"))["documents"]
    assert [(row["source"], row["document"]) for row in counted] == [
        (prefix, number) for prefix in prefixes for number in (7, 21)
    ]
    for row in counted:
        steps = [
            read["step"]
            for read in reads
            if read["source"] == row["source"] and any(doc["doc"] == row["document"] for doc in read["docs"])
        ]
        assert (row["first_step"], row["last_step"], row["samples"]) == (min(steps), max(steps), len(steps))
    dropped = binidx.load_dataset(prefixes[0], sequence_length=64, order=binidx.View("drop.en.txt"))
    assert len(dropped) < len(binidx.load_dataset(prefixes[0], sequence_length=64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grep", "text"], "TEXT PREFIX: found no text or no prefix, needs TEXT PREFIX ..."),
        (["grep", "--tokens", "sea", EN], "--tokens: found 'sea', needs ids such as 464,2330"),
        (["grep", "--tokens", "70000", EN], f"{EN}: uint16 does not hold the tokens [70000]"),
        (["grep", "--queries", "evals.jsonl", "--ngram", "99", EN], "--queries, --ngram: no item has 99 words"),
        (["grep", "--queries", "en.jsonl", "--key", "none", EN], "en.jsonl: line 1: found b'{"),
        (["grep", "sea", EN, "--run", "run.json"], "--run: needs --queries"),
        (["grep", "sea", EN, "--shard", "0/2"], "--shard, --records: a shard needs a folder"),
        (["grep", "sea", EN, "--tokenizer", "wordpiece/tokenizer.json"], "tokens have no bytes of their own"),
        (["grep", "sea", EN, "--tokenizer", "small/tokenizer.json"], "outside the tokenizer's vocabulary"),
        (["grep", "--tokens", "17", EN, "--normalize"], "--normalize, --tokens: found both, need one; token ids are"),
        (["grep", "...", EN, "--normalize"], "--normalize: nothing is left of the text '...'"),
        (["where", "--count", "run.json", "--documents", "-", "--normalize"], "--normalize: needs --text"),
        (["where", "--count", "run.json", "--documents", "none.txt"], "none.txt: line 1: found 'none'"),
        (["where", "run.json", "--documents", "-"], "stdin: found a number alone, needs the prefix of one of 2"),
    ],
)
def test_a_wrong_call_says_what_it_needs(
    folder: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"7\n")))
    assert main(arguments) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_text_that_is_no_utf8_is_refused_by_name(binidx_out: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("latin.txt").write_bytes("Hase mit Möhre".encode("latin-1"))
    assert main(["where", "--count", "run.json", "--text", "latin.txt"]) != 0
    assert "latin.txt: not UTF-8" in capsys.readouterr().err


def test_items_count_the_reads_of_a_source_by_any_of_its_prefixes(binidx_out: Any, folder: Path) -> None:
    call = ["grep", "--queries", "evals.jsonl", "--ngram", "8", "--run", "run.json", "--json"]
    items = {item["id"]: item for item in json.loads(binidx_out(*call))["items"]}
    named = {item["id"]: item for item in json.loads(binidx_out(*call, str(folder / CODE)))["items"]}
    assert named["rabbit"] == items["rabbit"]
    assert named["rabbit"]["samples_whole"] > 0
    assert main([*call, "en_text_other"]) == 2


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("")
    (tmp_path / "stdout").symlink_to(tmp_path / "list")
    write_text(f"{tmp_path}/stdout", "en\t1\n", None)
    assert (tmp_path / "stdout").is_symlink()
    assert (tmp_path / "list").read_text() == "en\t1\n"
