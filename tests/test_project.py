"""What a stranger finds around the code: addresses, workflows, community files."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS: str = PROJECT["urls"]["Repository"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
in_a_clone = pytest.mark.skipif(not WORKFLOWS, reason="an sdist has no workflows")


def test_every_address_of_the_repository_is_that_of_pyproject() -> None:
    assert all(url.startswith(ADDRESS) or "github.io" in url for url in PROJECT["urls"].values())
    owner = ADDRESS.split("/")[3]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(re.compile(r"\.(md|cff|toml|yml|yaml|py)$").search, listed.split("\0")):
        text = (ROOT / name).read_text()
        found = {
            *re.findall(r"github\.com/([\w.-]+)/binidx\b", text),
            *re.findall(r"\b([\w-]+)\.github\.io/binidx", text),
        }
        assert found <= {owner}, f"{name}: {found}, pyproject.toml has {ADDRESS}"


def test_the_citation_is_of_this_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert "repository-code" not in citation  # the address stands in pyproject.toml alone
    assert citation["license"] == PROJECT["license"]
    assert [each["name"] for each in citation["authors"]] == [each["name"] for each in PROJECT["authors"]]
    assert {"cff-version", "message", "title"} <= citation.keys()


@in_a_clone
def test_workflows_pin_their_actions_and_run_what_exists() -> None:
    for path in WORKFLOWS:
        text = path.read_text()
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for action in re.findall(r"uses: (.+)", text):
            if action.startswith("./"):
                assert (ROOT / action).is_file(), action
            else:
                assert re.fullmatch(r"[\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), f"{path.name}: {action}"
        for program in re.findall(r"run: ((?:tests|\.ci)/\S+)", text):
            assert (ROOT / program).is_file(), program
        for each in re.findall(r"TESTS: \"(.+?)\"", text):
            assert all((ROOT / folder).exists() for folder in each.split())


@in_a_clone
def test_every_declared_python_is_tested() -> None:
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    assert PROJECT["requires-python"] == f">={declared[0]}"
    assert jobs["linux"]["steps"][1]["with"]["python-version"] == declared[0]
    assert jobs["versions"]["strategy"]["matrix"]["python"] == declared[1:]
    assert f"\ttests/versions.sh {' '.join(declared)}\n" in (ROOT / "Makefile").read_text()


@in_a_clone
@pytest.mark.skipif(
    not find_spec("check_jsonschema"), reason="check-jsonschema: workflows are not checked against theirs"
)
@pytest.mark.parametrize(
    ("schema", "files"),
    [("github-workflows", WORKFLOWS), ("dependabot", [ROOT / ".github/dependabot.yml"]),
     ("github-issue-forms", [ROOT / ".github/ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")])],
)  # fmt: skip
def test_files_of_github_are_of_their_schema(schema: str, files: list[Path]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
