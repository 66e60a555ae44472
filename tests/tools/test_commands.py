"""binidx COMMAND: its table, its errors and its help."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.random_datasets import Document, build_ours

import binidx
from binidx import errors
from binidx.tools import COMMANDS, GROUPS, main, usage
from binidx.tools._command import Command, add_output, name_flags, parser, wrap_block
from binidx.tools._display import counts, human_bytes, human_seconds
from binidx.tools._old_names import RENAMED
from binidx.tools._options import add_json, num_bytes


def run(body: Callable[[], int]) -> int:
    """Run a command without options."""
    return Command("name", "Name.", lambda options: None, lambda arguments: body())([])


ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "int32"
SOMEBODY = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_row_is_a_module_with_a_main_and_an_example(name: str, capsys) -> None:
    module, purpose = COMMANDS[name]
    assert callable(import_module(f"binidx.tools.{module}").main)
    assert purpose[0].islower()
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"binidx {name}" in capsys.readouterr().out


def test_help_lists_the_commands(capsys) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(f"  {name:<10}  {purpose}\n" in out for name, (_, purpose) in COMMANDS.items())
        assert [line[:-1] for line in out.splitlines() if re.match(r"[a-z ]+:$", line)] == [*GROUPS]


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_names_the_new_one_and_works(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    told = capsys.readouterr()
    new = " ".join(RENAMED[name])
    assert (end.value.code, told.err) == (0, f"binidx {name} is binidx {new} now\n")
    assert told.out.startswith(f"usage: binidx {new if new.startswith('prepare ') else RENAMED[name][0]} ")


def test_no_page_and_no_help_names_an_old_command() -> None:
    old = re.compile(rf"binidx (?:{'|'.join(RENAMED)})(?![-.\w])")
    root = Path(__file__).parents[2]
    files = [file for folder in ("docs", "tools", "examples") for file in root.glob(f"{folder}/**/*.[mp][dy]")]
    assert [(file.name, old.findall(text)) for file in files if old.search(text := file.read_text("utf-8"))] == []


def test_the_version_is_said(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"binidx {binidx.__version__}\n"


def test_a_name_of_the_previous_release_says_the_new_one(tmp_path: Path, capsys) -> None:
    prefix, out = str(GOLDEN), str(tmp_path)
    calls = {
        "pack is binidx export litpkds now": ["pack", prefix, "--to", out, "--sep", "0", "--chunk-size", "50"],
        "pack --back is binidx import litpkds now":
            ["pack", "--back", f"{out}/train_0000000000.bin", "--to", f"{out}/back", "--sep=0"],
    }  # fmt: skip
    for told, call in calls.items():
        assert main(call) == 0
        assert capsys.readouterr().err == f"binidx {told}\n"
    assert (
        np.concatenate([*binidx.IndexedDataset(f"{out}/back")]).tolist()[:7]
        == np.concatenate([*binidx.IndexedDataset(prefix)]).tolist()
    )
    assert main(["run", "--from-megatron", "--sft"]) == 2
    assert capsys.readouterr().err.startswith("binidx run is binidx plan now\nbinidx plan: ")
    assert not {*RENAMED} & {*COMMANDS}


def test_old_options_of_steps_name_the_new_one_and_work(capsys: pytest.CaptureFixture[str]) -> None:
    calls = {
        "trace --step N is binidx trace --steps N": ["trace", "none.json", "--step", "5"],
        "account --before-step N is binidx account --steps :N": ["account", "none.json", "--before-step=5"],
    }
    for told, call in calls.items():
        assert main(call) == 2
        assert capsys.readouterr().err == f"binidx {told} now\nbinidx {call[0]}: none.json: no such file\n"


def test_an_unknown_command_gets_a_hint(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["cut", "data/en", "--to", "data/head"])
    assert "argument COMMAND: invalid choice: 'data/en' (choose from" in capsys.readouterr().err
    assert main(["convrt", "a", "b"]) == 2
    assert "binidx: 'convrt' is not a command, did you mean 'convert'?; binidx --help" in capsys.readouterr().err
    assert main(["compress", "a"]) == 2
    assert "did you mean 'convert --compress'?" in capsys.readouterr().err
    assert main(["tokenise", "a"]) == 2
    assert "did you mean 'preprocess'?" in capsys.readouterr().err
    assert main(["-v"]) == 2
    assert "did you mean '--version'?" in capsys.readouterr().err


def test_what_the_library_logs_is_a_line_of_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "binidx", "inspect", str(GOLDEN)], env={**os.environ, "BINIDX_CACHE_DRI": "x"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr.startswith("binidx inspect: BINIDX_CACHE_DRI: is no setting, and ignored; did you mean")


def test_the_help_of_no_command_imports_what_runs_it() -> None:
    code = """
