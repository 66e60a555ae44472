"""Settings of ours: from the options, the environment, or the defaults, and never seen by fsspec."""

from dataclasses import fields

import pytest

from binidx.errors import ConfigError
from binidx.storage.filesystem import tuned
from binidx.storage.settings import PARSERS, ReadSettings, parse_bytes


def test_every_setting_can_be_given_by_the_environment() -> None:
    assert list(PARSERS) == [each.name for each in fields(ReadSettings)]


def test_options_win_over_the_environment_and_that_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ReadSettings.of(None) == ReadSettings()
    monkeypatch.setenv("BINIDX_FAST", "0")
    monkeypatch.setenv("BINIDX_CACHE_BYTES", "2GiB")
    assert ReadSettings.of({"key": "k"}) == ReadSettings(fast=False, cache_bytes=2 << 30)
    assert ReadSettings.of({"binidx": {"fast": True}}).fast is True


def test_fsspec_does_not_see_them() -> None:
    assert "binidx" not in tuned("s3://b/k", {"binidx": {"fast": True}, "anon": True})


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("500GB", 500 * 10**9), ("64MiB", 64 << 20), ("1.5T", 15 * 10**11), ("2 k", 2000)]
)
def test_bytes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_what_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cache_dri"):
        ReadSettings.of({"binidx": {"cache_dri": "/x"}})
    monkeypatch.setenv("BINIDX_CACHE_BYTES", "many")
    with pytest.raises(ConfigError, match=r"BINIDX_CACHE_BYTES: found 'many'"):
        ReadSettings.of(None)
