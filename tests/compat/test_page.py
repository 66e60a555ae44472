"""What docs/moving/megatron.md says can be done as it says."""

from __future__ import annotations

import re
from pathlib import Path

from compat.running import start
from helpers.pages import python_blocks, read_page

from binidx.compat.megatron import __main__ as command
from binidx.dataset.megatron_releases import RELEASES, Rule

PAGE = read_page("moving/megatron")


def test_its_two_lines_put_ours_in_place(tmp_path: Path) -> None:
    [block] = python_blocks(PAGE)
    (tmp_path / "script.py").write_text(block + "\nprint('{}')\n")
    assert start([str(tmp_path / "script.py")]).lines() == [[{}]]


def test_its_options_are_there() -> None:
    named = set(re.findall(r"`?(--(?:trust|cache|megatron)-[a-z-]+)", PAGE))
    assert named == {option.partition("=")[0] for option in command.OPTIONS}


def test_its_table_has_the_rules_of_each_release() -> None:
    [head] = re.findall(r"^\| rule \| (0\.16 .*) \|$", PAGE, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` \|((?: x? ?\|)+)$", PAGE, re.MULTILINE)
    releases = head.split(" | ")
    assert [*RELEASES] == releases
    assert [name for name, _ in rows] == [*Rule]
    for number, release in enumerate(releases):
        marked = {name for name, marks in rows if marks.split("|")[number].strip()}
        assert marked == RELEASES[release], release
    assert set(re.findall(r"^\| `(\w+)` \| [a-zA-Z`]", PAGE, re.MULTILINE)) >= {*Rule}