import contextlib, io, sys
from binidx.tools import COMMANDS, main
heavy = {"numpy", "fsspec", "msgspec", "pydantic", "aiohttp", "pyarrow", "torch", "tqdm", "binidx._native"}
for name in COMMANDS:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as told:
        main([name, "--help"])
    assert told.getvalue().startswith(f"usage: binidx {name} "), name
    assert not heavy & {*sys.modules}, (name, heavy & {*sys.modules})
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_values_in_the_help_are_those_of_the_library() -> None:
    from binidx.corpus.shuffle import SHUFFLE_MEMORY_BYTES
    from binidx.prepare.preprocess.estimate import SAMPLE_BYTES
    from binidx.prepare.preprocess.job import EMPTY, ON_ERROR
    from binidx.run.display.figures import COLUMN_INCHES, FORMATS
    from binidx.run.plan.node_check import FAILED, OK
    from binidx.tokenizers.spec import POLICIES
    from binidx.tools import doctor

    def option(command: str, name: str) -> Any:
        options = parser(command, "")
        import_module(f"binidx.tools.{COMMANDS[command][0]}").add_options(options)
        return next(action for action in options._actions if f"--{name}" in action.option_strings)

    assert num_bytes(option("shuffle", "memory").default) == SHUFFLE_MEMORY_BYTES
    assert num_bytes(option("estimate", "sample").default) == SAMPLE_BYTES
    for name, choices in (("empty", EMPTY), ("on-error", ON_ERROR), ("specials", POLICIES)):
        assert option("preprocess", name).choices == [*choices]
    assert f"({COLUMN_INCHES})" in option("account", "width").help
    assert all(f".{ending}" in option("account", "to").help for ending in FORMATS)
    assert (doctor.OK, doctor.FAILED) == (OK, FAILED)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.FormatError("x"), 1),
        (errors.StorageError("x"), 1),
        (errors.ObjectChangedError("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.ObjectNotFoundError("x"), 2),
        (errors.ObjectExistsError("x"), 2),
        (errors.MissingDriverError("x"), 2),
        (errors.AccessError("x"), 2),
        (errors.UnreachableError("x"), 2),
    ],
)
def test_our_errors_are_one_line_and_a_status(error: Exception, status: int, capsys) -> None:
    def fail() -> int:
        raise error

    assert run(fail) == status
    assert capsys.readouterr().err == "binidx name: x\n"


