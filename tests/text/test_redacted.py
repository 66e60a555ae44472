"""What is written down of a URI holds no password and no signature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from binidx.text.batch import Problem
from binidx.text.redacted import redacted

SIGNED = "https://b.example/en.jsonl?X-Amz-Credential=AK%2Fx&X-Amz-Signature=5ec4e7&X-Amz-Expires=60"


@pytest.mark.parametrize(
    ("uri", "needed"),
    [
        ("corpus/what?sig=1.jsonl", "corpus/what?sig=1.jsonl"),
        ("s3://corpus/en?sig=1.jsonl", "s3://corpus/en?sig=1.jsonl"),
        ("https://me:5ec4e7@host:80/en.jsonl", "https://host:80/en.jsonl"),
        ("https://host/a@b.jsonl", "https://host/a@b.jsonl"),
        (SIGNED, "https://b.example/en.jsonl"),
        ("https://h/e.jsonl?part=2&sv=2024&sig=5ec4e7&download=1", "https://h/e.jsonl?part=2&download=1"),
        ("https://h/e.jsonl?Expires=1&Signature=5ec4e7&Key-Pair-Id=K", "https://h/e.jsonl"),
    ],
)
def test_passwords_and_signatures_are_left_out(uri: str, needed: str) -> None:
    assert redacted(uri) == needed


def test_a_problem_is_told_without_them() -> None:
    problem = Problem("null", SIGNED, 0, 0, "line 1", "'text' is null")
    assert str(problem) == "https://b.example/en.jsonl: line 1: null: 'text' is null"


def test_a_job_and_its_parts_are_the_same_when_signed_anew(tmp_path: Path) -> None:
    from preprocessing import job_of

    from binidx.prepare.preprocess.plan import plan_parts
    from binidx.prepare.preprocess.quarantine import format_problem
    from binidx.prepare.preprocess.run import mark_of
    from binidx.text.slices import JSONL, Input

    def marked(uri: str) -> Any:
        job = job_of([uri], tmp_path / "en")
        parts = plan_parts(job, [Input(uri, JSONL, {"size": 9000, "ETag": "e"})])
        return mark_of(job, parts), [str(each) for each in parts], json.dumps(job.to_json())

    assert marked(SIGNED) == marked(SIGNED.replace("5ec4e7", "other"))
    assert "5ec4e7" not in str(marked(SIGNED))
    assert b"5ec4e7" not in format_problem(Problem("null", SIGNED, 0, 0, "", ""), 0)
