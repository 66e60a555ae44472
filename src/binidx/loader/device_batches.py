"""Batches on a GPU: each crosses the bus as one block of int32, and becomes tensors of 28 bytes a token there.

    loader ─ batch ─► block, pinned ─ side stream ─► block on the device ─► tokens, labels, loss mask, positions
                      4.1 B a token     4.1 B a token                     `ahead` batches before the trainer takes them

    ranks of a group, such as tensor-parallel ones: the first one reads, the others receive the block

A batch that a block would not give back bit for bit (64-bit ids, float tokens, a user's own) is copied as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed
from torch.utils._pytree import tree_map_only  # torch has no public function for it

from binidx.errors import ConfigError, PeerError
from binidx.loader.collate import WorkerBatch, mask_words, pack_batch

BATCHES_AHEAD = 3

MOST_PINNED = 64
"""Most pinned tensors that a slot keeps: batches of many lengths need as many."""


def parse_device(device: Any) -> torch.device:
    """Return a device by its name.

    Raises:
        ConfigError: no name of a device, or this process has no CUDA.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device: found {device!r}, needs a name that torch.device takes, such as 'cuda'") from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        built = "torch sees no GPU" if torch.version.cuda else "this torch is built without CUDA"
        raise ConfigError(f"device: found {str(parsed)!r}, {built}; leave device out for batches in memory")
    return parsed


class DeviceBatches(Iterator[Any]):
    """Iterator over the batches of an iterable, on a device, equal key by key to those in memory.

    `build_pretraining_data_loader(device=...)` makes one for each iteration. Around another loader it takes batches
    before the trainer does, so a state of that loader may be `ahead` batches further than the trainer.

    Args:
        batches: iterable of batches, such as a DataLoader; None on the ranks of `group` that do not read.
        device: torch's name of the device, or a `torch.device`.
        ahead: number of batches that are copied before the trainer takes them.
        group: process group whose ranks train on the same batches; its first rank reads and sends each batch.

    Raises:
        ConfigError: no batches on the first rank of the group.
        PeerError: on the other ranks of the group: the first one could not read a batch.

    Example:
        >>> for batch in binidx.DeviceBatches(loader, "cuda"):
        ...     loss = model(batch["tokens"], batch["labels"], batch["loss_mask"])

    Source: ours; the keys are Megatron Core's.
    """

    def __init__(
        self, batches: Iterable[Any] | None, device: Any, *, ahead: int = BATCHES_AHEAD, group: Any = None
    ) -> None:
        self._device = parse_device(device)
        self._group: Any = None if group is None or torch.distributed.get_world_size(group) == 1 else group
        self._is_reader = self._group is None or torch.distributed.get_rank(self._group) == 0
        if self._is_reader and batches is None:
            raise ConfigError("batches: found None on the rank that reads, needs an iterable of batches")
        self._source: Iterator[Any] = iter(batches if self._is_reader and batches is not None else ())
        self._ahead, self._wanted, self._copied = max(1, ahead), 0, deque[Any]()
        self._copies: Copies = CudaCopies(self._device, self._ahead) if self._device.type == "cuda" else Copies()

    def __next__(self) -> Any:
        self._wanted = min(self._wanted + 1, self._ahead + 1)  # the first batch does not wait for others
        self._copied.extend(map(self._copy, islice(self._receive(), self._wanted - len(self._copied))))
        if not self._copied:
            raise StopIteration
        return self._copied.popleft()()

    def _receive(self) -> Iterator[Any]:
        """Yield the batches of the source, as blocks where they can be; ranks that do not read receive them."""
        while (batch := self._share()) is not None:
            yield batch

    def _share(self) -> Any:
        """Send the next batch to the group, if there is one, or receive it; None after the last.

        Raises:
            PeerError: on the ranks that do not read: the first one raised an error, which it has sent.
        """
        if self._group is None:
            return pack_batch(next(self._source, None))
        error = None
        try:
            batch = pack_batch(next(self._source, None))
        except Exception as found:  # else the others would wait for this batch until the group's timeout
            error = found
            batch = PeerError(f"batches: their reader, rank {torch.distributed.get_rank()}: {found!r}; see its log")
        is_block = isinstance(batch, WorkerBatch)
        shape = tuple(batch.block.shape) if is_block else None
        # The block crosses as a tensor; what describes it is pickled.
        described = [(replace(batch, block=None) if is_block else batch, shape)]
        source = torch.distributed.get_global_rank(self._group, 0)
        torch.distributed.broadcast_object_list(described, src=source, group=self._group)
        received, shape = described[0]
        if error or isinstance(received, PeerError):
            raise error or received
        if shape is None:
            return received
        on_device = torch.distributed.get_backend(self._group) == "nccl"
        place = self._device if on_device else torch.device("cpu")
        block = batch.block.to(place) if is_block else torch.empty(shape, dtype=torch.int32, device=place)
        torch.distributed.broadcast(block, src=source, group=self._group)
        return replace(received, block=block)

    def _copy(self, batch: Any) -> Callable[[], Any]:
        """Begin to copy a batch; return a function that returns it on the device."""
        if isinstance(batch, WorkerBatch):
            return self._copies.begin(batch.block, lambda block: unpack_block(batch, block))
        return self._copies.begin(batch, lambda copied: copied)


