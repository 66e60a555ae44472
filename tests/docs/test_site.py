"""The documentation is complete, its commands parse and its examples run. `make lint` builds it with --strict."""

from __future__ import annotations

import re
import shlex
from argparse import SUPPRESS
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pages import DOCS, python_blocks, read_page
from helpers.public_names import PUBLIC
from mkdocs.config import load_config
from mkdocs.structure.files import get_files, set_exclusions

import binidx
from binidx.tools import COMMANDS, main
from binidx.tools._command import UsageError, add_output, parser, subcommands
from binidx.tools._options import json_object

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)
SHELL = ("", "sh", "bash", "console", "text")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_examples_in_python_of_every_page_are_run_by_a_test() -> None:
    """One that reads the page by its name, in a module that runs blocks."""
    modules = [path.read_text() for path in ROOT.glob("tests/**/test_*.py")]
    runs = [text for text in modules if re.search(r"\b(python_blocks|run_blocks)\(", text)]
    read = {name for text in runs for name in re.findall(r'\b(?:read_page|run_blocks)\("([^"]+)"', text)}
    texts = {str(page.relative_to(DOCS).with_suffix("")): page.read_text() for page in PAGES}
    shown = {name: python_blocks(text) for name, text in texts.items()}
    assert {name for name, blocks in shown.items() if blocks} - read == set()
    assert {name for name, text in texts.items() if len(shown[name]) != text.count("```python")} == set(), "indented"


def test_every_example_is_on_a_page_whole() -> None:
    block = re.compile(r'^( *)``` { \.\w+ title="(.*)" }\n\1--8<-- "(.*)"\n\1```$', re.M)
    shown = [match for page in PAGES for match in block.finditer(page.read_text())]
    assert [match[2] for match in shown] == [match[3] for match in shown]
    files = {name_of(path) for path in ROOT.glob("examples/**/*.*") if path.suffix != ".pyc"}
    files -= {name_of(path) for path in ROOT.glob("examples/monitoring/*")}  # for Grafana and Prometheus
    assert files - {match[2] for match in shown} == {"examples/common.py"}  # which is a part of other blocks


def test_the_example_of_the_first_page_runs(tmp_path: Path) -> None:
    for name in ("en", "code"):
        builder = binidx.IndexedDatasetBuilder(f"{tmp_path}/{name}.bin", np.uint16)
        builder.add_document(np.arange(50_000), [50_000])
        builder.finalize(f"{tmp_path}/{name}.idx")
    (example,) = python_blocks(read_page("index"))
    shapes = list[Any]()
    local = re.sub(r"(s3|gs)://corpus", str(tmp_path), example)
    exec(local, {"model": lambda *tensors: shapes.append(tensors[0].shape)})
    assert {tuple(each) for each in shapes} == {(8, 4096)}


def code_of(page: Path) -> Iterator[str]:
    """Lines in the code blocks of a page that may be typed in a shell; those that continue are joined."""
    text = page.read_text()
    blocks = [match[3] for match in FENCE.finditer(text) if match[2] in SHELL]
    blocks += re.findall(r"(?:^ {4}.*\S.*\n)+", FENCE.sub("", text), re.M)
    for block in blocks:
        yield from block.replace("\\\n", " ").splitlines()


def calls(line: str) -> Iterator[list[str]]:
    """The arguments of each `binidx` in a line of a shell, without variables, pipes and comments."""
    line = re.sub(r"^\s*(\$ )?", "", line)
    if not re.match(r"(\w+=\S* )*(python3? -m )?binidx [a-z][a-z-]*( |$)", line):
        return
    for part in re.split(r" (?:&&|\|) |; ", re.sub(r"\s#.*", "", line)):
        words = [each for each in shlex.split(part) if each != "..."]
        if "binidx" in words:
            redirected = [at for at, word in enumerate(words) if re.fullmatch(r"\d?>{1,2}|&", word)]
            yield words[words.index("binidx") + 1 : min(redirected, default=None)]


def commands_of_pages() -> list[tuple[str, list[str]]]:
    pages = [*PAGES, *ROOT.glob("*.md")]
    return [(name_of(page), each) for page in pages for line in code_of(page) for each in calls(line)]


