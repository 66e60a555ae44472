"""Hooks of the site (mkdocs.yml): pages of commands and notebooks, links to names, docstring sections."""

from __future__ import annotations

import argparse
import ast
import base64
import html
import inspect
import json
import os
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent, indent
from typing import Any
from unittest.mock import patch

from griffe import Extension, Object, stdlib_decorators
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

import binidx
import binidx.core
import binidx.errors
from binidx.dataset.affects import described_fields
from binidx.tools import COMMANDS, GROUPS
from binidx.tools._command import parser
from binidx.tools._options import Names

for name in ("cached_property", "opened_once"):
    stdlib_decorators[f"binidx.forks.{name}"] = stdlib_decorators["functools.cached_property"]
FOLDER = "reference/commands"
ROOT = Path(__file__).parent
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
BOOSTS = {"tutorials": 2, "how-to": 2, "moving": 2}
"""Folder of pages -> factor of its results in the search."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the commands to the navigation, the version to the footer, links for edits to the pages."""
    config.copyright = f'binidx {binidx.__version__}, Apache-2.0, <a href="{ADDRESS}">source</a>'
    config.edit_uri = f"{ADDRESS}/edit/main/docs/"
    for section in config.nav or []:
        for pages in section.get("Reference", []):
            if "Commands" in pages:
                pages["Commands"] += [
                    {group.capitalize(): [f"{FOLDER}/{name}.md" for name in commands]}
                    for group, commands in GROUPS.items()
                ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and one for each command, with links to the pages that use it."""
    for notebook in [each for each in files if each.src_uri.endswith(".ipynb")]:
        content = notebook_page(json.loads(notebook.content_string))
        files.append(File.generated(config, f"{notebook.src_uri.removesuffix('.ipynb')}.md", content=content))
    pages = {each.src_uri: each.content_string for each in files.documentation_pages()}
    users = {uri: text for uri, text in pages.items() if not uri.startswith(("reference/", "index.md"))}
    for name in COMMANDS:
        content = "\n".join([command_page(name), *links_to(name, users)])
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=content))
    return files


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook in Markdown, with the richest form of each output."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = {
                kind: "".join(lines) for kind, lines in output.get("data", {"text/plain": output.get("text")}).items()
            }
            if "image/svg+xml" in data:
                image = base64.b64encode(data["image/svg+xml"].encode()).decode()
                parts.append(f'<img alt="{html.escape(data["text/plain"])}" src="data:image/svg+xml;base64,{image}">')
            else:
                plain = f"```text\n{data['text/plain'].rstrip()}\n```"
                parts.append(f"<div class=output>{data['text/html']}</div>" if "text/html" in data else plain)
    return "\n\n".join(parts)


def links_to(command: str, pages: dict[str, str]) -> list[str]:
    """Return lines with links to the pages that mention a command, by their titles."""
    mention = re.compile(rf"\bbinidx {command}(?![\w-])")
    titles = {uri: re.search(r"^# (.*)", text, re.M) for uri, text in pages.items() if mention.search(text)}
    links = [f"- [{title[1]}](../../{uri})" for uri, title in titles.items() if title]
    return ["", "## Pages that use it", "", *links] if links else []


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rank the page in the search, fill in derived tables, give errors and settings identifiers for links."""
    page.meta.setdefault("search", {"boost": BOOSTS.get(page.file.src_uri.partition("/")[0], 1)})
    markdown = linked_to_repository(markdown, page.file.src_uri, files)
    markdown = markdown.replace("<!-- commands -->", "\n".join(tables_of_commands()))
    markdown = markdown.replace("<!-- core -->", "\n".join(tables_of_core()))
    markdown = re.sub(r"<!-- affects (\w+) -->", lambda found: affected_by(found[1]), markdown)
    example = re.compile(r'^( *)--8<-- "(examples/\w+\.py)"$', re.M)
    markdown = example.sub(lambda found: indent(whole_example(Path(found[2])), found[1]), markdown)
    if page.file.src_uri == "reference/errors.md":
        markdown = re.sub(r"^(#+ (\w+Error))$", r"\1 { #binidx.errors.\2 }", markdown, flags=re.M)
        markdown = markdown.replace("```text", "```{ .text .wrap }")
    if page.file.src_uri == "reference/settings.md":
        markdown = re.sub(r"^\| `(BINIDX_[A-Z_]+)`", r"| `\1`{ #\1 }", markdown, flags=re.M)
    return markdown


def linked_to_repository(markdown: str, src_uri: str, files: Files) -> str:
    """Return the page with links to files of the repository that are no pages of the site as addresses there."""

    def target(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(src_uri), found[1]))
        page = files.get_file_from_path(path.removeprefix("docs/"))
        outside = (page is None or page.inclusion.is_excluded()) and (ROOT / path).is_file()
        return f"]({ADDRESS}/blob/HEAD/{path}{found[2] or ''})" if outside else found[0]

    return re.sub(r"\]\((?![a-z]+:|#)([^()\s#]+)(#[^()\s]*)?\)", target, markdown)


