"""README and the page of figures show the committed results, and each figure has its conditions."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.bench import quick
from tests.bench.__main__ import BENCHES, ON_REQUEST
from tests.bench.chart import draw_curve
from tests.bench.claims import CLAIMS, CURVES, LIMITS, Claim
from tests.bench.machine import describe_machine, slug
from tests.bench.parts import Spent, parts_of
from tests.bench.publish import (
    FIGURES,
    PAGE,
    ROOT,
    bench_section,
    charts,
    claim_cell,
    curve_section,
    machine_table,
    parts_section,
    with_all,
    with_figures,
    with_rows,
)
from tests.bench.results import COMMITTED, find_row, merge, nearest, read_committed, record_of
from tests.bench.table import Conditions, Row, to_json

FIELDS = {field.name for each in (Row, Conditions) for field in dataclasses.fields(each)} | {"ratio"}
CONDITIONS = Conditions(cores=1, size="10 documents", cached="nothing")
MACHINE = {**describe_machine(), "cpu": "A CPU", "vendor": "V", "family": 1, "model": 2, "cores": 2}
ROWS = [
    Row("read", 8.0, 2.0, "MB/s", True, "", "P", "best", "4 workers", CONDITIONS),
    Row("read", 8.0, 1.0, "MB/s", True, "", "P", "default", "no workers", CONDITIONS),
    Row("write", 2.0, 3.0, "s", False, conditions=CONDITIONS),
]


def record(rows: list[Row] = ROWS) -> dict[str, Any]:
    return record_of("a_bench", rows, MACHINE, {"numpy": "2"}, 1.5, (0.1, 0.9))


def test_the_page_and_the_charts_show_the_committed_results() -> None:
    results, page = read_committed(), PAGE.read_text()
    assert page == with_all(page, results), "run python -m tests.bench.publish"
    rows = FIGURES.read_text()
    assert rows == with_rows(rows, results), "run python -m tests.bench.publish"
    assert {path: path.read_text() for path in charts(results)} == charts(results), "run python -m tests.bench.publish"


def test_readme_quotes_no_ratio_beside_its_chart() -> None:
    assert re.findall(r"\b\d[\d.,]*x\b", (ROOT / "README.md").read_text()) == []


def test_committed_rows_have_all_fields_and_one_meaning_each() -> None:
    for path, results in zip(sorted(COMMITTED.glob("*.json")), read_committed(), strict=True):
        assert path.stem == slug(results["machine"])
        for name, found in results["benches"].items():
            assert name in BENCHES + ON_REQUEST
            assert {"measured", "commit", "versions"} <= set(found)
            keys = [(row["work"], row["setting"]) for row in found["rows"]]
            assert len(set(keys)) == len(keys), name
            assert all({*row, "conditions", "series"} == FIELDS for row in found["rows"]), name


def test_claims_show_a_row_of_each_bench_that_was_measured() -> None:
    for results in read_committed():
        for claim in CLAIMS:
            found = results["benches"].get(claim.bench)
            if found:
                assert find_row(found, claim.row, claim.setting), claim


def test_limits_and_curves_are_of_known_benches() -> None:
    assert {each.bench for each in (*LIMITS, *CURVES.values())} <= {*BENCHES, *ON_REQUEST}


def test_a_curve_has_all_points_and_its_values_stand_below() -> None:
    row = dataclasses.replace(ROWS[2], series={"ours": {"p50": 1.0, "p99": 2.5}, "theirs": {"p50": 4.0, "p99": 9.0}})
    drawn = ElementTree.fromstring(draw_curve("waits", "of 9 batches", row.series, "dark"))
    lines = [each.attrib["points"].split() for each in drawn.iter() if each.tag.endswith("polyline")]
    assert [len(line) for line in lines] == [2, 2]
    assert len({point.partition(",")[0] for line in lines for point in line}) == 2
    section = curve_section("next", to_json(row), record())
    assert "(next-light.svg#only-light)" in section
    assert "| | ours | theirs |\n|---|---:|---:|\n| p50 | 1.00 | 4.00 |\n| p99 | 2.50 | 9.00 |" in section


def test_parts_stand_with_their_shares() -> None:
    rows = [dataclasses.replace(ROWS[2], series={"s": {"copying": 1.5, "waiting": 0.5}})]
    section = parts_section([{"benches": {}}, {"benches": {"parts": record(rows)}}])
    assert "| copying | 1.50 | 75% |\n| waiting | 0.500 | 25% |\n| **all** (" in section


def test_the_profilers_own_time_is_no_part() -> None:
    plain, profiled = Spent(2.0, 3.0, []), Spent(4.0, 5.0, [("a.py:f", 3.0, 0.5), ("<len> a.py:f", 1.0, 0.5)])
    assert parts_of(plain, profiled, {"len": "counting", "": "rest"}) == {"counting": 0.0, "rest": 2.0}


def test_benches_state_their_conditions() -> None:
    for name in BENCHES + ON_REQUEST:
        assert isinstance(importlib.import_module(f"tests.bench.{name}").CONDITIONS, Conditions)
    for name in quick.BENCHES:
        assert callable(importlib.import_module(f"tests.bench.{name}").quick_rows)


def test_a_new_record_replaces_the_one_of_its_bench_and_cpu(tmp_path: Path) -> None:
    merge([record(), {**record(), "bench": "other"}], tmp_path)
    merge([record(ROWS[2:])], tmp_path)
    [results] = read_committed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a-cpu-2-cores.json"]
    assert results["benches"]["a_bench"]["rows"] == [to_json(ROWS[2])]
    assert len(results["benches"]["other"]["rows"]) == 3
    assert results["benches"]["other"]["machine"]["load_before"] == 0.1


def test_a_claim_shows_the_best_setting_and_the_default_behind_it() -> None:
    cell = claim_cell(Claim("reading", "P", "a_bench", "read"), record())
    assert cell == "**4x** (8.00 / 2.00 MB/s; 4 workers; its default 1.00: 8x)"
    assert claim_cell(Claim("writing", "P", "a_bench", "write"), record()) == "**1.5x** (2.00 / 3.00 s)"
    assert claim_cell(Claim("writing", "P", "a_bench", "write"), None) == ""


def test_without_a_best_setting_several_rows_are_no_claim() -> None:
    rows = [ROWS[1], dataclasses.replace(ROWS[1], setting="8 workers")]
    assert find_row(record(rows), "read") is None


def test_the_page_has_a_table_a_cpu() -> None:
    def results(cpu: str, rows: list[Row]) -> dict[str, Any]:
        found = record(rows)
        machine = {**found["machine"], "cpu": cpu}
        return {"machine": machine, "benches": {"blend": {**found, "machine": machine}}}

    section = bench_section("blend", [results("One", ROWS), results("Two", ROWS[2:])])
    assert section.startswith("### blend\n\nBlends against")
    first, second = section.split("**One**")[1].split("**Two**")
    assert "| work | against | binidx | the other | ratio |" in first
    assert f"| work | binidx | {ROWS[2].against} | ratio |" in second


def test_usual_conditions_stand_above_the_table() -> None:
    rows = [
        dataclasses.replace(ROWS[1], note="b"),
        dataclasses.replace(ROWS[0], note="a; b", conditions=Conditions(2, "10 documents", "nothing", 4)),
    ]
    above, table = machine_table(record(rows)).split("\n\n")
    assert above.endswith("Unless a row says otherwise: 10 documents; 1 core; warm: nothing; b.")
    assert table.splitlines()[2:] == [
        "| read | default<br><small>no workers</small> | 8.00 MB/s | 1.00 MB/s | **8x** |",
        "| <small>2 cores; a</small> | best<br><small>4 workers</small> | 8.00 MB/s | 2.00 MB/s | **4x** |",
    ]


def test_the_nearest_cpu_is_of_the_same_family() -> None:
    others = [{"machine": {**MACHINE, **other}} for other in ({"family": 7}, {"model": 9}, {"vendor": "W"})]
    assert nearest(MACHINE, others) == others[1]
    assert nearest(MACHINE, []) is None


def test_quick_marks_ratios_that_moved() -> None:
    assert "WORSE, 2.00x" in quick.line("work", 1.0, 2.0)
    assert "better, 2.00x" in quick.line("work", 4.0, 2.0)
    assert quick.line("work", 1.9, 2.0).endswith("work")
    assert quick.line("work", 1.9, None).split() == ["-", "1.90x", "work"]


def test_a_page_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="markers not found"):
        with_figures("no markers", "a table")