def problem_of(arguments: list[str]) -> str | None:
    """What the command's parser says against the arguments."""
    name, *rest = arguments
    if name not in COMMANDS:
        return f"no command {name}"
    module = import_module(f"binidx.tools.{COMMANDS[name][0]}")
    options = parser(name, module.__doc__)
    module.add_options(options)
    add_output(options, progress=True)
    options.register("type", json_object, str)  # no file is read
    try:
        options.parse_args([each for each in rest if each not in ("[...]", "…")])
    except UsageError as error:
        return error.message
    return None


def test_every_command_of_a_page_parses() -> None:
    found = commands_of_pages()
    assert len(found) > 20
    wrong = {f"{page}: binidx {shlex.join(each)}": problem for page, each in found if (problem := problem_of(each))}
    assert wrong == {}


def examples_of_commands() -> Iterator[str]:
    """Lines of the examples in the help of each command; those that continue are joined."""
    for module, _ in COMMANDS.values():
        doc = import_module(f"binidx.tools.{module}").__doc__ or ""
        yield from doc.partition("\nexample:\n")[2].splitlines()


def test_examples_of_the_commands_parse() -> None:
    for line in examples_of_commands():
        assert [problem_of(each) for each in calls(line)] == [None], line


def test_names_of_datasets_on_pages_are_those_that_the_commands_of_pages_make() -> None:
    """preprocess appends the key and `_document` to its --to: that prefix alone is the name of no dataset."""
    typed = [
        *(each for _, each in commands_of_pages()),
        *(each for line in examples_of_commands() for each in calls(line)),
    ]
    prefixes, names = set[str](), set[str]()
    for call in (each for each in typed if "--to" in each):
        (prefixes if call[0] == "preprocess" else names).add(call[call.index("--to") + 1])
    assert {"corpus/en", "s3://corpus/web"} <= prefixes
    names |= {f"{prefix}_text_document" for prefix in prefixes}
    assert "s3://corpus/en" in names
    files = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.ipynb"), *ROOT.glob("tools/*.py")]
    texts = {name_of(file): re.sub(r"preprocess .*(\\\n.*)*", "", file.read_text()) for file in files}
    alone = re.compile(rf"(?<![\w/])({'|'.join(map(re.escape, sorted(prefixes)))})(?![\w/.-])")
    assert {(name, prefix) for name, text in texts.items() for prefix in alone.findall(text)} == set()
    named = re.compile(r"(?:s3|gs)://[\w./-]+_document\b")
    assert {(name, uri) for name, text in texts.items() for uri in named.findall(text) if uri not in names} == set()


def test_the_error_of_the_page_of_commands_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "data/none", "--json"]) == 2
    (shown,) = re.findall(r"```json\n(.*?)```", read_page("reference/commands/index"), re.S)
    assert capsys.readouterr().out == shown


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in ROOT.glob("docs/reference/python/*.md"))
    documented = sorted(re.findall(r"^::: binidx\.(?:megatron\.|packed\.)?(\w+)$", pages, re.M))
    assert documented == sorted(PUBLIC)


def test_pages_of_commands_have_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BINIDX_STORAGE_OPTIONS", '{"secret": "5ec4e7"}')
    hooks = import_module("site_hooks")
    for name in COMMANDS:
        page = hooks.command_page(name)
        options = hooks.command_parser(name)
        shown = [action for action in options._actions if action.help != SUPPRESS]
        flags = [flag for action in shown for flag in action.option_strings if flag not in ("-h", "--help")]
        assert [flag for flag in flags if flag not in page] == []
        assert "5ec4e7" not in page
        assert "\nexample:" not in page


def test_every_option_of_a_command_is_named_in_a_page_or_a_test() -> None:
    files = [ROOT / "README.md", *PAGES, *ROOT.glob("docs/**/*.ipynb"), *ROOT.glob("tests/**/*.py")]
    texts = [file.read_text() for file in files if file != Path(__file__)]
    of_all = {"--help", "--json", "--progress", "--storage-options", "--source-options", "--target-options"}
    missing = []
    for name, (module, _) in COMMANDS.items():
        root = import_module(f"binidx.tools.{module}").main.fill(parser(name, ""))
        own = [text for text in texts if re.search(rf"\b{name}\b", text)]
        for options in (root, *subcommands(root).values()):
            for action in (each for each in options._actions if each.option_strings and each.help != SUPPRESS):
                option = re.compile(rf"(?<![\w-])({'|'.join(action.option_strings)})(?![\w-])")
                if not any(map(option.search, texts if of_all & {*action.option_strings} else own)):
                    missing.append((name, action.option_strings))
    assert missing == []


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("rows in = documents out, 2 * 3 -> 6 | 7", []),
        ("in place of binidx.BakedDataset(DIR, config) or so", ["binidx.BakedDataset(DIR, config)"]),
        ("--shard I/N splits; --plain, and dask=ADDRESS.", ["--shard I/N", "--plain", "dask=ADDRESS"]),
        ("the same for .bin/.idx, s3://a and `x = 1`", [".bin/.idx", "s3://a"]),
        ("samples(s) of a run", []),
    ],
)
def test_words_of_commands_are_marked_as_code_whole(text: str, codes: list[str]) -> None:
    marked = import_module("site_hooks").marked(text)
    assert re.findall(r"<code[^>]*>([^<]*)</code>", marked) == codes


