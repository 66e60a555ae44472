"""binidx demo: each of its parts, and the whole way in a few steps."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from demo.corpus import (
    EOD,
    MIN_CORPUS_BYTES,
    build_corpus,
    count_bytes,
    docstrings,
    read_sources,
    train_bpe,
    write_dataset,
)
from demo.stages import build_figures, check_step, describe_run, describe_steps, show_access, show_figures
from demo.train import BATCH_SIZE, GPT, SEQUENCE_LENGTH, Step, batch_hash, batches

import binidx
from binidx.errors import BinidxError, ConfigError
from binidx.tools.demo import main


@pytest.fixture(scope="module")
def corpus():
    return build_corpus()


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer(corpus, tokenizer_path):
    return train_bpe(corpus["en"][:300], tokenizer_path, vocab_size=1024)


# The corpus


def test_the_corpus_is_the_same_every_time_and_big_enough(corpus):
    part = Path(json.__file__).parent
    assert [*docstrings(read_sources(part))] == [*docstrings(read_sources(part))]
    assert list(read_sources(part)) == sorted(read_sources(part))
    for documents in corpus.values():
        assert count_bytes(documents) >= MIN_CORPUS_BYTES
        assert all(documents)


def test_a_python_without_a_library_in_files_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"demo corpus '\w+': \S+ bytes of text .* needs 500,000"):
        build_corpus(tmp_path)


def test_only_readable_modules_of_the_library_itself_are_sources(tmp_path):
    for folder in ("site-packages", "test", "json"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    (tmp_path / "empty.py").touch()
    assert read_sources(tmp_path) == {"json/module.py": "x = 1\n"}


def test_long_docstrings_of_modules_that_parse_are_found():
    words = "word " * 100 + "end."
    module = f'class A:\n  def f(self):\n    """{words}"""\n  def g(self):\n    """Short."""\n'
    found = list(docstrings({"json/module.py": module, "json/broken.py": "def :", "escape.py": "'\\d'"}))
    assert found == [f"{words}\n"]


# The tokenizer


def test_the_tokenizer_gives_back_every_text(tokenizer, corpus):
    for text in (*corpus["code"][:20], "naïve → 🙂\n\ttabs  and   spaces\r\n", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_in_text_are_text(tokenizer):
    assert tokenizer.get_vocab_size() == 1024
    assert tokenizer.token_to_id(EOD) not in tokenizer.encode("<eod> in a text is text, <pad> too").ids


def test_a_dataset_holds_its_documents_and_an_eod_after_each(tokenizer, corpus, tmp_path):
    texts = corpus["en"][:5]
    written = write_dataset(str(tmp_path / "en"), texts, tokenizer)
    dataset = binidx.IndexedDataset(str(tmp_path / "en"))
    found = [dataset[number].tolist() for number in range(len(dataset))]
    assert [tokenizer.decode(tokens[:-1]) for tokens in found] == texts
    assert {tokens[-1] for tokens in found} == {tokenizer.token_to_id(EOD)}
    assert written == {"documents": 5, "text_bytes": count_bytes(texts), "tokens": sum(map(len, found))}


# The datasets


def test_datasets_opened_again_find_their_indices_and_continue_their_order(tokenizer, tokenizer_path, corpus, tmp_path):
    write_dataset(str(tmp_path / "en"), corpus["en"][:100], tokenizer)
    write_dataset(str(tmp_path / "code"), corpus["code"][:60], tokenizer)
    blend = {str(tmp_path / "en"): 0.7, str(tmp_path / "code"): 0.3}
    run = describe_run(blend, str(tmp_path / "cache"), tokenizer_path, 6)
    run.save(str(tmp_path / "run.json"))
    order = [batch_hash(batch) for batch in islice(batches(run.build()[0]), 6)]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    train, _, _ = binidx.Run.load(str(tmp_path / "run.json")).build()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written
    assert len(set(order)) == 6
    for steps in range(6):
        rest = islice(batches(train, BATCH_SIZE * steps), 6 - steps)
        assert [batch_hash(batch) for batch in rest] == order[steps:]
    assert next(batches(train))["tokens"].shape == (BATCH_SIZE, SEQUENCE_LENGTH)


# The model


def test_the_loss_falls_on_a_fixed_batch():
    torch.manual_seed(0)
    model = GPT(vocab_size=64, sequence_length=16, width=32, num_layers=2, num_heads=2)
    text = torch.randint(64, (4, 17))
    batch = {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": torch.ones(4, 16),
        "position_ids": torch.arange(16).repeat(4, 1),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(64.0).log().item(), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]


def test_positions_see_no_later_token():
    torch.manual_seed(0)
    model = GPT(vocab_size=64, sequence_length=8, width=32, num_layers=1, num_heads=2)
    tokens, positions = torch.randint(64, (1, 8)), torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 64
    same = model(tokens, positions)[0] == model(changed, positions)[0]
    assert same[:5].all()
    assert not same[5:].all(dim=-1).any()


# What a person sees

STEP = Step(2, "bbb", 6.5, 0.0123, 0.2)


def test_a_step_or_a_batch_out_of_order_is_an_error():
    check_step(STEP, 2, ["aaa", "bbb"])
    with pytest.raises(BinidxError, match="step 2: found batch ccc, an unbroken run has bbb there"):
        check_step(replace(STEP, batch="ccc"), 2, ["aaa", "bbb"])
    with pytest.raises(BinidxError, match="training: found step 2, needed 1"):
        check_step(STEP, 1, ["bbb", "bbb"])


def test_a_line_has_the_means_of_its_steps():
    steps = [replace(STEP, number=number, loss=8.0 if number == 1 else 6.0) for number in (1, 2)]
    assert describe_steps(steps).split() == [
        "step", "2", "loss", "7.00", "10,240", "tokens/s", "wait", "12.3", "ms",
    ]  # fmt: skip
    assert len(describe_steps(steps)) <= 69


def test_the_end_fits_a_narrow_terminal_and_says_what_to_try(capsys):
    steps = [replace(STEP, number=number, batch="b") for number in (1, 2)]
    show_figures(build_figures(["b", "b"], steps[:1], steps[1:]))
    show_access({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    out = capsys.readouterr().out
    assert "2 of 2 batches are those of an unbroken run" in out
    assert "export AWS_ENDPOINT_URL=http://127.0.0.1:1" in out
    assert "binidx inspect s3://binidx-demo/en" in out
    assert all(len(line) <= 80 for line in out.splitlines())


# The call


def test_a_wrong_call_is_said_at_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    below = ["--directory", f"{tmp_path}/file/x"]
    empty = (["--directory", str(tmp_path)], "is not empty")
    for arguments, words in ((["--steps", "1"], "needs at least 4"), empty, (below, "name another place")):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_without_its_clone_the_demo_says_where_it_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("binidx.tools.demo.CLONE", tmp_path)
    assert main([]) == 2
    package = Path(binidx.__file__).parent
    assert capsys.readouterr().err == (
        f"binidx demo: examples/demo: not installed with {package}, needs a clone of the repository; in its folder "
        "run make demo, or pip install -e '.[demo]' and then binidx demo\n"
    )


def test_missing_extras_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr("demo.NEEDED", ("numpy", "no_such_package"))
    assert main([]) == 2
    said = "binidx demo: needs no_such_package; in the clone: pip install -e '.[demo]'\n"
    assert capsys.readouterr().err == said


def test_help_needs_no_torch():
    code = """if True:
        import sys, binidx.tools.demo
        try:
            binidx.tools.demo.main(["--help"])
        except SystemExit:
            print("torch" in sys.modules)
    """
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "binidx demo --keep" in words
    assert words.endswith("False\n")


def test_ctrl_c_leaves_no_server_and_no_files(tmp_path):
    command = [sys.executable, "-c", "import sys; from binidx.tools import main; sys.exit(main())", "demo"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as demo:
        line = next(line for line in demo.stdout if "127.0.0.1:" in line)
        port = int(line.split()[0].rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        demo.send_signal(signal.SIGINT)
        _, words = demo.communicate(timeout=1200)
    assert (demo.returncode, words) == (130, "\nbinidx demo: interrupted\n")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert not list(tmp_path.iterdir())


# The whole way


@pytest.fixture(scope="module")
def demo(corpus, tmp_path_factory):
    """A directory, and what `binidx demo --json` says of the few steps it made there."""
    directory = tmp_path_factory.mktemp("demo") / "work"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        few = {name: documents[::4] for name, documents in corpus.items()}
        patch.setattr("demo.stages.build_corpus", lambda: few)
        assert main(["--steps", "6", "--json", "--directory", str(directory)]) == 0
    return directory, json.loads(out.getvalue())


def test_a_killed_run_goes_on_with_the_batch_an_unbroken_one_would_see(demo):
    _, figures = demo
    resume = figures["resume"]
    assert resume["consumed_samples"] == 3 * 16
    assert resume["step"] == 4
    assert resume["batch"] == resume["unbroken_batch"]
    assert [step["number"] for step in figures["steps"]] == [1, 2, 3, 4, 4, 5, 6]
    assert resume["equal_batches"] == resume["batches"] == 7
    assert figures["steps"][3]["batch"] == figures["steps"][4]["batch"]


def test_the_checkpoint_gives_the_model_back(demo):
    # Step 4 was done twice, before the kill and after it, by two processes: the same weights, the same batch.
    _, figures = demo
    before, after = figures["steps"][3:5]
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-4)


def test_the_figures_of_the_demo_are_possible(demo):
    _, figures = demo
    training = figures["training"]
    assert training["tokens"] == 7 * 16 * 128
    assert training["last_loss"] < training["first_loss"] == pytest.approx(8.3, abs=0.2)
    assert 0 < training["wait_seconds_per_step"] < training["seconds_per_step"]


def test_a_named_directory_keeps_datasets_that_open(demo):
    directory, figures = demo
    for name, written in figures["corpus"].items():
        dataset = binidx.IndexedDataset(str(directory / name))
        assert len(dataset) == written["documents"]
        assert dataset.sequence_lengths.sum() == written["tokens"]
