"""What docs/moving/megatron.md says can be done as it says."""

from __future__ import annotations

import re
from pathlib import Path

from compat.running import start
from helpers.pages import python_blocks, read_page

from binidx.compat.megatron import __main__ as command

PAGE = read_page("moving/megatron")


def test_its_two_lines_put_ours_in_place(tmp_path: Path) -> None:
    [block] = python_blocks(PAGE)
    (tmp_path / "script.py").write_text(block + "\nprint('{}')\n")
    assert start([str(tmp_path / "script.py")]).lines() == [[{}]]


def test_its_options_are_there() -> None:
    named = set(re.findall(r"`?(--(?:trust|cache|megatron)-[a-z0-9.=-]+)", PAGE))
    assert named == set(command.OPTIONS)