def test_no_code_of_a_command_page_is_punctuation() -> None:
    hooks = import_module("site_hooks")
    for name in COMMANDS:
        codes = re.findall(r"<code[^>]*>([^<]*)</code>", hooks.command_page(name))
        assert [code for code in codes if not re.search(r"\w", code)] == []


def test_the_table_of_options_has_each_option_of_each_config() -> None:
    words = re.findall(r"<!-- affects (\w+) -->", read_page("reference/python/datasets"))
    listed = {name for word in words for name in re.findall(r"`(\w+)`", import_module("site_hooks").affected_by(word))}
    configs = [value for name, value in PUBLIC.items() if name.endswith("DatasetConfig")]
    assert listed == {option.name for config in configs for option in fields(config) if option.init}


def test_pages_of_commands_link_to_the_pages_that_use_them() -> None:
    pages = {"how-to/x.md": "# Copy\n\n    binidx convert a b\n", "how-to/y.md": "# Other\n`binidx convert-x`\n"}
    assert import_module("site_hooks").links_to("convert", pages)[-1] == "- [Copy](../../how-to/x.md)"


def test_docstrings_of_ours_are_sections_that_griffe_reads() -> None:
    hooks = import_module("site_hooks")
    text = "Read.\n\nArgs:\n    a, b: two\n        numbers.\n\nExample:\n    x = 1\n\nSource: ours."
    assert hooks.rewritten(text) == (
        "Read.\n\nArgs:\n    a: two\n        numbers.\n    b: two\n        numbers.\n\n"
        "Examples:\n    ```python\n    x = 1\n    ```\n\n**Source:** ours."
    )


@pytest.mark.parametrize(
    ("html", "refused"),
    [
        ('<script src="https://cdn.example/x.js">', True),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', True),
        ("<img src=http://h/x.png>", True),
        ('<a href="https://example.org">', False),
        ('<script src="assets/x.js">', False),
    ],
)
def test_a_page_may_link_to_other_hosts_but_load_nothing_from_them(html: str, refused: bool) -> None:
    assert bool(import_module("site_hooks").EXTERNAL.search(html)) is refused


def test_links_to_files_that_are_no_pages_lead_to_the_repository() -> None:
    hooks, config = import_module("site_hooks"), load_config(str(ROOT / "mkdocs.yml"))
    files = get_files(config)
    set_exclusions(files, config)
    text = "[c](../contributing/tests.md#marks) [d](../../LICENSE) [e](https://a.b/c.md) [f](none.md#x) [g](bake.md)"
    changed = hooks.linked_to_repository(text, "how-to/x.md", files)
    address = f"{hooks.ADDRESS}/blob/HEAD"
    assert changed == text.replace("../contributing", f"{address}/docs/contributing").replace("../..", address)


def test_the_pages_of_the_site_have_at_most_60_000_words() -> None:
    """Words with a letter or digit, those in code and tables, too; not in comments, tags or the targets of links."""
    texts = [page.read_text() for page in PAGES if "contributing" not in page.parts]
    plain = [re.sub(r"<!--.*?-->|</?\w[^>]*>|\]\([^)]*\)", " ", text, flags=re.S) for text in texts]
    assert sum(bool(re.search(r"\w", word)) for text in plain for word in text.split()) <= 60_000
