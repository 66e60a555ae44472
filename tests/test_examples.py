"""Each example, with its trainer: stopped and resumed it reads what it reads in one go, and learns the same; two ranks
read each batch once."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import Bucket
from helpers.forked_ranks import ForkedRanks, forked_ranks
from helpers.ports import free_port
from torch.distributed.run import get_args_parser as torch_launcher

import binidx
from binidx.loader.losses import read_losses

EXAMPLES = Path(__file__).parents[1] / "examples"
OTHERS = ("common", "metrics", "compare_with_megatron")
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in OTHERS)

PRELOADED = ("s3fs", "torch.nn.parallel", "torch._dynamo")
"""What runs import besides."""

OPTIONS = ["--vocab-size", "500", "--eod", "0"]


@pytest.fixture(scope="module")
def trainers(s3: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedRanks]:
    """A process that imports each trainer once, since an import takes longer than all runs of an example.

    They stand alone in a folder, as the blocks of the site that a user saves.
    """
    from site_hooks import whole_example

    folder = tmp_path_factory.mktemp("blocks")
    for script in SCRIPTS:
        (folder / f"{script}.py").write_text(whole_example(EXAMPLES / f"{script}.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with forked_ranks() as process:
            yield process


def torchrun(size: int) -> list[dict[str, str]]:
    """The variables of each rank of `torchrun --nproc-per-node SIZE`."""
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none"}
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "ROLE_WORLD_SIZE": str(size)}
    about |= {**sizes, "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    about |= {"GLOO_SOCKET_IFNAME": "lo"}
    return [{**about, "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)} for rank in range(size)]


def run(
    trainers: ForkedRanks, script: str, runs: list[list[str]], ranks: list[dict[str, str]], **how: str
) -> list[list[dict[str, Any]]]:
    """The steps that each rank printed."""
    single = [{**rank, "OMP_NUM_THREADS": "1"} for rank in ranks]
    imports = (*PRELOADED, script)
    found = trainers.run("helpers.example_runs", {"example": script, "runs": runs, **how}, single, imports)
    assert [each["status"] for each in found] == [0] * len(ranks), found
    # The lines of two processes that write to one pipe run together.
    return [[json.loads(step) for step in re.findall(r'{"step".*?}', each["out"])] for each in found]


@pytest.fixture(scope="module")
def corpus(s3: Bucket) -> str:
    prefix, rng = f"{s3.fresh()}/corpus", np.random.default_rng(7)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for length in rng.integers(10, 200, 100):
            builder.add_document([*rng.integers(1, 500, length), 0], [length + 1])
        builder.finalize(f"{prefix}.idx")
    return prefix


def import_common() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import common
    finally:
        sys.path.remove(str(EXAMPLES))
    return common


@pytest.fixture(scope="module")
def expected(corpus: str) -> list[str]:
    """Digests of six steps, of a loader that no trainer touches."""
    common = import_common()
    options = common.arguments([corpus, "--vocab-size", "500", "--eod", "0", "--save", "none"])
    loader = common.train_loader(common.train_dataset(options))
    return [blake2b(np.asarray(loader[step]["tokens"]).tobytes(), digest_size=8).hexdigest() for step in range(6)]


def recorded(folder: Path) -> list[float]:
    """Mean of the losses of each micro-batch of four samples, by position."""
    positions, losses = read_losses(folder / "losses")
    assert positions.tolist() == [*range(len(positions))]
    means: list[float] = losses.reshape(-1, 4).mean(1).tolist()
    return means


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stopped_and_resumed_example_reads_and_learns_what_the_unbroken_one_does(
    script: str, trainers: ForkedRanks, corpus: str, expected: list[str], tmp_path: Path
) -> None:
    runs = [["6", f"{tmp_path}/whole"], ["2", f"{tmp_path}/parts"], ["6", f"{tmp_path}/parts", "--resume"]]
    argued = [[corpus, *OPTIONS, "--steps", steps, "--save", *rest] for steps, *rest in runs]
    (lines,) = run(trainers, script, argued, [{}])
    assert [line["step"] for line in lines] == [*range(6), *range(2), *range(2, 6)]
    assert [line["read"] for line in lines[:6]] == expected
    assert lines[6:] == lines[:6]
    for folder in ("whole", "parts"):
        assert recorded(tmp_path / folder) == pytest.approx([line["loss"] for line in lines[:6]], abs=1e-5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_read_disjoint_batches_and_leave_none_out(
    script: str, trainers: ForkedRanks, corpus: str, expected: list[str], tmp_path: Path
) -> None:
    argued = [corpus, *OPTIONS, "--steps", "3", "--save", str(tmp_path)]
    first, second = run(trainers, script, [argued], torchrun(2))
    assert [line["read"] for line in first] == expected[::2]
    assert [line["read"] for line in second] == expected[1::2]
    told = [line["loss"] for pair in zip(first, second, strict=True) for line in pair]
    assert recorded(tmp_path) == pytest.approx(told, abs=1e-5)


def test_a_trainer_that_accumulates_gradients_goes_on_at_its_next_sample(
    trainers: ForkedRanks, corpus: str, expected: list[str], tmp_path: Path
) -> None:
    runs = [["3", f"{tmp_path}/whole"], ["1", f"{tmp_path}/parts"], ["3", f"{tmp_path}/parts", "--resume"]]
    argued = [[corpus, *OPTIONS, "--steps", steps, "--save", *rest] for steps, *rest in runs]
    (lines,) = run(trainers, "hf_trainer", argued, [{}], change="accumulate_gradients")
    assert [line["read"] for line in lines] == 2 * expected
    for folder in ("whole", "parts"):
        assert recorded(tmp_path / folder) == pytest.approx([line["loss"] for line in lines[:6]], abs=1e-5)


@pytest.mark.parametrize(("script", "framework"), [("hf_trainer", "hugging_face"), ("lightning_trainer", "lightning")])
def test_a_trainer_sees_the_number_of_batches_not_of_samples(
    script: str, framework: str, trainers: ForkedRanks, corpus: str, expected: list[str], tmp_path: Path
) -> None:
    argued = [corpus, *OPTIONS, "--steps", "6", "--save", str(tmp_path)]
    (lines,) = run(trainers, script, [argued], [{}], change=f"train_all_samples_with_{framework}")
    assert [line["read"] for line in lines[:6]] == expected
    assert len(lines) == 11
    assert lines[-1] == {"step": 10, "steps": 10, "rate": 0}  # 42 samples in batches of 4; the schedule ends at 0


def test_ranks_that_lightning_starts_itself_read_samples_of_their_own(
    trainers: ForkedRanks, corpus: str, expected: list[str], tmp_path: Path
) -> None:
    argued = [corpus, *OPTIONS, "--steps", "3", "--save", str(tmp_path)]
    (lines,) = run(trainers, "lightning_trainer", [argued], [{}], change="start_two_ranks")
    assert sorted(line["read"] for line in lines) == sorted(expected)


def training_of(job: str) -> tuple[list[str], list[str]]:
    """The options of torchrun in a job file, and those of the script that it starts."""
    text = (EXAMPLES / job).read_text().replace("\\\n", " ")
    [line] = re.findall(r"^ *(?:srun .*)?torchrun (.*)$", text, re.M)
    launcher, script, options = line.partition("examples/plain_torch.py")
    assert script
    return shlex.split(launcher), shlex.split(options)


def test_the_training_of_the_job_files_runs_on_two_ranks_and_resumes(
    trainers: ForkedRanks, corpus: str, expected: list[str], tmp_path: Path
) -> None:
    for job in ("slurm.sh", "kubernetes.yaml"):
        launcher, options = training_of(job)
        assert torch_launcher().parse_args([*launcher, "script"]).nnodes == "2"
        given = import_common().arguments(options)
        assert (given.data in ("$run", "s3://corpus/run.json"), given.save_interval, given.resume) == (True, 500, True)
    prefix = binidx.load_dataset(corpus, 64, num_samples=1_000_000, tokenizer=binidx.SpecialTokens(0))
    binidx.Run(prefix.config, prefix.sizes, 4, 2).save(f"{corpus}-run.json")
    small = ["--save-interval", "1", "--save", str(tmp_path), "--resume"]
    read: list[list[str]] = [[], []]
    for steps in ("2", "3"):
        argued = [f"{corpus}-run.json", *OPTIONS, "--steps", steps, *small]
        for lines, rank in zip(run(trainers, "plain_torch", [argued], torchrun(2)), read, strict=True):
            rank += [line["read"] for line in lines]
    assert read == [expected[::2], expected[1::2]]


def test_the_slurm_job_is_a_script_of_bash() -> None:
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], check=True)


def test_the_kubernetes_job_names_what_it_defines() -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"] == {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    assert pod["subdomain"] == service["metadata"]["name"]
    launcher, options = training_of("kubernetes.yaml")
    assert f"--nnodes={job['spec']['completions']}" in launcher
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:29500" in launcher
    for container in (*pod["initContainers"], *pod["containers"]):
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    check, prepare = pod["initContainers"]
    assert check["command"] == ["binidx", "doctor", options[0], "--nodes", str(job["spec"]["completions"])]
    assert prepare["command"] == ["binidx", "prepare", "index", options[0]]
