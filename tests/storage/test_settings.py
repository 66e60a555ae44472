"""Settings of ours: from the options, the environment, or the defaults, and never seen by fsspec."""

from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from binidx.errors import ConfigError
from binidx.storage.settings import RULES, ReadSettings, parse_bytes
from binidx.storage.stores.fsspec_store import driver_options


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BINIDX_INDEX_DIR", "BINIDX_HEDGE", "BINIDX_DEADLINE_SECONDS"):
        monkeypatch.delenv(name)


def test_every_setting_can_be_given_by_the_environment() -> None:
    assert list(RULES) == [each.name for each in fields(ReadSettings)]


def test_options_win_over_the_environment_and_that_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ReadSettings.of(None) == ReadSettings()
    monkeypatch.setenv("BINIDX_FAST", "0")
    monkeypatch.setenv("BINIDX_CACHE_BYTES", "2GiB")
    assert ReadSettings.of({"key": "k"}) == ReadSettings(fast=False, cache_bytes=2 << 30)
    assert ReadSettings.of({"binidx": {"fast": True}}).fast is True


def test_fsspec_does_not_see_them() -> None:
    assert "binidx" not in driver_options("s3://b/k", {"binidx": {"fast": True}, "anon": True})


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("500GB", 500 * 10**9), ("64MiB", 64 << 20), ("1.5T", 15 * 10**11), ("2 k", 2000)]
)
def test_bytes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_what_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"storage_options\['binidx'\]: unknown option cache_dri; did you mean cache_dir"
    ):
        ReadSettings.of({"binidx": {"cache_dri": "/x"}})
    monkeypatch.setenv("BINIDX_CACHE_BYTES", "many")
    with pytest.raises(ConfigError, match=r"BINIDX_CACHE_BYTES: found 'many'"):
        ReadSettings.of(None)


def test_text_means_the_same_in_the_options_as_in_the_environment(tmp_path: Path) -> None:
    given = {"cache_bytes": "500GB", "concurrency": "32", "deadline_seconds": "7.5", "hedge": "no", "fast": "0"}
    read = ReadSettings(cache_bytes=500 * 10**9, concurrency=32, deadline_seconds=7.5, hedge=False, fast=False)
    assert ReadSettings.of({"binidx": given}) == read
    assert ReadSettings.of({"binidx": {"cache_dir": tmp_path}}) == ReadSettings(cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"binidx cache_bytes: found 'many'"):
        ReadSettings.of({"binidx": {"cache_bytes": "many"}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("concurrency", -5),  # nothing would ever be sent
        ("concurrency", 0),
        ("deadline_seconds", float("nan")),
        ("deadline_seconds", -1.0),
        ("deadline_seconds", None),
        ("cache_bytes", -1),
        ("cache_chunk_bytes", 0),
        ("max_gap", -7),
        ("max_gap", [8]),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"{name}: found .*, needs a number, at least [01]"):
        ReadSettings.of({"binidx": {name: value}})
    if isinstance(value, int | float):
        monkeypatch.setenv(f"BINIDX_{name.upper()}", str(value))
        with pytest.raises(ConfigError, match=name):
            ReadSettings.of(None)


def test_patience_ends_before_that_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed

    assert ReadSettings().patience_seconds == 480
    for minutes, seconds in ((30, 1680), (3, 90)):
        timeout = timedelta(minutes=minutes)
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
        assert ReadSettings().patience_seconds == seconds
        assert ReadSettings(outage_seconds=7).patience_seconds == 7
        torch.distributed.destroy_process_group()
    monkeypatch.setenv("BINIDX_OUTAGE_SECONDS", "0")
    assert ReadSettings.of(None).patience_seconds == 0


def test_a_deadline_that_no_read_meets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="deadline_seconds: found 0, needs a number above it"):
        ReadSettings.of({"binidx": {"deadline_seconds": 0}})
    monkeypatch.setenv("BINIDX_DEADLINE_SECONDS", "0.0")
    with pytest.raises(ConfigError, match="deadline_seconds: found 0"):
        ReadSettings.of(None)


def test_a_cache_dir_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of a script that is not set: else a directory called `  ` appears where the job was started."""
    monkeypatch.setenv("BINIDX_CACHE_DIR", "  ")
    with pytest.raises(ConfigError, match="cache_dir: found '  ', needs a directory, or None for no cache"):
        ReadSettings.of(None)
    for nowhere in ("", " "):
        with pytest.raises(ConfigError, match="cache_dir: found"):
            ReadSettings.of({"binidx": {"cache_dir": nowhere}})
    monkeypatch.setenv("BINIDX_CACHE_DIR", "")  # as all variables: empty is not set
    assert ReadSettings.of(None).cache_dir is None


@pytest.mark.parametrize("ours", ["x", ["fast"], 7])
def test_what_is_no_table_of_settings_is_refused(ours: Any) -> None:
    with pytest.raises(ConfigError, match=r"storage_options\['binidx'\]: unknown option .*; (needs|did you mean) fast"):
        ReadSettings.of({"binidx": ours})


def test_a_variable_that_is_no_setting_is_named_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BINIDX_CACHE_DRI", "/nvme")
    monkeypatch.setenv("BINIDX_OF_ANOTHER_TOOL", "1")
    monkeypatch.setenv("BINIDX_MAX_GAP", "12345")
    assert ReadSettings.of(None).cache_dir is None
    assert [each.getMessage() for each in caplog.records] == [
        "BINIDX_CACHE_DRI: is no setting, and ignored; did you mean BINIDX_CACHE_DIR?"
    ]


def test_a_value_that_is_none_gets_the_form() -> None:
    with pytest.raises(ConfigError, match="cache_bytes: found 'lots', needs a number of bytes such as 2GB or 512MiB"):
        ReadSettings.of({"binidx": {"cache_bytes": "lots"}})
