"""Whose parts lie there: job.json, the first object of a job and the last to go.

nothing there                        ours from now on
ours                                 go on
another's, and no part beside it     ours from now on: a call that failed before it made any, of a wrong key say
another's, and parts                 an error that says in what the two differ; `overwrite` drops them
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from binidx.errors import FormatError, ObjectExistsError
from binidx.format.convert_target import Target
from binidx.json_models import JsonFile
from binidx.prepare.preprocess.finishing import name_of, objects_in, remove_others
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.places import Places
from binidx.prepare.preprocess.plan import Part, plan_digest
from binidx.storage.publish import create_object, put_if_absent, read_small


@dataclass(frozen=True)
class JobMark:
    """The fields of the file besides its version."""

    plan: str
    inputs: list[str]
    recipe: dict[str, Any]


MARK_FILE = JsonFile(JobMark, {"binidx_job": 1}, open=True)


def take_place(job: Job, parts: Sequence[Part], overwrite: bool) -> bool:
    """Say whose parts are about to lie there; whether there may be some already.

    Raises:
        ObjectExistsError: a dataset stands there, or parts of another job do.
    """
    places, told = Places(job), mark_of(job, parts)
    standing = read_small(places.job_uri, job.target_options)
    if standing == told:
        return True
    if not overwrite:
        if standing is not None and any(name_of(uri) != name_of(places.job_uri) for uri in objects_in(places)):
            differs = difference(standing, told)
            raise ObjectExistsError(f"{places.job_uri}: parts of another job, {differs}; --overwrite drops them")
        for prefix in job.datasets.values():
            Target(prefix, job.codec, job.target_options).check_free(None, ours=False)
        if standing is None and not put_if_absent(places.job_uri, told, job.target_options):
            raise ObjectExistsError(f"{places.job_uri}: another job began here in this moment; run it again")
    if overwrite or standing is not None:
        with create_object(places.job_uri, job.target_options) as out:
            out.write(told)
    if overwrite and standing is not None:
        remove_others(places, parts)
    return overwrite


def mark_of(job: Job, parts: Sequence[Part]) -> bytes:
    """What identifies a job, and says for people what it is."""
    mark = JobMark(plan_digest(job, parts), job.to_json()["inputs"], job.recipe)
    return json.dumps({**MARK_FILE.tags, **asdict(mark)}).encode()


def difference(standing: bytes, ours: bytes) -> str:
    """In what two jobs differ, in words."""
    try:
        theirs, mine = MARK_FILE.decode(standing, ""), MARK_FILE.decode(ours, "")
    except FormatError as error:
        return f"of a form that is not known ({error})"
    if names := list(_unequal(theirs.recipe, mine.recipe)):
        return f"which differs in {', '.join(names)}"
    if theirs.inputs != mine.inputs:
        return f"of other inputs: {', '.join(theirs.inputs[:3])}{', ...' if len(theirs.inputs) > 3 else ''}"
    return "of inputs that changed since, or of another --part-bytes or --format"


def _unequal(theirs: Mapping[str, Any], ours: Mapping[str, Any], of: str = "") -> Iterator[str]:
    """Names whose values differ: `append_eod`, `tokenizer eod`."""
    for name, value in ours.items():
        other = theirs.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _unequal(other, value, f"{name} ")
        elif value != other:
            yield of + name
