"""Tensors, samples and process groups: the only module of this layer that imports torch.

torch is imported when the first tensor is made: reading tokens or the order of samples does not cost that second, and
does not need torch to be installed.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, Protocol, TypeAlias, TypedDict, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, MissingDriverError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


Tensor: TypeAlias = "torch.Tensor"
GroupStore: TypeAlias = "Store"
Sample: TypeAlias = "dict[str, torch.Tensor | np.generic]"


class GPTBatch(TypedDict):
    """Samples of GPT data: tensors of shape (B, S), or (S,) of one sample; see `GPTDataset`.

    Attributes:
        tokens, labels, position_ids: int64.
        loss_mask: float32.
        attention_mask, cu_seqlens, max_seqlen: if the config requests them.
        dataset_id: number of the source in a blend.

    Source: Megatron Core, `GPTDataset` and `BlendedDataset`.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: NotRequired[torch.Tensor]
    cu_seqlens: NotRequired[torch.Tensor]
    max_seqlen: NotRequired[torch.Tensor]
    dataset_id: NotRequired[Any]


def missing_torch() -> MissingDriverError:
    """Return the error for what needs torch where it is not installed."""
    return MissingDriverError(
        "samples and batches: need torch; pip install 'binidx[torch]', or use read_tokens, which returns NumPy arrays"
    )


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the array's memory."""
    try:  # costs nothing if there is no error
        import torch
    except ModuleNotFoundError as error:
        raise missing_torch() from error
    return torch.from_numpy(array)


def copy_to_host(values: Any) -> tuple[Any, Callable[[], object]]:
    """Begin to copy numbers or a tensor to the host as float32; return the copy, and a function that awaits its end."""
    if type(values).__module__ != "torch":
        return np.array(values, np.float32), bool
    import torch

    copy = values.detach().to("cpu", torch.float32, non_blocking=values.is_cuda, copy=True)
    return copy, torch.cuda.current_stream(values.device).record_event().synchronize if values.is_cuda else bool


def is_distributed() -> bool:
    """Return whether `torch.distributed` has a process group; False if torch was never imported."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_initialized()


class Topology(NamedTuple):
    """Rank of a process among the processes that share the work, and their number."""

    rank: int
    size: int


@runtime_checkable
class ParallelState(Protocol):
    """Megatron Core's module `parallel_state`, also known as `mpu`."""

    def get_data_parallel_rank(self) -> int: ...

    def get_data_parallel_world_size(self) -> int: ...


@runtime_checkable
class Mesh(Protocol):
    """torch's `DeviceMesh`."""

    ndim: int

    def get_local_rank(self) -> int: ...

    def size(self) -> int: ...


MPI = ("OMPI_COMM_WORLD", "PMI", "MV2_COMM_WORLD", "JSM_NAMESPACE", "HOROVOD")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    (*(f"{name}_{end}" for name in MPI for end in ("RANK", "SIZE")), "PALS_RANKID"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    SLURM,
    ("PMIX_RANK", "JOB_COMPLETION_INDEX", "NODE_RANK"),
)
"""Environment variables of torchrun; of MPI (Open MPI; PMI, as of MPICH, Intel MPI and PALS; MVAPICH; JSM; Horovod); of
Flux; of Slurm; and ranks without a size (PMIx, an indexed Job of Kubernetes, nodes). The first launcher with one of
them decides. The others may have started it, as srun starts mpirun or torchrun: then they have no more processes."""


