"""Fixtures of the tests beside Megatron Core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of one: Megatron's blends ask for their rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