@pytest.mark.parametrize(
    ("uri", "environment", "message"),
    [
        ("s3://b/k", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "no credentials found; set AWS_ACCESS_KEY_ID"),
        ("s3://b/k", {"AWS_PROFILE": "nope"}, "The config profile (nope) could not be found; check the credentials"),
        ("s3://b/k", {**SOMEBODY, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "Could not connect to the endpoint"),
        ("s3://b/k", {**SOMEBODY, "AWS_ENDPOINT_URL": "http://host.invalid"}, "Could not connect to the endpoint"),
        ("s3://b/k", {**SOMEBODY, "AWS_ENDPOINT_URL": "127.0.0.1:1"}, "endpoint_url must begin with http"),
        ("http://127.0.0.1:1/k", {}, "Cannot connect to host 127.0.0.1:1"),
        ("hf://datasets/a/b/k", {"HF_ENDPOINT": "http://127.0.0.1:1"}, "Cannot connect to host 127.0.0.1:1"),
        ("foo://b/k", {}, "Protocol not known: foo"),
    ],
)
def test_who_may_not_or_cannot_reach_the_store_called_wrongly(
    uri: str, environment: dict[str, str], message: str
) -> None:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    nobody = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": ""}
    found = subprocess.run(
        [Path(sys.executable).parent / "binidx", "inspect", uri],
        capture_output=True,
        text=True,
        env={**ours, **nobody, **environment},
    )
    assert found.returncode == 2
    assert message in found.stderr
    assert found.stderr.startswith(f"binidx inspect: {uri}")
    assert found.stderr.count("\n") == 1


def test_refused_credentials_are_a_wrong_call(s3: Bucket, capsys) -> None:
    options = json.dumps({"key": s3.server.key, "secret": "wrong"})
    assert main(["inspect", f"{s3.uri}/k", "--storage-options", options]) == 2
    assert "access denied" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_errors_as_json_too(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--no-such-option", "--json"])
    assert end.value.code == 2
    told = capsys.readouterr()
    error = json.loads(told.out)["error"]
    assert (error["kind"], error["exit_status"]) == ("UsageError", 2)
    assert told.err == f"binidx {name}: {error['message']}; binidx {name} --help lists all options\n"


def test_an_error_of_a_command_is_one_json_object_on_stdout_and_a_line_on_stderr(tmp_path: Path, capsys) -> None:
    assert main(["inspect", f"{tmp_path}/none", "--json"]) == 2
    told = capsys.readouterr()
    message = f"{tmp_path}/none.idx: no such file"
    assert json.loads(told.out) == {"error": {"kind": "ObjectNotFoundError", "message": message, "exit_status": 2}}
    assert told.err == f"binidx inspect: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shuffle", "PREFIX", "--to", "OUT", "--seed", "1", "--memory", "1kB"], "--memory: 1,000 bytes are too few"),
        (["shuffle", "PREFIX", "--to", "OUT", "--seed", "1", "--scratch", "/no/such"], "--scratch: found /no/such"),
        (["cut", "head", "PREFIX", "--to", "OUT", "-n", "-1"], "-n: found -1, need 0 or more"),
        (["cut", "split", "PREFIX", "--to", "OUT", "--fractions", "0.5", "0.5", "--seed", "1"],
         "--to, --fractions: found 1 and 2, need as many of both"),
        (["verify", "PREFIX", "--vocab-size", "-5"], "--vocab-size: found -5, needs at least 1"),
        (["verify", "PREFIX", "--quick", "--vocab-size", "9"], "--vocab-size, --quick: found both, need one"),
        (["export", "litpkds", "PREFIX", "--to", "a"], "--eod: litpkds files have no bounds of documents; give the id"),
        (["import", "litpkds", "a", "--to", "OUT"], "--eod: litpkds files have no bounds of documents; give the id"),
        (["export", "litpkds", "PREFIX", "--to", "a", "--eod", "0", "--chunk-size", "0"],
         "--chunk-size: found 0, needs at least 1"),
        (["export", "mds", "PREFIX", "--to", "a", "--chunk-size", "0", "--shard", "0/2", "--overwrite"],
         "--chunk-size, --shard, --overwrite: litpkds takes it, mds does not"),
        (["import", "litpkds", "a", "--to", "OUT", "--eod", "0", "--column", "ids", "--dtype", "uint16"],
         "--column, --dtype: litpkds does not take it"),
        (["plan"], "RUN, --from-megatron: found none, need one"),
        (["plan", "a", "--from-megatron", "b"], "RUN, --from-megatron: found both, need one"),
        (["plan", "a", "--to", "b", "--first-step", "0"], "--to, --first-step: only with --from-megatron"),
        (["plan", "--world", "2", "--from-megatron", "x.py"], "--world: give it in the command after --from-megatron"),
        (["plan", "--from-megatron", "x.py", "--strict"], "--from-megatron: found --strict in the command"),
        (["plan", "--from-megatron", "x.py", "--to"], "--to: found none, needs the path of the file"),
        (["preprocess", "TEXT", "--to", "OUT"], "--tokenizer: found none, need a tokenizer.json"),
        (["shuffle", "--lines", "TEXT", "--to", "TEXT", "--seed", "1"], "--to: found TEXT, which is an input, too"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_name_options_as_the_user_typed_them(arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "en.jsonl").write_text('{"text": "sea"}\n')
    places = {"PREFIX": str(GOLDEN), "OUT": f"{tmp_path}/out", "TEXT": f"{tmp_path}/en.jsonl"}
    assert main([places.get(each, each) for each in arguments]) == 2
    assert capsys.readouterr().err.startswith(f"binidx {arguments[0]}: {message.replace('TEXT', places['TEXT'])}")


def test_a_file_that_is_named_like_an_option_is_no_option() -> None:
    flags = {"memory": "--memory", "targets": "--to"}
    assert name_flags("memory/en: is a folder", flags) == "memory/en: is a folder"
    assert name_flags("memory, en: both", flags) == "memory, en: both"
    assert name_flags("memory, targets: both", flags) == "--memory, --to: both"
    assert name_flags("no subject", flags) == "no subject"


def test_sizes_are_decimal_or_binary_in_any_case() -> None:
    for text, size in (("512MB", 512 * 10**6), ("512MiB", 512 << 20), ("512 mib", 512 << 20), ("1GIB", 1 << 30)):
        assert num_bytes(text) == size
    for text in ("-1MB", "512MX", "MB", ""):
        with pytest.raises(ArgumentTypeError, match="such as 2GB or 512MiB"):
            num_bytes(text)


def test_one_of_a_thing_is_not_several() -> None:
    assert counts(parts=1, rows=0, tokens=2034) == "1 part, 0 rows, 2,034 tokens"


def test_an_interrupt_is_130(capsys) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert run(interrupt) == 130
    assert capsys.readouterr().err == "\nbinidx name: interrupted\n"


def test_errors_that_are_not_ours_keep_their_traceback() -> None:
    def fail() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fail)


