"""binidx doctor RUN.json: what it finds on a node before a run, on real disks and a real store."""

from __future__ import annotations

import json
import re
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


def check(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, tuple[str, str]]:
    """Run the command; return what was checked -> state and detail."""
    assert main(["doctor", *arguments, "--json"]) == status
    result = json.loads(capsys.readouterr().out)
    return {row["what"]: (row["state"], row["detail"]) for row in result["checks"]}


def test_a_sound_node_reads_its_store_and_leaves_nothing_behind(
    remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINIDX_INDEX_DIR", f"{tmp_path}/index")
    monkeypatch.setenv("BINIDX_CACHE_DIR", f"{tmp_path}/tokens")
    (tmp_path / "caches").mkdir()
    found = check(capsys, save(tmp_path, remote, path_to_cache=f"{tmp_path}/caches"), "--strict")
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
    assert re.search(r" to the first byte, .*/s, [1-9]\d* of 64 requests refused \(429, 503\)$", detail)


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


def test_the_text_names_the_state_first(local: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", save(tmp_path, local, path_to_cache=f"{tmp_path}/caches")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"ok       {tmp_path}/caches", "         an object was written, read and removed"]


def test_a_run_of_any_name_is_one_by_its_options_or_its_old_command(
    local: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(save(tmp_path, local, path_to_cache=f"{tmp_path}/caches"))
    needed = check(capsys, str(file))
    run = str(file.rename(tmp_path / "run"))
    assert check(capsys, run, "--strict") == check(capsys, run, "--nodes", "1") == needed
    assert main(["check-node", run, "--json"]) == 0
    assert [row["what"] for row in json.loads(capsys.readouterr().out)["checks"]] == [*needed]
    assert f"{run}" in check(capsys, run)  # without them it is an object to reach, among the packages
    assert "binidx" in next(iter(check(capsys, run)))


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
