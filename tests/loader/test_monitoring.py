"""Dashboard and alert rules of examples/monitoring: every name and label in them is on a real /metrics page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

import binidx
from binidx.storage.stats import open_histogram

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
LABEL = re.compile(r"(?:\b(?:by|on|without)\s*\(([^)]*)\))|\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}|\$labels\.(\w+)")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("data") / "en"
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        builder.add_document([1] * 500, [500])
        builder.finalize(f"{prefix}.idx")
    for kind in ("request", "large_request"):
        open_histogram(kind, "s3://b")
    loader = binidx.load_dataset(prefix, 16).loader(2)
    with binidx.serve_metrics(loader, 0, address="127.0.0.1") as server:
        return urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()  # type: ignore[no-any-return]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield each expression of the dashboard and of the rules, and the texts that name labels of its result."""
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for rule in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"][0]["rules"]:
        yield rule["expr"], json.dumps(rule.get("annotations", {}))


def test_dashboard_and_rules_name_only_metrics_and_labels_that_are_exported(page: str) -> None:
    exported = {line.split("{")[0] for line in page.splitlines() if not line.startswith("#")}
    labels = {label for part in re.findall(r"\{(.*)\}", page) for label in re.findall(r'(\w+)="', part)} | {"le"}
    assert labels == {"rank", "node", "bucket", "le"}
    recorded = re.findall(r"record: (\S+)", (FOLDER / "rules.yaml").read_text())
    found = [*expressions()]
    assert len(found) > 20
    for expression, texts in found:
        names = {*re.findall(r"\bbinidx_\w+", expression)} | {*re.findall(r"\bbinidx:[\w:]+", expression)}
        assert names
        assert names <= exported | {*recorded}, expression
        parts = [part for groups in LABEL.findall(f"{expression} {texts}") for part in groups]
        assert {name.strip() for part in parts for name in part.split(",")} - {""} <= labels, (expression, texts)
        assert expression.count("(") == expression.count(")")
        used = [
            re.search(rf"rate\({name}\[\d+[smh]\]\)|_over_time|count by", expression)
            for name in names
            if ":" not in name
        ]
        assert all(used), "a counter is used by its rate"


def test_panels_are_in_a_grid_and_read_the_chosen_source() -> None:
    board = json.loads((FOLDER / "dashboard.json").read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len({*places}) == len({panel["id"] for panel in board["panels"]}) == len(places) == 10
    [variable] = board["templating"]["list"]
    assert (variable["type"], variable["name"]) == ("datasource", "source")
    assert {target["datasource"]["uid"] for panel in board["panels"] for target in panel["targets"]} == {"${source}"}


def test_promtool_accepts_the_rules_and_they_fire_in_each_incident() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not on the PATH: the rules are compared with /metrics only, not run here")
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run([promtool, *command], cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_expressions_of_panels_are_promql(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not on the PATH: the expressions of panels are not parsed here")
    rules = [{"record": "binidx:panel", "expr": expression} for expression, _ in expressions()]
    groups = [{"name": f"panel {number}", "rules": [rule]} for number, rule in enumerate(rules)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": groups}))
    done = subprocess.run([promtool, "check", "rules", tmp_path / "panels.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