def find_topology(given: Any = None) -> Topology:
    """Return the rank of this process and the number of ranks.

    Args:
        given: a `DeviceMesh` of one dimension, or Megatron Core's `parallel_state`, whose data-parallel rank and size
            are returned. None: the rank and size of the process group; before there is one, those in the environment
            variables of torchrun, else of MPI, else of Flux, else of Slurm; 0 and 1 without any. These are
            data-parallel rank and size only if every rank reads samples of its own: without tensor, pipeline or context
            parallelism.

    Returns:
        (rank, size), two arguments of `build_pretraining_data_loader`.

    Raises:
        ConfigError: the variables of launchers contradict each other, or some are missing; or `given` is neither.

    Example:
        >>> loader = binidx.build_pretraining_data_loader(train, 0, 8, *binidx.find_topology())

    Source: ours.
    """
    if isinstance(given, ParallelState):
        return Topology(given.get_data_parallel_rank(), given.get_data_parallel_world_size())
    if isinstance(given, Mesh) and given.ndim == 1:
        return Topology(given.get_local_rank(), given.size())
    if given is not None:
        raise ConfigError(
            f"mesh: found {given!r}, needs megatron.core.parallel_state or a DeviceMesh of one dimension; "
            'of a mesh of several give the data-parallel one, as mesh["dp"]; of HSDP, whose replicas read samples of '
            'their own, mesh["replicate", "shard"]._flatten("dp")'
        )
    if is_distributed():
        import torch.distributed

        return Topology(torch.distributed.get_rank(), torch.distributed.get_world_size())
    launchers = _find_launchers()
    if not launchers:
        return Topology(0, 1)
    topology = _parse_topology(launchers[0])
    for outer in launchers[1:]:
        num_processes = max((int(size) for size in _sizes(outer) if size.isdecimal()), default=1)
        if num_processes > topology.size:
            reason = f"a launcher of {topology.size} cannot span the {num_processes} processes of another"
            raise _contradiction({**launchers[0], **outer}, reason)
    return topology


def choose_topology(mesh: Any = None) -> Topology | None:
    """Return the rank and number of the ranks that read samples of their own, where the user names none.

    Args:
        mesh: a `DeviceMesh` of one dimension. None: the data-parallel ranks of Megatron's `parallel_state` if it is
            initialized, else all ranks.

    Returns:
        None if there are process groups of some ranks only, as those of a `DeviceMesh` of several dimensions: then the
        ranks of one group may have to read the same samples.
    """
    if mesh is not None:
        return find_topology(mesh)
    megatron: Any = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None and megatron.is_initialized():
        return find_topology(megatron)
    topology = find_topology()
    return None if is_distributed() and _has_subgroups(topology.size) else topology


def _has_subgroups(num_ranks: int) -> bool:
    from torch.distributed import distributed_c10d

    try:
        # torch has no public function for it.
        return any(len(ranks) < num_ranks for ranks in distributed_c10d._world.pg_group_ranks.values())
    except AttributeError:
        return True


def check_topology(rank: int | None, size: int | None) -> Topology:
    """Return the data-parallel rank and size of a loader, 0 and 1 where they are not given.

    Raises:
        ConfigError: one is not given, and there are several processes.
    """
    if (rank is None or size is None) and (num_processes := find_topology().size) > 1:
        raise ConfigError(
            f"data_parallel_rank, data_parallel_size: found {rank}, {size} in a group of {num_processes} processes; "
            "give both, or every rank would read the same samples: *binidx.find_topology() if each reads its own, "
            '*binidx.find_topology(mesh["dp"]) or (parallel_state) if some share theirs; a loader of load_dataset '
            'takes mesh=mesh["dp"] in their place'
        )
    return Topology(rank or 0, 1 if size is None else size)


def _find_launchers() -> list[dict[str, str]]:
    """Return the variables of each launcher that set some for this process, the innermost launcher first."""
    launchers = []
    for names in LAUNCHERS:
        variables = {name: os.environ[name] for name in names if os.environ.get(name)}
        if "SLURM_STEP_NUM_TASKS" in variables:
            variables.pop("SLURM_NTASKS", None)  # may be that of the whole job
        # srun sets SLURM_STEP_ID; a batch script has the variables of task 0 without it.
        no_task = {None, "0"} if "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ else {None}
        if variables and (names != SLURM or variables.get("SLURM_PROCID") not in no_task):
            launchers.append(variables)
    return launchers


def _parse_topology(variables: Mapping[str, str]) -> Topology:
    """Return the topology in the variables of one launcher."""
    try:
        (rank,), (size,) = ({*map(int, values)} for values in (_ranks(variables), _sizes(variables)))
        if 0 <= rank < size:
            return Topology(rank, size)
    except ValueError:
        pass
    raise _contradiction(variables, "not one rank below one size")


def _ranks(variables: Mapping[str, str]) -> set[str]:
    return {value for name, value in variables.items() if name.endswith(("RANK", "PROCID", "RANKID", "INDEX"))}


def _sizes(variables: Mapping[str, str]) -> set[str]:
    return {value for name, value in variables.items() if name.endswith(("SIZE", "TASKS"))}


