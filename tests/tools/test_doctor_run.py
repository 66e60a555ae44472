"""binidx doctor RUN.json: what it finds on a node before a run, on real disks and a real store."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER
from helpers.random_datasets import Document, build_ours
from servers.latency_proxy import latency_proxy

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.run.plan import node_check
from binidx.tools import main


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("node") / "en"
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(1, 500, 50, dtype=np.uint16), [50], [0]) for _ in range(2000)]
    build_ours(prefix, documents, np.uint16, multimodal=False)
    return str(prefix)


@pytest.fixture(scope="module")
def remote(local: str, s3: Any) -> str:
    uri = f"{s3.fresh()}/en"
    convert_dataset(local, uri)
    return uri


def save(directory: Path, prefix: str, **options: Any) -> str:
    config = binidx.GPTDatasetConfig(**{
        "random_seed": 1, "sequence_length": 16, "blend": ([prefix], None), "split": "1,0,0", "tokenizer": TOKENIZER,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, **options,
    })  # fmt: skip
    binidx.Run(config, [1000, 0, 0], 8).save(path := f"{directory}/run.json")
    return path


UNLIMITED = ("--max-latency", "1e6", "--min-bandwidth", "0", "--min-disk", "0")
"""Limits that no machine breaks, however slow."""


def report(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert main(["doctor", *UNLIMITED, *arguments, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


SLOWEST = ("--max-latency", "600", "--min-bandwidth", "1kB", "--min-disk", "1kB")
"""Limits that a sound machine keeps under any load."""


def check(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, tuple[str, str]]:
    """Run the command; return what was checked -> state and detail, without measured rates of disks."""
    rows = report(capsys, *arguments, status=status)["checks"]
    return {
        row["what"]: (row["state"], re.sub("(, )?writes .*/s, reads [^,;]*/s(, )?", "", row["detail"])) for row in rows
    }


def test_a_sound_node_reads_its_store_and_leaves_nothing_behind(
    remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINIDX_INDEX_DIR", f"{tmp_path}/index")
    monkeypatch.setenv("BINIDX_CACHE_DIR", f"{tmp_path}/tokens")
    (tmp_path / "caches").mkdir()
    found = check(capsys, save(tmp_path, remote, path_to_cache=f"{tmp_path}/caches"), "--strict", *SLOWEST)
    assert {state for state, _ in found.values()} == {"ok"}
    store, index, tokens, caches = found.values()
    assert "0 of 64 requests refused" in store[1]
    assert "needed for index files" in index[1]
    assert "needed for an epoch of this node's tokens" in tokens[1]
    assert caches[1] == "an object was written, read and removed"
    assert [*(tmp_path / "caches").iterdir()] == []


@pytest.mark.parametrize("status", ["503", pytest.param("429", marks=pytest.mark.slow)])
def test_a_store_that_refuses_requests_is_a_warning(
    status: str, s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # So large that each probe is a request of its own.
    documents = [Document(np.ones(10_000, np.uint16), [10_000], [0]) for _ in range(100)]
    prefix = f"{s3.fresh()}/en"
    convert_dataset(build_ours(tmp_path / "en", documents, np.uint16, multimodal=False), prefix)
    bucket, run = "/".join(prefix.split("/")[:3]), save(tmp_path, prefix)
    with latency_proxy(s3.server.endpoint, delay_ms=1, each=[status]) as proxy, proxy.in_environment():
        state, detail = check(capsys, run)[bucket]
        proxy.become()
        assert check(capsys, run, "--strict", status=1)[bucket][0] == "warning"
    assert state == "warning"
    assert re.search(r" to the first byte, [1-9]\d* of 64 requests refused \(429, 503\)$", detail)


def test_the_caches_of_a_run_in_a_store_are_tried_there(
    remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = check(capsys, save(tmp_path, remote))
    assert found[f"{remote}/cache/GPTDataset_indices"] == ("ok", "an object was written, read and removed")


def test_directories_without_access_or_room_are_named(
    remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("BINIDX_CACHE_DIR", f"{tmp_path}/file/tokens")
    monkeypatch.setenv("BINIDX_INDEX_DIR", "off")
    found = check(capsys, save(tmp_path, remote, path_to_cache=f"{tmp_path}/file/caches"), status=1)
    assert found[f"{tmp_path}/file/tokens"][0] == "failed"
    assert "Not a directory; needed a directory that this user can write to" in found[f"{tmp_path}/file/tokens"][1]
    assert found["directory of index files"][0] == "warning"
    assert found[f"{tmp_path}/file/caches"][0] == "warning"
    assert "indices cannot be kept here" in found[f"{tmp_path}/file/caches"][1]


def test_a_clock_that_differs_from_that_of_the_file_system_is_a_warning(
    local: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = save(tmp_path, local, path_to_cache=f"{tmp_path}/caches"), node_check.time.time
    monkeypatch.setattr(node_check.time, "time", lambda: now() + 3600)
    found = check(capsys, run, "--strict", status=1)
    assert found == {
        f"{tmp_path}/caches": ("warning", "its clock and that of this node differ by 3600 s; set both by NTP")
    }


def test_the_text_names_the_state_first(
    local: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", *UNLIMITED, save(tmp_path, local, path_to_cache=f"{tmp_path}/caches")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"ok       {tmp_path}/caches"
    assert re.match(r" {9}an object was written, read and removed, writes [\d.]+ .B/s, reads [\d.]+ .B/s$", second)


def test_a_store_that_is_slow_is_a_warning_by_its_figures(
    remote: str, s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket, run = "/".join(remote.split("/")[:3]), save(tmp_path, remote)
    with latency_proxy(s3.server.endpoint, delay_ms=300) as proxy, proxy.in_environment():
        rows = report(capsys, run, "--max-latency", "0.25", "--strict", "--min-bandwidth", "1000TB", status=1)["checks"]
    [row] = [row for row in rows if row["what"] == bucket]
    assert row["state"] == "warning"
    assert row["measured"]["latency_seconds"] >= 0.3
    assert row["detail"].endswith("; slower than --max-latency 0.25 s")  # of 200 kB the rate says nothing
    assert row["measured"].keys() == {"latency_seconds"}


def test_a_bucket_and_disks_below_the_least_rates_are_warnings(
    s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINIDX_INDEX_DIR", f"{tmp_path}/index")
    monkeypatch.setenv("BINIDX_CACHE_DIR", f"{tmp_path}/tokens")
    documents = [Document(np.ones(1 << 20, np.uint16), [1 << 20], [0]) for _ in range(5)]
    prefix = f"{s3.fresh()}/en"
    convert_dataset(build_ours(tmp_path / "en", documents, np.uint16, multimodal=False), prefix)
    run = save(tmp_path, prefix, path_to_cache=f"{tmp_path}/caches")
    for limits, state in ((SLOWEST, "ok"), (("--min-bandwidth", "1000TB", "--min-disk", "1000TB"), "warning")):
        rows = report(capsys, run, *limits)["checks"]
        assert [row["state"] for row in rows] == [state] * 4
        assert [row["detail"].endswith("/s") and "; less than --min-" in row["detail"] for row in rows] == [
            state == "warning"
        ] * 4
        assert {*rows[0]["measured"]} == {"latency_seconds", "bytes_per_second"}
        for row in rows[1:]:
            assert {*row["measured"]} == {"written_per_second", "read_per_second"}
            assert min(row["measured"].values()) > 0
    assert not [*tmp_path.glob("*/*.tmp")]


def test_a_disk_that_breaks_off_keeps_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            node_check.measure_disk(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []


def test_a_disk_is_measured_where_the_page_cache_cannot_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(node_check.os, "posix_fadvise")  # as on macOS
    assert min(node_check.measure_disk(str(tmp_path)).values()) > 0
    assert [*tmp_path.iterdir()] == []


def test_what_differs_from_another_node_is_named(
    remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = save(tmp_path, remote, path_to_cache=f"{tmp_path}/caches"), tmp_path / "other.json"
    bucket, caches = "/".join(remote.split("/")[:3]), f"{tmp_path}/caches"
    other = report(capsys, run)
    other["node"] = "node-0"

    def warnings(factor: float) -> dict[str, str]:
        file.write_text(json.dumps(other))
        rows = report(capsys, run, "--compare", str(file), "--factor", str(factor))["checks"]
        return {row["what"]: row["detail"] for row in rows[len(other["checks"]) :]}

    assert warnings(1e6) == {}
    rows = {row["what"]: row for row in other["checks"]}
    rows[bucket]["measured"]["latency_seconds"] = 1e9
    rows[caches]["measured"]["read_per_second"] *= 1e9
    found = warnings(1e6)
    assert found.keys() == {bucket, caches}
    assert re.fullmatch(r"first byte after .*s here, 1,000,000,000\.0 s on node-0", found[bucket])
    assert re.fullmatch(r"reads .*B/s here, .*B/s on node-0", found[caches])
    rows[caches]["what"] = "/elsewhere"
    found = warnings(1e20)
    assert found == {caches: "not measured on node-0", "/elsewhere": "not measured here, but on node-0"}
    file.write_text('{"random_seed": 1}')
    assert main(["doctor", run, "--compare", str(file)]) == 2
    assert "needs what binidx doctor RUN --json printed" in capsys.readouterr().err
    assert main(["doctor", run, "--factor", "3"]) == 2
    assert "--factor: only with --compare" in capsys.readouterr().err
    assert main(["doctor", remote, "--max-latency", "3"]) == 2
    assert "--max-latency: only for a run" in capsys.readouterr().err


def test_a_run_of_any_name_is_one_by_its_options_or_its_old_command(
    local: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(save(tmp_path, local, path_to_cache=f"{tmp_path}/caches"))
    needed = check(capsys, str(file))
    run = str(file.rename(tmp_path / "run"))
    assert check(capsys, run, "--strict") == check(capsys, run, "--nodes", "1") == needed
    assert main(["check-node", run, "--json"]) == 0
    assert [row["what"] for row in json.loads(capsys.readouterr().out)["checks"]] == [*needed]
    assert main(["doctor", run, "--json"]) == 0  # without them it is an object to reach, among the packages
    reached = [row["what"] for row in json.loads(capsys.readouterr().out)["checks"]]
    assert "binidx" in reached[0]
    assert run in reached


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.json", "x"], "run.json: found 2 URIs, needed one: the file of a run, by a call of its own"),
        (["--strict"], "--nodes, --strict: found 0 URIs, needed one: the file of a run"),
        (["run.json"], "no such file"),
        (["tokenizer.json"], "to reach an object named .json that is no run, give its folder"),
    ],
)
def test_arguments_that_are_no_run_are_an_error(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_text('{"model": {}}')
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err