class Copies:
    """Copies to the memory of this machine: none."""

    def begin(self, value: Any, finish: Callable[[Any], Any]) -> Callable[[], Any]:
        """Begin to copy a tensor or a batch of tensors; return a function that returns `finish` of the copy."""
        return lambda: finish(value)


class CudaCopies(Copies):
    """Copies to a GPU on a stream of their own, from pinned memory that is used again.

    Args:
        device: the GPU.
        ahead: number of copies that are begun before their results are taken.
    """

    def __init__(self, device: torch.device, ahead: int) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        events = [torch.cuda.Event() for _ in range(ahead + 1)]  # type: ignore[no-untyped-call]
        self._slots: deque[tuple[dict[tuple[Any, ...], Any], Any]] = deque(({}, event) for event in events)

    def begin(self, value: Any, finish: Callable[[Any], Any]) -> Callable[[], Any]:
        pinned, copied = self._slots[0]
        self._slots.rotate(-1)
        copied.synchronize()  # of an earlier batch, whose pinned memory this one takes
        if len(pinned) > MOST_PINNED:
            pinned.clear()
        numbers = iter(range(1 << 30))

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cuda":
                return tensor.to(self._device, non_blocking=True)
            key = next(numbers), tensor.dtype, tuple(tensor.shape)
            if key not in pinned:
                pinned[key] = torch.empty_like(tensor, pin_memory=True)
            pinned[key].copy_(tensor)
            moved: torch.Tensor = pinned[key].to(self._device, non_blocking=True)
            return moved

        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # of blocks that were received there
        with torch.cuda.stream(self._stream):
            batch = tree_map_only(torch.Tensor, copy, finish(tree_map_only(torch.Tensor, copy, value)))
            copied.record(self._stream)

        def take() -> Any:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            tree_map_only(torch.Tensor, lambda tensor: tensor.record_stream(current), batch)
            return batch

        return take


def unpack_block(batch: WorkerBatch, block: torch.Tensor) -> dict[str, Any]:
    """Return a batch as `WorkerBatch.unpack` does, on the device of its block.

    Args:
        batch: the batch, whose own block is not used.
        block: the block, on any device.
    """
    length = batch.length
    tensors: dict[str, Any] = {name: torch.as_tensor(value) for name, value in batch.others.items()}
    tensors["tokens"], tensors["labels"] = block[:, :length].long(), block[:, 1 : length + 1].long()
    if batch.has_positions:
        tensors["position_ids"] = block[:, length + 1 : 2 * length + 1].long()
    else:
        tensors["position_ids"] = torch.arange(length, device=block.device).repeat(len(block), 1)
    if batch.has_mask:
        words = block[:, block.shape[1] - mask_words(length) :, None]
        bits = (words >> torch.arange(32, dtype=torch.int32, device=block.device)) & 1
        tensors["loss_mask"] = bits.flatten(1)[:, :length].float()
    else:
        tensors["loss_mask"] = torch.ones((len(block), length), device=block.device)
    return {name: tensors[name] for name in batch.names}
