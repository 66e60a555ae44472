"""What a user installs: an sdist that builds, and the wheel it builds."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

USE_IT = """
import binidx, binidx.native.permutations, binidx.tools, numpy, sys
assert binidx.__file__.startswith(sys.argv[1]), binidx.__file__
array = numpy.arange(10, dtype=numpy.int32)
binidx.native.permutations.RandomState(1234).shuffle(array)
expected = numpy.arange(10, dtype=numpy.int32)
numpy.random.RandomState(1234).shuffle(expected)
assert (array == expected).all()
sys.exit(binidx.tools.main(["inspect", "--help"]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist and the wheel built from it, of the files that git knows, at their tag v9.8.7."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    for arguments in (("init",), ("add", "--all"), ("commit", "--quiet", "--message", "all"), ("tag", "v9.8.7")):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=source, check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    compiler = tmp_path_factory.mktemp("bin") / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')  # a third of the time
    compiler.chmod(0o755)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "CC": str(compiler)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def test_the_wheel_serves_every_later_python(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith("binidx-9.8.7-cp311-abi3-")


TAG_AFTER = ("0.2.0", r"0\.2\.1\.dev1\+g\w+", r"0\.2\.1\.dev1\+g\w+\.d\d+")


def test_the_version_is_that_of_the_tag_or_of_the_commits_after_it(tmp_path: Path) -> None:
    pytest.importorskip("setuptools_scm")
    (whole := tmp_path / "whole").mkdir()
    shutil.copy(ROOT / "pyproject.toml", whole)

    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
        subprocess.run(["git", "-C", str(whole), *author, *arguments], check=True, capture_output=True)

    def version(source: Path) -> str:
        command = [sys.executable, "-W", "ignore", "-m", "setuptools_scm"]
        return subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout.strip()

    assert version(whole) == "0.2.0.dev0", "without git"
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    git("commit", "--quiet", "--message", "second", "--allow-empty")
    assert re.fullmatch(r"0\.2\.0\.dev2\+g\w+", version(whole)), "without a tag"
    git("tag", "v0.2.0")
    found = [version(whole)]
    git("commit", "--quiet", "--message", "third", "--allow-empty")
    found.append(version(whole))
    (whole / "pyproject.toml").write_text((whole / "pyproject.toml").read_text() + "\n")
    found.append(version(whole))
    assert [*map(re.fullmatch, TAG_AFTER, found)].count(None) == 0, found
    git("clone", "--quiet", "--depth", "1", "--no-tags", f"file://{whole}", str(tmp_path / "shallow"))
    assert re.fullmatch(r"0\.2\.0\.dev1\+g\w+", version(tmp_path / "shallow"))


def test_every_module_is_in_the_wheel(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    modules = {path.relative_to(ROOT / "src") for path in ROOT.glob("src/binidx/**/*.py")}
    tools = {Path("binidx", path.relative_to(ROOT)) for path in ROOT.glob("tools/**/*.py")}
    assert found == {str(path) for path in modules | tools}
    pages = {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/binidx/explore/[ts]*/*")}
    assert pages <= set(zipfile.ZipFile(wheel).namelist())


def test_the_sdist_has_docs_examples_and_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    known = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    left_out = ("src/binidx/tools", ".")
    assert {name for name in known if not name.startswith(left_out)} - found == set()


def test_a_build_without_a_compiler_says_what_to_install(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    command, environment = [sys.executable, "setup.py", "--quiet", "build_ext"], {**os.environ, "CC": "no-such-cc -O2"}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    needed = "binidx: needs a C compiler for its core (found no no-such-cc); apt install gcc, "
    assert done.stderr.splitlines()[-1].startswith(needed)


def test_a_package_index_shows_absolute_links_and_nothing_of_a_clone(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = str(metadata.get_payload())
    assert "# binidx" in text
    links = re.findall(r"\]\(([^)]*)\)|src(?:set)?=\"([^\"]*)", text)
    assert len(links) > 20
    assert [link for pair in links for link in pair if link and not link.startswith("https://")] == []
    assert not re.search(r"in a clone|\bmake \w|127\.0\.0\.1:8000|<!--", text, re.IGNORECASE)
    markdown = pytest.importorskip(
        "readme_renderer.markdown", reason="readme_renderer: what PyPI shows is not rendered"
    )
    rendered = markdown.render(text)
    assert rendered
    assert rendered.count('<a href="https://') > 15
    assert rendered.count("<pre") == text.count("```") / 2 > 2


def test_the_wheel_works_by_itself(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    names = {path.name for path in tmp_path.iterdir() if path.suffix != ".dist-info"}
    assert names == {"binidx"}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", USE_IT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "binidx inspect" in result.stdout
    command = [sys.executable, "-m", "binidx", "demo"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    needed = f"binidx demo: examples/demo: not installed with {tmp_path}/binidx, needs a clone of the repository; "
    assert (result.returncode, result.stdout, result.stderr[: len(needed)]) == (2, "", needed)
