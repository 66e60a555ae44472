"""docs/reference/settings.md has every setting, and its example runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from conftest import Bucket
from helpers.pages import python_blocks, read_page

import binidx
from binidx.storage.settings import RULES, ReadSettings

ROOT = Path(__file__).parents[2]
PAGE = read_page("reference/settings")


def test_every_setting_is_in_the_page_of_settings() -> None:
    listed = re.findall(r"^\| `(BINIDX_\w+)` \| ([^|]*) \|", PAGE, re.M)
    assert {name for name, _ in listed} >= {f"BINIDX_{name.upper()}" for name in RULES}
    sources = [*ROOT.glob("src/binidx/**/*.py"), *ROOT.glob("tools/**/*.py")]
    sources = [path for path in sources if path.parent.name != "native"]  # constants of the C core
    named = {name for path in sources for name in re.findall(r"BINIDX_[A-Z]+(?:_[A-Z]+)*", path.read_text())}
    flags = {flag for path in sources for flag in re.findall(r'add_json\(\w+, "--([a-z-]+)"', path.read_text())}
    named |= {f"BINIDX_{flag.replace('-', '_').upper()}" for flag in flags}
    assert named - set(re.findall(r"`(BINIDX_\w+)`", PAGE)) == set()
    for name, default in listed:
        value = getattr(ReadSettings(), name.removeprefix("BINIDX_").lower(), None)
        text = f"`{value}`" if isinstance(value, str) else value and f"{float(value):g}"
        assert value in (None, ()) or isinstance(value, dict) or default.split(";")[0] == text, name


def test_the_example_of_the_page_of_settings_runs(s3: Bucket) -> None:
    builder = binidx.IndexedDatasetBuilder(f"{s3.uri}/settings/en.bin", np.uint16)
    builder.add_document(np.arange(9000), [9000])
    builder.finalize(f"{s3.uri}/settings/en.idx")
    (example,) = python_blocks(PAGE)
    names: dict[str, Any] = {"binidx": binidx}
    here = {"http://127.0.0.1:8333": os.environ["AWS_ENDPOINT_URL"], "s3://corpus": f"{s3.uri}/settings"}
    exec(re.sub("|".join(map(re.escape, here)), lambda found: here[found[0]], example), names)
    assert len(names["train"]) == 2