def _contradiction(variables: Mapping[str, str], reason: str) -> ConfigError:
    text = ", ".join(f"{name}={value}" for name, value in variables.items())
    return ConfigError(
        f"{text}: {reason}; give data_parallel_rank and data_parallel_size yourself, set the variables right (unset "
        "those that another launcher left), or call torch.distributed.init_process_group first"
    )


def is_first_rank() -> bool:
    """Return whether this process is rank 0; False if its rank is unknown."""
    try:
        return find_topology().rank == 0
    except ConfigError:
        return {rank for variables in _find_launchers() for rank in _ranks(variables)} == {"0"}


def count_known_processes() -> int:
    """Return the number of ranks; 1 if the variables of launchers contradict each other."""
    try:
        return find_topology().size
    except ConfigError:
        return 1


def group_store(name: str) -> tuple[GroupStore, int, int] | None:
    """Return the process group's key-value store for keys below `name`, this rank, and the number of ranks.

    Return None if there are no other ranks, or no store, as with MPI.
    """
    if not is_distributed() or find_topology().size == 1:
        return None
    from torch.distributed import distributed_c10d  # missing in a torch without distributed

    try:
        # torch has no public function for it.
        store = distributed_c10d.PrefixStore(name, distributed_c10d._get_default_store())
    except Exception:
        return None
    return store, *find_topology()


def reading_worker() -> tuple[int, int]:
    """Return which DataLoader worker this process is, from 0, and how many there are; (0, 1) in the trainer."""
    if "torch" not in sys.modules:
        return 0, 1
    import torch.utils.data

    worker = torch.utils.data.get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


def in_worker() -> bool:
    """Return whether this process is a DataLoader worker."""
    import torch.utils.data

    return torch.utils.data.get_worker_info() is not None


def collate_by_torch(samples: Sequence[Any]) -> Any:
    """Return the batch of torch's `default_collate`."""
    import torch.utils.data

    return torch.utils.data.default_collate([*samples])


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, NumPy and random."""
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def shared_zeros(*shape: int) -> torch.Tensor:
    """Return float64 zeros in memory shared with workers, forked or spawned."""
    zeros = as_tensor(np.zeros(shape))
    zeros.share_memory_()  # type: ignore[no-untyped-call]
    return zeros


class Samples(Sequence["Sample"]):
    """Samples of a micro-batch that are rows of shared tensors, so that stacking them costs nothing.

    Args:
        num_samples: number of samples, B.
        columns: for each key a tensor of shape (B, ...), or one that all samples share.
        shared: keys of the tensors that all samples share.
        numbers: for each further key one number per sample, shape (B,), served as NumPy scalars.
    """

    def __init__(
        self,
        num_samples: int,
        columns: Mapping[str, Tensor],
        shared: Collection[str] = (),
        numbers: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.columns = columns
        self.shared = shared
        self.numbers = numbers or {}

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            start, stop, step = row.indices(len(self))
            return self.part(start, stop) if step == 1 else [self[number] for number in range(start, stop, step)]
        if not -len(self) <= row < len(self):
            raise IndexError(f"sample {row}: out of range (there are {len(self)})")
        sample: Sample = {name: numbers[row] for name, numbers in self.numbers.items()}
        for name, column in self.columns.items():
            sample[name] = column if name in self.shared else column[row]
        return sample

    def part(self, start: int, stop: int) -> Samples:
        """Return the samples of rows `start` to before `stop`, which share this batch's memory."""
        rows = slice(start, max(start, stop))
        columns = {name: column if name in self.shared else column[rows] for name, column in self.columns.items()}
        numbers = {name: values[rows] for name, values in self.numbers.items()}
        return Samples(len(range(len(self))[rows]), columns, self.shared, numbers)

    @property
    def num_bytes(self) -> int:
        """Size of the samples in bytes, without the tensors that all samples share."""
        own = [column.nbytes for name, column in self.columns.items() if name not in self.shared]
        return sum(own) + sum(numbers.nbytes for numbers in self.numbers.values())

    def stack(self) -> dict[str, Tensor]:
        """Return the batch that torch's `default_collate` would make."""
        batch = {name: as_tensor(numbers) for name, numbers in self.numbers.items()}
        for name, column in self.columns.items():
            batch[name] = column.expand(len(self), *column.shape).clone() if name in self.shared else column
        return batch