def test_numbers_for_people() -> None:
    counts = {0: "0 bytes", 1023: "1,023 bytes", 1024: "1.0 KiB", 12_345_678: "11.8 MiB", 2**60: "1,048,576.0 TiB"}
    assert {count: human_bytes(count) for count in counts} == counts
    times = {0.04: "0.0 s", 59.9: "59.9 s", 75.3: "1 min 15 s", 3600: "1 h 0 min", 90_000: "25 h 0 min"}
    assert {seconds: human_seconds(seconds) for seconds in times} == times


def test_a_parser_takes_its_help_from_the_docstring() -> None:
    text = parser("x", "First line.\n\nThe rest.\n\nexample:\n  binidx x\n").format_help()
    assert text.startswith("usage: binidx x [-h]\n\nFirst line.\n")
    assert text.endswith("The rest.\n\nexample:\n  binidx x\n")


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, (module, _) in COMMANDS.items():
        command = parser(name, import_module(f"binidx.tools.{module}").__doc__)
        import_module(f"binidx.tools.{module}").add_options(command)
        add_output(command, progress=True)
        assert [line for line in command.format_help().splitlines() if len(line) > 80] == [], name
    assert max(map(len, usage().splitlines())) <= 80


def test_help_wraps_lines_of_names() -> None:
    assert wrap_block("  name   some words\n         of text", 20) == "  name   some words\n         of text"
    assert wrap_block("example:\n  x --some --options", 14) == "example:\n  x --some \\\n      --options"


