"""binidx COMMAND: one table, one code for `binidx x` and `python tools/x.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from binidx.tools import COMMANDS, main
from binidx.tools._command import add_json, parser, run
from binidx.tools._display import human_bytes, human_seconds
from conftest import Bucket

import binidx
from binidx import errors

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


def test_no_module_here_hides_one_of_the_standard_library() -> None:
    ours = {path.stem for path in (ROOT / "tools").iterdir()}
    assert not ours & sys.stdlib_module_names


def test_help_lists_the_commands(capsys) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(f"  {name:<13} {purpose}\n" in out for name, (_, purpose) in COMMANDS.items())


def test_the_version_is_said(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"binidx {binidx.__version__}\n"


def test_an_unknown_command_gets_a_hint(capsys) -> None:
    assert main(["convrt", "a", "b"]) == 2
    assert "binidx: 'convrt' is not a command, did you mean 'convert'?; binidx --help" in capsys.readouterr().err


def test_a_script_and_the_command_are_one_code() -> None:
    binary = Path(sys.executable).parent / "binidx"
    script = ROOT / "tools" / "inspect_dataset.py"
    for arguments in ([str(GOLDEN)], [str(GOLDEN), "--json"], ["nowhere"], ["--help"]):
        found = [
            subprocess.run([*command, *arguments], capture_output=True, env={**os.environ, "COLUMNS": "80"})
            for command in ([binary, "inspect"], [sys.executable, script])
        ]
        assert len({(each.returncode, each.stdout, each.stderr) for each in found}) == 1


def test_the_commands_bring_no_torch() -> None:
    code = "from binidx.tools import convert, inspect_dataset; import sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"False\n"


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

    assert run("name", fail) == status
    assert capsys.readouterr().err == "binidx name: x\n"


@pytest.mark.parametrize(
    ("uri", "environment", "message"),
    [
        ("s3://b/k", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "no credentials found; set AWS_ACCESS_KEY_ID"),
        ("s3://b/k", {"AWS_PROFILE": "nope"}, "The config profile (nope) could not be found; check the credentials"),
        ("s3://b/k", {**SOMEBODY, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "Could not connect to the endpoint"),
        ("s3://b/k", {**SOMEBODY, "AWS_ENDPOINT_URL": "http://host.invalid"}, "Could not connect to the endpoint"),
        ("http://127.0.0.1:1/k", {}, "Cannot connect to host 127.0.0.1:1"),
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
    assert found.stderr.startswith(f"binidx inspect: {uri}.")
    assert found.stderr.count("\n") == 1


def test_refused_credentials_are_a_wrong_call(s3: Bucket, capsys) -> None:
    options = json.dumps({"key": s3.server.key, "secret": "wrong"})
    assert main(["inspect", f"{s3.uri}/k", "--storage-options", options]) == 2
    assert "access denied" in capsys.readouterr().err


def test_an_interrupt_is_130(capsys) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert run("name", interrupt) == 130
    assert capsys.readouterr().err == "\nbinidx name: interrupted\n"


def test_errors_that_are_not_ours_keep_their_traceback() -> None:
    def fail() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run("name", fail)


def test_numbers_for_people() -> None:
    counts = {0: "0 bytes", 1023: "1,023 bytes", 1024: "1.0 KiB", 12_345_678: "11.8 MiB", 2**60: "1,048,576.0 TiB"}
    assert {count: human_bytes(count) for count in counts} == counts
    times = {0.04: "0.0 s", 59.9: "59.9 s", 75.3: "1 min 15 s", 3600: "1 h 0 min", 90_000: "25 h 0 min"}
    assert {seconds: human_seconds(seconds) for seconds in times} == times


def test_a_parser_takes_its_help_from_the_docstring() -> None:
    text = parser("x", "First line.\n\nThe rest.\n\nexample:\n  binidx x\n").format_help()
    assert text.startswith("usage: binidx x [-h]\n\nFirst line.\n")
    assert text.endswith("The rest.\n\nexample:\n  binidx x\n")


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
        monkeypatch.setenv("BINIDX_STORAGE_OPTIONS", text)
        for arguments in ([], ["--storage-options", text]):
            with pytest.raises(SystemExit) as end:
                parsed(*arguments)
            assert end.value.code == 2
            error = capsys.readouterr().err
            assert f"error: argument --storage-options: {problem}" in error
            assert "5ec4e7" not in error