def whole_example(path: Path) -> str:
    """Return an example as one file that runs: what it imports from common.py stands in it."""
    text, shared = path.read_text(), path.with_name("common.py").read_text()
    own, common = (ast.parse(each).body for each in (text, shared))
    imports, shared_imports = ([node for node in body if isinstance(node, IMPORT)] for body in (own, common))
    known = {name: node for node in common for name in bound_names(node)}
    waiting = [name for node in imports if getattr(node, "module", "") == "common" for name in bound_names(node)]
    needed = set[ast.stmt]()
    while waiting:
        node = known[waiting.pop()]
        used = () if node in needed else (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
        needed.add(node)
        waiting += [name for name in used if name in known]
    if not needed:
        return text
    lines = {ast.unparse(node) for node in (*imports[1:], *needed.intersection(shared_imports))}
    lines, needed = {line for line in lines if not line.startswith("from common ")}, needed - {*shared_imports}
    standard = {line for line in lines if re.split(r"[ .]", line)[1] in sys.stdlib_module_names}
    groups = [
        "\n".join(sorted(group, key=lambda line: (line.startswith("from"), line)))
        for group in (standard, lines - standard)
    ]
    pieces = ["\n".join(shared.splitlines()[node.lineno - 1 : node.end_lineno]) for node in common if node in needed]
    head, rest = text.splitlines()[: imports[0].end_lineno], text.splitlines()[imports[-1].end_lineno :]
    top = "\n\n".join(["\n".join(head), *filter(None, groups)])
    return "\n\n\n".join([top, *pieces, "\n".join(rest).strip("\n")]) + "\n"


IMPORT = ast.Import | ast.ImportFrom


def bound_names(node: ast.stmt) -> set[str]:
    """Return the names that an import, an assignment or a definition binds."""
    if isinstance(node, IMPORT):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign):
        return {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()


def tables_of_commands() -> Iterator[str]:
    """Yield the lines of a table of commands for each group."""
    for group, commands in GROUPS.items():
        yield from (f"## {group.capitalize()}", "", "| command | purpose |", "|---|---|")
        yield from (f"| [`{name}`]({name}.md) | {purpose} |" for name, (_, purpose) in commands.items())
        yield ""


def tables_of_core() -> Iterator[str]:
    """Yield the lines of a table of names of `binidx.core` for each level, as the comments of its stub divide them."""
    for line in Path(binidx.core.__file__).with_suffix(".pyi").read_text().splitlines():
        if line.startswith("# "):
            yield from ("", f"## {line[2:]}", "", "| name | | module |", "|---|---|---|")
        elif found := re.match(r"from (\S+) import (\w+)", line):
            module, name = found.groups()
            value = getattr(import_module(module), name)
            call = f"{name}({', '.join(arguments_of(value))})" if inspect.isfunction(value) else name
            yield f"| `{call}` | {first_line(module, name)} | `{module.removeprefix('binidx.')}` |"


def arguments_of(function: Any) -> Iterator[str]:
    """Yield the names of a function's parameters, those with a default with an equals sign."""
    for parameter in inspect.signature(function).parameters.values():
        yield str(parameter.replace(annotation=parameter.empty, default=parameter.empty)) + "=" * (
            parameter.default is not parameter.empty
        )


def first_line(module: str, name: str) -> str:
    """Return the first line of the docstring of a class or function, or of the string below an assignment."""
    top = ast.parse(inspect.getsource(import_module(module))).body
    body = [inner for node in top for inner in ([*node.body, *node.orelse] if isinstance(node, ast.If) else [node])]
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return str(ast.get_docstring(node)).partition("\n")[0]
        targets = node.targets if isinstance(node, ast.Assign) else []
        if name in map(ast.unparse, targets) and isinstance(below, ast.Expr):
            return str(ast.literal_eval(below.value)).partition("\n")[0]
    raise PluginError(f"{module}.{name}: found no docstring, which the page of core names needs")


def affected_by(word: str) -> str:
    """Return the options of all configs that affect what a word of `binidx.dataset.affects` names, in Markdown."""
    named = [name for name in PUBLIC if name.endswith("DatasetConfig")]
    configs = [getattr(import_module(PUBLIC[name]), name) for name in named]
    options = {}
    for config in sorted(configs, key=lambda kind: len(kind.__mro__)):
        options |= {name: option for name, option in described_fields(config).items() if option.init}
    texts = []
    for name, option in options.items():
        scopes = [scope for scope, scoped in option.metadata["scoped"].items() if scoped == word]
        if word in option.metadata["words"]:
            texts.append(f"`{name}`")
        elif scopes:
            texts.append(f"`{name}` ({', '.join(scopes)})")
    return ", ".join(texts)


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command, without defaults from this process's environment."""
    module = import_module(f"binidx.tools.{COMMANDS[name][0]}")
    found = parser(name, module.__doc__)
    ours = [each for each in os.environ if each.startswith("BINIDX_")]
    with patch.dict(os.environ):
        for variable in ours:
            del os.environ[variable]
        module.add_options(found)
    return found


def command_page(name: str) -> str:
    """Return the page of a command in Markdown: purpose, example, text, usage, options, exit status."""
    found = command_parser(name)
    text = sections(found.epilog or "")
    example = [*fence("sh", text.pop("example")), ""] if "example" in text else []
    status = ["## Exit status", "", marked(text.pop("exit status")), ""] if "exit status" in text else []
    options = ["" if found._subparsers else "## Usage", "", *usage(found, "##"), *status]
    return "\n".join([f"# binidx {name}", "", marked(found.description or ""), "", *example, *text.values(), *options])


def sections(text: str) -> dict[str, str]:
    """Return the rest of a command's docstring: `example`, `exit status`, and the paragraphs in Markdown."""
    found = {}
    for number, block in enumerate(re.split(r"\n\s*\n", text.strip("\n"))):
        if block.startswith("example:"):
            found["example"] = dedent(block.removeprefix("example:").strip("\n"))
        elif block.startswith("exit status:"):
            found["exit status"] = block.removeprefix("exit status:").strip()
        elif block.startswith("  "):
            found[str(number)] = "\n".join(definitions(dedent(block)))
        else:
            found[str(number)] = marked(block) + "\n"
    return found


def definitions(block: str) -> list[str]:
    """Return the lines of a table for `name  text` with continued lines."""
    rows: list[list[str]] = []
    for line in block.splitlines():
        name, text = re.fullmatch(r"(\S.*?)? {2,}(.*)", line).groups()  # type: ignore[union-attr]
        if name:
            rows.append([name, text])
        else:
            rows[-1][1] += f" {text}"
    return ["| | |", "|---|---|", *(f"| {code(name)} | {marked(text)} |" for name, text in rows), ""]


def fence(language: str, text: str) -> list[str]:
    """Return the lines of a code block; a command that is too wide continues on a second line."""
    wide = re.compile(r"^(?=.{93})(.*) (--)", re.M)
    return [f"```{language}", *wide.sub(r"\1 \\\n    \2", text).splitlines(), "```", ""]


def usage(found: argparse.ArgumentParser, level: str) -> Iterator[str]:
    """Yield the usage and the tables of arguments of a parser and of its subcommands."""
    actions = [each for each in found._actions if "-h" not in each.option_strings and each.help != argparse.SUPPRESS]
    commands = [each for each in actions if isinstance(each, argparse._SubParsersAction)]
    if not commands:
        needed = [typed(each)[0] for each in actions if each.required or not each.option_strings]
        yield from fence("text", " ".join([found.prog, *needed, "[OPTION ...]"]))
    groups = [("", [each for group in found._action_groups[:2] for each in group._group_actions])]
    groups += [(str(each.title), each._group_actions) for each in found._action_groups[2:]]
    for title, members in groups:
        if rows := [row(each) for each in members if each in actions and each not in commands]:
            yield from ((f"{level}# {title[0].upper()}{title[1:]}", "") if title else ())
            columns = 3 if any(each[2] for each in rows) else 2
            head = [("argument", "meaning", "default"), ("---",) * 3]
            yield from (" | ".join(["", *each[:columns], ""]).strip() for each in [*head, *rows])
            yield ""
    for each in commands:
        for name, command in each.choices.items():
            yield from (f"{level} {found.prog.split()[-1]} {name}", "", *usage(command, level))


def typed(action: argparse.Action) -> list[str]:
    """Return an argument as users type it: each of its flags with its value, or the value of a positional one."""
    action.metavar = action.metavar or action.dest.upper()
    value = "" if action.nargs == 0 else argparse.HelpFormatter("")._format_args(action, action.dest.upper())
    return [f"{each} {value}".strip() for each in action.option_strings] or [value]


def row(action: argparse.Action) -> tuple[str, ...]:
    """Return the cells of an argument: how it is typed, its help with its choices, its default."""
    default = " ".join(map(str, action.default)) if isinstance(action.default, list | tuple) else action.default
    needless = default in (None, False, "", argparse.SUPPRESS) or action.nargs == 0
    text = marked(((action.help or "") % vars(action)).removesuffix(f" ({default})"))
    names = [*action.type] if isinstance(action.type, Names) else action.choices
    if names and not all(str(each) in text for each in names):
        text = f"{text}: {', '.join(map(code, names))}"
    shown = "required" if action.required and action.option_strings else "" if needless else code(default)
    return ", ".join(map(code, typed(action))), text, shown


def code(text: Any) -> str:
    """Return text as code that a table takes, and in which Markdown changes nothing."""
    kept = html.escape(str(text)).replace("|", "&#124;").replace("*", "&#42;")
    return f"<code{' class=nowrap' if len(str(text)) < 40 else ''}>{kept}</code>"


def marked(text: str) -> str:
    """Return plain text as Markdown: commands, calls, and words like options, files or URIs become code, whole."""

    def word(found: re.Match[str]) -> str:
        bare = " ".join(found[0].split()).rstrip(".:")
        special = (
            not bare.startswith("`")
            and re.search(r"\w", bare)
            and re.search(
                r"^binidx[ .]|^[a-z]+:[A-Z]|^--?[a-zA-Z]|^\.\w|[_*={}<>|]|://|\w\.(idx|bin|zst|parquet|json|jsonl)\b",
                bare,
            )
        )
        return f"{code(bare)}{found[0][len(found[0].rstrip('.:')) :]}" if special else found[0]

    commands = rf"binidx\s(?:{'|'.join(COMMANDS)})\b"
    mapping = r"""[^\s,;()`]*{"(?:[^{}]|{[^{}]*})*}"""
    call, valued = r"[\w.]+\([^()`]*\)", r"--?[a-z][\w-]*\s[A-Z][A-Z/]*\b"
    return re.sub(rf"{commands}|`[^`]*`|{mapping}|{call}|{valued}|[^\s,;()`]+", word, text)


# Links to the reference from inline code of any page: public names, commands, settings.
ERRORS = {name: f"binidx.errors.{name}" for name in vars(binidx.errors) if name.endswith("Error")}
PUBLIC = {name: module.__name__ for module in (binidx, binidx.megatron, binidx.packed) for name in module.__all__}
HOMES = {name: f"{module}.{name}" for name, module in PUBLIC.items()} | ERRORS
AMBIGUOUS = {"account", "bake", "preprocess", "report"}
"""Names that in prose are commands or words; they are linked with `binidx.` before them, and on the page of names."""
CODE = re.compile(
    r"<strong>Source:</strong>.*?</p>|<pre.*?</pre>|<a\b.*?</a>|<h\d.*?</h\d>|<autoref.*?</autoref>|<code[^>]*>([^<]*)</code>",
    re.S,
)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link inline code that is a public name, an error class, a command or a setting to its reference."""
    names_page = page.file.src_uri == "reference/names.md"

    def link(found: re.Match[str]) -> str:
        text = found[1] or ""
        name = re.sub(r"^(binidx\.)?((megatron|packed)\.)?", "", text.removesuffix("()"))
        if re.fullmatch(r"BINIDX_[A-Z_]+(=\S*)?", text):
            return anchor(found[0], "reference/settings.html", text.partition("=")[0])
        if (command := "".join(re.findall(r"^binidx ([\w-]+)", text))) in COMMANDS:
            return anchor(found[0], f"{FOLDER}/{command}.html", "")
        if name in HOMES and (name not in AMBIGUOUS or "." in text or names_page):
            return f'<autoref identifier="{HOMES[name]}">{found[0]}</autoref>'
        return found[0]

    def anchor(inner: str, url: str, fragment: str) -> str:
        target = get_relative_url(url, page.url)
        return inner if page.url == url else f'<a href="{target}{fragment and "#"}{fragment}">{inner}</a>'

    content = re.sub(r"<code>(--?\w\S{0,28})</code>", r"<code class=nowrap>\1</code>", content)  # no break at a hyphen
    return CODE.sub(link, content)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let names in tables break on a phone. Refuse a page that loads from another host: it is read offline, too."""
    output = re.sub(r"<td.*?</td>", breakable, output, flags=re.S)
    if found := EXTERNAL.search(output):
        raise PluginError(f"{page.file.src_uri}: loads from another host ({found[0]}); put the file into docs/")
    return output


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Say on the page of missing pages what to do."""
    way_out = '<p>There is no such page. Search above, or begin <a href="/index.html">at the first page</a>.</p>'
    return output_content.replace("<h1>404 - Not found</h1>", f"<h1>Not found</h1>{way_out}")


def breakable(cell: re.Match[str]) -> str:
    """Return a cell whose names in code may break between their words; site.css allows it on small screens alone."""

    def marked_name(found: re.Match[str]) -> str:
        return found[1] + re.sub(r"(?<=[a-z])(?=[A-Z][a-z])|(?<=_)(?=\w)|(?<=\w/)(?=\w)", "<wbr>", found[2])

    return re.sub(r"(<code[^>]*>)([^<]*)", marked_name, cell[0])


EXTERNAL = re.compile(
    r"""<(?:script|img|iframe|source|video|link(?![^>]*rel="?canonical))[^>]*?\b(?:src|href|srcset)=["']?(?:https?:)?//[^>]*"""
)


class Sections(Extension):
    """Write sections of our docstrings as Griffe reads them."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """Return a docstring with fenced examples, one argument an item, results without types, and a marked source."""
    text = re.sub(r"^Source: ", "**Source:** ", text, flags=re.M)
    text = re.sub(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 .*)*)", split_names, text, flags=re.M)
    # Griffe takes all before the first colon of a result for its type; without one it takes the annotation.
    text = re.sub(r"^((?:Returns|Yields):\n    )", r"\1: ", text, flags=re.M)
    return re.sub(r"^Example:\n((?:    .*\n?|\n)+)", fenced, text, flags=re.M)


def split_names(found: re.Match[str]) -> str:
    """Return `a, b: text` as two items."""
    indent, names, described = found.groups()
    return "\n".join(f"{indent}{name}{described}" for name in names.split(", "))


def fenced(found: re.Match[str]) -> str:
    """Return an example in the form of Griffe: doctests as they are, other code in a fence."""
    code = found[1].rstrip()
    if ">>>" in code:
        return f"Examples:\n{code}\n\n"
    return f"Examples:\n    ```python\n{code}\n    ```\n\n"
