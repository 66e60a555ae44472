"""Filters: what stays is as it was, what goes is counted under its first reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.text_oracle import read_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from binidx.errors import ConfigError
from binidx.prepare.text.batch import Filters, parse_keep

ROWS = st.fixed_dictionaries(
    {"text": st.text("aé語😀", max_size=6) | st.lists(st.text("ab", max_size=3), max_size=3)},
    optional={"lang": st.sampled_from(["en", "de", "", None, 1, True]), "id": st.integers() | st.text(max_size=3)},
)


def shown(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def reason(row: dict[str, Any], filters: Filters) -> str | None:
    """Why it goes, by hand."""
    for name, values in filters.keep.items():
        if shown(row.get(name)) not in values:
            return f"keep {name}"
    count = sum(map(len, [row["text"]] if isinstance(row["text"], str) else row["text"]))
    if count < filters.min_characters:
        return "min characters"
    if filters.max_characters is not None and count > filters.max_characters:
        return "max characters"
    return None


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(ROWS, max_size=10),
    least=st.integers(0, 4),
    most=st.none() | st.integers(4, 6),
    keep=st.dictionaries(
        st.sampled_from(["lang", "id"]), st.lists(st.sampled_from(["en", "de", "", "1", "true"])), max_size=2
    ),
)
def test_filters_are_what_they_say(
    tmp_path: Path, rows: list[dict[str, Any]], least: int, most: int | None, keep: dict[str, list[str]]
) -> None:
    filters = Filters(least, most, keep)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_file(path, id_key="id", filters=filters)
    stay = [number for number, row in enumerate(rows) if reason(row, filters) is None]
    assert found.rows == stay
    assert found.texts == [texts if isinstance(texts := rows[n]["text"], list) else [texts] for n in stay]
    assert found.ids == [shown(rows[number].get("id")) for number in stay]
    reasons = [why for row in rows if (why := reason(row, filters))]
    assert found.dropped == {why: reasons.count(why) for why in reasons}


def test_keep_is_read_from_the_command_line() -> None:
    assert parse_keep(["lang=en", "lang=de", "a=b=c", "x="]) == {"lang": ["en", "de"], "a": ["b=c"], "x": [""]}
    for text in ("lang", "=en", ""):
        with pytest.raises(ConfigError, match="need FIELD=VALUE"):
            parse_keep([text])


@pytest.mark.parametrize("bounds", [(-1, None), (5, 4)])
def test_bounds_that_let_nothing_through_are_refused(bounds: tuple[int, int | None]) -> None:
    with pytest.raises(ConfigError, match="characters"):
        Filters(*bounds)
