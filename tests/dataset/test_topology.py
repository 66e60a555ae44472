"""The rank of a process: given, of the process group, of torchrun, MPI, Flux or Slurm. Groups: test_rank_agreement."""

from __future__ import annotations

import logging
import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.traceable_runs import write_source

import binidx
from binidx import errors
from binidx.dataset.torch_bridge import LAUNCHERS, choose_topology, is_first_rank
from binidx.errors import ConfigError

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "8"}
BROKEN_PMI = {"PMI_RANK": "0", "PMI_SIZE": "1"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the variables of launchers, and no others."""
    for name in [*os.environ]:
        if name in {name for names in LAUNCHERS for name in names} or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    errors._warned.pop("data_parallel_size", None)

    def launch(environment: dict[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.mark.parametrize(
    ("environment", "topology"),
    [
        ({}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        (OPEN_MPI, (3, 8)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({**OPEN_MPI, "PMI_RANK": "3", "PMI_SIZE": "8"}, (3, 8)),
        (SLURM, (2, 4)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, (2, 4)),
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (0, 1)),  # a shell of salloc with 4 tasks
        (BATCH_SCRIPT, (0, 1)),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, (0, 1)),
        ({**SLURM, "RANK": "5", "WORLD_SIZE": "16"}, (5, 16)),  # torchrun under srun
        ({**SLURM, **OPEN_MPI}, (3, 8)),  # mpirun under srun
        ({**BATCH_SCRIPT, "RANK": "5", "WORLD_SIZE": "16"}, (5, 16)),
        ({**SLURM, "RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),  # a rendezvous may number the nodes in another order
        ({**BATCH_SCRIPT, **BROKEN_PMI}, (0, 1)),  # mpiexec -n 1 in a batch script
        ({**BATCH_SCRIPT, "RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),  # torchrun in it
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", **BROKEN_PMI}, (0, 1)),  # in a shell of salloc
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),  # in srun --pty
        ({**SLURM, "PMIX_RANK": "2"}, (2, 4)),  # srun --mpi=pmix
        ({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4)),  # srun --mpi=pmi2
        ({**SLURM, "PMIX_RANK": "2", "NODE_RANK": "2", "RANK": "5", "WORLD_SIZE": "16"}, (5, 16)),
        ({**OPEN_MPI, "PMIX_RANK": "3"}, (3, 8)),
        ({**OPEN_MPI, "PMIX_RANK": "3", "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "8"}, (3, 8)),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "RANK": "5", "WORLD_SIZE": "8"}, (5, 8)),
        ({**PMI, "PALS_RANKID": "3"}, (3, 8)),
        ({"PALS_RANKID": "1", "RANK": "5", "WORLD_SIZE": "8"}, (5, 8)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, (1, 2)),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, (1, 2)),
        ({"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "8", **PMI}, (3, 8)),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", **OPEN_MPI}, (3, 8)),  # mpirun in a task of Flux
        ({"JOB_COMPLETION_INDEX": "1", "RANK": "9", "WORLD_SIZE": "16"}, (9, 16)),  # torchrun in a pod
        ({"NODE_RANK": "1", "RANK": "9", "WORLD_SIZE": "16"}, (9, 16)),
    ],
)
def test_the_launcher_nearest_to_the_process_names_its_rank(
    launched: Any, environment: dict[str, str], topology: tuple[int, int]
) -> None:
    launched(environment)
    assert binidx.find_topology() == topology
    assert is_first_rank() == (topology[0] == 0)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    ("rank_name", "size_name", "others"),
    [
        ("RANK", "WORLD_SIZE", {}),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {}),
        ("PMI_RANK", "PMI_SIZE", {}),
        ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", {}),
        ("HOROVOD_RANK", "HOROVOD_SIZE", {}),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", {}),
        ("SLURM_PROCID", "SLURM_NTASKS", {}),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", {"SLURM_NTASKS": "9"}),
        ("SLURM_PROCID", "SLURM_NTASKS", {"SLURM_STEP_ID": "0"}),
        ("SLURM_PROCID", "SLURM_NTASKS", {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}),
    ],
)
def test_every_process_of_a_launcher_has_a_rank(
    launched: Any, rank_name: str, size_name: str, others: dict[str, str], rank: int
) -> None:
    launched({rank_name: str(rank), size_name: "3", **others})
    assert binidx.find_topology() == (rank, 3)
    assert is_first_rank() == (rank == 0)


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "4"},
        {"RANK": "1"},
        {"RANK": "4", "WORLD_SIZE": "4"},
        {"RANK": "-1", "WORLD_SIZE": "4"},
        {"RANK": "one", "WORLD_SIZE": "4"},
        {**OPEN_MPI, "PMI_RANK": "0", "PMI_SIZE": "1"},
        {**OPEN_MPI, "PMI_RANK": "2"},
        {"PMI_RANK": "2"},
        {"SLURM_PROCID": "2"},
        {"SLURM_PROCID": "4", "SLURM_NTASKS": "4"},
        {"FLUX_TASK_RANK": "1"},
        {**PMI, "PALS_RANKID": "4"},
        {"PALS_RANKID": "1"},
        {"PMIX_RANK": "1"},
        {"JOB_COMPLETION_INDEX": "1"},
        {"NODE_RANK": "1"},
    ],
)
def test_variables_of_one_launcher_that_contradict_each_other_are_refused(
    launched: Any, environment: dict[str, str]
) -> None:
    launched(environment)
    with pytest.raises(ConfigError, match="not one rank below one size") as refused:
        binidx.find_topology()
    assert all(f"{name}={value}" in str(refused.value) for name, value in environment.items())
    assert not is_first_rank()


TASK = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "16"}


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (BROKEN_PMI, {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}),
        (BROKEN_PMI, TASK),
        (OPEN_MPI, TASK),
        ({"RANK": "0", "WORLD_SIZE": "1"}, TASK),
        ({"RANK": "0", "WORLD_SIZE": "1"}, PMI),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, TASK),
    ],
)
def test_a_launcher_that_spans_fewer_processes_than_the_one_around_it_is_refused(
    launched: Any, inner: dict[str, str], outer: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    environment = {**inner, **outer}
    launched({**environment, "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"})
    with pytest.raises(ConfigError, match="cannot span the") as refused:
        binidx.find_topology()
    assert all(f"{name}={value}" in str(refused.value) for name, value in environment.items())
    assert "give data_parallel_rank and data_parallel_size" in str(refused.value)
    assert not is_first_rank()
    with pytest.raises(ConfigError, match="cannot span the"):
        binidx.build_pretraining_data_loader(range(100), 0, 4)


@pytest.mark.parametrize("environment", [{**BROKEN_PMI, **TASK}, {"NODE_RANK": "1"}, {"JOB_COMPLETION_INDEX": "3"}])
def test_given_ranks_are_taken_whatever_the_launchers_say(launched: Any, environment: dict[str, str]) -> None:
    """A sweep of independent runs under srun: each is rank 0 of 1."""
    launched(environment)
    for rank, size in [(0, 1), (1, 2)]:
        loader = binidx.build_pretraining_data_loader(range(100), 0, 4, rank, size)
        assert loader is not None
        assert next(iter(loader)).tolist() == [*range(4 * rank, 4 * rank + 4)]


def test_the_first_pod_of_an_indexed_job_is_known_without_their_number(launched: Any) -> None:
    """It builds indices in an init container."""
    launched({"JOB_COMPLETION_INDEX": "0"})
    assert is_first_rank()


def test_the_ranks_that_megatron_gives_come_before_those_of_launchers(launched: Any) -> None:
    launched(OPEN_MPI)
    parallel_state: Any = ModuleType("parallel_state")
    parallel_state.get_data_parallel_rank, parallel_state.get_data_parallel_world_size = lambda: 1, lambda: 2
    assert binidx.find_topology(parallel_state) == (1, 2)
    with pytest.raises(ConfigError, match=r"found 7, needs megatron\.core\.parallel_state or a DeviceMesh"):
        binidx.find_topology(7)


def test_a_dataset_of_one_line_takes_the_ranks_of_megatron_once_it_has_some(
    launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(OPEN_MPI)
    parallel_state: Any = ModuleType("parallel_state")
    parallel_state.is_initialized = lambda: False
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state)
    assert choose_topology() == (3, 8)
    parallel_state.is_initialized = lambda: True
    parallel_state.get_data_parallel_rank, parallel_state.get_data_parallel_world_size = lambda: 1, lambda: 2
    assert choose_topology() == (1, 2)


def test_a_loader_of_one_line_trusts_megatron_and_a_mesh(
    launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched(SLURM)
    write_source(tmp_path / "en", random.Random(1), False)
    parallel_state: Any = ModuleType("parallel_state")
    parallel_state.is_initialized = lambda: True
    parallel_state.get_data_parallel_rank, parallel_state.get_data_parallel_world_size = lambda: 0, lambda: 1
    caplog.set_level(logging.INFO, "binidx")
    data = binidx.load_dataset(tmp_path / "en", 4)
    next(iter(data.loader(1, mesh=parallel_state)))
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state)
    next(iter(data.loader(1)))
    assert caplog.text.count("loader: data_parallel_size is 1, of 4 processes") == 2
    assert "WARNING" not in caplog.text


def test_a_loader_of_one_line_is_refused_if_the_ranks_form_groups_after_it(
    launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(OPEN_MPI)
    write_source(tmp_path / "en", random.Random(1), False)
    loader = binidx.load_dataset(tmp_path / "en", 4).loader(1)
    assert next(iter(loader))["tokens"].tolist() == loader[0]["tokens"].tolist()
    parallel_state: Any = ModuleType("parallel_state")
    parallel_state.is_initialized = lambda: True
    parallel_state.get_data_parallel_rank, parallel_state.get_data_parallel_world_size = lambda: 1, lambda: 2
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state)
    with pytest.raises(ConfigError, match="was made for rank 3 of 8, before groups of ranks were made"):
        next(iter(loader))


@pytest.mark.parametrize("environment", [OPEN_MPI, SLURM, {"PMI_RANK": "1", "PMI_SIZE": "2"}])
def test_a_loader_without_a_rank_is_refused_under_every_launcher(launched: Any, environment: dict[str, str]) -> None:
    launched(environment)
    with pytest.raises(ConfigError, match=r"every rank would read the same samples: \*binidx.find_topology\(\)"):
        binidx.build_pretraining_data_loader(range(100), 0, 4)
    loader = binidx.build_pretraining_data_loader(range(100), 0, 4, *binidx.find_topology())
    assert loader is not None
    assert loader[0].tolist() == [*range(100)][4 * binidx.find_topology().rank :][:4]


def test_one_data_parallel_rank_in_a_larger_world_is_warned_of_once(
    launched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    launched(SLURM)
    caplog.set_level(logging.WARNING, "binidx")
    for _ in range(2):
        loader = binidx.build_pretraining_data_loader(range(100), 0, 4, 0, 1)
        assert loader is not None
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert [each.getMessage()[:50] for each in caplog.records] == ["data_parallel_size: found 1 in a group of 4 proces"]


def test_a_loader_older_than_its_group_is_warned_of_at_its_first_batch(
    launched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = binidx.build_pretraining_data_loader(range(100), 0, 4)
    assert loader is not None
    launched(SLURM)
    caplog.set_level(logging.WARNING, "binidx")
    next(iter(loader))
    assert "found 1 in a group of 4 processes" in caplog.text