def test_options_of_stores_come_from_a_file_or_the_environment_too(tmp_path: Path, monkeypatch, capsys) -> None:
    def parsed(*arguments: str) -> object:
        options = parser("x", "X")
        add_json(options, "--storage-options", "fsspec's own")
        return options.parse_args(arguments).storage_options

    file = tmp_path / "s3.json"
    file.write_text('{"secret": "5ec4e7"}')
    assert parsed() is None
    assert parsed("--storage-options", f"@{file}") == {"secret": "5ec4e7"}
    for value in ('{"key": 1}', f"@{file}"):
        monkeypatch.setenv("BINIDX_STORAGE_OPTIONS", value)
        assert parsed() == ({"secret": "5ec4e7"} if value[0] == "@" else {"key": 1})
    assert parsed("--storage-options", "{}") == {}
    for text, problem in (
        ('{"secret": "5ec4e7"', "no JSON: "),
        ('["5ec4e7"]', "found a JSON list, needed an object"),
        (f"@{tmp_path}/none", f"{tmp_path}/none: No such file or directory"),
    ):
        for arguments in (["--storage-options", text], []):
            if not arguments:
                monkeypatch.setenv("BINIDX_STORAGE_OPTIONS", text)
            with pytest.raises(SystemExit) as end:
                parsed(*arguments)
            assert end.value.code == 2
            error = capsys.readouterr().err
            assert f"x: argument --storage-options: {'' if arguments else 'BINIDX_STORAGE_OPTIONS: '}{problem}" in error
            assert "5ec4e7" not in error


def test_an_option_is_refused_as_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    for call in (["merge", "a", "b", "--too", "c"], ["cut", "head", "a", "--too=c", "-n", "1"]):
        with pytest.raises(SystemExit):
            main(call)
        assert "unrecognized arguments: --too; did you mean --to?" in capsys.readouterr().err
    for call, word in ((["convert", "en", "s3://c/en"], "s3://c/en"), (["merge", "a", "b", "c"], "c")):
        with pytest.raises(SystemExit):
            main(call)
        assert f"unrecognized arguments: {word}; did you mean --to {word}?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["verify", "a", "b", "--quick"])
    assert "unrecognized arguments: b; needs one PREFIX at a time; binidx verify" in capsys.readouterr().err
    for call in (["convert", "en", "--to", "s3://c"], ["preprocess", "en.jsonl", "--to", "s3://c"]):
        with pytest.raises(SystemExit):
            main(call)
        assert "found s3://c, a bucket, needed a prefix in it such as s3://c/en" in capsys.readouterr().err
    for call in (["convert", "en", "--to", ""], ["inspect", ""]):
        with pytest.raises(SystemExit):
            main(call)
        assert "found an empty name, needed a path or a URI" in capsys.readouterr().err
    for flag, hint in (("--stepz", "; did you mean --steps?;"), ("--stop", ";"), ("--ranks", ";")):
        with pytest.raises(SystemExit):
            main(["account", "run.json", flag, "5"])
        assert f"unrecognized arguments: {flag}{hint} binidx account" in capsys.readouterr().err
    for flag, way in (("--seq-length", "give the whole command after --from-megatron"), ("--strct", "mean --strict?")):
        with pytest.raises(SystemExit):
            main(["plan", "pretrain_gpt.py" if "seq" in flag else "run.json", flag, "8"])
        told = capsys.readouterr().err
        assert f"binidx plan: unrecognized arguments: {flag}; " in told
        assert way in told
    with pytest.raises(SystemExit):
        main(["verify", "a", "--vocab-size", "1k"])
    assert "binidx verify: --vocab-size: found 1k, needs a number; " in capsys.readouterr().err


def test_a_name_that_the_encoding_of_the_terminal_lacks_is_printed(tmp_path: Path) -> None:
    prefix = build_ours(tmp_path / "größe", [Document(np.arange(3, dtype=np.uint8), [3], [])], np.uint8)
    call = [sys.executable, "-m", "binidx", "inspect", prefix]
    shown = subprocess.run(call, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    assert b"gr\\xf6\\xdfe\n" in shown.stdout
